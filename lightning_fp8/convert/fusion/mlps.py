"""Finds the gated MLPs of unchanged models whose layers all run in FP8, and lets them cast for their last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_fp8.convert.summary import MLP, LayerDecision
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.fusion.mlp import LAYERS, activation_of, cast_activation, hooks_of, is_known_mlp
from lightning_fp8.names import clean_name


def plan_mlps(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each MLP of ``model`` whether it can cast its activation for its last layer, and why."""
    return tuple(
        LayerDecision(name, (), not why_not, why_not or "casts its activation for down_proj", MLP)
        for name, module in ((clean_name(raw), module) for raw, module in model.named_modules())
        if type(module).__name__.endswith("MLP") and not isinstance(module, FP8Module)
        for why_not in (_why_not(name, module, decisions),)
    )


def fuse_mlps(model: nn.Module, mlps: Sequence[LayerDecision]) -> None:
    """Retype the MLPs that were planned to cast, in place."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for mlp in mlps:
        if mlp.fp8:
            cast_activation(modules[mlp.name])


def _why_not(name: str, mlp: nn.Module, decisions: Mapping[str, LayerDecision]) -> str:
    if not is_known_mlp(mlp):
        return f"fuse=True knows no {type(mlp).__name__}"
    if "forward" in vars(mlp):
        return "its forward was replaced on the instance"
    for layer_name in LAYERS:
        decision = decisions.get(f"{name}.{layer_name}".lstrip("."))
        if decision is None:
            return f"its {layer_name} is a {type(getattr(mlp, layer_name)).__name__}"
        if not decision.fp8:
            return f"{layer_name} runs in BF16"
        if getattr(mlp, layer_name).bias is not None and layer_name != "down_proj":
            return f"{layer_name} has a bias, whose gradient needs what would not be written"
    if activation_of(mlp) is None:
        return f"fuse=True knows no {type(mlp.act_fn).__name__}"
    return "its act_fn has hooks" if hooks_of(mlp.act_fn) else ""
