"""Scales from amaxes: the formulas of every recipe, as pure functions of tensors.

Convention: values are multiplied by ``scale`` before the cast, and codes by ``scale_inv = 1 / scale``. All arithmetic
is float32. Kernels implement the same formulas in ``cuda_kernels/device/codec.py``, and delayed scaling in
``cuda_kernels/casts/update_scales.py``; tests compare them bit by bit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max

AmaxAlgorithm = Literal["max", "most_recent"]


def floor_power_of_2(scale: Tensor) -> Tensor:
    """Round ``scale`` (float32, positive, normal) down to a power of two, elementwise."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def is_usable(amax: Tensor) -> Tensor:
    """True where a scale can be computed from ``amax``, elementwise: it is neither 0, inf nor NaN."""
    return (amax > 0) & torch.isfinite(amax)


def current_scale(amax: Tensor, fp8_max: float, power_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """Scale of a tensor, row or block from its current amax: ``fp8_max / max(amax, epsilon)``.

    The scale is 1 if that maximum is 0, inf or NaN. A quotient that overflows float32 is clamped to float32's largest
    value. Source: Transformer Engine's ``compute_scale_from_amax``.

    Args:
        amax: float32, any shape, non-negative.
        fp8_max: largest finite value of the FP8 format.
        power_2: round the scale down to a power of two.
        epsilon: lower bound of amax.

    Returns:
        float32 of amax's shape, finite and positive.
    """
    amax = amax.clamp(min=epsilon) if epsilon else amax
    # Divided in float64, then rounded to float32: see inverse. The numerator is a tensor because torch computes
    # number / tensor as a reciprocal times the number, which rounds twice.
    quotient = (torch.full_like(amax, fp8_max, dtype=torch.float64) / amax).float()
    scale = torch.where(is_usable(amax), quotient, 1.0).clamp(max=FLOAT32_MAX)
    return floor_power_of_2(scale) if power_2 else scale


def inverse(scale: Tensor) -> Tensor:
    """``1 / scale`` in float32, correctly rounded on every device.

    GPU compilers approximate float32 division, but divide float64 as IEEE 754 specifies. A quotient rounded to float64
    and then to float32 equals the quotient rounded once, since 53 >= 2 * 24 + 2: Figueroa, "When is double rounding
    innocuous?", SIGNUM Newsletter 30 (1995).
    """
    return (1.0 / scale.double()).float()


def delayed_scale(amax: Tensor, scale: Tensor, fp8_max: float | Tensor, margin: float = 0) -> Tensor:
    """The delayed-scaling formula: ``(fp8_max * 2**-margin) / amax``, evaluated in this order.

    Where amax is 0, inf or NaN, the old ``scale`` is kept. For the amax of a step, :func:`updated_scales` decides that
    before. A quotient that overflows float32 is clamped to float32's largest value. Source: Transformer Engine's fused
    update (``delayed_scaling.cu``).

    Args:
        amax: float32 ``[n]``, the amax of each tensor's history.
        scale: float32 ``[n]``, the current scales.
        fp8_max: largest finite value of the format, a number or float32 ``[n]``.
        margin: the scale is divided by ``2**margin``.

    Returns:
        float32 ``[n]``, the new scales.
    """
    largest = torch.as_tensor(fp8_max, dtype=torch.float32, device=amax.device)
    return torch.where(is_usable(amax), ((largest * 2.0**-margin) / amax).clamp(max=FLOAT32_MAX), scale)


def rescaling(fp8_maxes: tuple[float, float], margins: tuple[int, int]) -> float:
    """The factor that converts a delayed scale to another format or margin, for the same amax.

    Args:
        fp8_maxes: the formats' largest values, old and new.
        margins: the margins, old and new; see :func:`delayed_scale`.
    """
    before, after = (fp8_max * 2.0**-margin for fp8_max, margin in zip(fp8_maxes, margins))
    return after / before


def updated_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: AmaxAlgorithm
) -> tuple[Tensor, Tensor]:
    """The update of delayed scaling: append ``amax`` to the history, reduce the history, compute the scales.

    A tensor keeps its scale and history if its amax is 0 (its module did not run), inf or NaN (which would freeze the
    scale for the whole history). Source: Transformer Engine's fused update (``delayed_scaling.cu``), which lets inf and
    NaN enter the history.

    Args:
        amax: float32 ``[n]``, the amaxes of this step.
        amax_history: float32 ``[len, n]``, oldest first.
        scale: float32 ``[n]``, the current scales.
        fp8_max: float32 ``[n]``, the largest value of each tensor's format.
        margin: the scale is divided by ``2**margin``.
        algorithm: how the history is reduced: its ``"max"``, or its ``"most_recent"`` step.

    Returns:
        The new scales ``[n]`` and the new history ``[len, n]``. The history's oldest step is set to 0: its amax is not
        used again.
    """
    usable = is_usable(amax)
    amax_history = torch.where(usable, torch.cat([amax_history[1:], amax[None]]), amax_history)
    largest = amax_history.amax(0) if algorithm == "max" else amax_history[-1]
    scale = torch.where(usable, delayed_scale(largest, scale, fp8_max, margin), scale)
    amax_history[0] = 0
    return scale, amax_history


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> Tensor:
    """E8M0 code (uint8) of the inverse scale ``amax / fp8_max``, rounded up to a power of two.

    The quotient is computed as ``amax`` times the float32 reciprocal of ``fp8_max``, as on GPUs. An amax of 0 gives
    code 0 (2**-127), inf gives 254, and NaN gives 255. Source: OCP Microscaling Formats v1.0, with Transformer Engine's
    rounding up, which never saturates a finite block.

    Args:
        amax: float32, any shape, non-negative.
        fp8_max: largest finite value of the FP8 format.
    """
    bits = (amax * (1.0 / fp8_max)).view(torch.int32)  # torch rounds the number to float32 first
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Code 0 represents subnormals up to 2**-127; inf (exponent 255, no mantissa) saturates to 254.
    round_up = (mantissa > 0) & (exponent != 254) & ((exponent > 0) | (mantissa > 0x400000))
    code = (exponent + round_up.int()).clamp(max=254)
    return torch.where(torch.isnan(amax), 255, code).to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    """``2**(code - 127)`` as float32 from uint8 codes; 255 is NaN."""
    bits = code.int() << 23
    bits = torch.where(code == 0, 0x00400000, bits)  # 2**-127 is subnormal in float32
    return torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_scale(code: Tensor) -> Tensor:
    """``2**(127 - code)``, the scale to multiply by, as float32 from uint8 codes; 255 is NaN."""
    return e8m0_decode(254 - code)  # 255 becomes itself; torch.ldexp's powers may be of the default dtype
