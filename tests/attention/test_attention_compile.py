"""torch.compile of a model with FP8 attention against eager: outputs, gradients and amaxes, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DotProductAttention, fp8_autocast
from tests.attention.attention_modules import cu_seqlens


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Channels are split into heads of a fused projection, so that queries, keys and values are strided views."""

    def __init__(self, recompute: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.attention, self.recompute = DotProductAttention(2, 32, **arguments), recompute

    def attend(self, x: Tensor, arguments: dict[str, Any]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).unbind(-3)
        return self.attention(q, k, v, **arguments)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        if self.recompute:
            return self.proj(checkpoint(self.attend, x, arguments, use_reentrant=False))
        return self.proj(self.attend(x, arguments))


def numbers(model: Model, x: Tensor, recipe: str, arguments: dict[str, Any]) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with fp8_autocast(fp8_recipe={"name": recipe, "fp8_dpa": True}):
        y = model(leaf, **arguments)
        y.float().square().mean().backward()  # recomputation of what is compiled reads the current setting
    found = [y.detach(), leaf.grad, *(p.grad for p in model.parameters()), model.attention.history.amax.clone()]
    model.zero_grad()
    return found  # type: ignore[return-value]


def compare(
    model: Model, shapes: list[tuple[int, ...]], recipe: str, backend: str, dynamic: bool | None, **arguments: Any
) -> None:
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    for shape in shapes:
        x = torch.randn(*shape, 64).to(next(model.parameters()).dtype)
        said = {name: value(shape) if callable(value) else value for name, value in arguments.items()}
        for ours, eager in zip(numbers(compiled, x, recipe, said), numbers(model, x, recipe, said)):
            assert torch.equal(ours, eager)


@pytest.mark.parametrize(("dynamic", "recompute"), [(False, "core"), (True, ""), (True, "around"), (None, "core")])
def test_a_compiled_model_computes_the_same(dynamic: bool | None, recompute: str) -> None:
    model = Model(recompute == "around", qkv_format="bshd").bfloat16()
    shapes = [(2, 40), (2, 40) if dynamic is False else (3, 72)]
    compare(model, shapes, "delayed", "aot_eager", dynamic, checkpoint_core_attention=recompute == "core")


def test_packed_and_padded_sequences() -> None:
    packed = Model(qkv_format="thd", attn_mask_type="padding_causal", window_size=(16, 0))
    compare(packed, [(40,), (55,)], "rowwise", "aot_eager", True,
            cu_seqlens_q=lambda shape: cu_seqlens([7, 0, shape[0] - 7]))  # fmt: skip

    def mask(shape: tuple[int, ...]) -> Tensor:
        return torch.arange(shape[0]) >= torch.tensor([30, 9])[:, None, None, None]

    padded = Model(qkv_format="sbhd", attn_mask_type="padding")
    compare(padded, [(40, 2), (55, 2)], "rowwise", "aot_eager", True,
            attention_mask=mask)  # fmt: skip


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_inductor(recipe: str) -> None:
    compare(Model(qkv_format="bshd").bfloat16(), [(2, 40)] * 2, recipe, "inductor", False)


def test_what_does_not_run_in_fp8_is_told_while_it_is_compiled() -> None:
    model = Model(qkv_format="bshd", attn_mask_type="causal")
    model.compile(fullgraph=True, backend="aot_eager")
    bias = torch.randn(1, 1, 40, 40)
    with (
        pytest.warns(UserWarning, match="high precision: core_attention_bias_type='post_scale_bias'"),
        fp8_autocast(fp8_recipe={"name": "mxfp8", "fp8_dpa": True}),
    ):
        model(torch.randn(2, 40, 64), core_attention_bias_type="post_scale_bias", core_attention_bias=bias)


def test_second_derivatives_of_compiled_attention_are_refused_by_torch() -> None:
    module, q = DotProductAttention(2, 32, qkv_format="bshd"), torch.randn(1, 20, 2, 32, requires_grad=True)
    module.compile(fullgraph=True, backend="aot_eager")
    with fp8_autocast(fp8_recipe={"name": "mxfp8", "fp8_dpa": True}):
        o = module(q, q, q)
    (gradient,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()
