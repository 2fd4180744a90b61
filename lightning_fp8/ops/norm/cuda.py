"""``norm_quantize`` on CUDA tensors: one of three ways to normalize and cast, chosen once for tensors of one key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.norm.rows import cast_row_layout
from cuda_kernels.norm.statistics import NormSpec
from lightning_fp8.ops.core.alignment import ALIGNMENT
from lightning_fp8.ops.core.dispatch import check_not_empty, current_device, planned
from lightning_fp8.ops.core.options import DTYPE_NAMES
from lightning_fp8.ops.core.tensor_keys import PlainKey, TensorKey, tensor_key
from lightning_fp8.ops.norm import reference
from lightning_fp8.ops.norm.launches import BandNorm, NormLaunches, OneReadNorm, TwoReadNorm
from lightning_fp8.ops.norm.schema import Results, check_parameters, parse_norm_options
from lightning_fp8.ops.quantize.launches import cast_variant, overflow_counts_key
from lightning_fp8.ops.quantize.outputs import with_kernel_strides
from lightning_fp8.ops.quantize.schema import implement_cast


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options_text: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    overflow_counts: Tensor | None = None,
) -> Results:
    """See :mod:`lightning_fp8.ops.norm.schema`."""
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    return _plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), weight.dtype,
        (weight.data_ptr() | (0 if bias is None else bias.data_ptr())) % ALIGNMENT, bias is not None,
        options_text, scale is not None, amax is not None,
        None if overflow_counts is None else overflow_counts_key(overflow_counts),
    )(x, weight, bias, options_text, (scale, amax, overflow_counts))  # fmt: skip


@planned(fallback=with_kernel_strides(reference.normalize))
def _plan(
    device: torch.device,
    x_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    parameters_misalignment: int,
    has_bias: bool,
    options_text: str,
    *given: Any,
) -> Callable[..., Results]:
    """Plan for x, and for parameters; ``parameters_misalignment``: the bitwise OR of theirs."""
    x_key = TensorKey(*x_plain_key, device)
    x_key = x_key._replace(misalignment=x_key.misalignment | parameters_misalignment)
    weight_key = TensorKey(weight_dtype, x_key.shape[1:], (1,), x_key.misalignment, device)
    check_parameters(x_key.shape[1:], device, weight_key)
    variant = cast_variant(device, options_text, *given)
    check_not_empty(x_key.shape)
    if not x_key.has_contiguous_rows:
        return lambda x, weight, bias, options_text, io: norm_quantize(x.contiguous(), weight, bias, options_text, *io)
    norm_options, cast_options = parse_norm_options(options_text), variant.options
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], not norm_options.rms, has_bias)
    aligned = x_key.is_vectorizable(4) and weight_key.is_vectorizable(4)
    row_layout = None
    if x_key.is_vectorizable(8, ALIGNMENT) and weight_key.is_vectorizable(8, ALIGNMENT):
        row_layout = cast_row_layout(spec.dtype, x_key.columns)
    one_scale = cast_options.layout.has_one_scale and not variant.has_overflow_counts
    launches: NormLaunches
    if row_layout and one_scale and cast_options.rowwise and not cast_options.columnwise:
        launches = OneReadNorm(x_key, spec, norm_options, row_layout, variant)
    elif one_scale and variant.scale_is_known and cast_options.columnwise:
        launches = BandNorm(x_key, spec, norm_options, aligned, variant)
    else:
        launches = TwoReadNorm(x_key, spec, norm_options, row_layout, aligned, variant)
    return launches.run


implement_cast("norm_quantize", "cuda", norm_quantize)
