"""``transformer_engine.pytorch.quantization``: regions, weights in FP8, and which recipes the device supports.

Every recipe runs on every device. The ``is_..._available`` functions return whether its matrix multiplications run on
FP8 tensor cores; with ``return_reason=True`` they return ``(available, reason)``, with an empty reason if they do.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from lightning_fp8.fp8_region import autocast, fp8_autocast
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks
from lightning_fp8.weights.model_init import fp8_model_init

__all__ = [
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

quantized_model_init = fp8_model_init

Available: TypeAlias = bool | tuple[bool, str]

_ADA, _BLACKWELL_OF_DATA_CENTRES = (8, 9), 10


def get_default_recipe() -> DelayedScaling:
    """The default recipe of a region: delayed scaling, on every device."""
    return DelayedScaling()


def is_fp8_available(return_reason: bool = False) -> Available:
    """Whether matrix multiplications of ``DelayedScaling`` and ``Float8CurrentScaling`` run on FP8 tensor cores."""
    return _answer(_why_not_fp8(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Available:
    """Whether matrix multiplications of ``Float8BlockScaling`` run on FP8 tensor cores."""
    reason = _why_not_fp8()
    if not reason and torch.cuda.get_device_capability()[0] == _BLACKWELL_OF_DATA_CENTRES:
        reason = f"Float8BlockScaling runs on compute capability {_capability()}, but its products run in float32"
    return _answer(reason, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Available:
    """Whether matrix multiplications of ``MXFP8BlockScaling`` run on FP8 tensor cores."""
    reason = _why_not_fp8()
    if not reason and not multiplies_mx_blocks(torch.device("cuda", torch.cuda.current_device())):
        reason = (
            f"MXFP8BlockScaling runs on compute capability {_capability()} with CUDA {torch.version.cuda}, but its "
            "products run in BF16; tensor cores of compute capability 10.0 and later run them, from CUDA 12.8 on"
        )
    return _answer(reason, return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Available:
    """False: there is no recipe of four bits."""
    return _answer("no recipe casts to four bits", return_reason)


def _answer(reason: str, return_reason: bool) -> Available:
    return (not reason, reason) if return_reason else not reason


def _capability() -> str:
    return ".".join(map(str, torch.cuda.get_device_capability()))


def _why_not_fp8() -> str:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; FP8 layers run on the CPU with the same rounding, but slowly"
    if torch.cuda.get_device_capability() < _ADA:
        return (
            f"compute capability {_capability()} has no FP8 tensor cores, which begin with 8.9; FP8 layers run there "
            "with the same rounding, but slowly"
        )
    return ""
