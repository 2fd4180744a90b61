"""Products as ``Gemm`` of dequantized operands, which runtimes with FP8 GEMMs fuse: Transformer Engine writes them so.

The weight stays as it lies, ``[N, K]``.
"""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import ir
from onnxscript import opset18 as op

from lightning_fp8.export.casts import as_float32, dequantize
from lightning_fp8.export.scales import Value
from lightning_fp8.ops.gemm.options import parse_scaled_mm_options

_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}


def scaled_mm(a: Any, scale_a: Any, b: Any, scale_b: Any, options_text: str, bias: Any = None) -> Value:
    """See :func:`lightning_fp8.ops.scaled_mm`; the result is rounded once, from float32."""
    options = parse_scaled_mm_options(options_text)
    operands = [dequantize(a, scale_a, options.layout_a), dequantize(b, scale_b, options.layout_b)]
    if bias is not None:
        operands.append(as_float32(bias))
    return op.Cast(op.Gemm(*operands, transB=1), to=_TYPES[options.out_dtype])
