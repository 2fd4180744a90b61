"""What computes a product: one of our kernels, ``torch._scaled_mm``, or the reference, which is exact and slower."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.config import parse_scaled_mm_config
from lightning_fp8.ops.jobs import Job, Operand
from lightning_fp8.ops.operands import allocator
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
    from cuda_kernels.host.gemm_configs import Plan

Given = Tensor | None
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, str, "Given", "Given", "Given"], Tensor]
"""``(a, scale_a, b, scale_b, config, bias, amax, out) -> out``; ``out`` is what to add to, or None."""


def multiplier(job: Job, plan: Plan) -> Multiply:
    """What computes ``job`` as planned."""
    from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
    from cuda_kernels.host.gemm_configs import Library

    if isinstance(plan, GemmConfig):
        return _Hopper(job, plan).multiply
    if isinstance(plan, MmaConfig):
        return _Mma(job, plan).multiply
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

    def __init__(self, job: Job) -> None:
        from cuda_kernels.host import launch

        self._at, self._allocate = launch.address_on(job.device), allocator(job.device)
        self._out = (job.a.rows, job.b.rows), (job.b.rows, 1), parse_scaled_mm_config(job.config).out

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, amax: Given, out: Tensor
    ) -> None:
        raise NotImplementedError

    def multiply(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Given, amax: Given, out: Given
    ) -> Tensor:
        if out is None:
            out = self._allocate(*self._out)
        self._start(a, scale_a, b, scale_b, bias, amax, out)
        return out


class _Hopper(_Kernel):
    def __init__(self, job: Job, tile: GemmConfig) -> None:
        from cuda_kernels.gemm import wgmma
        from cuda_kernels.gemm.spec import Scaling
        from cuda_kernels.host import launch, tensor_maps

        super().__init__(job)
        device, problem, product = job.device, job.problem, job.problem.spec
        self._along_k, self._both = product.scaling.along_k, product.scaling is Scaling.BLOCKS
        shared = tile.cluster
        rows, columns = (
            tile.tile_m // (shared if tile.multicast_a else 1),
            tile.tile_n // (1 if tile.multicast_a else shared),
        )
        box, map_on = tensor_maps.Box, partial(tensor_maps.map_on, device)
        self._map_a, self._map_b = map_on(box(rows, 128)), map_on(box(columns, 128))
        chunk = 32 if product.out == "float32" else 64
        self._map_out = map_on(box(64, chunk)) if tile.smem_epilogue else None
        self._map_scale_a = map_on(box(1, tile.tile_m, swizzle=False, transposed=True))
        self._map_scale_b = map_on(box(1, tile.tile_n, swizzle=False, transposed=True))
        self._strides = job.stride, job.b.scale_strides[0] if product.scaling is Scaling.BLOCK else 0
        down, across = -(-problem.m // tile.tile_m), -(-problem.n // tile.tile_n)
        units = (down * -(-across // shared)) if tile.multicast_a else (-(-down // shared) * across)
        blocks = min(units * shared, launch.multiprocessors(device) // shared * shared)
        kernel = wgmma.gemm_kernel(product, tile)
        self._launch = launch.Launch(kernel, blocks, (problem.m, problem.n, problem.k), device).start

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, amax: Given, out: Tensor
    ) -> None:
        at, of_a, of_b = self._at, self._map_a(a), self._map_b(b)
        maps = (
            of_a, of_b, of_a if self._map_out is None else self._map_out(out),
            self._map_scale_a(scale_a) if self._along_k else of_a, self._map_scale_b(scale_b) if self._both else of_a,
        )  # fmt: skip
        self._launch(
            *maps, at(scale_a), at(scale_b), 0 if bias is None else at(bias), 0 if amax is None else at(amax), at(out),
            *self._strides,
        )  # fmt: skip


class _Mma(_Kernel):
    def __init__(self, job: Job, tile: MmaConfig) -> None:
        from cuda_kernels.gemm import mma
        from cuda_kernels.host import launch

        super().__init__(job)
        device, problem, a, b, _, stride = job

        def scale_stride(operand: Operand) -> int:
            along = {Layout.BLOCK_1X128: 1, Layout.BLOCK_128X128: 0}.get(operand.layout)
            return 0 if along is None else operand.scale_strides[along]

        self._strides = a.stride, b.stride, scale_stride(a), scale_stride(b), stride
        blocks = -(-problem.m // tile.tile_m) * -(-problem.n // tile.tile_n)
        kernel = mma.mma_gemm_kernel(problem.spec, tile)
        self._launch = launch.Launch(kernel, blocks, (problem.m, problem.n, problem.k), device).start

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, amax: Given, out: Tensor
    ) -> None:
        at, (stride_a, stride_b, stride_scale_a, stride_scale_b, stride) = self._at, self._strides
        self._launch(
            at(a), stride_a, at(b), stride_b, at(scale_a), stride_scale_a, at(scale_b), stride_scale_b,
            0 if bias is None else at(bias), 0 if amax is None else at(amax), at(out), stride,
        )  # fmt: skip


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
