"""Activations cast to FP8 in one pass, and their gradients: the ops, and their specification in plain torch.

They cast as ``quantize`` does, and have the same last arguments. The float32 values are cast directly, without rounding
to x's dtype first. The ``gated`` ops take the factor of the activation as a separate tensor. Kernels are in
``activation_cuda.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.cast import (
    CastArgs,
    Outputs,
    Quantized,
    asked_by,
    check_cast,
    fake_outputs,
    joined,
    operands_of,
    reference_quantize,
)
from lightning_fp8.ops.checks import HIGH_PRECISION, require
from lightning_fp8.ops.op import op


class GradientOutputs(NamedTuple):
    """The results of a cast of the gradient, and the gradient's sum over rows, which is empty if not requested."""

    data: Tensor
    scale_inv: Tensor
    data_t: Tensor
    scale_inv_t: Tensor
    dbias: Tensor


class GatedGradients(NamedTuple):
    """The results of the casts of a gate's and of its factor's gradient."""

    data: Tensor
    scale_inv: Tensor
    data_t: Tensor
    scale_inv_t: Tensor
    factor_data: Tensor
    factor_scale_inv: Tensor
    factor_data_t: Tensor
    factor_scale_inv_t: Tensor


def is_gated(activation: str) -> bool:
    """Whether the activation is gated: the activation of the first half of x is multiplied by the second half."""
    return activation.endswith("glu")


def activated_shape(activation: str, shape: Sequence[int]) -> tuple[int, int]:
    """The shape ``[R, F]`` of the activation's output, given the shape ``[R, F or 2 F]`` of x."""
    rows, columns = shape
    return rows, columns // 2 if is_gated(activation) else columns


# --- The public functions ---------------------------------------------------------------------------------------------


def activation_quantize(x: Tensor, activation: str, cast: Cast, **cast_args: Unpack[CastArgs]) -> Quantized:
    """``activation(x)``, cast to FP8. With a gated activation, ``activation(x[:, :F]) * x[:, F:]`` of ``x [R, 2 F]``.

    Args:
        x: a bfloat16, float16 or float32 tensor.
        activation: one of :data:`ACTIVATIONS`.
        cast: the format and layout.
        cast_args: ``scale``, ``amax``, ``rowwise`` and so on; see :func:`lightning_fp8.ops.quantize`.

    Raises:
        TypeError, ValueError: If x or the cast is invalid (see :func:`lightning_fp8.ops.quantize`), if the activation
            is unknown, or if x has an odd number of columns and the activation is gated.
    """
    usage, requested, observed = asked_by(x, cast, cast_args)
    return operands_of(activation_quantize_op.call(x, activation, usage, *observed), usage, *requested)


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    cast: Cast,
    *,
    bias_dtype: torch.dtype | None = None,
    **cast_args: Unpack[CastArgs],
) -> tuple[Quantized, Tensor | None]:
    """The gradient of x in :func:`activation_quantize`, cast to FP8, and its sum over rows.

    Args:
        dy: ``[R, F]``, a bfloat16, float16 or float32 tensor.
        x: ``[R, F]``, or ``[R, 2 F]`` for a gated activation; the input of the activation.
        bias_dtype: the dtype of the sum of the float32 gradient over rows, which is the gradient of a bias that was
            added to x. None does not compute it.
        cast_args: the arguments of the gradient's cast; see :func:`activation_quantize`.

    Returns:
        The operands ``[R, F or 2 F]``, and the sum ``[F or 2 F]`` or None.

    Raises:
        TypeError, ValueError: See :func:`activation_quantize`. Also if dy does not have the shape of the activation's
            output, or if ``bias_dtype`` is not bfloat16, float16 or float32.
    """
    usage, requested, observed = asked_by(dy, cast, cast_args)
    results = activation_backward_quantize_op.call(dy, x, activation, bias_dtype, usage, *observed)
    return operands_of(results, usage, *requested), results[4] if bias_dtype else None


def gated_quantize(x: Tensor, factor: Tensor, activation: str, cast: Cast, **cast_args: Unpack[CastArgs]) -> Quantized:
    """``activation(x) * factor``, cast to FP8: a gated :func:`activation_quantize` of two separate tensors.

    Args:
        x: ``[R, F]``, a bfloat16, float16 or float32 tensor.
        factor: a tensor with x's shape and dtype.
        activation: one of :data:`ACTIVATIONS` that is not gated.
        cast, cast_args: see :func:`activation_quantize`.

    Raises:
        TypeError, ValueError: See :func:`activation_quantize`. Also if the activation is gated, or if the shape or
            dtype of ``factor`` is not x's.
    """
    usage, requested, observed = asked_by(x, cast, cast_args)
    return operands_of(gated_quantize_op.call(x, factor, activation, usage, *observed), usage, *requested)


def gated_backward_quantize(
    dy: Tensor, x: Tensor, factor: Tensor, activation: str, cast: Cast, of_x: CastArgs, of_factor: CastArgs
) -> tuple[Quantized, Quantized]:
    """The gradients of x and of factor in :func:`gated_quantize`, each cast to FP8, from one pass over the tensors.

    Args:
        dy: ``[R, F]``, the gradient of the result, in x's dtype.
        x, factor, activation: see :func:`gated_quantize`.
        cast: the format and layout of both.
        of_x, of_factor: the other arguments of each cast. Both have a scale, or none has. A
            copy that one of them asks for is made of both.

    Raises:
        TypeError, ValueError: See :func:`gated_quantize`. Also if the shape or dtype of ``dy`` is not x's, or if only
            one scale is given.
    """
    args: CastArgs = {
        "rowwise": of_x.get("rowwise", True) or of_factor.get("rowwise", True),
        "columnwise": of_x.get("columnwise", False) or of_factor.get("columnwise", False),
        "scale_is_nonzero": of_x.get("scale_is_nonzero", False) and of_factor.get("scale_is_nonzero", False),
    }
    usage, requested, _ = asked_by(x, cast, args)
    observed = (each.get(name) for name in ("scale", "amax") for each in (of_x, of_factor))
    results = gated_backward_quantize_op.call(dy, x, factor, activation, usage, *observed)
    return operands_of(results[:4], usage, *requested), operands_of(results[4:], usage, *requested)


# --- The ops ----------------------------------------------------------------------------------------------------------


def _check(x: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> None:
    check_cast(x, cast, *observed)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if is_gated(activation) and x.shape[1] % 2:
        raise ValueError(
            f"{activation} splits x into two halves; x has {x.shape[1]} columns, which must be an even number"
        )


def _check_backward(
    dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype | None, cast: Cast, *observed: Tensor | None
) -> None:
    _check(x, activation, cast, *observed)
    if bias_dtype is not None and bias_dtype not in HIGH_PRECISION:
        raise TypeError(f"bias_dtype={bias_dtype} must be None or one of {', '.join(map(str, HIGH_PRECISION))}")
    if dy.shape != activated_shape(activation, x.shape):
        raise ValueError(
            f"dy has shape {tuple(dy.shape)}, which is not the shape of {activation} of x {tuple(x.shape)}"
        )
    require("dy", dy, HIGH_PRECISION, dy.shape, x.device)


def _check_gated(x: Tensor, factor: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> None:
    _check(x, activation, cast, *observed)
    if is_gated(activation):
        raise ValueError(
            f"{activation} splits x, but gated ops have a separate factor; use a plain activation (silu, not swiglu)"
        )
    require("factor", factor, x.dtype, x.shape, x.device)


def _check_gated_backward(
    dy: Tensor, x: Tensor, factor: Tensor, activation: str, cast: Cast, *observed: Tensor | None
) -> None:
    scale, factor_scale, amax, factor_amax = observed
    _check_gated(x, factor, activation, cast, scale, amax)
    check_cast(x, cast, factor_scale, factor_amax)
    if (scale is None) != (factor_scale is None):
        raise ValueError("scale and factor_scale must both be given, or neither; a value of 0 computes it")
    require("dy", dy, x.dtype, x.shape, x.device)


@op("activation_quantize", check=_check)
def activation_quantize_op(x: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> Outputs:
    return fake_outputs(x, cast, *activated_shape(activation, x.shape))


@op("activation_backward_quantize", check=_check_backward)
def activation_backward_quantize_op(
    dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype | None, cast: Cast, *observed: Tensor | None
) -> GradientOutputs:
    dbias = x.new_empty(x.shape[1] if bias_dtype else 0, dtype=bias_dtype or torch.float32)
    return GradientOutputs(*fake_outputs(x, cast, x.shape[0], x.shape[1]), dbias)


@op("gated_quantize", check=_check_gated)
def gated_quantize_op(x: Tensor, factor: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> Outputs:
    return fake_outputs(x, cast, x.shape[0], x.shape[1])


@op("gated_backward_quantize", check=_check_gated_backward, writes=("amax", "factor_amax"), twin=True)
def gated_backward_quantize_op(
    dy: Tensor,
    x: Tensor,
    factor: Tensor,
    activation: str,
    cast: Cast,
    scale: Tensor | None = None,
    factor_scale: Tensor | None = None,
    amax: Tensor | None = None,
    factor_amax: Tensor | None = None,
) -> GatedGradients:
    first, second = (fake_outputs(x, cast, x.shape[0], x.shape[1]) for _ in range(2))
    return GatedGradients(*first, *second)


# --- The specification ------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """An activation in float32, ``forward(x)``, and its gradient, ``backward(dy, x)``."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


# The sigmoid is 0 or 1 beyond this limit. A larger factor changes nothing, and an infinite one would give NaN.
_FAR = 128.0


def _silu(x: Tensor) -> Tensor:
    return x.clamp(min=-_FAR) * torch.sigmoid(x)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * (s * (1 + x.clamp(-_FAR, _FAR) * (1 - s)))


# GELU's tanh form is x (1 + tanh(u)) / 2 = x sigmoid(2 u), which does not cancel where x is negative.
_GELU_1 = 2 * math.sqrt(2 / math.pi)
_GELU_3 = _GELU_1 * 0.044715


def _gelu(x: Tensor) -> Tensor:
    return x.clamp(min=-_FAR) * torch.sigmoid(x * (_GELU_1 + _GELU_3 * (x * x)))


def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x * (_GELU_1 + _GELU_3 * (x * x)))
    near = x.clamp(-_FAR, _FAR)
    return dy * (s * (1 + near * (1 - s) * (_GELU_1 + 3 * _GELU_3 * (near * near))))


# Hendrycks and Gimpel, arXiv:1606.08415, section 2: the coarser approximation of GELU.
_QGELU = 1.702


def _qgelu(x: Tensor) -> Tensor:
    return x.clamp(min=-_FAR) * torch.sigmoid(_QGELU * x)


def _qgelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(_QGELU * x)
    return dy * (s * (1 + _QGELU * x.clamp(-_FAR, _FAR) * (1 - s)))


def _sigmoid_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * (s * (1 - s))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, x)


def _relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, dy)


def _srelu(x: Tensor) -> Tensor:
    return _relu(x).square()


def _srelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, dy * (2 * x))


_FORMULAS = {
    name: Activation(forward, backward)
    for names, forward, backward in (
        (("gelu", "geglu"), _gelu, _gelu_backward),
        (("qgelu", "qgeglu"), _qgelu, _qgelu_backward),
        (("relu", "reglu"), _relu, _relu_backward),
        (("srelu", "sreglu"), _srelu, _srelu_backward),
        (("silu", "swiglu"), _silu, _silu_backward),
        (("glu",), torch.sigmoid, _sigmoid_backward),
    )
    for name in names
}
"""The activations by Transformer Engine's names. ``gelu`` is the tanh form, and ``qgelu`` is ``x sigmoid(1.702 x)``."""

ACTIVATIONS = tuple(_FORMULAS)
"""Transformer Engine's names of the activations. ``gelu`` is the tanh form. Gated activations end in ``glu``."""


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation of ``x [R, F]``, or ``x [R, 2 F]`` if it is gated, in float32."""
    if not is_gated(activation):
        return _FORMULAS[activation].forward(x.float())
    x, gate = x.chunk(2, 1)
    return gated(x, gate, activation)


def activated_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x in :func:`activated`, in float32."""
    forward, backward = _FORMULAS[activation]
    dy, x = dy.float(), x.float()
    if not is_gated(activation):
        return backward(dy, x)
    x, gate = x.chunk(2, 1)
    return torch.cat([backward(dy * gate, x), dy * forward(x)], 1)


def reference_activation(x: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> Outputs:
    """See :func:`activation_quantize`."""
    return reference_quantize(activated(x, activation), cast, *observed)


def reference_activation_backward(
    dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype | None, cast: Cast, *observed: Tensor | None
) -> GradientOutputs:
    """See :func:`activation_backward_quantize`."""
    dx = activated_backward(dy, x, activation)
    dbias = dx.sum(0).to(bias_dtype) if bias_dtype else dx.new_empty(0)
    return GradientOutputs(*reference_quantize(dx, cast, *observed), dbias)


def gated(x: Tensor, factor: Tensor, activation: str) -> Tensor:
    """``activation(x) * factor`` in float32."""
    return _FORMULAS[activation].forward(x.float()) * factor.float()


def gated_backward(dy: Tensor, x: Tensor, factor: Tensor, activation: str) -> Tensor:
    """The gradient of x in :func:`gated`, in float32."""
    return _FORMULAS[activation].backward(dy.float() * factor.float(), x.float())


def reference_gated(x: Tensor, factor: Tensor, activation: str, cast: Cast, *observed: Tensor | None) -> Outputs:
    """See :func:`gated_quantize`."""
    return reference_quantize(gated(x, factor, activation), cast, *observed)


def reference_gated_backward(
    dy: Tensor, x: Tensor, factor: Tensor, activation: str, cast: Cast, *observed: Tensor | None
) -> GatedGradients:
    """See :func:`gated_backward_quantize`."""
    scale, factor_scale, amax, factor_amax = observed
    of_x = reference_quantize(gated_backward(dy, x, factor, activation), cast, scale, amax)
    of_factor = reference_quantize(gated(x, dy, activation), cast, factor_scale, factor_amax)
    return GatedGradients(*joined(of_x, of_factor))


activation_quantize_op.implement("cpu", reference_activation)
activation_backward_quantize_op.implement("cpu", reference_activation_backward)
gated_quantize_op.implement("cpu", reference_gated)
gated_backward_quantize_op.implement("cpu", reference_gated_backward)
