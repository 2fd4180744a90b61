"""Norms and activations that are cast in one go: their values in float32, then the cast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnxscript import opset18 as op

from lightning_fp8.export.casts import Outputs, as_float32, cast
from lightning_fp8.export.scales import Value, constant
from lightning_fp8.ops.activation.schema import activated_shape, is_gated, parse_activation_options
from lightning_fp8.ops.norm.schema import parse_norm_options


def norm_quantize(x: Any, weight: Any, bias: Any, options_text: str, scale: Any = None) -> tuple[Value, ...]:
    """See :func:`lightning_fp8.ops.norm_quantize`."""
    options = parse_norm_options(options_text)
    axis = constant([1], np.int64)
    values = as_float32(x)
    statistics = []
    if not options.rms:
        mean = op.ReduceMean(values, axis, keepdims=1)
        statistics.append(mean)
        values = op.Sub(values, mean)
    variance = op.ReduceMean(op.Mul(values, values), axis, keepdims=1)
    rstd = op.Reciprocal(op.Sqrt(op.Add(variance, constant(options.eps))))
    statistics.append(rstd)
    gamma = as_float32(weight)
    if options.zero_centered:
        gamma = op.Add(gamma, constant(1.0))
    y = op.Mul(op.Mul(values, rstd), gamma)
    if bias is not None:
        y = op.Add(y, as_float32(bias))
    return *cast(y, tuple(x.shape), options_text, scale), op.Transpose(op.Concat(*statistics, axis=1), perm=[1, 0])


def activation_quantize(x: Any, options_text: str, scale: Any = None) -> Outputs:
    """See :func:`lightning_fp8.ops.activation_quantize`."""
    name = parse_activation_options(options_text).name
    values = as_float32(x)
    if is_gated(name):
        values, gate = op.Split(values, axis=1, num_outputs=2)
        y = op.Mul(VALUES[name](values), gate)
    else:
        y = VALUES[name](values)
    return cast(y, activated_shape(name, x.shape), options_text, scale)


def _gelu(x: Value) -> Value:
    """The tanh form as ``x sigmoid(2 u)``, as :mod:`lightning_fp8.ops.activation.reference` has it."""
    factor = 2 * math.sqrt(2 / math.pi)
    inner = op.Add(constant(factor), op.Mul(constant(factor * 0.044715), op.Mul(x, x)))
    return op.Mul(_not_far(x), op.Sigmoid(op.Mul(x, inner)))


def _qgelu(x: Value) -> Value:
    return op.Mul(_not_far(x), op.Sigmoid(op.Mul(x, constant(1.702))))


def _silu(x: Value) -> Value:
    return op.Mul(_not_far(x), op.Sigmoid(x))


def _not_far(x: Value) -> Value:
    """``x`` where a sigmoid is not 0; onnxruntime's is never, and would leave something of a large x."""
    return op.Max(x, constant(-128.0))


def _srelu(x: Value) -> Value:
    positive = op.Relu(x)
    return op.Mul(positive, positive)


VALUES = {
    name: value
    for names, value in (
        (("gelu", "geglu"), _gelu),
        (("qgelu", "qgeglu"), _qgelu),
        (("relu", "reglu"), op.Relu),
        (("srelu", "sreglu"), _srelu),
        (("silu", "swiglu"), _silu),
        (("glu",), op.Sigmoid),
    )
    for name in names
}
"""The activations in float32, by Transformer Engine's names."""
