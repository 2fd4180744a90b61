"""Casts as ``QuantizeLinear``, and their inverse as ``DequantizeLinear``.

ONNX divides by ``scale_inv`` where :mod:`lightning_fp8.ops.quantize.reference` multiplies by ``scale``. Codes are equal
where scales are powers of two; else a value next to the middle between two codes may take the other one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnxscript import evaluator, ir, opset19, opset21
from onnxscript import opset18 as op

from lightning_fp8.export.scales import Value, constant, own_scale_inv
from lightning_fp8.formats import Float8
from lightning_fp8.ops.quantize.options import QuantizeOptions, parse_quantize_options
from lightning_fp8.scaled import Layout

Outputs = tuple[Value, Value, Value, Value]
"""``data``, ``scale_inv``, and the same of the transposed tensor; empty where it was not asked for."""

_TYPES = {"E4M3": ir.DataType.FLOAT8E4M3FN, "E5M2": ir.DataType.FLOAT8E5M2}

_ALL_OPSETS = 18
"""What torch's exporter says while it translates in every opset, to convert the model later."""


def quantize(x: Any, options_text: str, scale: Any = None) -> Outputs:
    """See :func:`lightning_fp8.ops.quantize`."""
    return cast(as_float32(x), tuple(x.shape), options_text, scale)


def cast(x: Value, shape: tuple[Any, Any], options_text: str, scale: Value | None) -> Outputs:
    """Cast float32 ``x`` of ``shape`` by ``scale``, by its own scale where that is 0 or None, or in blocks.

    Raises:
        ValueError: the opset has no such cast.
    """
    options = parse_quantize_options(options_text)
    layout = options.layout
    _check_opset(layout)
    data, scale_inv, data_t, scale_inv_t = _empty(options), _empty(), _empty(options), _empty()
    if layout.has_one_scale:
        scale_inv = _typed(_one_scale_inv(x, shape, options, scale))
    if options.rowwise:
        if not layout.has_one_scale:
            scale_inv = _typed(own_scale_inv(x, shape, options))
        data = _quantize_linear(x, scale_inv, layout, shape[0], options.float8)
    if options.columnwise:
        transposed, turned = op.Transpose(x, perm=[1, 0]), (shape[1], shape[0])
        if not layout.has_one_scale:
            scale_inv_t = _typed(own_scale_inv(transposed, turned, options))
        of = scale_inv if layout.has_one_scale else scale_inv_t
        data_t = _quantize_linear(transposed, of, layout, turned[0], options.float8)
    return data, scale_inv, data_t, scale_inv_t


def dequantize(data: Value, scale_inv: Value, layout: Layout) -> Value:
    """``data * scale_inv`` in float32."""
    scale_inv, where = _placed(scale_inv, layout, data.shape[0])
    opset = opset21 if where else opset19
    return opset.DequantizeLinear(data, scale_inv, **where)


def as_float32(x: Value) -> Value:
    """``x`` in float32; scales are."""
    return x if x.dtype == ir.DataType.FLOAT else op.Cast(x, to=ir.DataType.FLOAT)


def _one_scale_inv(x: Value, shape: tuple[Any, Any], options: QuantizeOptions, scale: Value | None) -> Value:
    if scale is None:
        return own_scale_inv(x, shape, options)
    if options.scale_is_nonzero:
        return op.Reciprocal(scale)
    given = op.Greater(scale, constant(0.0))
    return op.Where(given, op.Reciprocal(op.Where(given, scale, constant(1.0))), own_scale_inv(x, shape, options))


def _quantize_linear(x: Value, scale_inv: Value, layout: Layout, rows: Any, float8: Float8) -> Value:
    scale_inv, where = _placed(scale_inv, layout, rows)
    code = _TYPES[float8.name]
    if where:  # a zero point would need the scales' shape, which may vary
        return opset21.QuantizeLinear(x, scale_inv, None, output_dtype=code, **where)
    return opset19.QuantizeLinear(x, scale_inv, constant(0, code.numpy()))


def _placed(scale_inv: Value, layout: Layout, rows: Any) -> tuple[Value, dict[str, int]]:
    """``scale_inv`` in the shape that ONNX takes, and the attributes that say what shares a scale."""
    if layout.has_one_scale:
        return scale_inv, {}
    if layout.has_one_scale_per_row:
        return op.Reshape(scale_inv, constant([-1], np.int64)), {"axis": 0}
    block_rows, block_columns = layout.block
    assert block_rows is not None
    assert block_columns is not None
    if block_rows > 1:  # ONNX cuts one axis
        of_row = np.arange(rows) // block_rows
        scale_inv = op.Gather(scale_inv, constant(of_row, np.int64), axis=0)
    return scale_inv, {"axis": 1, "block_size": block_columns}


def _empty(options: QuantizeOptions | None = None) -> Value:
    """What stands for an operand, or without options its scales, that was not asked for; nothing reads it."""
    return _typed(constant([])) if options is None else constant([], _TYPES[options.float8.name].numpy())


def _typed(scale_inv: Value) -> Value:
    """Say that scales are float32: of MXFP8 the op gives E8M0, which no ``QuantizeLinear`` takes."""
    scale_inv.dtype = ir.DataType.FLOAT
    return scale_inv


def _check_opset(layout: Layout) -> None:
    needed = 19 if layout.has_one_scale else 21
    asked = evaluator.default().opset.version
    if _ALL_OPSETS < asked < needed:
        raise ValueError(
            f"opset_version={asked} has no QuantizeLinear to FP8 with scales of layout {layout.value!r}; pass "
            f"opset_version={needed} or later to torch.onnx.export"
        )
