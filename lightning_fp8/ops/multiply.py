"""What computes a product: one of our kernels, ``torch._scaled_mm``, or the reference, which is exact and slower."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.how import parsed_product
from lightning_fp8.ops.jobs import Job, Operand
from lightning_fp8.ops.operands import allocator
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
    from cuda_kernels.host.gemm_configs import Plan

Given = Tensor | None
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, str, "Given", "Given", "Given"], Tensor]
"""``(a, scale_a, b, scale_b, how, bias, seen, out) -> out``; ``out`` is what to add to, or None."""


def multiplier(job: Job, plan: Plan) -> Multiply:
    """What computes ``job`` as planned."""
    from cuda_kernels.gemm.spec import GemmConfig, MmaConfig
    from cuda_kernels.host.gemm_configs import Library

    if isinstance(plan, GemmConfig):
        return _Hopper(job, plan).multiply
    if isinstance(plan, MmaConfig):
        return _Mma(job, plan).multiply
    return _ScaledMm(job.how, exactly).multiply if plan is Library.CUBLASLT else exactly


def exactly(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Given, seen: Given, out: Given
) -> Tensor:
    """A product in BF16 or float32 that rounds no operand."""
    result = reference.scaled_mm(a, scale_a, b, scale_b, how, bias)
    return _left(result, seen, out)


def _left(result: Tensor, seen: Given, out: Given) -> Tensor:
    """What is left to do where no kernel has done it."""
    if seen is not None:
        torch.ops.lightning_fp8.observe.default(result, seen)
    return result if out is None else out.add_(result)


class _Kernel:
    """One of our kernels, started with operands that lie as planned."""

    def __init__(self, job: Job) -> None:
        from cuda_kernels.host import launch

        self._at, self._allocate = launch.address_on(job.device), allocator(job.device)
        self._out = (job.a.rows, job.b.rows), (job.b.rows, 1), parsed_product(job.how).out

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, seen: Given, out: Tensor
    ) -> None:
        raise NotImplementedError

    def multiply(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Given, seen: Given, out: Given
    ) -> Tensor:
        if out is None:
            out = self._allocate(*self._out)
        self._start(a, scale_a, b, scale_b, bias, seen, out)
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
        self._pitches = job.pitch, job.b.scale_strides[0] if product.scaling is Scaling.BLOCK else 0
        down, across = -(-problem.m // tile.tile_m), -(-problem.n // tile.tile_n)
        units = (down * -(-across // shared)) if tile.multicast_a else (-(-down // shared) * across)
        blocks = min(units * shared, launch.multiprocessors(device) // shared * shared)
        kernel = wgmma.gemm_kernel(product, tile)
        self._launch = launch.Launch(kernel, blocks, (problem.m, problem.n, problem.k), device).start

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, seen: Given, out: Tensor
    ) -> None:
        at, of_a, of_b = self._at, self._map_a(a), self._map_b(b)
        maps = (
            of_a, of_b, of_a if self._map_out is None else self._map_out(out),
            self._map_scale_a(scale_a) if self._along_k else of_a, self._map_scale_b(scale_b) if self._both else of_a,
        )  # fmt: skip
        self._launch(
            *maps, at(scale_a), at(scale_b), 0 if bias is None else at(bias), 0 if seen is None else at(seen), at(out),
            *self._pitches,
        )  # fmt: skip


class _Mma(_Kernel):
    def __init__(self, job: Job, tile: MmaConfig) -> None:
        from cuda_kernels.gemm import mma
        from cuda_kernels.host import launch

        super().__init__(job)
        device, problem, a, b, _, pitch = job

        def scale_pitch(operand: Operand) -> int:
            along = {Layout.BLOCK_1X128: 1, Layout.BLOCK_128X128: 0}.get(operand.layout)
            return 0 if along is None else operand.scale_strides[along]

        self._pitches = a.pitch, b.pitch, scale_pitch(a), scale_pitch(b), pitch
        blocks = -(-problem.m // tile.tile_m) * -(-problem.n // tile.tile_n)
        kernel = mma.mma_gemm_kernel(problem.spec, tile)
        self._launch = launch.Launch(kernel, blocks, (problem.m, problem.n, problem.k), device).start

    def _start(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Given, seen: Given, out: Tensor
    ) -> None:
        at, (pitch_a, pitch_b, pitch_scale_a, pitch_scale_b, pitch) = self._at, self._pitches
        self._launch(
            at(a), pitch_a, at(b), pitch_b, at(scale_a), pitch_scale_a, at(scale_b), pitch_scale_b,
            0 if bias is None else at(bias), 0 if seen is None else at(seen), at(out), pitch,
        )  # fmt: skip


class _ScaledMm:
    """``torch._scaled_mm``; where it refuses, from then on ``instead``, with one warning."""

    def __init__(self, how: str, instead: Multiply) -> None:
        *_, self._dtype, self._fast = parsed_product(how)
        self._instead, self._refuses = instead, False

    def multiply(
        self, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Given, seen: Given, out: Given
    ) -> Tensor:
        if self._refuses:
            return self._instead(a, scale_a, b, scale_b, how, bias, seen, out)
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
            return self._instead(a, scale_a, b, scale_b, how, bias, seen, out)
        return _left(result, seen, out)
