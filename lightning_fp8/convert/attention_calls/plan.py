"""Find the modules that compute attention, decide which of them run in FP8, and report which did in a training step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.convert.attention_calls import sdpa
from lightning_fp8.convert.attention_calls.attach import AttentionPlace
from lightning_fp8.convert.attention_calls.owners import COMPILED_WHOLE, Owner, was_compiled_whole
from lightning_fp8.convert.blocks import BlockPosition
from lightning_fp8.convert.summary import ATTENTION, LayerDecision
from lightning_fp8.names import clean_name
from lightning_fp8.traced import was_traced

_SDPA = "scaled_dot_product_attention"
_HF = "ALL_ATTENTION_FUNCTIONS"
_SWITCHED_FROM = ("sdpa", "flash", "lightning_fp8")
_BUILT_IN = F.scaled_dot_product_attention
_NO_FORWARD = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.", "torch.nn.functional")

OTHER_MEANS = "its forward did not call torch.nn.functional.scaled_dot_product_attention"
WEIGHTS = "need_weights=True has nn.MultiheadAttention compute the weights themselves; call it with need_weights=False"

OUR = "our"
TORCH = "torch"
BY_NAME = "by name"
HF = "hf"


def attention_modules(model: nn.Module) -> dict[str, str]:
    """Names of the modules that compute attention, and how: :data:`OUR`, :data:`TORCH`, :data:`BY_NAME`, :data:`HF`."""
    found = {clean_name(name): how_it_attends(module) for name, module in model.named_modules()}
    return {name: how for name, how in found.items() if how}


def how_it_attends(module: nn.Module) -> str:
    """How ``module`` computes attention, from the code of its forward and of what that calls; empty if it does not."""
    if isinstance(module, DotProductAttention):
        return OUR
    if isinstance(module, nn.MultiheadAttention):
        return TORCH
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or _is_from(_NO_FORWARD, forward):
        return ""
    said: set[str] = set()
    _read(forward, module, said, set())
    return next((how for how in (HF, TORCH, BY_NAME) if how in said), "")


def _read(function: Callable[..., Any], module: nn.Module, said: set[str], known: set[CodeType]) -> None:
    function = getattr(function, "__wrapped__", function)
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType) or _is_from("torch.", function):
        return
    for code in _codes(function.__code__):
        if code in known:
            continue
        known.add(code)
        for name in code.co_names:
            value = function.__globals__.get(name)
            if value is _BUILT_IN or (
                name == _SDPA and value is not None and value is not sdpa.scaled_dot_product_attention
            ):
                said.add(BY_NAME)
            elif name == _SDPA:
                said.add(TORCH)
            elif name == _HF:
                said.add(HF)
            else:
                for other in (value, _attribute(module, name)):
                    if isinstance(other, (FunctionType, MethodType)) and not _is_from(_NO_FORWARD, other):
                        _read(other, module, said, known)


def _is_from(modules: str | tuple[str, ...], function: FunctionType | MethodType) -> bool:
    """Whether the name of its module starts with ``modules``; generated code, as by torch.fx, has no module."""
    return (function.__module__ or "").startswith(modules)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _attribute(module: nn.Module, name: str) -> Any:
    """The method ``name``, or ``__call__`` of an attribute that is not a module, such as an attention processor."""
    own = vars(module).get(name)
    if own is not None and not isinstance(own, (FunctionType, MethodType)):
        return vars(type(own)).get("__call__")
    return own if own is not None else getattr(type(module), name, None)


class PlannedAttention(NamedTuple):
    """The table's row for a module that computes attention, and how FP8 contexts reach it.

    Attributes:
        decision: the row of the table.
        follows: whether the module follows FP8 contexts. A module that cannot train in FP8 may still run in evaluation.
        place: what to attach; None if nothing has to be attached.
    """

    decision: LayerDecision
    follows: bool
    place: AttentionPlace | None


def plan_attention(
    model: nn.Module, replace_layers: bool, reason_for_bf16: Callable[[str], str]
) -> list[PlannedAttention]:
    """Decide for each module that computes attention whether it runs in FP8; changes nothing."""
    modules = {clean_name(name): (name, module) for name, module in model.named_modules()}
    planned = []
    for name, how in attention_modules(model).items():
        raw_name, module = modules[name]
        hf_config, why = _reached(modules, name, module, how)
        kept = (
            "" if replace_layers or how == OUR else "replace_layers=False keeps attention of modules that are not ours"
        )
        decided = kept or reason_for_bf16(name) or why
        reason = decided or _why_not_in_training(module, how)
        decision = LayerDecision(name, (), not reason, reason, ATTENTION)
        place = None if how == OUR else AttentionPlace(raw_name, not decided, hf_config)
        planned.append(PlannedAttention(decision, not decided, place))
    return planned


def reached_places(planned: Sequence[PlannedAttention], kept_blocks: Sequence[str]) -> list[AttentionPlace]:
    """What to attach: the modules, and high-precision blocks in which no attention was found."""
    found = [attention.decision.name for attention in planned]
    blind = [block for block in kept_blocks if not any(f"{name}.".startswith(f"{block}.") for name in found)]
    return [attention.place for attention in planned if attention.place is not None] + [
        AttentionPlace(name, False) for name in blind
    ]


def place_in(blocks: Mapping[str, BlockPosition], name: str) -> BlockPosition | None:
    """The position of the block that contains the module called ``name``."""
    return next((place for block, place in blocks.items() if f"{name}.".startswith(f"{block}.")), None)


def _why_not_in_training(module: nn.Module, how: str) -> str:
    """Why training steps of the module do not run in FP8; empty if that depends on the calls."""
    if isinstance(module, DotProductAttention):
        return module.why_not_in_training()
    name = "dropout" if isinstance(module, nn.MultiheadAttention) else "attention_dropout"
    dropout = getattr(module, name, 0.0) if how == HF or name == "dropout" else 0.0
    if isinstance(dropout, (int, float)) and dropout > 0:
        return f"its dropout is {dropout:g} in training; set it to 0"
    return ""


def _reached(modules: dict[str, Any], name: str, module: nn.Module, how: str) -> tuple[Any, str]:
    """transformers' configuration to switch, or None, and the reason why this attention cannot run in FP8, or ""."""
    if how == BY_NAME:
        return None, f"{type(module).__name__} imported {_SDPA} by name; call torch.nn.functional.{_SDPA}"
    if how != HF:
        return None, ""
    hf_config = getattr(module, "config", None)
    implementation = getattr(hf_config, "_attn_implementation", None) or "eager"
    if not any(known in implementation for known in _SWITCHED_FROM):
        return None, f"attn_implementation={implementation!r} computes it; load the model with 'sdpa'"
    return (hf_config, "") if _is_switchable(modules, name) else (None, "")


def _is_switchable(modules: dict[str, Any], name: str) -> bool:
    """Whether the transformers model that contains the module accepts masks that are not dense, as FlashAttention's."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return False
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        _, holder = modules.get(".".join(parts[:depth]), ("", None))
        if isinstance(holder, modeling.PreTrainedModel):
            if not (getattr(holder, "_supports_flash_attn", False) or getattr(holder, "_supports_flash_attn_2", False)):
                return False
            try:
                from lightning_fp8.convert.attention_calls import hf
            except ImportError:  # a version without mask functions
                return False
            return hf.supported()
    return False


def judged(
    layer: LayerDecision,
    module: nn.Module | None,
    owner: Owner | None,
    counts: tuple[int, int],
    calls: int,
    otherwise: str,
) -> LayerDecision:
    """``layer`` updated with what its attention did.

    Args:
        owner: None for our own modules.
        counts: calls of attention in FP8 and in high precision.
        calls: forwards of the module, where they are counted.
        otherwise: the reason to report if attention was not called, or only outside FP8 contexts; see ``first_step``.
    """
    fp8, high_precision = counts
    if owner is not None and owner.slower:
        return replace(layer, ran=False, reason=owner.slower)
    if not layer.fp8:  # as decided for the module at that time
        return replace(layer, fp8=True, ran=True, reason="") if fp8 else layer
    why = owner.why if owner is not None else getattr(module, "reason", "")
    if fp8:
        if owner is not None and owner.comparison:
            layer = replace(layer, reason=owner.comparison)
        also = f"{high_precision} of {fp8 + high_precision} calls ran in high precision: {why}"
        return replace(layer, ran=True, reason=also if high_precision and why else layer.reason)
    if owner is not None and not high_precision and not calls and was_traced(owner.cls):
        return layer
    if high_precision and why:
        return replace(layer, ran=False, reason=why)
    if calls and not high_precision:
        return replace(layer, ran=False, reason=WEIGHTS if isinstance(module, nn.MultiheadAttention) else OTHER_MEANS)
    whole = not calls and was_compiled_whole(module)
    return replace(layer, ran=False, reason=COMPILED_WHOLE if whole else otherwise)
