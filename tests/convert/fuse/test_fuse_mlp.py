"""``fuse=True``: MLPs of Hugging Face's Llama and its like cast their activation for their last layer."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import fp8_autocast, fp8_state_dict
from lightning_fp8.convert.conversion import plan_conversion
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.policy import Policy
from lightning_fp8.hf_fusion.deferred_gated import ActivatedGradient, FactorGradient, GatedOutput
from lightning_fp8.hf_fusion.mlp import KNOWN, activation_of, is_known_mlp
from tests.convert.fuse.test_fuse import Ops, assert_equal, converted, llama, step
from tests.tiers import thorough

transformers = pytest.importorskip("transformers")

TWICE = (1 + 2.0**-8) ** 2 - 1
"""The most by which two roundings to BF16 change a number, relative to it; the fused pass has none."""


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_values_are_those_of_the_models_own_modules(name: str) -> None:
    """Of whoever reads them. The float32 values that are cast instead differ by two roundings to BF16."""
    torch.manual_seed(0)
    x, factor, dy = (torch.randn(64, 48).bfloat16().requires_grad_() for _ in range(3))

    def own(x: Tensor, factor: Tensor) -> Tensor:
        return (F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh")) * factor

    y = own(x, factor)
    gradients = torch.autograd.grad(y, (x, factor), dy)
    with torch.no_grad():
        made = GatedOutput(x, factor, name), ActivatedGradient(dy, x, factor, name), FactorGradient(dy, x, name)
        wide = [tensor.double().requires_grad_() for tensor in (x, factor)]
    exact_y = own(*wide)
    exact = exact_y, *torch.autograd.grad(exact_y, wide, dy.double())
    for deferred, value, right in zip(made, (y, *gradients), exact):
        assert torch.equal(deferred + 0, value)
        assert bool(((value.double() - right).abs() <= (TWICE + 1e-5) * right.abs() + 1e-5).all())


def test_amaxes_are_those_of_the_exact_values() -> None:
    """Of down's input and of the gradients of gate and up, from what hooks of the layers see."""
    model, seen = converted(True), {}
    mlp = model.model.layers[1].mlp
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).register_forward_hook(lambda *args, name=name: seen.update({name: args[-1]}))

    def watch_gradient(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].register_hook(lambda dy: seen.update(dy=dy))

    mlp.down_proj.register_forward_pre_hook(watch_gradient)
    step(model)
    gate, up = (seen[name].detach().double().requires_grad_() for name in ("gate_proj", "up_proj"))
    y = F.silu(gate) * up
    y.backward(seen["dy"].double())
    state = fp8_state_dict(model)
    for row, exact in (("down_proj.input", y), ("gate_proj.grad_output", gate.grad), ("up_proj.grad_output", up.grad)):
        found = state["seen"][state["names"].index(f"model.layers.1.mlp.{row}")]
        torch.testing.assert_close(found.double(), exact.abs().max(), rtol=1e-5, atol=0.0)  # type: ignore[union-attr]


def test_what_is_kept_are_the_outputs_of_gate_and_up() -> None:
    model = converted(True)
    mlp = model.model.layers[0].mlp
    sizes: list[tuple[int, torch.dtype]] = []
    x = torch.randn(24, 64).bfloat16().requires_grad_()
    for parameter in mlp.parameters():
        parameter.requires_grad_(False)  # no layer keeps its input

    def pack(tensor: Tensor) -> Tensor:
        sizes.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fp8_autocast(fp8_recipe="rowwise"):
        mlp(x)
    weights = [parameter.numel() for parameter in mlp.parameters()]
    kept = [size for size in sizes if size[0] not in weights]
    assert kept == [(24 * 96, torch.bfloat16)] * 2


def test_a_layer_that_is_wrapped_later_leaves_the_mlp_as_it_was() -> None:
    """As an adapter does. The table says so after the first step."""

    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) * 2  # type: ignore[no-any-return]

    plan = plan_conversion(llama(), Policy(first_last_layers_bf16=False, fuse=True))
    found = []
    for fuse in (True, False):
        model = converted(fuse)
        for layer in model.model.layers:
            layer.mlp.up_proj = Wrapped(layer.mlp.up_proj)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm._readers = ()  # the norms' own values
        watch = FirstStep(model, plan if fuse else plan_conversion(model, Policy(first_last_layers_bf16=False)))
        found.append(step(model, "rowwise"))
        summary = watch.finish()
        assert [(mlp.precision, "replaced" in mlp.reason) for mlp in summary.mlps] == [("BF16", True)] * 2 * fuse
    assert_equal(*found)


def test_the_table_says_why_not() -> None:
    model = llama(6)
    mlps = [layer.mlp for layer in model.model.layers]
    mlps[0].forward = mlps[0].forward
    mlps[1].act_fn = nn.ReLU()
    mlps[2].act_fn = nn.SiLU()
    mlps[2].act_fn.register_forward_hook(lambda *args: None)
    mlps[3].up_proj = nn.Sequential(mlps[3].up_proj, nn.Dropout(0.1))
    mlps[4].gate_proj.bias = nn.Parameter(torch.zeros(96, dtype=torch.bfloat16))
    policy = Policy(first_last_layers_bf16=False, skip=("*.5.mlp.down_proj",), fuse=True)
    assert [mlp.reason for mlp in plan_conversion(model, policy).mlps] == [
        "its forward was replaced on the instance",
        "fuse=True does not support ReLU",
        "its act_fn has hooks",
        "its up_proj is a Sequential",
        "gate_proj has a bias, whose gradient needs a tensor that would not be written",
        "down_proj runs in BF16",
    ]
    assert not any(mlp.fp8 for mlp in plan_conversion(model, policy).mlps)
    assert [mlp.reason for mlp in plan_conversion(llama(1), Policy(first_last_layers_bf16=False, fuse=True)).mlps] == [
        "casts its activation for down_proj"
    ]


def test_under_autocast_and_in_evaluation_it_casts() -> None:
    model, plain = converted(True).float(), converted(False).float()
    with torch.autocast("cpu", dtype=torch.bfloat16), Ops() as ops:
        step(model, "rowwise")
    assert (ops.counts["gated_quantize"], ops.counts["gated_backward_quantize"]) == (4, 2)
    x = torch.randn(24, 64)
    with torch.no_grad(), fp8_autocast(fp8_recipe="rowwise"), Ops() as ops:
        fused, own = (each.eval().model.layers[0].mlp(x) for each in (model, plain))
    assert ops.counts["gated_quantize"] == 1
    torch.testing.assert_close(fused, own, rtol=0.05, atol=0.05 * float(own.abs().max()))


@thorough
def test_a_compiled_mlp_is_the_models_own() -> None:
    model, plain = converted(True), converted(False)
    x = torch.randn(24, 64).bfloat16()
    outputs = []
    for each in (model, plain):
        compiled = torch.compile(each.model.layers[0].mlp, backend="eager", fullgraph=True)
        with fp8_autocast(fp8_recipe="rowwise"):
            outputs.append(compiled(x))
    assert torch.equal(*outputs)


def test_the_formula_is_that_of_every_known_class() -> None:
    """Older versions of transformers lack the newest models."""
    known = [(name, path) for name, path in KNOWN.items() if find_spec(path.rpartition(".")[0])]
    assert {"LlamaMLP", "GemmaMLP"} <= {name for name, _ in known}
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name, path in known:
        config = next(
            getattr(transformers, name.replace("MLP", kind))
            for kind in ("TextConfig", "Config")
            if hasattr(transformers, name.replace("MLP", kind))
        )
        mlp = getattr(import_module(path), name)(config(**sizes))
        x = torch.randn(3, 64)
        with torch.no_grad():
            own = GatedOutput(mlp.gate_proj(x), mlp.up_proj(x), activation_of(mlp)) + 0
            assert torch.equal(mlp.down_proj(own), mlp(x)), name
        assert is_known_mlp(mlp)


def test_copies_cast_too() -> None:
    model = converted(True)
    step(model, "rowwise")
    with Ops() as ops:
        step(copy.deepcopy(model), "rowwise")
    assert ops.counts["gated_backward_quantize"] == 2
