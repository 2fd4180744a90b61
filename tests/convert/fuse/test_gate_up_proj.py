"""``fuse=True``: MLPs whose gate and up are one layer, as Phi-3's and GLM4's, are one autograd function, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import fp8_autocast, fp8_state_dict
from lightning_fp8.convert.fused.mlp import FusedMLP, activation_of, is_known_mlp
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from tests.convert.fuse.runs import TOKENS, Ops, causal_lm, converted, error, step

RECIPES = pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])


@RECIPES
@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_gradients_are_as_near_to_float64_as_those_of_the_layers(name: str, recipe: str) -> None:
    exact = step(causal_lm(name, dtype=torch.float64), enabled=False)
    fused, unfused = (converted(fuse, causal_lm(name)) for fuse in (True, False))
    with Ops() as ops:
        found = [step(fused, recipe) for _ in range(2)][-1]
    assert (ops.counts["activation_quantize"], ops.counts["activation_backward_quantize"]) == (2 * 2, 2 * 2)
    assert not ops.of_torch["silu"] + ops.of_torch["silu_backward"]
    plain = [step(unfused, recipe) for _ in range(2)][-1]
    assert error(found, exact) < 1.15 * error(plain, exact)
    assert all(layer.mlp.why_not == "" for layer in fused.model.layers)


def test_amaxes_are_those_of_the_exact_values() -> None:
    model = converted(True, causal_lm("phi3"))
    mlp = model.model.layers[1].mlp
    seen: dict[str, Tensor] = {}
    mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].detach()))
    mlp.register_full_backward_hook(lambda _m, _i, of_output: seen.update(dy=of_output[0].detach()))
    step(model)
    # The layers one by one, in FP8 as well, give what the function has between them.
    again = converted(False, causal_lm("phi3")).model.layers[1].mlp
    with fp8_autocast():
        h = again.gate_up_proj(seen["x"]).detach().double().requires_grad_()
    gate, up = h.chunk(2, -1)
    a = F.silu(gate) * up
    state = fp8_state_dict(model)
    amax = {
        role: float(state["seen"][state["names"].index(f"model.layers.1.mlp.{role}")])  # type: ignore[union-attr]
        for role in ("gate_up_proj.input", "down_proj.input", "gate_up_proj.grad_output", "down_proj.grad_output")
    }
    assert amax["gate_up_proj.input"] == float(seen["x"].abs().max())
    assert amax["down_proj.grad_output"] == float(seen["dy"].abs().max())
    assert amax["down_proj.input"] == pytest.approx(float(a.detach().abs().max()), rel=1e-5)
    leaf = a.detach().bfloat16().requires_grad_()
    with fp8_autocast():
        again.down_proj(leaf).backward(seen["dy"])
    assert leaf.grad is not None
    a.backward(leaf.grad.double())
    assert h.grad is not None
    assert amax["gate_up_proj.grad_output"] == pytest.approx(float(h.grad.abs().max()), rel=1e-5)


def test_what_is_known_and_what_the_table_says() -> None:
    model = causal_lm("phi3")
    policy = Policy(first_last_layers_bf16=False, fuse=True)

    def told() -> list[tuple[bool, str]]:
        return [(each.fp8, each.reason) for each in plan_conversion(model, policy).summary.mlps]

    fuses = True, "in one autograd function"
    assert told() == [fuses] * 2
    first, second = (layer.mlp for layer in model.model.layers)
    assert is_known_mlp(first)
    assert activation_of(first) == "silu"
    first.gate_up_proj = nn.Linear(64, 192, bias=True, dtype=torch.bfloat16)
    second.activation_fn = nn.Tanh()
    assert told() == [
        (False, "gate_up_proj has a bias, whose gradient needs a tensor that would not be written"),
        (False, "fuse=True does not support Tanh"),
    ]


def test_frozen_layers_and_hooks() -> None:
    """A frozen layer has no gradient and the others keep theirs; a hooked layer makes its MLP run layer by layer."""
    models = [converted(True, causal_lm("glm4")) for _ in range(2)]
    everything = dict(zip((name for name, _ in models[0].named_parameters()), step(models[0], "rowwise")[1:]))
    frozen = models[1].model.layers[1].mlp
    assert isinstance(frozen, FusedMLP)
    frozen.gate_up_proj.weight.requires_grad_(False)
    models[1].zero_grad()
    with fp8_autocast(fp8_recipe="rowwise"):
        models[1](input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in models[1].named_parameters():
        assert (parameter.grad is None) == (name == "model.layers.1.mlp.gate_up_proj.weight")
        assert parameter.grad is None or torch.equal(parameter.grad, everything[name])
    frozen.down_proj.register_forward_hook(lambda *args: None)
    with Ops() as ops, fp8_autocast(fp8_recipe="rowwise"):
        models[1](input_ids=TOKENS)
    assert ops.counts["activation_quantize"] == 1
