"""amax -> scale: the formulas of every recipe, as pure functions of tensors.

Convention: ``scale`` multiplies before the cast, ``scale_inv = 1 / scale`` divides back. All arithmetic is float32.
Kernels have the same formulas in ``cuda_kernels/device/codec.py`` and, of delayed scaling, in
``cuda_kernels/casts/update_scales.py``; tests compare them bit by bit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max

AmaxAlgorithm = Literal["max", "most_recent"]


def floor_power_of_2(scale: Tensor) -> Tensor:
    """The largest power of two that is not above ``scale`` (float32, positive, normal), element by element."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def is_usable(amax: Tensor) -> Tensor:
    """Whether a scale may be computed from ``amax``, element by element: it is neither 0, inf nor NaN."""
    return (amax > 0) & torch.isfinite(amax)


def current_scale(amax: Tensor, fp8_max: float, power_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """Scale of a tensor, row or block from its own amax: ``fp8_max / max(amax, epsilon)``.

    An amax of 0, inf or NaN gives 1; a quotient beyond float32 gives float32's largest value; ``power_2`` rounds
    down to a power of two. Source: Transformer Engine's ``compute_scale_from_amax``.

    Args:
        amax: float32, any shape, non-negative.

    Returns:
        float32 of amax's shape, finite and positive.
    """
    amax = amax.clamp(min=epsilon) if epsilon else amax
    # In float64, which gives float32's quotient: see inverse. Tensor by tensor: torch turns a number divided by a
    # tensor into a reciprocal, which rounds twice.
    quotient = (torch.full_like(amax, fp8_max, dtype=torch.float64) / amax).float()
    scale = torch.where(is_usable(amax), quotient, 1.0).clamp(max=FLOAT32_MAX)
    return floor_power_of_2(scale) if power_2 else scale


def inverse(scale: Tensor) -> Tensor:
    """``1 / scale`` in float32, rounded to nearest even wherever it runs.

    Compilers for GPUs divide float32 approximately, and float64 as IEEE 754 says. A quotient that is rounded to float64
    and then to float32 is that rounded once, since 53 >= 2 * 24 + 2: Figueroa, "When is double rounding innocuous?",
    SIGNUM Newsletter 30 (1995).
    """
    return (1.0 / scale.double()).float()


def delayed_scale(amax: Tensor, scale: Tensor, fp8_max: float | Tensor, margin: float = 0) -> Tensor:
    """The delayed-scaling rule: ``(fp8_max * 2**-margin) / amax``, in this order.

    Keeps the old ``scale`` where amax is 0, inf or NaN; a quotient beyond float32 gives float32's largest value.
    Source: Transformer Engine's fused update (``delayed_scaling.cu``).

    Args:
        amax: float32 ``[n]``, the window's amax.
        scale: float32 ``[n]``, the scales in use.
        fp8_max: the format's largest value, one number or float32 ``[n]``.
        margin: binary digits of head room.
    """
    largest = torch.as_tensor(fp8_max, dtype=torch.float32, device=amax.device)
    return torch.where(is_usable(amax), ((largest * 2.0**-margin) / amax).clamp(max=FLOAT32_MAX), scale)


def rescaling(fp8_maxes: tuple[float, float], margins: tuple[int, int]) -> float:
    """The factor from a delayed scale that was made for one format and margin to that for another, of the same amax.

    Args:
        fp8_maxes: the formats' largest values, before and after.
        margins: binary digits of head room, before and after.
    """
    before, after = (fp8_max * 2.0**-margin for fp8_max, margin in zip(fp8_maxes, margins))
    return after / before


def updated_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: AmaxAlgorithm
) -> tuple[Tensor, Tensor]:
    """The scale update of delayed scaling: push ``amax`` into the history, reduce that over its steps, and scale.

    A tensor whose amax is 0 (its module did not run), inf or NaN (it would freeze the scale for the whole window) keeps
    its scale and history. Source: Transformer Engine's fused update (``delayed_scaling.cu``).

    Args:
        amax: float32 ``[n]``, of this step.
        amax_history: float32 ``[len, n]``, oldest first.
        scale: float32 ``[n]``, the scales in use.
        fp8_max: float32 ``[n]``, the largest value of each tensor's format.
        margin: binary digits of head room.
        algorithm: ``"max"`` of the history or its ``"most_recent"`` step.

    Returns:
        New scales and the new history, whose first step is 0: that amax counted for the last time.
    """
    usable = is_usable(amax)
    amax_history = torch.where(usable, torch.cat([amax_history[1:], amax[None]]), amax_history)
    largest = amax_history.amax(0) if algorithm == "max" else amax_history[-1]
    scale = torch.where(usable, delayed_scale(largest, scale, fp8_max, margin), scale)
    amax_history[0] = 0
    return scale, amax_history


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> Tensor:
    """E8M0 code (uint8) of the inverse scale ``amax / fp8_max``, rounded up to a power of two.

    The quotient is ``amax`` times the float32 reciprocal of ``fp8_max``, as on GPUs. 0 gives code 0 (2**-127), inf
    gives 254, NaN gives 255. Source: OCP Microscaling Formats v1.0 with Transformer Engine's round-up, which never
    saturates a finite block.

    Args:
        amax: float32, any shape, non-negative.
    """
    bits = (amax * (1.0 / fp8_max)).view(torch.int32)  # torch rounds the number to float32 first
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal up to 2**-127 is what code 0 stands for; inf (exponent 255, no mantissa) saturates to 254.
    round_up = (mantissa > 0) & (exponent != 254) & ((exponent > 0) | (mantissa > 0x400000))
    code = (exponent + round_up.int()).clamp(max=254)
    return torch.where(torch.isnan(amax), 255, code).to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    """``2**(code - 127)`` as float32 from uint8 codes; 255 is NaN."""
    bits = code.int() << 23
    bits = torch.where(code == 0, 0x00400000, bits)  # 2**-127 is subnormal in float32
    return torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_scale(code: Tensor) -> Tensor:
    """``2**(127 - code)``, the scale that multiplies, as float32 from uint8 codes; 255 is NaN."""
    return e8m0_decode(254 - code)  # 255 becomes itself; torch.ldexp's powers may be of the default dtype
