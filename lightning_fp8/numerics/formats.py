"""The FP8 number formats: dtype and largest value.

The number 448 appears only here in lightning_fp8. Kernels do not import torch and have ``FP8_MAX`` in
:mod:`cuda_kernels.device.codec`; a test compares the two.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433) for E4M3 and E5M2; OCP
Microscaling Formats v1.0 for E8M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


@dataclass(frozen=True)
class Float8:
    """One 8-bit floating-point format.

    Attributes:
        name: the name of the format in the literature.
        dtype: the torch dtype.
        max: the largest finite value, at which casts saturate.
    """

    name: str
    dtype: torch.dtype
    max: float

    def __reduce__(self) -> Any:  # there is one object of each format: copies and pickles of a model have it, too
        return float8_of, (self.dtype,)


E4M3 = Float8("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Float8("E5M2", torch.float8_e5m2, 57344.0)

E8M0_DTYPE = torch.float8_e8m0fnu
"""A power of two, 2**(code - 127), without sign or mantissa; code 255 is NaN. Scales of MXFP8 only."""

CODES_NEED_SCALES = (
    "such values are codes, which mean nothing without the scales of the checkpoint, weight_scale_inv in those of "
    "transformers: load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"
)
"""What to do about codes where a high-precision weight should be."""


def holds_codes(tensor: torch.Tensor) -> bool:
    """Whether the values have a floating-point dtype of one byte: float8, its scales in E8M0, or pairs of float4.

    An ``FP8Tensor`` has a high-precision dtype.
    """
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


FORMATS = {format.name.lower(): format for format in (E4M3, E5M2)}
"""The formats by the names that ops and kernels give them."""

_BY_DTYPE = {format.dtype: format for format in FORMATS.values()}


def float8_of(dtype: torch.dtype) -> Float8:
    """The format of ``dtype``.

    Raises:
        ValueError: If ``dtype`` is not an FP8 data type.
    """
    if dtype not in _BY_DTYPE:
        raise ValueError(f"dtype={dtype} is not an FP8 format; use one of {', '.join(map(str, _BY_DTYPE))}")
    return _BY_DTYPE[dtype]


@dataclass(frozen=True)
class FormatPair:
    """The formats of one training step: ``forward`` for inputs and weights, ``backward`` for gradients.

    ``max_fwd`` and ``max_bwd`` are for code that reads ``Format.HYBRID.value`` as Transformer Engine's.
    """

    forward: Float8
    backward: Float8

    @property
    def max_fwd(self) -> float:
        return self.forward.max

    @property
    def max_bwd(self) -> float:
        return self.backward.max


_E4M3_ONLY = FormatPair(E4M3, E4M3)
_E5M2_ONLY = FormatPair(E5M2, E5M2)
_HYBRID = FormatPair(E4M3, E5M2)


class Format(Enum):
    """The FP8 formats of the operands of a GEMM.

    ``HYBRID`` casts inputs and weights to E4M3 (more precision) and gradients to E5M2 (more range). Pure E5M2 is
    included so that recipes can refuse it by name.
    """

    E4M3 = _E4M3_ONLY
    E5M2 = _E5M2_ONLY
    HYBRID = _HYBRID

    def __init__(self, pair: FormatPair) -> None:
        self.forward = pair.forward
        self.backward = pair.backward

    def __repr__(self) -> str:
        return f"Format.{self.name}"
