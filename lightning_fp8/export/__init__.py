"""Export for inference: ONNX models whose FP8 casts are ``QuantizeLinear`` and ``DequantizeLinear`` nodes.

``torch.export`` needs only :func:`onnx_export`: the ops of ``torch.ops.lightning_fp8`` are nodes of its graph. For ONNX
each of them is translated, so that modules contain no export code.
"""

from lightning_fp8.export.context import onnx_export
from lightning_fp8.export.table import translation_table
from lightning_fp8.export.weights import fp8_weights

__all__ = ["fp8_weights", "onnx_export", "translation_table"]
