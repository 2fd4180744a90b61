"""The FP8 ops: ``torch.ops.lightning_fp8``, wrapped by functions that take and return :class:`ScaledTensor`.

They allocate and dispatch by device. They do not depend on autograd or modules. The file of an operation has its public
function, its typed signature and its specification in plain torch. ``<operation>_cuda.py`` launches its kernels.
"""

# Imported for their side effect: they implement the ops, as gemm_cuda does, which grouped_cuda imports.
from lightning_fp8.ops import activation_cuda, cast_cuda, grouped_cuda, norm_cuda, transpose_cuda  # noqa: F401
from lightning_fp8.ops.activation import (
    ACTIVATIONS,
    activation_backward_quantize,
    activation_quantize,
    gated_backward_quantize,
    gated_quantize,
)
from lightning_fp8.ops.cast import Quantized, observe, quantize, quantize_columns
from lightning_fp8.ops.checks import HIGH_PRECISION
from lightning_fp8.ops.gemm import scaled_mm, scaled_mm_accumulate
from lightning_fp8.ops.grouped import (
    Casts,
    grouped_mm,
    grouped_wgrad,
    grouped_wgrad_in_high_precision,
    quantize_experts,
)
from lightning_fp8.ops.norm import Normalized, norm_backward, norm_quantize, rms_norm
from lightning_fp8.ops.sample import sample_cast, sample_recipes
from lightning_fp8.ops.scales import update_scales
from lightning_fp8.ops.transpose import transpose

__all__ = [
    "ACTIVATIONS",
    "HIGH_PRECISION",
    "Casts",
    "Normalized",
    "Quantized",
    "activation_backward_quantize",
    "activation_quantize",
    "gated_backward_quantize",
    "gated_quantize",
    "grouped_mm",
    "grouped_wgrad",
    "grouped_wgrad_in_high_precision",
    "norm_backward",
    "norm_quantize",
    "observe",
    "quantize",
    "quantize_columns",
    "quantize_experts",
    "rms_norm",
    "sample_cast",
    "sample_recipes",
    "scaled_mm",
    "scaled_mm_accumulate",
    "transpose",
    "update_scales",
]
