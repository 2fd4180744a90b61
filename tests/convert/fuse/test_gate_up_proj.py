"""``fuse=True``: MLPs whose gate and up are one layer, as Phi-3's and GLM4's, are one autograd function, too."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.convert.conversion import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.hf_fusion.mlp import FusedMLP, activation_of, is_known_mlp

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(48).view(2, 24) % 37
RECIPES = pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])


def tiny(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=37,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train().to(dtype)


def step(model: Any, recipe: str = "delayed", enabled: bool = True) -> list[Tensor]:
    """All gradients of one training step."""
    model.zero_grad()
    with fp8_autocast(enabled, fp8_recipe=recipe):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of all gradients together."""
    difference = sum(float((one.double() - two.double()).square().sum()) for one, two in zip(found, exact))
    return float((difference / sum(float(two.double().square().sum()) for two in exact)) ** 0.5)


class Ops(TorchDispatchMode):
    """Counts ops: ours, and those of torch that compute an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name().rpartition(":")[2].removesuffix("_unobserved")] += 1
        return function(*args, **(kwargs or {}))


@RECIPES
@pytest.mark.parametrize("name", ["Phi3", "Glm4"])
def test_gradients_are_as_near_to_float64_as_those_of_the_layers(name: str, recipe: str) -> None:
    exact = step(tiny(name, torch.float64), enabled=False)
    fused, unfused = (convert_module(tiny(name), first_last_layers_bf16=False, fuse=fuse) for fuse in (True, False))
    with Ops() as ops:
        found = [step(fused, recipe) for _ in range(2)][-1]
    assert (ops.counts["activation_quantize"], ops.counts["activation_backward_quantize"]) == (2 * 2, 2 * 2)
    assert not ops.counts["silu"] + ops.counts["silu_backward"]
    plain = [step(unfused, recipe) for _ in range(2)][-1]
    assert error(found, exact) < 1.15 * error(plain, exact)
    assert all(layer.mlp.fused for layer in fused.model.layers)


def test_amaxes_are_those_of_the_exact_values() -> None:
    model = convert_module(tiny("Phi3"), first_last_layers_bf16=False, fuse=True)
    mlp = model.model.layers[1].mlp
    seen: dict[str, Tensor] = {}
    mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].detach()))
    mlp.register_full_backward_hook(lambda _m, _i, of_output: seen.update(dy=of_output[0].detach()))
    step(model)
    # The layers one by one, in FP8 as well, give what the function has between them.
    again = convert_module(tiny("Phi3"), first_last_layers_bf16=False, fuse=False).model.layers[1].mlp
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
    model = tiny("Phi3")
    policy = Policy(first_last_layers_bf16=False, fuse=True)

    def told() -> list[tuple[bool, str]]:
        return [(each.fp8, each.reason) for each in plan_conversion(model, policy).mlps]

    fuses = True, "activates and casts in one pass"
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
    models = [convert_module(tiny("Glm4"), first_last_layers_bf16=False, fuse=True) for _ in range(2)]
    everything = dict(zip((name for name, _ in models[0].named_parameters()), step(models[0], "rowwise")))
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
