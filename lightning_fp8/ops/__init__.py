"""The FP8 ops: ``torch.ops.lightning_fp8`` behind functions that take and give :class:`ScaledTensor`.

They allocate and dispatch by device; they know no gradients and no modules. Each operation has a folder: its ``schema``
says what it takes and gives, ``reference`` computes it in plain torch and is its specification, ``cuda`` runs kernels.
"""

from lightning_fp8.ops.activation import (
    ACTIVATIONS,
    activation_backward_quantize,
    activation_quantize,
    gated_backward_quantize,
    gated_quantize,
)
from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.gemm import scaled_mm, scaled_mm_accumulate
from lightning_fp8.ops.norm import Normalized, norm_backward, norm_quantize
from lightning_fp8.ops.quantize import Quantized, observe, quantize
from lightning_fp8.ops.scales import update_scales

__all__ = [
    "ACTIVATIONS",
    "HIGH_PRECISION",
    "Normalized",
    "Quantized",
    "activation_backward_quantize",
    "activation_quantize",
    "gated_backward_quantize",
    "gated_quantize",
    "norm_backward",
    "norm_quantize",
    "observe",
    "quantize",
    "scaled_mm",
    "scaled_mm_accumulate",
    "update_scales",
]
