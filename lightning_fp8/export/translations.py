"""Translations of FP8 ops to ONNX: functions of an op's arguments that return its results as values of the graph.

Casts become ``QuantizeLinear``, dequantization ``DequantizeLinear``. ONNX divides by ``scale_inv``, while
:mod:`lightning_fp8.ops.cast` multiplies by ``scale``. Codes are equal if scales are powers of two. Otherwise a value
close to the middle between two codes may get the other one.

Products become ``Gemm`` of dequantized operands, which runtimes with FP8 GEMMs fuse, as in Transformer Engine's export.
The weight keeps its layout, ``[N, K]``.

ONNX has no bit operations on floats. A power of two is looked up in a table, at the integer nearest to the logarithm,
and compared with the value: the rounding of the logarithm does not affect the result.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import torch
from onnxscript import evaluator, ir, opset19, opset21
from onnxscript import opset18 as op

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.numerics.formats import E8M0_DTYPE, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.numerics.scaling import FLOAT32_MAX
from lightning_fp8.ops.activation import activated_shape, is_gated
from lightning_fp8.ops.gemm import Gemm

Value = Any
"""A value of the ONNX graph."""

Outputs = tuple[Value, Value, Value, Value]
"""``data``, ``scale_inv``, and the same of the transposed tensor; empty if not requested."""

_DTYPES = {
    torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN,
    torch.float8_e5m2: ir.DataType.FLOAT8E5M2,
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}
_TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in _DTYPES.items()}

_ALL_OPSETS = 18
"""The opset version that torch's exporter reports if it converts the model to the requested opset afterwards."""

_SMALLEST, _LARGEST = -126, 127
"""Exponents of float32's normal powers of two."""


# --- The ops ----------------------------------------------------------------------------------------------------------


def quantize(x: Value, *cast_and_scale: Any) -> Outputs:
    """See :func:`lightning_fp8.ops.quantize`."""
    cast, scale = _cast(*cast_and_scale)
    return _quantize(_as_float32(x), tuple(x.shape), cast, scale)


def norm_quantize(
    x: Value, weight: Value, bias: Value, eps: float, rms: bool, zero_centered: bool, *cast_and_scale: Any
) -> tuple[Value, ...]:
    """See :func:`lightning_fp8.ops.norm_quantize`."""
    cast, scale = _cast(*cast_and_scale)
    axis = _constant([1], np.int64)
    values = _as_float32(x)
    means = [] if rms else [op.ReduceMean(values, axis, keepdims=1)]
    if means:
        values = op.Sub(values, *means)
    variance = op.ReduceMean(op.Mul(values, values), axis, keepdims=1)
    rstd = op.Reciprocal(op.Sqrt(op.Add(variance, _constant(eps))))
    gamma = _as_float32(weight)
    if zero_centered:
        gamma = op.Add(gamma, _constant(1.0))
    y = op.Mul(op.Mul(values, rstd), gamma)
    if bias is not None:
        y = op.Add(y, _as_float32(bias))
    return *_quantize(y, tuple(x.shape), cast, scale), op.Transpose(op.Concat(*means, rstd, axis=1), perm=[1, 0])


def activation_quantize(x: Value, activation: str, *cast_and_scale: Any) -> Outputs:
    """See :func:`lightning_fp8.ops.activation_quantize`."""
    cast, scale = _cast(*cast_and_scale)
    values = _as_float32(x)
    if is_gated(activation):
        values, gate = op.Split(values, axis=1, num_outputs=2)
        y = op.Mul(VALUES[activation](values), gate)
    else:
        y = VALUES[activation](values)
    return _quantize(y, activated_shape(activation, x.shape), cast, scale)


def scaled_mm(
    a: Value,
    scale_a: Value,
    b: Value,
    scale_b: Value,
    layout_a: str,
    layout_b: str,
    out_dtype: Any,
    fast_accum: bool,
    bias: Value = None,
) -> Value:
    """See :func:`lightning_fp8.ops.scaled_mm`; the result is rounded once from float32."""
    gemm = Gemm.from_flat(layout_a, layout_b, _torch_dtype(out_dtype), fast_accum)
    operands = [_dequantize(a, scale_a, gemm.layout_a), _dequantize(b, scale_b, gemm.layout_b)]
    if bias is not None:
        operands.append(_as_float32(bias))
    return op.Cast(op.Gemm(*operands, transB=1), to=_DTYPES[gemm.out_dtype])


def attention_forward(*_: Any) -> NoReturn:
    """Not supported: attention casts tile by tile inside the softmax, for which ONNX has no nodes."""
    raise NotImplementedError(
        "FP8 attention is not exported to ONNX: it casts tile by tile inside the softmax. Export under a recipe with "
        "fp8_dpa=False: attention is then exported in high precision, and linear layers in FP8"
    )


def _cast(dtype: Any, layout: str, *options: Any) -> tuple[Cast, Value]:
    """The cast that an op's last arguments describe, ``Cast.flat``, and the scale that may follow them, or None."""
    usage, scale = options[:5], options[5:]
    return Cast.from_flat(_torch_dtype(dtype), layout, *usage), scale[0] if scale else None


def _torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype passed to an op; torch's exporter passes ONNX's."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH_DTYPES[dtype]


# --- Casts and their inverse ------------------------------------------------------------------------------------------


def _quantize(x: Value, shape: tuple[Any, Any], cast: Cast, scale: Value | None) -> Outputs:
    """Cast float32 ``x`` of ``shape`` with ``scale``, with its own scale if that is 0 or None, or in blocks."""
    layout = cast.layout
    _check_opset(layout)
    data, scale_inv, data_t, scale_inv_t = _empty(cast), _empty(), _empty(cast), _empty()
    if layout.has_one_scale:
        scale_inv = _typed(_one_scale_inv(x, shape, cast, scale))
    if cast.rowwise:
        if not layout.has_one_scale:
            scale_inv = _typed(_own_scale_inv(x, shape, cast))
        data = _quantize_linear(x, scale_inv, layout, shape[0], cast.float8)
    if cast.columnwise:
        transposed, turned = op.Transpose(x, perm=[1, 0]), (shape[1], shape[0])
        if not layout.has_one_scale:
            scale_inv_t = _typed(_own_scale_inv(transposed, turned, cast))
        of = scale_inv if layout.has_one_scale else scale_inv_t
        data_t = _quantize_linear(transposed, of, layout, turned[0], cast.float8)
    return data, scale_inv, data_t, scale_inv_t


def _dequantize(data: Value, scale_inv: Value, layout: Layout) -> Value:
    """``data * scale_inv`` in float32."""
    scale_inv, where = _placed(scale_inv, layout, data.shape[0])
    opset = opset21 if where else opset19
    return opset.DequantizeLinear(data, scale_inv, **where)


def _as_float32(x: Value) -> Value:
    """``x`` in float32, the dtype of scales."""
    return x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)


def _one_scale_inv(x: Value, shape: tuple[Any, Any], cast: Cast, scale: Value | None) -> Value:
    if scale is None:
        return _own_scale_inv(x, shape, cast)
    if cast.scale_is_nonzero:
        return op.Reciprocal(scale)
    given = op.Greater(scale, _constant(0.0))
    return op.Where(given, op.Reciprocal(op.Where(given, scale, _constant(1.0))), _own_scale_inv(x, shape, cast))


def _quantize_linear(x: Value, scale_inv: Value, layout: Layout, rows: Any, float8: Float8) -> Value:
    scale_inv, where = _placed(scale_inv, layout, rows)
    code = _DTYPES[float8.dtype]
    if where:  # a zero point would need the shape of the scales, which may be dynamic
        return opset21.QuantizeLinear(x, scale_inv, None, output_dtype=code, **where)
    return opset19.QuantizeLinear(_kept_apart(x), scale_inv, _constant(0, code.numpy()))


_MOVES = frozenset({"Cast", "Identity", "Reshape", "Transpose"})
"""Operations that do not change values. onnxruntime moves a cast with a constant scale in front of them."""


def _kept_apart(x: Value) -> Value:
    """``x``, whose ``Relu`` or ``Clip`` onnxruntime does not drop.

    It takes the codes of a cast with a constant scale for unsigned integers, which cannot be negative, and drops a
    ``Relu`` in front of it, with wrong results. ``Max`` with the smallest number changes no value, NaN included.
    Weights stay as they are, since :func:`lightning_fp8.export.fp8_weights` looks for their casts.
    """
    root, producer = x, x.producer()
    while producer is not None and producer.op_type in _MOVES:
        root = producer.inputs[0]
        producer = root.producer()
    return x if producer is None else op.Max(x, _constant(-np.inf))


def _placed(scale_inv: Value, layout: Layout, rows: Any) -> tuple[Value, dict[str, int]]:
    """``scale_inv`` in the shape that ONNX requires, and the node's attributes for its blocks."""
    if layout.has_one_scale:
        return scale_inv, {}
    if layout.has_one_scale_per_row:
        return op.Reshape(scale_inv, _constant([-1], np.int64)), {"axis": 0}
    block_rows, block_columns = _block_of(layout)
    if block_rows > 1:  # ONNX blocks one axis only
        of_row = np.arange(rows) // block_rows
        scale_inv = op.Gather(scale_inv, _constant(of_row, np.int64), axis=0)
    return scale_inv, {"axis": 1, "block_size": block_columns}


def _block_of(layout: Layout) -> tuple[int, int]:
    rows, columns = layout.block
    assert rows is not None
    assert columns is not None
    return rows, columns


def _empty(cast: Cast | None = None) -> Value:
    """Placeholder for an operand that was not requested, or without a cast for its scales; it has no readers."""
    return _typed(_constant([])) if cast is None else _constant([], _DTYPES[cast.float8.dtype].numpy())


def _typed(scale_inv: Value) -> Value:
    """Set the dtype of scales to float32: the op returns E8M0 for MXFP8, which ``QuantizeLinear`` does not support."""
    scale_inv.dtype = ir.DataType.FLOAT
    return scale_inv


def _check_opset(layout: Layout) -> None:
    needed = 19 if layout.has_one_scale else 21
    asked = evaluator.default().opset.version
    if _ALL_OPSETS < asked < needed:
        raise ValueError(
            f"opset_version={asked} does not support QuantizeLinear to FP8 with scales of layout {layout.value!r}; "
            f"pass opset_version={needed} or later to torch.onnx.export"
        )


# --- Scales from amaxes; see lightning_fp8/numerics/scaling.py --------------------------------------------------------


def _constant(value: Any, dtype: Any = np.float32) -> Value:
    """A constant of the graph."""
    return op.Constant(value=ir.tensor(np.asarray(value, dtype)))


def _own_scale_inv(x: Value, shape: tuple[Any, Any], cast: Cast) -> Value:
    """``scale_inv`` of float32 ``x`` from its own amaxes, in the layout's shape.

    An E8M0 scale of 2**-127, for a block of zeros or tiny values, becomes 2**-126, float32's smallest normal number, as
    does that of a NaN: zeros stay zeros, and NaN elements NaN. ``shape`` is rows, which may be dynamic if a block has
    one row, and columns.
    """
    amax = _amax(x, shape, cast.layout)
    if cast.layout.scale_dtype == E8M0_DTYPE:
        return _power_of_2_above(op.Mul(amax, _constant(np.float32(1) / np.float32(cast.float8.max))))
    if cast.amax_epsilon:
        amax = op.Max(amax, _constant(cast.amax_epsilon))
    largest = _constant(cast.float8.max)
    usable = op.And(op.Greater(amax, _constant(0.0)), op.LessOrEqual(amax, _constant(FLOAT32_MAX)))
    scale = op.Min(op.Div(largest, op.Where(usable, amax, largest)), _constant(FLOAT32_MAX))
    return op.Reciprocal(_power_of_2_below(scale) if cast.power_2_scale else scale)


def _amax(x: Value, shape: tuple[Any, Any], layout: Layout) -> Value:
    magnitude = op.Abs(x)
    if layout.has_one_scale:
        return op.ReduceMax(magnitude, keepdims=0)
    if layout.has_one_scale_per_row:
        return op.ReduceMax(magnitude, _constant([1], np.int64), keepdims=1)
    block_rows, block_columns = _block_of(layout)
    rows, columns = shape
    missing = [0, -columns % block_columns]
    grid = [ceil_div(columns, block_columns), block_columns]
    if block_rows == 1:
        blocks, axes = [0, *grid], [2]  # 0 keeps the number of rows
    else:
        missing[0] = -rows % block_rows
        blocks, axes = [ceil_div(rows, block_rows), block_rows, *grid], [1, 3]
    if any(missing):
        magnitude = op.Pad(magnitude, _constant([0, 0, *missing], np.int64))
    cut = op.Reshape(magnitude, _constant(blocks, np.int64))
    return op.ReduceMax(cut, _constant(axes, np.int64), keepdims=0)


def _nearest_power_of_2(x: Value) -> Value:
    """The power of two whose exponent is the integer nearest to ``log2(x)``, for positive x."""
    exponent = op.Round(op.Mul(op.Log(x), _constant(1 / math.log(2))))
    index = op.Sub(op.Clip(exponent, _constant(_SMALLEST), _constant(_LARGEST)), _constant(_SMALLEST))
    powers = _constant(np.exp2(np.arange(_SMALLEST, _LARGEST + 1)))
    return op.Gather(powers, op.Cast(index, to=ir.DataType.INT64))


def _power_of_2_below(x: Value) -> Value:
    """The largest power of two that is at most x, for positive finite x."""
    power = _nearest_power_of_2(x)
    return op.Where(op.LessOrEqual(power, x), power, op.Mul(power, _constant(0.5)))


def _power_of_2_above(x: Value) -> Value:
    """The smallest normal power of two of float32 that is at least x; the largest one for inf."""
    least = _constant(2.0**_SMALLEST)
    x = op.Min(op.Where(op.Greater(x, least), x, least), _constant(FLOAT32_MAX))
    power = _nearest_power_of_2(x)
    above = op.Where(op.GreaterOrEqual(power, x), power, op.Mul(power, _constant(2.0)))
    return op.Min(above, _constant(2.0**_LARGEST))


# --- Activations ------------------------------------------------------------------------------------------------------


def _gelu(x: Value) -> Value:
    """The tanh form as ``x sigmoid(2 u)``, as in :mod:`lightning_fp8.ops.activation`."""
    factor = 2 * math.sqrt(2 / math.pi)
    inner = op.Add(_constant(factor), op.Mul(_constant(factor * 0.044715), op.Mul(x, x)))
    return op.Mul(_not_far(x), op.Sigmoid(op.Mul(x, inner)))


def _qgelu(x: Value) -> Value:
    return op.Mul(_not_far(x), op.Sigmoid(op.Mul(x, _constant(1.702))))


def _silu(x: Value) -> Value:
    return op.Mul(_not_far(x), op.Sigmoid(x))


def _not_far(x: Value) -> Value:
    """``x``, but at least -128: onnxruntime's sigmoid is never 0, so that a large negative x would not become 0."""
    return op.Max(x, _constant(-128.0))


def _srelu(x: Value) -> Value:
    positive = op.Relu(x)
    return op.Mul(positive, positive)


VALUES = {
    **dict.fromkeys(("gelu", "geglu"), _gelu),
    **dict.fromkeys(("qgelu", "qgeglu"), _qgelu),
    **dict.fromkeys(("relu", "reglu"), op.Relu),
    **dict.fromkeys(("srelu", "sreglu"), _srelu),
    **dict.fromkeys(("silu", "swiglu"), _silu),
    "glu": op.Sigmoid,
}
"""The activations in float32, by Transformer Engine's names."""
