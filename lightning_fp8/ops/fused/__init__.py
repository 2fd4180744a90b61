"""Ops that compute a tensor and cast it to FP8 in one go: normalizations, activations, and activations' gradients.

What they cast are the float32 values, not rounded to x's dtype before. They know no gradients and no modules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops import HIGH_PRECISION, Quantized, gives_a_view, quantized
from lightning_fp8.ops.config import quantize_config
from lightning_fp8.ops.fused import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.fused import reference as _reference  # (registers the implementation)
from lightning_fp8.ops.fused import schema as _schema  # (defines the ops)
from lightning_fp8.ops.fused.schema import activation_config, norm_config
from lightning_fp8.scaled import Cast, Layout

_ops = torch.ops.lightning_fp8

ACTIVATIONS = tuple(_reference.ACTIVATIONS)
"""Names of the activations: Transformer Engine's, ``gelu`` being the tanh form; those with ``glu`` are gated."""


class Normalized(NamedTuple):
    """``y`` as GEMM operands, and what its gradient needs: float32 ``[2, R]``, mean and rstd; RMSNorm's only rstd."""

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
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    may_be_0: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    counts: Tensor | None = None,
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
        scale, amax, may_be_0, rowwise, columnwise, counts: as in :func:`lightning_fp8.ops.quantize`, of y.

    Raises:
        TypeError, ValueError: x or the cast as in :func:`lightning_fp8.ops.quantize`; a parameter that does not fit.
    """
    _check(x, cast, scale, amax)
    _check_parameter("weight", weight, x)
    if bias is not None:
        if rms:
            raise ValueError("RMSNorm has no bias; pass bias=None, or rms=False for LayerNorm")
        _check_parameter("bias", bias, x)
        if bias.dtype != weight.dtype:
            raise TypeError(f"bias is {bias.dtype}, weight is {weight.dtype}; give both in one dtype")
    view = gives_a_view(x, cast, columnwise)
    config = quantize_config(cast, rowwise or view, columnwise and not view, not may_be_0)
    config = f"{norm_config(rms, eps, zero_centered)}, {config}"
    if amax is None and counts is None:
        *operands, statistics = _ops.norm_quantize_unobserved.default(x, weight, bias, config, scale)
    else:
        *operands, statistics = _ops.norm_quantize.default(x, weight, bias, config, scale, amax, counts)
    return Normalized(quantized(operands, cast, rowwise, columnwise, view), statistics)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    rms: bool = False,
    zero_centered: bool = False,
    bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of :func:`norm_quantize`: of x ``[R, K]``, weight ``[K]`` and, if there is one, bias ``[K]``.

    With ``x^ = (x - mean) rstd`` and ``g = dy * weight``: ``dx = rstd (g - mean(g) - x^ mean(g x^))``, RMSNorm's
    without ``mean(g)``; sums over rows are float32 and come in the same order every time.

    Args:
        dy: ``[R, K]``, one of the three dtypes.
        x, weight, rms, zero_centered: as in :func:`norm_quantize`; the gradients have x's and weight's dtypes.
        statistics: what it gave.
        bias: whether to give its gradient.

    Raises:
        TypeError, ValueError: x, dy, weight or statistics do not fit together.
    """
    _check(x)
    norm = norm_config(rms, 0.0, zero_centered, bias)
    dx, dweight, dbias = _ops.norm_backward.default(dy, x, weight, statistics, norm)
    return dx, dweight, dbias if bias else None


def activation_quantize(
    x: Tensor,
    activation: str,
    cast: Cast,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    may_be_0: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    counts: Tensor | None = None,
) -> Quantized:
    """``activation(x)``, cast to FP8; a gated one is ``activation(x[:, :F]) * x[:, F:]`` of ``x [R, 2 F]``.

    Args:
        x: bfloat16, float16 or float32.
        activation: one of :data:`ACTIVATIONS`.
        cast: format and layout.
        scale, amax, may_be_0, rowwise, columnwise, counts: as in :func:`lightning_fp8.ops.quantize`, of the values.

    Raises:
        TypeError, ValueError: x or the cast as in :func:`lightning_fp8.ops.quantize`; an unknown activation; an odd
            number of columns for a gated one.
    """
    _check(x, cast, scale, amax)
    _check_activation(activation, x)
    view = gives_a_view(x, cast, columnwise)
    config = quantize_config(cast, rowwise or view, columnwise and not view, not may_be_0)
    config = f"{activation}, {config}"
    if amax is None and counts is None:
        operands = _ops.activation_quantize_unobserved.default(x, config, scale)
    else:
        operands = _ops.activation_quantize.default(x, config, scale, amax, counts)
    return quantized(operands, cast, rowwise, columnwise, view)


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    cast: Cast,
    *,
    bias_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    may_be_0: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    counts: Tensor | None = None,
) -> tuple[Quantized, Tensor | None]:
    """The gradient of x through :func:`activation_quantize`, cast to FP8, and its sum over rows.

    Args:
        dy: ``[R, F]``, one of the three dtypes.
        x: ``[R, F]``, or ``[R, 2 F]`` for a gated activation: what the activation was computed from.
        bias_dtype: dtype of the sum over rows of the float32 gradient, the gradient of a bias that was added to x;
            None for no sum.
        others: as in :func:`activation_quantize`, of the gradient.

    Returns:
        The operands ``[R, F or 2 F]``; the sum ``[F or 2 F]``, or None.
    """
    _check(x, cast, scale, amax)
    _check_activation(activation, x)
    if dy.shape != _schema.activated_shape(activation, x.shape):
        raise ValueError(f"dy of shape {tuple(dy.shape)} is no gradient of {activation} of x {tuple(x.shape)}")
    view = gives_a_view(x, cast, columnwise)
    config = quantize_config(cast, rowwise or view, columnwise and not view, not may_be_0)
    config = f"{activation_config(activation, bias_dtype)}, {config}"
    if amax is None and counts is None:
        *operands, dbias = _ops.activation_backward_quantize_unobserved.default(dy, x, config, scale)
    else:
        *operands, dbias = _ops.activation_backward_quantize.default(dy, x, config, scale, amax, counts)
    return quantized(operands, cast, rowwise, columnwise, view), dbias if bias_dtype else None


def _check(x: Tensor, cast: Cast | None = None, scale: Tensor | None = None, amax: Tensor | None = None) -> None:
    if x.dtype not in HIGH_PRECISION or x.dim() != 2:
        raise TypeError(f"takes a 2-D tensor in bfloat16, float16 or float32, not {x.dtype} {tuple(x.shape)}")
    if cast is not None and cast.layout is not Layout.TENSOR and scale is not None:
        raise ValueError(f"layout {cast.layout.value!r} scales each block from itself; scale must be None")
    if amax is not None and scale is None:
        raise ValueError("amax is collected for a given scale; pass scale too (0 takes the tensor's own)")


def _check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    if parameter.shape != x.shape[1:] or parameter.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{name} is {parameter.dtype} {tuple(parameter.shape)}; x {tuple(x.shape)} needs [{x.shape[1]}]"
        )


def _check_activation(activation: str, x: Tensor) -> None:
    if activation not in _reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if _schema.is_gated(activation) and x.shape[1] % 2:
        raise ValueError(f"{activation} splits x in two halves, which {x.shape[1]} columns do not have")
