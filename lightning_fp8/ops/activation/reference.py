"""The specification of activations in plain torch: values in float32, cast as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.activation.schema import (
    activated_shape,
    is_gated,
    parse_activation_options,
)
from lightning_fp8.ops.core.checks import require
from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.quantize.outputs import Outputs
from lightning_fp8.ops.quantize.reference import cast
from lightning_fp8.ops.quantize.schema import CastIO, cast_op, implement_cast


class Activation(NamedTuple):
    """An activation in float32: ``forward(x)``, and its gradient ``backward(dy, x)``."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


# A sigmoid that far from 0 is 0 or 1: a larger factor changes nothing, and infinity would make NaN of its product.
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


# Hendrycks and Gimpel, arXiv:1606.08415, section 2: GELU's coarser form.
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


ACTIVATIONS = {
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
"""The activations by Transformer Engine's names; ``gelu`` is the tanh form, ``qgelu`` is ``x sigmoid(1.702 x)``."""


def activate(x: Tensor, options_text: str, io: CastIO) -> Outputs:
    """See :func:`lightning_fp8.ops.activation_quantize`."""
    name = parse_activation_options(options_text).name
    forward, _ = ACTIVATIONS[name]
    if is_gated(name):
        x, gate = x.float().chunk(2, 1)
        y = forward(x) * gate
    else:
        y = forward(x.float())
    return cast(y, options_text, io)


activation_quantize = cast_op(activate, num_inputs=1)


def activate_backward(dy: Tensor, x: Tensor, options_text: str, io: CastIO) -> tuple[Tensor, ...]:
    """See :func:`lightning_fp8.ops.activation_backward_quantize`."""
    options = parse_activation_options(options_text)
    require("dy", dy, HIGH_PRECISION, activated_shape(options.name, x.shape), x.device)
    forward, backward = ACTIVATIONS[options.name]
    dy, x = dy.float(), x.float()
    if is_gated(options.name):
        x, gate = x.chunk(2, 1)
        dx = torch.cat([backward(dy * gate, x), dy * forward(x)], 1)
    else:
        dx = backward(dy, x)
    dbias = dx.sum(0).to(options.bias_dtype) if options.bias_dtype else dx.new_empty(0)
    return *cast(dx, options_text, io), dbias


activation_backward_quantize = cast_op(activate_backward, num_inputs=2)


def activate_gated(x: Tensor, factor: Tensor, options_text: str, io: CastIO) -> Outputs:
    """See :func:`lightning_fp8.ops.gated_quantize`."""
    require("factor", factor, x.dtype, x.shape, x.device)
    forward, _ = ACTIVATIONS[parse_activation_options(options_text).name]
    return cast(forward(x.float()) * factor.float(), options_text, io)


gated_quantize = cast_op(activate_gated, num_inputs=2)


def activate_gated_backward(dy: Tensor, x: Tensor, factor: Tensor, options_text: str, io: CastIO) -> Outputs:
    """See :func:`lightning_fp8.ops.gated_backward_quantize`."""
    require("dy", dy, x.dtype, x.shape, x.device)
    require("factor", factor, x.dtype, x.shape, x.device)
    _, backward = ACTIVATIONS[parse_activation_options(options_text).name]
    return cast(backward(dy.float() * factor.float(), x.float()), options_text, io)


gated_backward_quantize = cast_op(activate_gated_backward, num_inputs=3)

implement_cast("activation_quantize", "cpu", activation_quantize)
implement_cast("activation_backward_quantize", "cpu", activation_backward_quantize)
implement_cast("gated_quantize", "cpu", gated_quantize)
implement_cast("gated_backward_quantize", "cpu", gated_backward_quantize)
