"""torch.compile of a model with FP8 attention against eager: outputs, gradients and amaxes, to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DotProductAttention, fp8_autocast
from lightning_fp8.attention.ops import Band
from tests.attention.attention_modules import RAGGED, Batch, cu_seqlens, drawn_batch, of_definition, run
from tests.tiers import covering, thorough


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


@pytest.mark.parametrize(
    ("dynamic", "recompute"),
    covering([(False, "core"), (True, ""), (True, "around"), (None, "core")], lambda row: {row[1]} & {"core"}),
)
def test_a_compiled_model_computes_the_same(dynamic: bool | None, recompute: str) -> None:
    model = Model(recompute == "around", qkv_format="bshd").bfloat16()
    shapes = [(2, 40), (2, 40) if dynamic is False else (3, 72)]
    compare(model, shapes, "delayed", "aot_eager", dynamic, checkpoint_core_attention=recompute == "core")


@thorough
def test_packed_sequences() -> None:
    packed = Model(qkv_format="thd", attn_mask_type="padding_causal", window_size=(16, 0))
    compare(packed, [(40,), (55,)], "rowwise", "aot_eager", True,
            cu_seqlens_q=lambda shape: cu_seqlens([7, 0, shape[0] - 7]))  # fmt: skip


@thorough
def test_padded_sequences() -> None:
    def mask(shape: tuple[int, ...]) -> Tensor:
        return torch.arange(shape[0]) >= torch.tensor([30, 9])[:, None, None, None]

    padded = Model(qkv_format="sbhd", attn_mask_type="padding")
    compare(padded, [(40, 2), (55, 2)], "rowwise", "aot_eager", True,
            attention_mask=mask)  # fmt: skip


def spread_out(x: Batch, rows: int) -> Batch:
    """So many rows of NaN behind each sequence."""
    return Batch(*([torch.cat([each, each.new_full((rows, *each.shape[1:]), math.nan)]) for each in of] for of in x))


@pytest.mark.parametrize(
    ("enabled", "gap"), covering([(False, 0), (False, 7), (True, 7)], lambda row: {row} & {(False, 7)})
)
def test_packed_sequences_in_high_precision_and_between_gaps(enabled: bool, gap: int) -> None:
    lengths = [list(of) for of in zip(*RAGGED)]
    x = drawn_batch(RAGGED, 4, 2, 16, torch.float32)
    module = DotProductAttention(4, 16, 2, qkv_format="thd", attn_mask_type="padding_causal_bottom_right")
    given: dict[str, Any] = {"cu_seqlens_q": cu_seqlens(lengths[0]), "cu_seqlens_kv": cu_seqlens(lengths[1])}
    if gap:
        padded = (cu_seqlens([n + gap for n in of]) for of in lengths)
        given |= dict(zip(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded))
    else:
        given |= {"max_seqlen_q": max(lengths[0])}
    module.compile(fullgraph=True, backend="aot_eager" if enabled else "eager")
    with fp8_autocast(enabled, fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        found = run(module, spread_out(x, gap), "thd", **given)
    for ours, right, of in zip(found, of_definition(x, Band(right=0, bottom_right=True)), (0, 0, 1, 1)):
        rows = ours.split([n + gap for n in lengths[of]])
        seen = torch.cat([each[: len(each) - gap] for each in rows])
        assert (seen - right).norm() < (0.1 if enabled else 1e-5) * right.norm()
        assert not any(each[len(each) - gap :].any() for each in rows)


@pytest.mark.parametrize(
    ("starts", "padded", "longest", "said"),
    covering(
        [
            ([0, 9, 5, 20], None, None, "lengths added up, 0 first"),
            ([0, 5, 21], None, None, "at or before"),
            ([0, 15, 20], None, 9, "max_seq"),
            ([0, 8, 18], [0, 5, 20], None, "do not fit"),
            ([0, 8, 18], [0, 9, 30], None, "do not fit"),
        ],
        lambda row: {row[1] is None},
    ),
)
def test_wrong_sequences_fail_in_compiled_code(
    starts: list[int], padded: list[int] | None, longest: int | None, said: str
) -> None:
    module, q = DotProductAttention(2, 8, qkv_format="thd"), torch.randn(20, 2, 8)
    module.compile(fullgraph=True, backend="eager")
    gaps = {} if padded is None else {"cu_seqlens_q_padded": torch.tensor(padded)}
    with pytest.raises(RuntimeError, match=said):
        module(q, q, q, cu_seqlens_q=torch.tensor(starts), max_seqlen_q=longest, **gaps)


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_inductor(recipe: str) -> None:
    compare(Model(qkv_format="bshd").bfloat16(), [(2, 40)] * 2, recipe, "inductor", False)


@thorough
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
