"""Which norms and gated MLPs of unchanged models can cast for the FP8 layers after them, and which did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_fp8.convert.summary import MLP, NORM, LayerDecision
from lightning_fp8.hf_fusion.casting import CastingModule
from lightning_fp8.hf_fusion.mlp import LAYERS, activation_of, cast_activation, hooks_of, is_known_mlp
from lightning_fp8.hf_fusion.norm import cast_for, is_known_norm
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.record import was_traced
from lightning_fp8.modules.swap import calls_own_forward, unsharded_class
from lightning_fp8.names import clean_name

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""By a norm's name in a block of Hugging Face's Llama, the layers that read its output, in order of their calls."""


def plan_norms(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each norm of ``model``, whether it can cast for the layers that read it, and why (not)."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    return tuple(
        LayerDecision(name, tuple(module.weight.shape), not why_not, why_not or _casts_for(name), NORM)  # type: ignore[arg-type, union-attr]
        for name, module in modules.items()
        if type(module).__name__.endswith("Norm") and getattr(module, "weight", None) is not None
        for why_not in (_why_norm_does_not(name, module, modules, decisions),)
    )


def _name_of(module: Any) -> str:
    """The class of ``module``, with its Python module, since several have a ``Qwen2MLP``; without it for torch's."""
    cls = unsharded_class(module)
    return cls.__name__ if cls.__module__.startswith("torch.") else f"{cls.__module__}.{cls.__name__}"


def fuse_norms(model: nn.Module, norms: Sequence[LayerDecision]) -> None:
    """Make the norms that were planned cast, in place."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for norm in norms:
        if norm.fp8:
            cast_for(modules[norm.name], [modules[name] for name in _readers(norm.name)])  # type: ignore[misc]


def _readers(name: str) -> list[str]:
    block, _, norm = name.rpartition(".")
    return [f"{block}.{reader}".lstrip(".") for reader in READERS.get(norm, ())]


def _casts_for(name: str) -> str:
    *others, last = (reader.rpartition(".")[2] for reader in _readers(name))
    return f"casts for {', '.join(others)} and {last}"


def _why_norm_does_not(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], decisions: Mapping[str, LayerDecision]
) -> str:
    readers = _readers(name)
    if not is_known_norm(module):
        return f"fuse=True does not support {_name_of(module)}"
    if not readers or not all(reader in modules for reader in readers):
        return "fuse=True does not know which layers read it"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    in_bf16 = [reader for reader in readers if not (reader in decisions and decisions[reader].fp8)]
    return f"{in_bf16[0].rpartition('.')[2]}, which reads it, runs in BF16" if in_bf16 else ""


def plan_mlps(model: nn.Module, decisions: Mapping[str, LayerDecision]) -> tuple[LayerDecision, ...]:
    """For each MLP of ``model``, whether it can cast its activation for its last layer, and why (not)."""
    return tuple(
        LayerDecision(name, (), not why_not, why_not or "casts its activation for down_proj", MLP)
        for name, module in ((clean_name(raw), module) for raw, module in model.named_modules())
        if type(module).__name__.endswith("MLP") and not isinstance(module, FP8Module)
        for why_not in (_why_mlp_does_not(name, module, decisions),)
    )


def fuse_mlps(model: nn.Module, mlps: Sequence[LayerDecision]) -> None:
    """Make the MLPs that were planned cast, in place."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for mlp in mlps:
        if mlp.fp8:
            cast_activation(modules[mlp.name])


def _why_mlp_does_not(name: str, mlp: nn.Module, decisions: Mapping[str, LayerDecision]) -> str:
    if not is_known_mlp(mlp):
        return f"fuse=True does not support {_name_of(mlp)}"
    if "forward" in vars(mlp):
        return "its forward was replaced on the instance"
    for layer_name in LAYERS:
        decision = decisions.get(f"{name}.{layer_name}".lstrip("."))
        if decision is None:
            return f"its {layer_name} is a {type(getattr(mlp, layer_name)).__name__}"
        if not decision.fp8:
            return f"{layer_name} runs in BF16"
        if getattr(mlp, layer_name).bias is not None and layer_name != "down_proj":
            return f"{layer_name} has a bias, whose gradient needs a tensor that would not be written"
    if activation_of(mlp) is None:
        return f"fuse=True does not support {_name_of(mlp.act_fn)}"
    return "its act_fn has hooks" if hooks_of(mlp.act_fn) else ""


_CAST_NOTHING = {
    NORM: "its input and weight differ in dtype, or torch.autocast is on (compute_dtype turns it on), so readers cast",
    MLP: "one of its layers or its activation was replaced, hooked or compiled, so down_proj casts",
}
FORWARD_REPLACED = "its forward was replaced on the instance after the conversion"
CLASS_REPLACED = "its class was replaced after the conversion"
MODULE_REPLACED = "it was replaced by another module"
REMOVED = "it was removed from the model"

WAYS_OUT = {
    _CAST_NOTHING[NORM]: "; weights_dtype=torch.bfloat16 without compute_dtype lets norms cast",
    **dict.fromkeys(
        (_CAST_NOTHING[MLP], FORWARD_REPLACED, CLASS_REPLACED, MODULE_REPLACED),
        ", which only costs one more pass over memory; fuse=False removes it from the table",
    ),
    REMOVED: "; fuse=False removes it from the table",
}
"""By the reason why a norm or an MLP did not cast, what can be done."""


def forget_what_ran(planned: LayerDecision, module: nn.Module | None) -> None:
    """Reset what :func:`judged_casting` reports."""
    if planned.fp8:
        for each in _casting_in(module):
            each.cast, each.called_otherwise = None, False


def _casting_in(module: nn.Module | None) -> list[CastingModule]:
    """``module``, or what it wraps, if that casts."""
    return [] if module is None else [each for each in module.modules() if isinstance(each, CastingModule)]


def judged_casting(
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
    known = [each.cast for each in (*_casting_in(module), *_casting_in(now)) if each.cast is not None]
    if known:
        return replace(planned, ran=any(known), reason=planned.reason if any(known) else _CAST_NOTHING[planned.kind])
    current = module if now is None else now
    if current is None:
        why_not = REMOVED
    elif not (casting := _casting_in(current)):
        why_not = CLASS_REPLACED if "cast" in vars(current) else MODULE_REPLACED
    elif all("forward" in vars(each) and not calls_own_forward(each) for each in casting):
        why_not = FORWARD_REPLACED
    elif any(each.called_otherwise or was_traced(*each.features) for each in casting):
        return planned
    else:
        why_not = uncalled
    return replace(planned, ran=False, reason=why_not)
