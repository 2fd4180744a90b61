"""torch.compile of unchanged models with FP8 attention in a Trainer, and recomputation of what is compiled."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert_module, fp8_autocast
from tests.attention.models.test_attention_models import (
    HEADS,
    WIDTH,
    Model,
    Regression,
    Torch,
    attentions,
    trained,
    why,
)
from tests.tiers import covering, thorough

pytestmark = pytest.mark.usefixtures("nothing_traced")


@thorough
@pytest.mark.parametrize("what", covering(["whole", "blocks", "attention"], lambda what: {"whole"} & {what}))
def test_compiled_as_it_runs(what: str) -> None:
    torch.manual_seed(0)
    template = Model(depth=4 if what == "whole" else 10)  # more blocks than Dynamo compiles one code for
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template))
        parts = {
            "whole": [module.model],
            "blocks": module.model.blocks,
            "attention": [b.attention for b in module.model.blocks],
        }
        for part in parts[what] if compiled else ():
            part.compile(fullgraph=True, backend="aot_eager")
        plugin = trained(module)
        if compiled:
            assert {layer.ran for layer in plugin.summary.layers} == {None}
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


@thorough
@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_are_recomputed(reentrant: bool) -> None:
    torch.manual_seed(0)
    template = Model(reentrant=reentrant)
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template), lambda model, x: model(x.requires_grad_()))
        for block in module.model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        trained(module)
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


class Own(nn.MultiheadAttention):
    """Somebody's own, which calls torch's function."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


KEPT_WHOLE = "torch.compile does not trace into torch.nn.functional.multi_head_attention_forward"


def test_what_torch_compile_keeps_whole_is_in_the_table() -> None:
    module = Regression(Torch(Own(WIDTH, HEADS, batch_first=True), need_weights=False))
    module.model.compile(fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match=KEPT_WHOLE):
        plugin = trained(module)
    assert attentions(plugin.summary) == {"model.part": "BF16"}
    assert "leave its block uncompiled" in why(plugin.summary, "model.part")


def test_without_a_plugin_that_is_said_once() -> None:
    part = Torch(Own(WIDTH, HEADS, batch_first=True), need_weights=False)
    model, x = nn.Sequential(part, nn.Linear(WIDTH, WIDTH)), torch.randn(2, 8, WIDTH)
    convert_module(model, first_last_layers_bf16=False)
    model.compile(fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
                model(x)
    told = [str(each.message) for each in caught if "high precision" in str(each.message)]
    assert len(told) == 1
    assert KEPT_WHOLE in told[0]


@thorough
@pytest.mark.parametrize(
    ("options", "cross"), [({"batch_first": True}, False), ({"kdim": WIDTH, "vdim": 8, "add_bias_kv": True}, True)]
)
def test_torchs_own_attention_computes_the_same(options: dict[str, Any], cross: bool) -> None:
    """Of every form of ``nn.MultiheadAttention``, with masks, unbatched, with weights, in evaluation."""
    part = nn.MultiheadAttention(WIDTH, HEADS, **options)
    q = torch.randn(6, 6, WIDTH)
    k = torch.randn(6, 6, WIDTH) if cross else q
    v = torch.randn(6, 6, part.vdim) if "vdim" in options else k
    hidden = torch.ones(6, 6).triu(1).bool()
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, k, v), {"need_weights": False}),
        ((q, k, v), {"attn_mask": hidden, "is_causal": True, "need_weights": False}),
        ((q, k, v), {"key_padding_mask": hidden, "average_attn_weights": False}),
        ((q[0], k[0], v[0]), {"need_weights": False}),
    ]
    model = nn.Sequential(part, nn.Linear(WIDTH, WIDTH))
    convert_module(model, first_last_layers_bf16=False)
    for training, (given, said) in [(False, calls[0]), *((True, call) for call in calls)]:
        model.train(training)
        found = []
        for compiled in (False, True):
            run = torch.compile(part, fullgraph=True, backend="eager") if compiled else part
            with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(run(*given, **said))
        for ours, eager in zip(*found, strict=True):
            assert (ours is None and eager is None) or torch.equal(ours, eager)
