"""Which norms and gated MLPs of unchanged models take fewer passes, and which did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_fp8.convert.fused.fused import FusedModule, fuse, has_hooks, name_of, unfuse
from lightning_fp8.convert.fused.liger import is_patched
from lightning_fp8.convert.fused.mlp import FusedMLP, act_fn_of, activation_of, is_known_mlp, layers_of, why_not_bias
from lightning_fp8.convert.fused.norm import formula_of, fuse_norm
from lightning_fp8.convert.summary import MLP, NORM, ConversionSummary, LayerDecision
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.swap import calls_own_forward
from lightning_fp8.traced import was_traced


def plan_norms(modules: Mapping[str, nn.Module], decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each RMSNorm of a model, whether it takes one kernel each way, and why (not)."""
    any_fp8 = any(each.fp8 for each in decisions.values())
    return tuple(
        LayerDecision(name, tuple(weight.shape), not why_not, why_not or "in one kernel", NORM)
        for name, module in modules.items()
        if (weight := getattr(module, "weight", None)) is not None
        and not isinstance(module, FP8Module)
        and ((formula := formula_of(module)) or "RMSNorm" in type(module).__name__)
        for why_not in (_why_not(module, formula) if any_fp8 else "no layer runs in FP8",)
    )


def plan_mlps(modules: Mapping[str, nn.Module], decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each gated MLP of a model, whether it is one autograd function, and why (not)."""
    return tuple(
        LayerDecision(name, (), not why_not, why_not or "in one autograd function", MLP)
        for name, module in modules.items()
        if (known := is_known_mlp(module)) or (type(module).__name__.endswith("MLP") and "down_proj" in module._modules)
        for why_not in (_why_not(module, known) or _why_mlp_does_not(name, module, decisions),)
    )


def fuse_planned(modules: Mapping[str, nn.Module], summary: ConversionSummary) -> None:
    """Make the norms and the MLPs that were planned take fewer passes, and no others, in place."""
    kinds = {each.name: each.kind for each in (*summary.norms, *summary.mlps) if each.fp8}
    for name, module in modules.items():
        if name not in kinds:
            unfuse(module)
        else:
            fuse_norm(module) if kinds[name] == NORM else fuse(module, FusedMLP)


def _why_not(module: nn.Module, known: Any) -> str:
    if not known:
        return f"fuse=True does not support {name_of(module)}"
    replaced = "forward" in vars(module) and not (is_patched(module) or calls_own_forward(module))
    return "its forward was replaced on the instance" if replaced else ""


def _why_mlp_does_not(name: str, mlp: nn.Module, decisions: Mapping[str, LayerDecision]) -> str:
    for layer_name in layers_of(mlp):
        layer: Any = getattr(mlp, layer_name)
        decision = decisions.get(f"{name}.{layer_name}".lstrip("."))
        if decision is None:
            return f"its {layer_name} is a {name_of(layer)}"
        if not decision.fp8:
            return f"{layer_name} runs in BF16"
        if reason := why_not_bias(layer_name, layer.bias):
            return reason
    if activation_of(mlp) is None:
        act_fn = act_fn_of(mlp)
        hooked = isinstance(act_fn, nn.Module) and has_hooks(act_fn)
        return "its act_fn has hooks" if hooked else f"fuse=True does not support {name_of(act_fn)}"
    return ""


WAY_OUT = ", which only costs passes over memory; fuse=False removes it from the table"
"""What can be done if a norm or an MLP ran as the model's own."""


def forget_what_ran(planned: LayerDecision, module: nn.Module | None) -> None:
    """Reset what :func:`judged_fused` reports."""
    if planned.fp8:
        for each in _fused_in(module):
            each.why_not, each.called_otherwise = None, False


def _fused_in(module: nn.Module | None) -> list[FusedModule]:
    """``module``, or what it wraps, if that is fused."""
    return [] if module is None else [each for each in module.modules() if isinstance(each, FusedModule)]


def judged_fused(
    planned: LayerDecision, module: nn.Module | None, now: nn.Module | None, uncalled: str
) -> LayerDecision:
    """``planned`` with what its module did in training forwards since :func:`forget_what_ran`.

    Args:
        module: the module that it was; None if it is deallocated.
        now: the module that has its name now; None if there is none.
        uncalled: the reason to report if it was not called.
    """
    if not planned.fp8:
        return planned
    known = [each.why_not for each in (*_fused_in(module), *_fused_in(now)) if each.why_not is not None]
    if known:
        why_not = next(filter(None, known), "")
        return replace(planned, ran=not why_not, reason=why_not or planned.reason)
    current = module if now is None else now
    if current is None:
        why_not = "it was removed from the model"
    elif not (fused := _fused_in(current)):
        of_class = "why_not" in vars(current)
        why_not = "its class was replaced after the conversion" if of_class else "it was replaced by another module"
    elif all("forward" in vars(each) and not calls_own_forward(each) for each in fused):
        why_not = "its forward was replaced on the instance after the conversion"
        why_not += "; convert it again to fuse it" * all(map(is_patched, fused))
    elif any(each.called_otherwise or was_traced(*each.features) for each in fused):
        return planned
    else:
        why_not = uncalled
    return replace(planned, ran=False, reason=why_not)
