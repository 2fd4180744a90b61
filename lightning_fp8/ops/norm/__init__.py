"""LayerNorm and RMSNorm, cast to FP8 in one go, and their gradients.

The float32 values are cast, not rounded to x's dtype before.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.norm import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.norm import cuda_backward as _cuda_backward  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.norm import reference as _reference  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.norm import schema as _schema  # noqa: F401  (defines the ops)
from lightning_fp8.ops.norm.schema import format_norm_options
from lightning_fp8.ops.quantize.casting import CastArgs, Quantized, check_cast, run_cast
from lightning_fp8.scaled import Cast

_norm_quantize = op("norm_quantize")
_norm_quantize_unobserved = op("norm_quantize_unobserved")
_norm_backward = op("norm_backward")


class Normalized(NamedTuple):
    """A norm's result.

    Attributes:
        operands: ``y`` as GEMM operands.
        statistics: float32 ``[2, R]``, (mean, rstd), or for RMSNorm ``[1, R]``, (rstd,); the gradient needs them.
    """

    operands: Quantized
    statistics: Tensor


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cast: Cast,
    *,
    eps: float,
    rms: bool = False,
    zero_centered: bool = False,
    **cast_args: Unpack[CastArgs],
) -> Normalized:
    """LayerNorm or RMSNorm of the rows of ``x [R, K]``, cast to FP8.

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` (Ba et al., arXiv:1607.06450), for
    RMSNorm ``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x²) + eps)`` (Zhang and Sennrich, arXiv:1910.07467).

    Args:
        x: bfloat16, float16 or float32.
        weight: ``[K]``, one of the three dtypes.
        bias: ``[K]`` in weight's dtype; RMSNorm has none.
        cast: format and layout.
        eps: added to the variance.
        rms: RMSNorm, not LayerNorm.
        zero_centered: ``weight`` holds the factor minus 1.
        cast_args: ``scale``, ``amax``, ``rowwise`` and so on, as in :func:`lightning_fp8.ops.quantize`, of y.

    Raises:
        TypeError, ValueError: x or the cast as in :func:`lightning_fp8.ops.quantize`; a parameter that does not fit.
    """
    check_cast("norm_quantize", x, cast, **cast_args)
    _check_parameter("weight", weight, x)
    if bias is not None:
        if rms:
            raise ValueError("RMSNorm has no bias; pass bias=None, or rms=False for LayerNorm")
        _check_parameter("bias", bias, x)
        if bias.dtype != weight.dtype:
            raise TypeError(f"bias is {bias.dtype}, weight is {weight.dtype}; give both in one dtype")
    operands, (statistics,) = run_cast(
        _norm_quantize, _norm_quantize_unobserved, (x, weight, bias),
        f"{format_norm_options(rms, eps, zero_centered)}, ", cast, **cast_args,
    )  # fmt: skip
    return Normalized(operands, statistics)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    rms: bool = False,
    zero_centered: bool = False,
    bias_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of :func:`norm_quantize`: of x ``[R, K]``, weight ``[K]`` and, if there is one, bias ``[K]``.

    With ``x^ = (x - mean) rstd`` and ``g = dy * weight``: ``dx = rstd (g - mean(g) - x^ mean(g x^))``, RMSNorm's
    without ``mean(g)``; sums over rows are float32 and come in the same order every time.

    Args:
        dy: ``[R, K]``, one of the three dtypes.
        x, weight, rms, zero_centered: as in :func:`norm_quantize`; the gradients have x's and weight's dtypes.
        statistics: what it gave.
        bias_gradient: whether to give the bias's.

    Raises:
        TypeError, ValueError: x, dy, weight or statistics do not fit together.
    """
    if x.dtype not in HIGH_PRECISION or x.dim() != 2:
        raise TypeError(f"takes a 2-D tensor in bfloat16, float16 or float32, not {x.dtype} {tuple(x.shape)}")
    options_text = format_norm_options(rms, 0.0, zero_centered, bias_gradient)
    dx, dweight, dbias = _norm_backward(dy, x, weight, statistics, options_text)
    return dx, dweight, dbias if bias_gradient else None


def _check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Check that a parameter fits the columns of ``x``."""
    if parameter.shape != x.shape[1:] or parameter.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{name} is {parameter.dtype} {tuple(parameter.shape)}; x {tuple(x.shape)} needs [{x.shape[1]}]"
        )
