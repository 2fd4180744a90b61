"""What the products are tested with: every scaling, epilogue and shape, against float64; see ``kernel_cases``.

Values are small integers times powers of two, so that sums are exact and a result is the exact one, rounded once; where
scales are no powers of two, it is within float32's rounding of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import GemmChoice, GemmProblem, Library, legal_choices
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import grouped_cuda, plans
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.gemm import scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.proofs import products
from lightning_fp8.proofs.cases import Case, tile_of
from lightning_fp8.proofs.comparing import kernels_of
from tests.cuda_kernels.cases.kernel_cases import BF16, E4M3, E5M2, FP16, FP32

PAIRS = {
    "tensor": (Layout.TENSOR, Layout.TENSOR),
    "row": (Layout.ROW, Layout.ROW),
    "block": (Layout.BLOCK_1X128, Layout.BLOCK_128X128),
    "blocks": (Layout.BLOCK_1X128, Layout.BLOCK_1X128),
}

scaled_mm, scaled_mm_accumulate = kernels_of(scaled_mm_op), kernels_of(scaled_mm_accumulate_op)


def check_product(scaling: str, shape: tuple[int, int, int], device: str, **options: Any) -> None:
    """:func:`lightning_fp8.proofs.products.check_product` of operands of one of :data:`PAIRS`."""
    products.check_product(PAIRS[scaling], shape, device, **options)


@contextmanager
def multiplying(architecture: str, *numbers: int) -> Iterator[None]:
    """Products run in tiles that are made of these numbers, or the case fails: warpgroups, times 64 rows and columns on
    Hopper, else rows and columns."""

    def chosen(problem: GemmProblem, *rest: object) -> GemmChoice:
        for choice in legal_choices(problem):
            if not isinstance(choice, Library) and tile_of(choice) == numbers:
                return choice
        raise AssertionError(f"{numbers} is not legal for {problem}")

    plans.clear_plan_cache()
    with (
        patch.object(gemm_selection, "choose_gemm", chosen),
        patch.object(grouped_cuda, "fastest_by_estimate", chosen),
        patch.object(launch, "architecture_of", lambda device: architecture),
    ):
        yield
    plans.clear_plan_cache()


def _case(tile: tuple[int, ...], scaling: str, shape: tuple[int, int, int], **options: Any) -> Case:
    words = [f"{key}={DTYPE_NAMES.get(value, value)}" for key, value in options.items() if key != "formats"]
    words += ["e5m2*e4m3"] * (options.get("formats") == (E5M2, E4M3)) + ["e4m3*e5m2"] * (
        options.get("formats") == (E4M3, E5M2)
    )
    name = "-".join(["product", scaling, "x".join(map(str, shape)), "/".join(map(str, tile)), *words])

    def run(device: str) -> None:
        with multiplying("90a" if len(tile) > 2 else "89", *tile):
            check_product(scaling, shape, device, **options)

    return Case(name, run)


WIDE, RAGGED, EVEN = (300, 264, 700), (133, 131, 77), (70, 130, 150)
"""Several tiles each way, the ring of places turned, nothing a multiple of a tile; rows that lie anywhere; in pairs."""

CASES = [
    _case((2, 1, 256), "tensor", WIDE, fast=True),
    _case((2, 1, 256), "tensor", WIDE, fast=True, bias=BF16, exact=False),
    _case((2, 2, 128), "tensor", (600, 264, 1300), formats=(E5M2, E4M3)),
    _case((2, 2, 128), "tensor", WIDE, out=FP32, accumulate=True, formats=(E4M3, E5M2)),
    _case((2, 1, 192), "tensor", WIDE, out=FP16, bias=FP32),
    _case((2, 1, 256), "row", (600, 264, 1300), fast=True, bias=BF16),
    _case((1, 1, 128), "tensor", (16, 16, 16), out=FP16),
    _case((1, 1, 128), "tensor", WIDE, fast=True, formats=(E4M3, E5M2)),
    _case((1, 1, 128), "tensor", RAGGED, bias=FP16),
    _case((1, 1, 128), "tensor", RAGGED, out=FP32, accumulate=True),
    _case((1, 1, 128), "tensor", EVEN, fast=True),
    _case((1, 1, 128), "tensor", (1, 1, 1)),
    _case((2, 1, 256), "row", WIDE, fast=True, bias=BF16, exact=False),
    _case((2, 2, 128), "row", WIDE, out=FP16, exact=False),
    _case((1, 1, 128), "row", RAGGED, out=FP32, bias=BF16),
    _case((2, 2, 128), "block", WIDE, bias=BF16, exact=False),
    _case((2, 2, 128), "block", WIDE, out=FP32),
    _case((1, 1, 128), "block", (1, 16, 4096)),
    _case((1, 1, 128), "block", EVEN, exact=False),
    _case((2, 2, 128), "blocks", WIDE, out=FP32, accumulate=True),
    _case((1, 1, 128), "blocks", WIDE, exact=False),
    _case((1, 1, 128), "blocks", RAGGED, out=FP32, accumulate=True, exact=False),
    _case((1, 1, 128), "blocks", EVEN, out=FP32, accumulate=True),
    _case((2, 1, 192), "tensor", WIDE, fast=True, bias=BF16),
    _case((2, 1, 192), "tensor", WIDE, out=FP32, accumulate=True, formats=(E4M3, E5M2)),
    _case((2, 1, 192), "row", (300, 392, 700), fast=True, bias=BF16),
    _case((2, 1, 192), "block", (140, 704, 700), bias=FP32),
    _case((2, 1, 192), "block", (70, 336, 4300), out=FP16),
    _case((2, 1, 192), "blocks", (140, 264, 700), exact=False),
    _case((128, 128), "tensor", WIDE, fast=True, formats=(E4M3, E5M2)),
    _case((128, 128), "tensor", WIDE, bias=BF16, exact=False),
    _case((64, 64), "tensor", RAGGED, out=FP16, bias=FP32, formats=(E5M2, E4M3)),
    _case((64, 64), "tensor", (1, 1, 1), out=FP32),
    _case((128, 128), "row", WIDE, out=FP16, bias=BF16),
    _case((64, 64), "row", RAGGED, fast=True, exact=False),
    _case((128, 128), "block", WIDE, bias=FP16, exact=False),
    _case((64, 64), "block", (1, 16, 4096)),
    _case((128, 128), "blocks", WIDE, out=FP32, accumulate=True),
    _case((64, 64), "blocks", RAGGED, exact=False),
]
"""Hopper's, and those of ``mma.sync``."""
