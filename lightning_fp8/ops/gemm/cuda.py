"""FP8 GEMMs on CUDA tensors: what computes one is chosen once for operands of one key, and cached.

What :mod:`cuda_kernels.host.gemm_selection` chooses multiplies. The reference computes what ``torch._scaled_mm`` then
refuses, and what nothing else takes, slower and with a warning.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import CUBLASLT_MULTIPLE, Library
from lightning_fp8.ops.core.dispatch import check_not_empty, current_device, planned, warn_once
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.core.tensor_keys import KeyAndDevice, TensorKey, key_and_device, memoryless_key
from lightning_fp8.ops.gemm import reference
from lightning_fp8.ops.gemm.launches import build_gemm
from lightning_fp8.ops.gemm.options import parse_scaled_mm_options
from lightning_fp8.ops.gemm.problem import (
    SCALINGS,
    GemmOperand,
    OperandKey,
    aligned_operand,
    bind_gemm,
    operand_key,
)
from lightning_fp8.ops.gemm.schema import Gemm, Operand, check_epilogue, gemm_ops
from lightning_fp8.scaled import Layout


def gemm(
    a: Operand, b: Operand, options_text: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
) -> Tensor:
    """Multiply, see :func:`lightning_fp8.ops.scaled_mm`; raise ``amax``; add to ``out``."""
    if out is not None and not (out.dtype == torch.float32 and out.stride(1) == 1):
        out += gemm(a, b, options_text, bias, amax, None)
        return out
    bias = None if bias is None else bias.contiguous()
    (data_a, scale_inv_a), (data_b, scale_inv_b) = a, b
    return _plan(
        data_a.device, data_a.is_cuda and current_device(),
        operand_key(data_a, scale_inv_a), operand_key(data_b, scale_inv_b), options_text,
        None if bias is None else key_and_device(bias), None if out is None else key_and_device(out),
        None if amax is None else memoryless_key(amax),
    )(a, b, options_text, bias, amax, out)  # fmt: skip


def _plan_gemm(
    device: torch.device,
    a_key: OperandKey,
    b_key: OperandKey,
    options_text: str,
    bias_plain_key: KeyAndDevice | None,
    out_plain_key: KeyAndDevice | None,
    amax_plain_key: KeyAndDevice | None,
    kernels: bool = True,
) -> Gemm:
    """Plan what :mod:`cuda_kernels.host.gemm_selection` chooses: one of our kernels, if ``kernels``, or a library.

    Raises:
        TypeError, ValueError: ``bias``, ``out`` or ``amax`` do not fit.
    """
    options = parse_scaled_mm_options(options_text)
    a = GemmOperand.from_key(options.layout_a, a_key, device)
    b = GemmOperand.from_key(options.layout_b, b_key, device)
    bias_key = None if bias_plain_key is None else TensorKey(*bias_plain_key)
    out_key = None if out_plain_key is None else TensorKey(*out_plain_key)
    amax_key = None if amax_plain_key is None else TensorKey(*amax_plain_key)
    check_epilogue((a.rows, b.rows), device, bias_key, out_key, amax_key)
    check_not_empty((a.rows, b.rows, a.k))
    layouts = options.layout_a, options.layout_b
    if layouts not in SCALINGS:
        if kernels:
            _warn_of_reference(device, layouts)
        return reference.gemm
    if not (a.is_aligned and b.is_aligned):
        return _multiply_aligned_copies
    bound = bind_gemm(device, a, b, options_text, bias_key, out_key, amax_key is not None, kernels)
    choice = gemm_selection.choose_gemm_on(launch.name_of(device), bound.problem)
    if choice is Library.REFERENCE and kernels:
        _warn_of_reference(device, layouts)
    return build_gemm(bound, choice)


_plan = planned(fallback=reference.gemm, planner_without_kernels=partial(_plan_gemm, kernels=False))(_plan_gemm)


def _warn_of_reference(device: torch.device, layouts: tuple[Layout, Layout]) -> None:
    """Warn once that nothing but the reference multiplies operands of these layouts on a device that runs kernels."""
    warn_once(
        device,
        f"No FP8 GEMM multiplies operands scaled {layouts[0].value} and {layouts[1].value} on {device}, or none of "
        "these sizes: plain torch does, slower. There are kernels for recipe='blockwise' on compute "
        "capability 8.9, 9.0 and 12.0; torch._scaled_mm takes recipe='tensorwise' everywhere, features and tokens in "
        f"multiples of {CUBLASLT_MULTIPLE}",
    )


def _multiply_aligned_copies(
    a: Operand, b: Operand, options_text: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
) -> Tensor:
    """Multiply the operands, or aligned copies of them."""
    options = parse_scaled_mm_options(options_text)
    a = aligned_operand(a, options.layout_a)
    b = aligned_operand(b, options.layout_b)
    return gemm(a, b, options_text, bias, amax, out)


scaled_mm, scaled_mm_observed, scaled_mm_accumulate = gemm_ops(gemm)

implement("scaled_mm", "cuda", scaled_mm)
implement("scaled_mm_observed", "cuda", scaled_mm_observed)
implement("scaled_mm_accumulate", "cuda", scaled_mm_accumulate)
