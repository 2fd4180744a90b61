"""The matrix products on CUDA tensors: planned once for operands that lie alike; see :mod:`cuda_kernels.gemm`.

What no kernel computes, ``torch._scaled_mm`` does, and what that does not, the reference: exact, and slower.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_fp8.ops.config import parse_scaled_mm_config
from lightning_fp8.ops.given import Lie, lie_of, require_beside_a_product
from lightning_fp8.ops.jobs import SCALINGS, Operand, Place, job_of, laid_out, place_of
from lightning_fp8.ops.multiply import Given, Multiply, exactly, multiplier
from lightning_fp8.ops.planning import current_device, planned, refuse_empty
from lightning_fp8.ops.schema import NAMESPACE


def scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Tensor | None = None
) -> Tensor:
    return _multiply(a, scale_a, b, scale_b, config, bias, None, None)


def scaled_mm_observed(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Tensor | None, amax: Tensor
) -> Tensor:
    return _multiply(a, scale_a, b, scale_b, config, bias, amax, None)


def scaled_mm_accumulate(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str) -> None:
    if out.dtype == torch.float32 and out.stride(1) == 1:
        _multiply(a, scale_a, b, scale_b, config, None, None, out)
    else:
        out += _multiply(a, scale_a, b, scale_b, config, None, None, None)


def _multiply(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    of_bias = None if bias is None else (bias.dtype, bias.data_ptr() % 16, bias.shape, bias.device)
    of_out = None if out is None else (out.stride(0), out.data_ptr() % 16, out.shape)
    multiply = _plan(
        a.device, a.is_cuda and current_device(), place_of(a, scale_a), place_of(b, scale_b), config, of_bias, of_out,
        lie_of(amax),
    )  # fmt: skip
    return multiply(a, scale_a, b, scale_b, config, bias, amax, out)


def _planned_anywhere(
    device: torch.device,
    a: Place,
    b: Place,
    config: str,
    bias: tuple[torch.dtype, int, Sequence[int], torch.device] | None,
    out: tuple[int, int, Sequence[int]] | None,
    amax: Lie | None,
    kernels: bool = True,
) -> Multiply:
    """What multiplies: our kernels, if ``kernels``, or a library.

    ``bias``: dtype, address modulo 16, shape and device; ``out``: stride of what to add to, address modulo 16, shape.

    Raises:
        TypeError, ValueError: ``bias``, ``out`` or ``amax`` do not fit.
    """
    from cuda_kernels.host import gemm_selection, launch
    from cuda_kernels.host.gemm_configs import Library

    layout_a, layout_b, *_ = parse_scaled_mm_config(config)
    left, right = Operand.at(a, layout_a), Operand.at(b, layout_b)
    require_beside_a_product(
        (left.rows, right.rows),
        device,
        None if bias is None else (bias[0], *bias[2:]),
        None if out is None else (torch.float32, out[2], device),
        amax,
    )
    refuse_empty((left.rows, right.rows, left.k))
    if (layout_a, layout_b) not in SCALINGS:
        return exactly
    if not (left.lies_well and right.lies_well):
        return _laid_out_first
    job = job_of(device, left, right, config, bias and bias[:2], out and out[:2], amax is not None)
    wish = (os.environ.get(gemm_selection.CHOICE_VARIABLE) or None) if kernels else "cublaslt"
    plan = gemm_selection.plan_for(job.problem, gemm_selection.measured_on(launch.name_of(device)), wish)
    return multiplier(job, plan) if kernels or isinstance(plan, Library) else exactly


_plan = planned(exactly, without_kernels=partial(_planned_anywhere, kernels=False))(_planned_anywhere)


def _laid_out_first(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
) -> Tensor:
    layout_a, layout_b, *_ = parse_scaled_mm_config(config)
    return _multiply(*laid_out(a, scale_a, layout_a), *laid_out(b, scale_b, layout_b), config, bias, amax, out)


for _op in (scaled_mm, scaled_mm_observed, scaled_mm_accumulate):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _op)  # type: ignore[operator]
