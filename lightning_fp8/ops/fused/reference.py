"""The specification of the fused ops in plain torch: values in float32, cast as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.fused.schema import (
    NormConfig,
    activated_shape,
    is_gated,
    parse_activation_config,
    parse_norm_config,
)
from lightning_fp8.ops.given import compact, lie_of, require_beside_a_norm, require_gradient, require_statistics
from lightning_fp8.ops.reference import quantize
from lightning_fp8.ops.schema import NAMESPACE, UNOBSERVED

# --- Normalization ----------------------------------------------------------------------------------------------------


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :func:`lightning_fp8.ops.fused.norm_quantize`."""
    require_beside_a_norm(x.shape[1:], x.device, lie_of(weight), lie_of(bias))
    kind, x = parse_norm_config(config), x.float()
    means = [] if kind.rms else [x.mean(1)]
    centered = x if kind.rms else x - means[0][:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + kind.eps)
    y = centered * rstd[:, None] * _gamma(weight, kind)
    if bias is not None:
        y = y + bias.float()
    return *quantize(y, config, scale, amax, counts), torch.stack((*means, rstd))


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`lightning_fp8.ops.fused.norm_backward`."""
    kind = parse_norm_config(norm)
    require_gradient(lie_of(dy), x.shape, x.device)
    require_beside_a_norm(x.shape[1:], x.device, lie_of(weight))
    require_statistics(compact("statistics", statistics), kind.rms, x.shape[0], x.device)
    dy, rstd = dy.float(), statistics[-1]
    normalized = (x.float() if kind.rms else x.float() - statistics[0][:, None]) * rstd[:, None]
    g = dy * _gamma(weight, kind)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not kind.rms:
        dx = dx - g.mean(1, keepdim=True)
    dweight = (dy * normalized).sum(0).to(weight.dtype)
    return (dx * rstd[:, None]).to(x.dtype), dweight, dy.sum(0).to(weight.dtype) if kind.bias else weight.new_empty(0)


def _gamma(weight: Tensor, kind: NormConfig) -> Tensor:
    return weight.float() + (1.0 if kind.zero_centered else 0.0)


# --- Activations ------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """``value(x)`` and ``backward(dy, x)``, in float32."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


# A sigmoid that far from 0 is 0 or 1: a larger factor changes nothing, and infinity would make NaN of its product.
_FAR = 128.0


def _silu(x: Tensor) -> Tensor:
    return x.clamp(min=-_FAR) * torch.sigmoid(x)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return dy * (s * (1 + x.clamp(-_FAR, _FAR) * (1 - s)))


# GELU's tanh form is x (1 + tanh(u)) / 2 = x sigmoid(2 u), which does not cancel where x is negative.
_GELU_1, _GELU_3 = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715


def _gelu(x: Tensor) -> Tensor:
    return x.clamp(min=-_FAR) * torch.sigmoid(x * (_GELU_1 + _GELU_3 * (x * x)))


def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s, near = torch.sigmoid(x * (_GELU_1 + _GELU_3 * (x * x))), x.clamp(-_FAR, _FAR)
    return dy * (s * (1 + near * (1 - s) * (_GELU_1 + 3 * _GELU_3 * (near * near))))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, x)


def _relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, dy)


def _srelu(x: Tensor) -> Tensor:
    return _relu(x).square()


def _srelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, dy * (2 * x))


ACTIVATIONS = {
    name: Activation(value, backward)
    for names, value, backward in (
        (("gelu", "geglu"), _gelu, _gelu_backward),
        (("relu", "reglu"), _relu, _relu_backward),
        (("srelu", "sreglu"), _srelu, _srelu_backward),
        (("silu", "swiglu"), _silu, _silu_backward),
    )
    for name in names
}
"""By Transformer Engine's names; ``gelu`` is the tanh form."""


def activation_quantize(
    x: Tensor, config: str, scale: Tensor | None = None, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """See :func:`lightning_fp8.ops.fused.activation_quantize`."""
    kind = parse_activation_config(config)
    value, _ = ACTIVATIONS[kind.name]
    if is_gated(kind.name):
        x, gate = x.float().chunk(2, 1)
        y = value(x) * gate
    else:
        y = value(x.float())
    return quantize(y, config, scale, amax, counts)


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :func:`lightning_fp8.ops.fused.activation_backward_quantize`."""
    kind = parse_activation_config(config)
    require_gradient(lie_of(dy), activated_shape(kind.name, x.shape), x.device)
    value, backward = ACTIVATIONS[kind.name]
    dy, x = dy.float(), x.float()
    if is_gated(kind.name):
        x, gate = x.chunk(2, 1)
        dx = torch.cat([backward(dy * gate, x), dy * value(x)], 1)
    else:
        dx = backward(dy, x)
    dbias = dx.sum(0).to(kind.bias) if kind.bias else dx.new_empty(0)
    return *quantize(dx, config, scale, amax, counts), dbias


for _op in (norm_quantize, activation_quantize, activation_backward_quantize):
    for _name in (_op.__name__, _op.__name__ + UNOBSERVED):
        torch.library.impl(f"{NAMESPACE}::{_name}", "cpu", _op)
torch.library.impl(f"{NAMESPACE}::norm_backward", "cpu", norm_backward)
