"""What Liger-Kernel has replaced in a model, found without importing it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn

from lightning_fp8.names import clean_name

if TYPE_CHECKING:  # calls of imported names are compiled differently, so templates import what Liger does
    from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.swiglu import _swiglu_dispatch

READS_THE_HEAD = "Liger's fused linear cross entropy reads its weight and does not call it in training"


def rms_norm(self: Any, x: Any) -> Any:  # a template, of which only the code is read; so are MLPS
    return LigerRMSNormFunction.apply(
        x, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place, self.row_mode
    )


MLPS = (
    lambda self, x: self.down_proj(_swiglu_dispatch(self.gate_proj(x), self.up_proj(x))),
    lambda self, x: self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x))),
    lambda self, x: self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x))),
)


def is_patched(module: nn.Module) -> bool:
    """Whether Liger has replaced the forward of this instance."""
    return _is_ligers(vars(module).get("forward"))


def _is_ligers(function: Any, package: str = "liger_kernel.") -> bool:
    return (getattr(function, "__module__", None) or "").startswith(package)


def heads_read_by_liger(model: nn.Module) -> frozenset[str]:
    """The names of the output heads, and of the modules in them, whose weight Liger's loss multiplies by itself."""
    return frozenset(
        clean_name(f"{owner}.{name}".lstrip("."))
        for owner, module in model.named_modules()
        if _is_ligers(module.forward, "liger_kernel.transformers.model.")
        for name, _ in module.named_modules()
        if "lm_head" in name.split(".")
    )


def computed_by_liger(model: nn.Module) -> tuple[str, ...]:
    """A message that names what Liger computes in ``model`` besides norms and MLPs; none if nothing."""
    sources = {sys.modules.get(type(module).__module__, F) for module in model.modules()}
    ligers = [getattr(each, "__name__", "") for source in sources for each in vars(source).values() if _is_ligers(each)]
    found = {
        "RoPE": any("rotary" in name for name in ligers),
        "cross entropy": _is_ligers(F.cross_entropy),
        "the fused linear cross entropy": bool(heads_read_by_liger(model)),
    }
    computed = " and ".join(what for what, is_so in found.items() if is_so)
    return (f"Liger-Kernel computes {computed}, in high precision.",) if computed else ()
