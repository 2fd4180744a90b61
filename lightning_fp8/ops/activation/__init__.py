"""Activations, cast to FP8 in one go, and their gradients.

The float32 values are cast, not rounded to x's dtype before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_fp8.ops.activation import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.activation import cuda_gated as _cuda_gated  # noqa: F401  (those of the gated ops)
from lightning_fp8.ops.activation import reference as _reference  # (registers the implementation)
from lightning_fp8.ops.activation import schema as _schema  # noqa: F401  (defines the ops)
from lightning_fp8.ops.activation.schema import activated_shape, format_activation_options, is_gated
from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.quantize.casting import CastArgs, Quantized, check_cast, run_cast
from lightning_fp8.scaled import Cast

_activation_quantize = op("activation_quantize")
_activation_quantize_unobserved = op("activation_quantize_unobserved")
_activation_backward_quantize = op("activation_backward_quantize")
_activation_backward_quantize_unobserved = op("activation_backward_quantize_unobserved")
_gated_quantize = op("gated_quantize"), op("gated_quantize_unobserved")
_gated_backward_quantize = op("gated_backward_quantize"), op("gated_backward_quantize_unobserved")

ACTIVATIONS = tuple(_reference.ACTIVATIONS)
"""Names of the activations: Transformer Engine's, ``gelu`` being the tanh form; those that end in ``glu`` are gated."""


def activation_quantize(
    x: Tensor,
    activation: str,
    cast: Cast,
    **cast_args: Unpack[CastArgs],
) -> Quantized:
    """``activation(x)``, cast to FP8; a gated one is ``activation(x[:, :F]) * x[:, F:]`` of ``x [R, 2 F]``.

    Args:
        x: bfloat16, float16 or float32.
        activation: one of :data:`ACTIVATIONS`.
        cast: format and layout.
        cast_args: ``scale``, ``amax``, ``rowwise`` and so on, as in :func:`lightning_fp8.ops.quantize`, of the values.

    Raises:
        TypeError, ValueError: x or the cast as in :func:`lightning_fp8.ops.quantize`; an unknown activation; an odd
            number of columns for a gated one.
    """
    check_cast("activation_quantize", x, cast, **cast_args)
    _check_activation(activation, x)
    operands, _ = run_cast(
        _activation_quantize, _activation_quantize_unobserved, (x,), f"{activation}, ",
        cast, **cast_args,
    )  # fmt: skip
    return operands


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    cast: Cast,
    *,
    bias_dtype: torch.dtype | None = None,
    **cast_args: Unpack[CastArgs],
) -> tuple[Quantized, Tensor | None]:
    """The gradient of x through :func:`activation_quantize`, cast to FP8, and its sum over rows.

    Args:
        dy: ``[R, F]``, one of the three dtypes.
        x: ``[R, F]``, or ``[R, 2 F]`` for a gated activation: what the activation was computed from.
        bias_dtype: dtype of the sum over rows of the float32 gradient, the gradient of a bias that was added to x;
            None for no sum.
        cast_args: as in :func:`activation_quantize`, of the gradient.

    Returns:
        The operands ``[R, F or 2 F]``; the sum ``[F or 2 F]``, or None.

    Raises:
        TypeError, ValueError: as :func:`activation_quantize`; dy has another shape than the activation of x, or
            ``bias_dtype`` is none of the three dtypes.
    """
    check_cast("activation_backward_quantize", x, cast, **cast_args)
    _check_activation(activation, x)
    if dy.shape != activated_shape(activation, x.shape):
        raise ValueError(f"dy of shape {tuple(dy.shape)} is no gradient of {activation} of x {tuple(x.shape)}")
    operands, (dbias,) = run_cast(
        _activation_backward_quantize, _activation_backward_quantize_unobserved, (dy, x),
        f"{format_activation_options(activation, bias_dtype)}, ", cast, **cast_args,
    )  # fmt: skip
    return operands, dbias if bias_dtype else None


def gated_quantize(x: Tensor, factor: Tensor, activation: str, cast: Cast, **cast_args: Unpack[CastArgs]) -> Quantized:
    """``activation(x) * factor``, cast to FP8; of two tensors what :func:`activation_quantize` is of two halves of one.

    It is also the gradient of ``factor``, where that of the result stands in its place.

    Args:
        x: ``[R, F]``, bfloat16, float16 or float32.
        factor: of x's shape and dtype.
        activation: one of :data:`ACTIVATIONS` that is not gated itself.
        cast, cast_args: as in :func:`activation_quantize`.

    Raises:
        TypeError, ValueError: as :func:`activation_quantize`; a gated activation; ``factor`` of another dtype or shape.
    """
    _check_gated("gated_quantize", x, activation, cast, cast_args)
    operands, _ = run_cast(*_gated_quantize, (x, factor), f"{activation}, ", cast, **cast_args)
    return operands


def gated_backward_quantize(
    dy: Tensor, x: Tensor, factor: Tensor, activation: str, cast: Cast, **cast_args: Unpack[CastArgs]
) -> Quantized:
    """The gradient of x through :func:`gated_quantize`, cast to FP8.

    Args:
        dy: ``[R, F]``, the gradient of the result, in x's dtype.
        x, factor, activation, cast, cast_args: as in :func:`gated_quantize`; the cast is the gradient's.

    Raises:
        TypeError, ValueError: as :func:`gated_quantize`; ``dy`` of another dtype or shape than x.
    """
    _check_gated("gated_backward_quantize", x, activation, cast, cast_args)
    operands, _ = run_cast(*_gated_backward_quantize, (dy, x, factor), f"{activation}, ", cast, **cast_args)
    return operands


def _check_gated(name: str, x: Tensor, activation: str, cast: Cast, cast_args: CastArgs) -> None:
    """Check what the gated ops take, and that a tensor of its own multiplies the activation."""
    check_cast(name, x, cast, **cast_args)
    _check_activation(activation, x)
    if is_gated(activation):
        raise ValueError(f"{name} multiplies by a tensor of its own; {activation} would split x: pass silu for swiglu")


def _check_activation(activation: str, x: Tensor) -> None:
    """Check that an activation exists and fits the columns of ``x``."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if is_gated(activation) and x.shape[1] % 2:
        raise ValueError(f"{activation} splits x in two halves, which {x.shape[1]} columns do not have")
