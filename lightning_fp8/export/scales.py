"""The scales of tensors, rows and blocks from their own amaxes, as ONNX nodes; see :mod:`lightning_fp8.scaling`.

ONNX has no operation on the bits of a float. A power of two comes out of a table, at the nearest integer to the
logarithm, and one comparison says on which side of the value it lies: no rounding of the logarithm changes the result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnxscript import ir
from onnxscript import opset18 as op

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.formats import E8M0_DTYPE
from lightning_fp8.ops.quantize.options import QuantizeOptions
from lightning_fp8.scaled import Layout
from lightning_fp8.scaling import FLOAT32_MAX

Value = Any
"""A value of the graph that is written."""

SMALLEST, LARGEST = -126, 127
"""The exponents of float32's normal powers of two."""


def constant(value: Any, dtype: Any = np.float32) -> Value:
    """A constant of the graph."""
    return op.Constant(value=ir.tensor(np.asarray(value, dtype)))


def own_scale_inv(x: Value, shape: tuple[Any, Any], options: QuantizeOptions) -> Value:
    """``scale_inv`` of float32 ``x`` from its own amaxes, shaped as the layout says.

    Args:
        shape: rows, which may vary where a block has one row, and columns.

    An E8M0 scale of 2**-127, of a block that is all zeros or nearly so, is 2**-126 here, the least of float32's normal
    numbers, and that of a NaN, too: zeros stay zeros, and NaN elements NaN.
    """
    amax = _amax(x, shape, options.layout)
    if options.layout.scale_dtype == E8M0_DTYPE:
        return _power_of_2_above(op.Mul(amax, constant(np.float32(1) / np.float32(options.float8.max))))
    if options.epsilon:
        amax = op.Max(amax, constant(options.epsilon))
    largest = constant(options.float8.max)
    usable = op.And(op.Greater(amax, constant(0.0)), op.LessOrEqual(amax, constant(FLOAT32_MAX)))
    scale = op.Min(op.Div(largest, op.Where(usable, amax, largest)), constant(FLOAT32_MAX))
    return op.Reciprocal(_power_of_2_below(scale) if options.power_2 else scale)


def _amax(x: Value, shape: tuple[Any, Any], layout: Layout) -> Value:
    magnitude = op.Abs(x)
    if layout.has_one_scale:
        return op.ReduceMax(magnitude, keepdims=0)
    if layout.has_one_scale_per_row:
        return op.ReduceMax(magnitude, constant([1], np.int64), keepdims=1)
    block_rows, block_columns = layout.block
    assert block_rows is not None
    assert block_columns is not None
    rows, columns = shape
    missing = [0, -columns % block_columns]
    grid = [ceil_div(columns, block_columns), block_columns]
    if block_rows == 1:
        blocks, axes = [0, *grid], [2]  # 0: as many rows as there are
    else:
        missing[0] = -rows % block_rows
        blocks, axes = [ceil_div(rows, block_rows), block_rows, *grid], [1, 3]
    if any(missing):
        magnitude = op.Pad(magnitude, constant([0, 0, *missing], np.int64))
    cut = op.Reshape(magnitude, constant(blocks, np.int64))
    return op.ReduceMax(cut, constant(axes, np.int64), keepdims=0)


def _nearest_power_of_2(x: Value) -> Value:
    """The power of two whose exponent is next to ``log2(x)`` of a positive x."""
    exponent = op.Round(op.Mul(op.Log(x), constant(1 / math.log(2))))
    index = op.Sub(op.Clip(exponent, constant(SMALLEST), constant(LARGEST)), constant(SMALLEST))
    powers = constant(np.exp2(np.arange(SMALLEST, LARGEST + 1)))
    return op.Gather(powers, op.Cast(index, to=ir.DataType.INT64))


def _power_of_2_below(x: Value) -> Value:
    """The largest power of two that is not above x, positive and finite."""
    power = _nearest_power_of_2(x)
    return op.Where(op.LessOrEqual(power, x), power, op.Mul(power, constant(0.5)))


def _power_of_2_above(x: Value) -> Value:
    """The smallest power of two of float32's normal numbers that is not below x; the largest of inf."""
    least = constant(2.0**SMALLEST)
    x = op.Min(op.Where(op.Greater(x, least), x, least), constant(FLOAT32_MAX))
    power = _nearest_power_of_2(x)
    above = op.Where(op.GreaterOrEqual(power, x), power, op.Mul(power, constant(2.0)))
    return op.Min(above, constant(2.0**LARGEST))
