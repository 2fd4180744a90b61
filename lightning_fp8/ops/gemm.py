"""The matrix products on CUDA tensors: planned once for operands that lie alike; see :mod:`cuda_kernels.gemm`.

What no kernel computes, ``torch._scaled_mm`` does, and what that does not, the reference: exact, and slower.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops import reference
from lightning_fp8.ops.how import NAMES, parsed_product
from lightning_fp8.ops.operands import allocator
from lightning_fp8.ops.planning import current_device, planned, refuse_empty
from lightning_fp8.ops.schema import NAMESPACE, empty_operand, operand_layout
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.gemm.config import Plan, Problem
    from cuda_kernels.gemm.product import MmaTile, Tile

_SCALINGS = {
    (Layout.TENSOR, Layout.TENSOR): "TENSOR",
    (Layout.ROW, Layout.ROW): "ROW",
    (Layout.BLOCK_1X128, Layout.BLOCK_128X128): "BLOCK",
    (Layout.BLOCK_1X128, Layout.BLOCK_1X128): "BLOCKS",
}
"""Pairs of layouts that kernels multiply, by the names of :class:`cuda_kernels.gemm.product.Scaling`."""

Given = Tensor | None
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, str, "Given", "Given", "Given"], Tensor]
"""``(a, scale_a, b, scale_b, how, bias, seen, out) -> out``; ``out`` is what to add to, or None."""

Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int, tuple[int, ...], int]
"""How an operand lies: dtype, shape, strides, its address modulo 16, and of its scales the strides and the address."""


def place_of(data: Tensor, scale: Tensor) -> Place:
    return data.dtype, data.shape, data.stride(), data.data_ptr() % 16, scale.stride(), scale.data_ptr() % 16


class Operand(NamedTuple):
    """A K-major operand ``[rows, k]`` and its scales; ``pitch`` is 0 where a row's elements are not side by side."""

    dtype: torch.dtype
    layout: Layout
    rows: int
    k: int
    pitch: int
    address: int
    scale_strides: tuple[int, ...]
    scale_address: int

    @classmethod
    def at(cls, place: Place, layout: Layout) -> Operand:
        dtype, (rows, k), strides, address, scale_strides, scale_address = place
        pitch = strides[0] if strides[1] == 1 or k == 1 else 0
        return cls(dtype, layout, rows, k, pitch, address, scale_strides, scale_address)

    @classmethod
    def promised(cls, layout: Layout, dtype: torch.dtype, rows: int, k: int) -> Operand:
        """As the ops that cast lay it out."""
        data, scales = operand_layout(layout, dtype, rows, k)
        return cls(dtype, layout, rows, k, data.strides[0], 0, scales.strides, 0)

    @property
    def lies_well(self) -> bool:
        """Whether copies of tensors and of scales can begin at each row."""
        if self.pitch <= 0 or self.pitch % 16 or self.address:
            return False
        strides = self.scale_strides
        if self.layout is Layout.BLOCK_1X128:
            return strides[0] == 1 and strides[1] % 4 == 0 and not self.scale_address
        return self.layout is not Layout.BLOCK_128X128 or strides[1] == 1


def laid_out(data: Tensor, scale: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The operand where kernels read it: itself, or a copy."""
    if Operand.at(place_of(data, scale), layout).lies_well:
        return data, scale
    promised = empty_operand(data.device, layout, data.dtype, *data.shape)
    for tensor, empty in zip((data, scale), promised):
        kind = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
        empty.view(kind).copy_(tensor.view(kind))
    return promised


# --- Ops --------------------------------------------------------------------------------------------------------------


def scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Tensor | None = None) -> Tensor:
    return _multiply(a, scale_a, b, scale_b, how, bias, None, None)


def scaled_mm_observed(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Tensor | None, seen: Tensor
) -> Tensor:
    return _multiply(a, scale_a, b, scale_b, how, bias, seen, None)


def scaled_mm_accumulate(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str) -> None:
    if out.dtype == torch.float32 and out.stride(1) == 1:
        _multiply(a, scale_a, b, scale_b, how, None, None, out)
    else:
        out += _multiply(a, scale_a, b, scale_b, how, None, None, None)


def _multiply(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Given, seen: Given, out: Given
) -> Tensor:
    of_bias = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
    of_out = None if out is None else (out.stride(0), out.data_ptr() % 16)
    multiply = _plan(
        a.device, a.is_cuda and current_device(), place_of(a, scale_a), place_of(b, scale_b), how, of_bias, of_out,
        seen is not None,
    )  # fmt: skip
    return multiply(a, scale_a, b, scale_b, how, bias, seen, out)


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


def _planned_anywhere(
    device: torch.device,
    a: Place,
    b: Place,
    how: str,
    bias: tuple[torch.dtype, int] | None,
    out: tuple[int, int] | None,
    amax: bool,
    kernels: bool = True,
) -> Multiply:
    """What multiplies: our kernels, if ``kernels``, or a library.

    ``bias``: dtype, and address modulo 16; ``out``: pitch of what to add to, and address modulo 16; ``amax``: whether
    ``seen`` is given.
    """
    from cuda_kernels import launch
    from cuda_kernels.gemm import tuning
    from cuda_kernels.gemm.config import Library

    layout_a, layout_b, *_ = parsed_product(how)
    left, right = Operand.at(a, layout_a), Operand.at(b, layout_b)
    refuse_empty((left.rows, right.rows, left.k))
    if (layout_a, layout_b) not in _SCALINGS:
        return exactly
    if not (left.lies_well and right.lies_well):
        return _laid_out_first
    job = job_of(device, left, right, how, bias, out, amax)
    wish = (os.environ.get(tuning.CHOICE_VARIABLE) or None) if kernels else "cublaslt"
    plan = tuning.plan_for(job.problem, tuning.measured_on(launch.name_of(device)), wish)
    return multiplier(job, plan) if kernels or isinstance(plan, Library) else exactly


_plan = planned(exactly, without_kernels=partial(_planned_anywhere, kernels=False))(_planned_anywhere)


def _laid_out_first(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, how: str, bias: Given, seen: Given, out: Given
) -> Tensor:
    layout_a, layout_b, *_ = parsed_product(how)
    return _multiply(*laid_out(a, scale_a, layout_a), *laid_out(b, scale_b, layout_b), how, bias, seen, out)


class Job(NamedTuple):
    """A product of operands that lie well; ``pitch``: of the result, in elements."""

    device: torch.device
    problem: Problem
    a: Operand
    b: Operand
    how: str
    pitch: int


def job_of(
    device: torch.device,
    a: Operand,
    b: Operand,
    how: str,
    bias: tuple[torch.dtype, int] | None = None,
    out: tuple[int, int] | None = None,
    amax: bool = False,
) -> Job:
    """The product of these operands on ``device``; ``bias``, ``out`` and ``amax`` as in :func:`_planned_anywhere`."""
    from cuda_kernels import launch
    from cuda_kernels.gemm.config import Problem
    from cuda_kernels.gemm.product import Product, Scaling

    _, _, dtype, fast = parsed_product(how)
    format_a, format_b = (float8_of(operand.dtype).name.lower() for operand in (a, b))
    scaling, of_bias = Scaling[_SCALINGS[a.layout, b.layout]], None if bias is None else NAMES[bias[0]]
    product = Product(format_a, format_b, scaling, NAMES[dtype], of_bias, out is not None, not fast, amax)
    pitch, address = out or (b.rows, 0)
    aligned = pitch * dtype.itemsize % 16 == 0 and address == 0
    even = pitch % 2 == b.rows % 2 == 0 and address % (2 * dtype.itemsize) == 0
    even = even and (bias is None or bias[1] % 8 == 0) and b.scale_address % 8 == 0
    card = launch.architecture_of(device), launch.multiprocessors(device)
    return Job(device, Problem(a.rows, b.rows, a.k, product, *card, aligned, even), a, b, how, pitch)


def multiplier(job: Job, plan: Plan) -> Multiply:
    """What computes ``job`` as planned."""
    from cuda_kernels.gemm.config import Library
    from cuda_kernels.gemm.product import MmaTile, Tile

    if isinstance(plan, Tile):
        return _Hopper(job, plan).multiply
    if isinstance(plan, MmaTile):
        return _Mma(job, plan).multiply
    return _ScaledMm(job.how, exactly).multiply if plan is Library.CUBLASLT else exactly


# --- What multiplies --------------------------------------------------------------------------------------------------


class _Kernel:
    """One of our kernels, started with operands that lie as planned."""

    def __init__(self, job: Job) -> None:
        from cuda_kernels import launch

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
        self._start(a, scale_a, b, scale_b, None if bias is None else bias.contiguous(), seen, out)
        return out


class _Hopper(_Kernel):
    def __init__(self, job: Job, tile: Tile) -> None:
        from cuda_kernels import launch, tensor_maps
        from cuda_kernels.gemm import hopper
        from cuda_kernels.gemm.product import Scaling

        super().__init__(job)
        device, problem, product = job.device, job.problem, job.problem.product
        self._along_k, self._both = product.scaling.along_k, product.scaling is Scaling.BLOCKS
        shared = tile.cluster if tile.cluster > 1 else 1
        rows, columns = tile.rows // (shared if tile.shares_a else 1), tile.columns // (1 if tile.shares_a else shared)
        box, map_on = tensor_maps.Box, partial(tensor_maps.map_on, device)
        self._map_a, self._map_b = map_on(box(rows, 128)), map_on(box(columns, 128))
        chunk = 32 if product.out == "float32" else 64
        self._map_out = map_on(box(64, chunk)) if tile.staged else None
        self._map_scale_a = map_on(box(1, tile.rows, swizzle=False, transposed=True))
        self._map_scale_b = map_on(box(1, tile.columns, swizzle=False, transposed=True))
        self._pitches = job.pitch, job.b.scale_strides[0] if product.scaling is Scaling.BLOCK else 0
        down, across = -(-problem.m // tile.rows), -(-problem.n // tile.columns)
        units = (down * -(-across // shared)) if tile.shares_a else (-(-down // shared) * across)
        blocks = min(units * shared, launch.multiprocessors(device) // shared * shared)
        kernel = hopper.gemm_kernel(product, tile)
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
            *maps,
            at(scale_a),
            at(scale_b),
            0 if bias is None else at(bias),
            0 if seen is None else at(seen),
            at(out),
            *self._pitches,
        )


class _Mma(_Kernel):
    def __init__(self, job: Job, tile: MmaTile) -> None:
        from cuda_kernels import launch
        from cuda_kernels.gemm import mma

        super().__init__(job)
        device, problem, a, b, _, pitch = job

        def scale_pitch(operand: Operand) -> int:
            along = {Layout.BLOCK_1X128: 1, Layout.BLOCK_128X128: 0}.get(operand.layout)
            return 0 if along is None else operand.scale_strides[along]

        self._pitches = a.pitch, b.pitch, scale_pitch(a), scale_pitch(b), pitch
        blocks = -(-problem.m // tile.rows) * -(-problem.n // tile.columns)
        kernel = mma.mma_gemm_kernel(problem.product, tile)
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
        if not self._refuses:
            try:
                result = torch._scaled_mm(
                    a, b.t(), scale_a=scale_a, scale_b=scale_b.t() if scale_b.dim() == 2 else scale_b,
                    bias=bias, out_dtype=self._dtype, use_fast_accum=self._fast,
                )  # fmt: skip
                return _left(result, seen, out)
            except (RuntimeError, ValueError) as error:
                self._refuses = True
                warnings.warn(
                    f"torch._scaled_mm refuses {tuple(a.shape)} x {tuple(b.t().shape)} on {a.device}: {error}. "
                    "Products run exactly in BF16, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._instead(a, scale_a, b, scale_b, how, bias, seen, out)


for _op in (scaled_mm, scaled_mm_observed, scaled_mm_accumulate):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _op)  # type: ignore[operator]
