"""What computes a product: one of our kernels, ``torch._scaled_mm``, or the reference, which is exact and slower."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.config import parse_scaled_mm_config
from lightning_fp8.ops.jobs import Job, Operand
from lightning_fp8.ops.operands import allocator
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.host.gemm_configs import GemmChoice, KernelConfig

Given = Tensor | None
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, str, "Given", "Given", "Given"], Tensor]
"""``(a, scale_a, b, scale_b, config, bias, amax, out) -> out``; ``out`` is what to add to, or None."""


def multiplier(job: Job, plan: GemmChoice) -> Multiply:
    """What computes ``job`` as planned."""
    from cuda_kernels.host.gemm_configs import Library

    if not isinstance(plan, Library):
        return _Kernel(job, plan).multiply
    return _ScaledMm(job.config, exactly).multiply if plan is Library.CUBLASLT else exactly


def exactly(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
) -> Tensor:
    """A product in BF16 or float32 that rounds no operand."""
    result = reference.scaled_mm(a, scale_a, b, scale_b, config, bias)
    return _left(result, amax, out)


def _left(result: Tensor, amax: Given, out: Given) -> Tensor:
    """What is left to do where no kernel has done it."""
    if amax is not None:
        torch.ops.lightning_fp8.observe.default(result, amax)
    return result if out is None else out.add_(result)


class _Kernel:
    """One of our kernels, started with operands that lie as planned."""

    def __init__(self, job: Job, config: KernelConfig) -> None:
        from cuda_kernels.host.gemm_launch import GemmStrides, bind_gemm

        a, b = job.a, job.b
        strides = GemmStrides(a.stride, b.stride, _scale_stride(a), _scale_stride(b), job.stride)
        self._allocate = allocator(job.device)
        self._out = (a.rows, b.rows), (b.rows, 1), parse_scaled_mm_config(job.config).out
        self._start = bind_gemm(job.device, job.problem, config, strides)

    def multiply(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
    ) -> Tensor:
        if out is None:
            out = self._allocate(*self._out)
        self._start(a, scale_a, b, scale_b, bias, amax, out)
        return out


def _scale_stride(operand: Operand) -> int:
    """As :class:`cuda_kernels.host.gemm_launch.GemmStrides` has it."""
    dim = {Layout.BLOCK_1X128: 1, Layout.BLOCK_128X128: 0}.get(operand.layout)
    return 0 if dim is None else operand.scale_strides[dim]


class _ScaledMm:
    """``torch._scaled_mm``; where it refuses, from then on ``instead``, with one warning."""

    def __init__(self, config: str, instead: Multiply) -> None:
        *_, self._dtype, self._fast = parse_scaled_mm_config(config)
        self._instead, self._refuses = instead, False

    def multiply(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
    ) -> Tensor:
        if self._refuses:
            return self._instead(a, scale_a, b, scale_b, config, bias, amax, out)
        try:
            result = torch._scaled_mm(
                a, b.t(), scale_a=scale_a, scale_b=scale_b.t() if scale_b.dim() == 2 else scale_b,
                bias=bias, out_dtype=self._dtype, use_fast_accum=self._fast,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            self._refuses = True
            warnings.warn(
                f"torch._scaled_mm refuses {tuple(a.shape)} x {tuple(b.t().shape)} on {a.device}: {error}. "
                "Products run exactly in BF16, slower.",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._instead(a, scale_a, b, scale_b, config, bias, amax, out)
        return _left(result, amax, out)
