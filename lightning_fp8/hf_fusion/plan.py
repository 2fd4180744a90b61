"""Which norms and gated MLPs of unchanged models take fewer passes, and which did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_fp8.convert.summary import MLP, NORM, LayerDecision
from lightning_fp8.hf_fusion.fused import FusedModule, has_hooks
from lightning_fp8.hf_fusion.mlp import LAYERS, activation_by_liger, activation_of, fuse_mlp, is_known_mlp
from lightning_fp8.hf_fusion.norm import formula_of, fuse_norm
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.names import clean_name


def plan_norms(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each norm of ``model``, whether it runs in one kernel, and why (not)."""
    any_fp8 = any(each.fp8 for each in decisions.values())
    return tuple(
        LayerDecision(
            name,
            tuple(module.weight.shape),
            any_fp8 and not why_not,
            why_not or "one kernel",
            NORM,  # type: ignore[arg-type, union-attr]
        )
        for name, module in ((clean_name(raw), module) for raw, module in model.named_modules())
        if (type(module).__name__.endswith("Norm") or "RMSNorm" in type(module).__name__)
        and getattr(module, "weight", None) is not None
        and not isinstance(module, FP8Module)
        for why_not in (_why_norm_does_not(module),)
    )


def fuse_norms(model: nn.Module, norms: Sequence[LayerDecision]) -> None:
    """Make the norms that were planned run in one kernel, in place."""
    _fuse(model, norms, fuse_norm)


def _fuse(model: nn.Module, planned: Sequence[LayerDecision], fuse: Any) -> None:
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for each in planned:
        if each.fp8:
            fuse(modules[each.name])


def _why_norm_does_not(module: nn.Module) -> str:
    return "" if formula_of(module) else _why_unknown(module)


def _why_unknown(module: nn.Module) -> str:
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return f"fuse=True does not support {type(module).__name__}"


def plan_mlps(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each MLP of ``model``, whether it runs as one function, and why (not)."""
    return tuple(
        LayerDecision(name, (), not why_not, why_not or "activates and casts in one pass", MLP)
        for name, module in ((clean_name(raw), module) for raw, module in model.named_modules())
        if type(module).__name__.endswith("MLP") and not isinstance(module, FP8Module)
        for why_not in (_why_mlp_does_not(name, module, decisions),)
    )


def fuse_mlps(model: nn.Module, mlps: Sequence[LayerDecision]) -> None:
    """Make the MLPs that were planned run as one function, in place."""
    _fuse(model, mlps, fuse_mlp)


def _why_mlp_does_not(name: str, mlp: nn.Module, decisions: Mapping[str, LayerDecision]) -> str:
    if not is_known_mlp(mlp):
        return _why_unknown(mlp)
    for layer_name in LAYERS:
        decision = decisions.get(f"{name}.{layer_name}".lstrip("."))
        if decision is None:
            return f"its {layer_name} is a {type(getattr(mlp, layer_name)).__name__}"
        if not decision.fp8:
            return f"{layer_name} runs in BF16"
        if getattr(mlp, layer_name).bias is not None and layer_name != "down_proj":
            return f"{layer_name} has a bias, whose gradient needs a tensor that would not be written"
    if activation_by_liger(mlp) is None and activation_of(mlp) is None:
        act_fn: Any = mlp.act_fn
        return "its act_fn has hooks" if has_hooks(act_fn) else f"fuse=True does not support {type(act_fn).__name__}"
    return ""


NORM_CAST_NOTHING = "its input or weight has another type or device than the kernel supports"
MLP_CAST_NOTHING = "one of its layers or its activation was replaced, hooked, sharded or compiled"


def forget_what_ran(planned: LayerDecision, module: nn.Module | None) -> None:
    """Reset what :func:`judged_casting` reports."""
    if planned.fp8 and isinstance(module, FusedModule):
        module.fused = None


def judged_casting(planned: LayerDecision, module: nn.Module | None, *_: Any) -> LayerDecision:
    """``planned`` with what the module did in training forwards since :func:`forget_what_ran`."""
    if not planned.fp8 or not isinstance(module, FusedModule):
        return planned
    if "forward" in vars(module):
        return replace(planned, ran=False, reason="its forward was replaced on the instance after the conversion")
    if module.fused is None:
        return planned
    why_not = NORM_CAST_NOTHING if planned.kind == NORM else MLP_CAST_NOTHING
    return replace(planned, ran=module.fused, reason=planned.reason if module.fused else why_not)


WAYS_OUT: dict[str, str] = {}
