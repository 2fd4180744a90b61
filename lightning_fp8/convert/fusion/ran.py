"""What modules that cast for FP8 layers did in training."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_fp8.convert.summary import NORM, LayerDecision
from lightning_fp8.modules.fusion.casting import CastingModule

NORM_CAST_NOTHING = (
    "its input is not of its weight's dtype, or torch.autocast is on (compute_dtype turns it on), so its readers cast"
)
MLP_CAST_NOTHING = "a layer or the activation of it was replaced, hooked or compiled, so down_proj casts"


def forget_what_ran(planned: LayerDecision, module: nn.Module | None) -> None:
    """Let :func:`judged_casting` tell of forwards from now on alone."""
    if planned.fp8 and isinstance(module, CastingModule):
        module.cast = None


def judged_casting(planned: LayerDecision, module: nn.Module | None) -> LayerDecision:
    """``planned`` with what it did in training forwards since :func:`forget_what_ran`."""
    if not planned.fp8 or not isinstance(module, CastingModule) or module.cast is None:
        return planned
    why_not = NORM_CAST_NOTHING if planned.kind == NORM else MLP_CAST_NOTHING
    return replace(planned, ran=module.cast, reason=planned.reason if module.cast else why_not)
