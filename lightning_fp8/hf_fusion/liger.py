"""What Liger-Kernel has replaced in a model, found without importing it. Norms and MLPs: their modules here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from lightning_fp8.hf_fusion.fused import forward_of
from lightning_fp8.names import clean_name

READS_THE_HEAD = "Liger's fused linear cross entropy reads its weight and does not call it in training"


def _is_ligers(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("liger_kernel.")


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward is a model's that Liger has replaced, for its loss."""
    for name, module in model.named_modules():
        if _is_ligers(function := forward_of(module)) and ".transformers.model." in function.__module__:
            yield clean_name(name), module


def heads_read_by_liger(model: nn.Module) -> frozenset[str]:
    """The names of the output heads, and of the modules in them, whose weight Liger's loss multiplies by itself."""
    return frozenset(
        clean_name(f"{owner}.{name}".lstrip("."))
        for owner, module in _owners(model)
        for name, _ in module.named_modules()
        if "lm_head" in name.split(".")
    )


def computed_by_liger(model: nn.Module) -> tuple[str, ...]:
    """A message that names what Liger's kernels compute in ``model`` besides norms and MLPs; empty if nothing."""
    sources = {sys.modules.get(type(module).__module__) for module in model.modules()} - {None}
    names = {each.__name__ for source in sources for each in vars(source).values() if _is_ligers(each)}
    found = {
        "RoPE": any("rotary" in name for name in names),
        "cross entropy": _is_ligers(F.cross_entropy),
        "the fused linear cross entropy": any(True for _ in _owners(model)),
    }
    computed = " and ".join(what for what, is_so in found.items() if is_so)
    return (f"Liger-Kernel computes {computed}, in high precision.",) if computed else ()


__all__ = ["READS_THE_HEAD", "computed_by_liger", "heads_read_by_liger"]
