"""Find the modules that compute attention, decide which of them run in FP8, and report which did in a training step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn

from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.convert.attention_calls import sdpa
from lightning_fp8.convert.attention_calls.attach import AttentionPlace
from lightning_fp8.convert.attention_calls.owners import Owner
from lightning_fp8.convert.summary import ATTENTION, LayerDecision
from lightning_fp8.names import prefixes
from lightning_fp8.traced import was_traced

_SDPA = "scaled_dot_product_attention"
_HF = "ALL_ATTENTION_FUNCTIONS"
_SWITCHED_FROM = ("sdpa", "flash", "lightning_fp8")
_BUILT_IN = F.scaled_dot_product_attention
_NO_FORWARD = ("torch.", "lightning.", "pytorch_lightning.")

OTHER_MEANS = "its forward did not call torch.nn.functional.scaled_dot_product_attention"

OUR = "our"
MULTIHEAD = "multihead"
TORCH = "torch"
BY_NAME = "by name"
HF = "hf"


def how_it_attends(module: nn.Module) -> str:
    """How ``module`` computes attention, from the code of its forward and of what that calls; empty if it does not.

    It is :data:`OUR`, :data:`MULTIHEAD`, :data:`TORCH`, :data:`BY_NAME` or :data:`HF`.
    """
    if isinstance(module, (DotProductAttention, nn.MultiheadAttention)):
        return OUR if isinstance(module, DotProductAttention) else MULTIHEAD
    said: set[str] = set()
    forward = getattr(type(module), "forward", None)
    if isinstance(forward, FunctionType):
        _read(forward, module, said, set())
    return next((how for how in (HF, TORCH, BY_NAME) if how in said), "")


def _read(function: Any, module: nn.Module, said: set[str], known: set[CodeType]) -> None:
    """Add to ``said`` by what names the code of ``function``, and of what it calls, refers to attention."""
    function = unwrap(function)  # a decorated forward, of a module that was attached
    function = getattr(function, "__func__", function)
    # generated code, as by torch.fx, has no module
    if not isinstance(function, FunctionType) or (function.__module__ or "").startswith(_NO_FORWARD):
        return
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        if code in known:
            continue
        known.add(code)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if name == _SDPA:
                said.add(TORCH if value is None or value is sdpa.scaled_dot_product_attention else BY_NAME)
            elif name == _HF or value is _BUILT_IN:
                said.add(HF if name == _HF else BY_NAME)
            else:
                for called in (value, _attribute(module, name)):
                    if isinstance(called, (FunctionType, MethodType)):
                        _read(called, module, said, known)


def _attribute(module: nn.Module, name: str) -> Any:
    """The method ``name``, or ``__call__`` of an attribute that is not a module, such as an attention processor."""
    own = vars(module).get(name)
    if own is not None and not isinstance(own, (FunctionType, MethodType)):
        return vars(type(own)).get("__call__")
    return own if own is not None else getattr(type(module), name, None)


def plan_attention(
    modules: Mapping[str, nn.Module], replace_layers: bool, reason_for_bf16: Callable[[str], str], compares: bool
) -> list[tuple[LayerDecision, AttentionPlace]]:
    """For each of a model's ``modules`` that computes attention, the row of the table and what FP8 contexts apply to.

    A module that cannot train in FP8 may still run in evaluation.
    """
    planned = []
    for name, module in modules.items():
        if not (how := how_it_attends(module)):
            continue
        hf_config, why = _reached(modules, name, module, how)
        kept = (
            "" if replace_layers or how == OUR else "replace_layers=False keeps attention of modules that are not ours"
        )
        decided = kept or reason_for_bf16(name) or why
        reason = decided or _why_not_in_training(module, how)
        decision = LayerDecision(name, (), not reason, reason, ATTENTION)
        planned.append((decision, AttentionPlace(name, not decided, hf_config, compares)))
    return planned


def _why_not_in_training(module: nn.Module, how: str) -> str:
    """Why training steps of the module do not run in FP8; empty if that depends on the calls."""
    if isinstance(module, DotProductAttention):
        return module.why_not_in_training()
    dropout = getattr(module, "attention_dropout", 0.0) if how == HF else 0.0
    if isinstance(dropout, (int, float)) and dropout > 0:
        return f"its dropout is {dropout:g} in training; set it to 0"
    return ""


def _reached(modules: Mapping[str, nn.Module], name: str, module: nn.Module, how: str) -> tuple[Any, str]:
    """transformers' configuration to switch, or None, and the reason why this attention cannot run in FP8, or ""."""
    if how == MULTIHEAD:
        return None, sdpa.MULTIHEAD
    if how == BY_NAME:
        return None, f"{type(module).__name__} imported {_SDPA} by name; call torch.nn.functional.{_SDPA}"
    if how != HF:
        return None, ""
    hf_config = getattr(module, "config", None)
    implementation = getattr(hf_config, "_attn_implementation", None) or "eager"
    if not any(known in implementation for known in _SWITCHED_FROM):
        return None, f"attn_implementation={implementation!r} computes it; load the model with 'sdpa'"
    return (hf_config, "") if _is_switchable(modules, name) else (None, "")


def _is_switchable(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether the transformers model that contains the module accepts masks that are not dense, as FlashAttention's."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return False
    holders = (modules.get(each) for each in (name, *reversed(prefixes(name)), ""))
    model = next((each for each in holders if isinstance(each, modeling.PreTrainedModel)), None)
    if not (getattr(model, "_supports_flash_attn", False) or getattr(model, "_supports_flash_attn_2", False)):
        return False
    try:
        from lightning_fp8.convert.attention_calls import hf
    except ImportError:  # a version without mask functions
        return False
    return hf.supported()


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
        reason = owner.comparison if owner is not None and owner.comparison else layer.reason
        if high_precision and why:
            reason = f"{high_precision} of {fp8 + high_precision} calls ran in high precision: {why}"
        return replace(layer, ran=True, reason=reason)
    if owner is not None and not high_precision and not calls and was_traced(owner.cls):
        return layer
    if high_precision and why:
        return replace(layer, ran=False, reason=why)
    return replace(layer, ran=False, reason=OTHER_MEANS if calls and not high_precision else otherwise)
