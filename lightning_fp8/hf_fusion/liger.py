"""What Liger-Kernel has replaced in a model, found without importing it."""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import nn

from lightning_fp8.names import clean_name

READS_THE_HEAD = "Liger's fused linear cross entropy reads its weight and does not call it in training"


def is_ligers(function: Any, module: str = "liger_kernel.") -> bool:
    """Whether ``function`` is of a Python module whose name begins with ``module``."""
    return (getattr(function, "__module__", None) or "").startswith(module)


def is_patched(module: nn.Module) -> bool:
    """Whether Liger has replaced the forward of this instance."""
    return is_ligers(vars(module).get("forward"))


def heads_read_by_liger(model: nn.Module) -> frozenset[str]:
    """The names of the output heads, and of the modules in them, whose weight Liger's loss multiplies by itself."""
    return frozenset(
        clean_name(f"{owner}.{name}".lstrip("."))
        for owner, module in model.named_modules()
        if is_ligers(module.forward, "liger_kernel.transformers.model.")
        for name, _ in module.named_modules()
        if "lm_head" in name.split(".")
    )


def computed_by_liger(model: nn.Module) -> tuple[str, ...]:
    """A message that names what Liger computes in ``model`` besides norms and MLPs; empty if nothing."""
    sources = {sys.modules.get(type(module).__module__) for module in model.modules()}
    names = {each.__name__ for source in sources for each in vars(source or F).values() if is_ligers(each)}
    found = {
        "RoPE": any("rotary" in name for name in names),
        "cross entropy": is_ligers(F.cross_entropy),
        "the fused linear cross entropy": bool(heads_read_by_liger(model)),
    }
    computed = " and ".join(what for what, is_so in found.items() if is_so)
    return (f"Liger-Kernel computes {computed}, in high precision.",) if computed else ()
