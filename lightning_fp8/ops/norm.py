"""LayerNorm and RMSNorm cast to FP8 in one pass, and their gradients: the ops, and their specification in plain torch.

``norm_quantize`` casts as ``quantize`` does, and has the same last arguments. The float32 values are cast directly,
without rounding to x's dtype first. Kernels are in ``norm_cuda.py``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.cast import (
    CastArgs,
    Quantized,
    asked_by,
    check_cast,
    fake_outputs,
    operands_of,
    reference_quantize,
)
from lightning_fp8.ops.checks import HIGH_PRECISION, require, require_contiguous, require_matrix
from lightning_fp8.ops.op import op, spec


@spec("float eps, bool rms, bool zero_centered")
class Norm(NamedTuple):
    """The formula of a norm.

    Attributes:
        eps: added to the variance.
        rms: True for RMSNorm, which has no mean; False for LayerNorm.
        zero_centered: whether the weight stores gamma - 1.
    """

    eps: float
    rms: bool = False
    zero_centered: bool = False

    @property
    def flat(self) -> tuple[float, bool, bool]:
        """The fields as the arguments of an op."""
        # As text, a float is a constant in compiled code. As a number, it would be dynamic.
        return float(f"{self.eps!r}"), self.rms, self.zero_centered

    @classmethod
    def from_flat(cls, *flat: Any) -> Norm:
        """The inverse of :attr:`flat`."""
        return cls(*flat)

    @property
    def num_statistics(self) -> int:
        """The number of statistics of a row: the mean (LayerNorm), and the reciprocal of the deviation."""
        return 1 if self.rms else 2


class Normalized(NamedTuple):
    """The result of a norm.

    Attributes:
        operands: ``y`` as GEMM operands.
        statistics: float32 ``[2, R]``, (mean, rstd), or for RMSNorm ``[1, R]``, (rstd,). The gradient needs them.
    """

    operands: Quantized
    statistics: Tensor


class NormOutputs(NamedTuple):
    """The results of a cast, and the statistics."""

    data: Tensor
    scale_inv: Tensor
    data_t: Tensor
    scale_inv_t: Tensor
    statistics: Tensor


class NormGradients(NamedTuple):
    """The gradients ``[R, K]``, ``[K]`` and ``[K]``. The last is empty if it is not requested."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


# --- The public functions ---------------------------------------------------------------------------------------------


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

    LayerNorm is ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` (Ba et al.,
    arXiv:1607.06450). RMSNorm is ``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x²) + eps)`` (Zhang and
    Sennrich, arXiv:1910.07467).

    Args:
        x: a bfloat16, float16 or float32 tensor.
        weight: ``[K]`` in bfloat16, float16 or float32.
        bias: ``[K]`` in the dtype of weight; None for RMSNorm.
        cast: the FP8 format of y and the layout of its scales.
        eps: added to the variance, or for RMSNorm to the mean of squares.
        rms: True for RMSNorm, False for LayerNorm.
        zero_centered: whether ``weight`` stores gamma - 1. The formulas then use ``weight + 1``.
        cast_args: ``scale``, ``amax``, ``rowwise`` and so on for y; see :func:`lightning_fp8.ops.quantize`.

    Returns:
        y as FP8 operands of GEMMs, and the statistics that the gradient needs.

    Raises:
        TypeError, ValueError: If x or the cast is invalid (see :func:`lightning_fp8.ops.quantize`), if the shape,
            dtype or device of a parameter is invalid, or if ``eps`` is negative or not finite.
    """
    usage, requested, observed = asked_by(x, cast, cast_args)
    results = norm_quantize_op.call(x, weight, bias, Norm(float(eps), rms, zero_centered), usage, *observed)
    return Normalized(operands_of(results, usage, *requested), results[4])


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
    """The gradients of :func:`norm_quantize`: x ``[R, K]``, weight ``[K]`` and optionally bias ``[K]``.

    With ``x^ = (x - mean) rstd`` and ``g = dy * weight``, ``dx = rstd (g - mean(g) - x^ mean(g x^))``. For RMSNorm the
    term ``mean(g)`` is omitted. Sums over rows are in float32 and deterministic.

    Args:
        dy: ``[R, K]`` in bfloat16, float16 or float32.
        x, weight, rms, zero_centered: see :func:`norm_quantize`. The gradients have the dtypes of x and weight.
        statistics: the statistics that :func:`norm_quantize` returned.
        bias_gradient: whether to compute the gradient of the bias.

    Raises:
        TypeError, ValueError: If the shape, dtype or device of a tensor is invalid.
    """
    norm = Norm(0.0, rms, zero_centered)
    dx, dweight, dbias = norm_backward_op.call(dy, x, weight, statistics, norm, bias_gradient)
    return dx, dweight, dbias if bias_gradient else None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    eps: float,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the rows of ``x [R, K]`` in ``dtype``, and the statistics that :func:`norm_backward` needs.

    Args:
        x, weight, eps, zero_centered: see :func:`norm_quantize`.
        rounds_first: whether ``x rstd`` is rounded to x's dtype before it is multiplied by the weight, as in Hugging
            Face's Llama.
    """
    return rms_norm_op.call(x, weight, Norm(float(eps), True, zero_centered), dtype, rounds_first)  # type: ignore[no-any-return]


# --- The ops ----------------------------------------------------------------------------------------------------------


def _check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    """Check the shape, dtype and device of a parameter for the norm of ``x``."""
    if parameter.shape != x.shape[1:] or parameter.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{name} is {parameter.dtype} of shape {tuple(parameter.shape)}; for x of shape {tuple(x.shape)} it must "
            f"have shape [{x.shape[1]}] and be bfloat16, float16 or float32"
        )
    if parameter.device != x.device:
        require(name, parameter, HIGH_PRECISION, parameter.shape, x.device)


def _check_rms_norm(x: Tensor, weight: Tensor, norm: Norm, *_: Any) -> None:
    require_matrix(x)
    if not 0 <= norm.eps < math.inf:
        raise ValueError(f"eps={norm.eps} must be a finite number of at least 0")
    _check_parameter("weight", weight, x)


def _check_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast, *observed: Tensor | None
) -> None:
    check_cast(x, cast, *observed)
    _check_rms_norm(x, weight, norm)
    if bias is not None:
        if norm.rms:
            raise ValueError("RMSNorm has no bias; pass bias=None, or rms=False for LayerNorm")
        _check_parameter("bias", bias, x)
        if bias.dtype != weight.dtype:
            raise TypeError(f"bias is {bias.dtype}, weight is {weight.dtype}; both must have the same dtype")


def _check_backward(dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: Norm, bias_gradient: bool) -> None:
    require_matrix(x)
    require("dy", dy, HIGH_PRECISION, x.shape, x.device)
    require("weight", weight, HIGH_PRECISION, x.shape[1:], x.device)
    require_contiguous("statistics", statistics)
    require("statistics", statistics, torch.float32, (norm.num_statistics, x.shape[0]), x.device)


@op("norm_quantize", check=_check_norm)
def norm_quantize_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast, *observed: Tensor | None
) -> NormOutputs:
    statistics = x.new_empty(norm.num_statistics, x.shape[0], dtype=torch.float32)
    return NormOutputs(*fake_outputs(x, cast, x.shape[0], x.shape[1]), statistics)


@op("rms_norm", check=_check_rms_norm)
def rms_norm_op(x: Tensor, weight: Tensor, norm: Norm, dtype: torch.dtype, rounds_first: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(1, x.shape[0], dtype=torch.float32)


@op("norm_backward", check=_check_backward)
def norm_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: Norm, bias_gradient: bool
) -> NormGradients:
    dbias = weight.new_empty(weight.shape if bias_gradient else 0)
    return NormGradients(x.new_empty(x.shape), weight.new_empty(weight.shape), dbias)


# --- The specification ------------------------------------------------------------------------------------------------


def reference_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast, *observed: Tensor | None
) -> NormOutputs:
    """See :func:`norm_quantize`."""
    x = x.float()
    means = [] if norm.rms else [x.mean(1)]
    centered = x if norm.rms else x - means[0][:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + norm.eps)
    y = centered * rstd[:, None] * _gamma(weight, norm)
    if bias is not None:
        y = y + bias.float()
    return NormOutputs(*reference_quantize(y, cast, *observed), torch.stack((*means, rstd)))


def reference_rms_norm(
    x: Tensor, weight: Tensor, norm: Norm, dtype: torch.dtype, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`rms_norm`."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1) + norm.eps)
    normalized = wide * rstd[:, None]
    if rounds_first:
        normalized = normalized.to(x.dtype).float()
    return (normalized * _gamma(weight, norm)).to(dtype), rstd[None]


def reference_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: Norm, bias_gradient: bool
) -> NormGradients:
    """See :func:`norm_backward`."""
    dy, rstd = dy.float(), statistics[-1]
    normalized = (x.float() if norm.rms else x.float() - statistics[0][:, None]) * rstd[:, None]
    g = dy * _gamma(weight, norm)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not norm.rms:
        dx = dx - g.mean(1, keepdim=True)
    dweight = (dy * normalized).sum(0).to(weight.dtype)
    dbias = dy.sum(0).to(weight.dtype) if bias_gradient else weight.new_empty(0)
    return NormGradients((dx * rstd[:, None]).to(x.dtype), dweight, dbias)


def _gamma(weight: Tensor, norm: Norm) -> Tensor:
    return weight.float() + (1.0 if norm.zero_centered else 0.0)


norm_quantize_op.implement("cpu", reference_norm)
norm_backward_op.implement("cpu", reference_norm_backward)
rms_norm_op.implement("cpu", reference_rms_norm)
