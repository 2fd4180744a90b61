"""Every variant of the matrix products, its compiled PTX run on the CPU with the race detector on, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cuda_kernels.host import gemm_selection
from lightning_fp8.numerics.recipes import DelayedScaling, Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling
from lightning_fp8.numerics.scaled import Layout, Role
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import Gemm, scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.gemm_cuda import GemmOperand, aligned_operand, operand_key
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import kernels_of, reference_of
from lightning_fp8.proofs.drawing import numbers
from lightning_fp8.proofs.products import aligned, operand
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.gemm_cases import CASES, multiplying, scaled_mm, scaled_mm_accumulate
from tests.cuda_kernels.cases.kernel_cases import E4M3, E5M2
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import covering, late_rows, thorough

pytestmark = [needs_compilers, pytest.mark.usefixtures("emulator")]

PIPELINES = [
    case for case in CASES if case.name.startswith(("product-tensor-300x264x700", "product-blocks-300x264x700"))
]

Operand = tuple[torch.Tensor, torch.Tensor, Layout]


@late_rows("case", lambda: tiered(CASES))
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert [kernel.function.__name__ for kernel in emulator.launched if "gemm" in kernel.name]


@pytest.mark.parametrize(
    ("case", "schedule", "copies"),
    covering(
        [
            (case, *order)
            for case, order in zip(PIPELINES, itertools.cycle((("reverse", "late"), ("random", "random"))))
        ],
        lambda row: row[1:],
    ),
    ids=lambda each: each.name if isinstance(each, Case) else each,
)
def test_the_order_of_threads_and_copies_changes_nothing(
    case: Case, schedule: str, copies: str, emulator: Emulator
) -> None:
    emulator.schedule, emulator.copies = schedule, copies  # type: ignore[assignment]
    case.run("cpu")


@thorough
@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (DelayedScaling, (96, 160, 208)),
        (Float8RowwiseScaling, (96, 160, 208)),
        (Float8BlockScaling, (37, 50, 70)),
        (MXFP8BlockScaling, (37, 50, 70)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_three_products_of_a_layer(
    recipe: type, shape: tuple[int, int, int], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels cast, kernels multiply: fprop, dgrad and wgrad are the reference's, and no operand is copied between."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "numba")
    plans.clear_plan_cache()
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(rows, columns, generator=generator).bfloat16()
        for rows, columns in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    bias = torch.randn(outputs, generator=generator).bfloat16()
    roles = {Role.INPUT: x, Role.WEIGHT: w, Role.GRAD_OUTPUT: dy}
    results = []
    for side in (kernels_of, reference_of):
        row, column = {}, {}
        for role, tensor in roles.items():
            cast = recipe().cast(role)
            data, scale, data_t, scale_t = side(quantize_op)(tensor, cast.usage(True, True))
            row[role] = data, scale, cast.layout
            column[role] = data_t, scale if cast.layout is Layout.TENSOR else scale_t, cast.layout
        if side is kernels_of and recipe is not MXFP8BlockScaling:
            for data, scale, layout in (*row.values(), *column.values()):
                assert GemmOperand.from_key(layout, operand_key(data, scale), data.device).is_aligned
        main_grad = torch.ones(outputs, inputs)

        def product(a: Operand, b: Operand, out: torch.dtype = torch.bfloat16, fast: bool = False) -> tuple[Any, ...]:
            return *a[:2], *b[:2], Gemm(a[2], b[2], out, fast)

        of_weight = column[Role.GRAD_OUTPUT], column[Role.INPUT]
        side(scaled_mm_accumulate_op)(main_grad, *product(*of_weight, torch.float32))
        multiply = side(scaled_mm_op)
        results.append(
            (
                multiply(*product(row[Role.INPUT], row[Role.WEIGHT], fast=True), bias),
                multiply(*product(row[Role.GRAD_OUTPUT], column[Role.WEIGHT])),
                multiply(*product(*of_weight)),
                main_grad,
            )
        )
    names = [kernel.name for kernel in emulator.launched if kernel.name.startswith("gemm")]
    assert len(names) == (0 if recipe is MXFP8BlockScaling else 4)
    for actual, right in zip(*results):
        tolerance = 2.0**-8 if actual.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))
    plans.clear_plan_cache()


@thorough
def test_promotion_keeps_the_digits_of_long_sums(emulator: Emulator) -> None:
    """With 13 bits behind the leading product's point in the tensor core, 4,096 products of one sign lose digits.

    Summed up 128 at a time they keep them.
    """
    emulator.accumulation, emulator.races = "hopper", False
    errors = []
    x = torch.rand(16, 4096, generator=torch.Generator().manual_seed(0))
    for fast in (True, False):
        a = operand(x, E4M3, Layout.TENSOR, True)
        right = a.dequantize().double() @ a.dequantize().double().t()
        with multiplying("90a", 1, 1, 128):
            gemm = Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32, fast)
            actual = scaled_mm(*aligned(a), *aligned(a), gemm)
        errors.append(float(((actual - right) / right).abs().max()))
    fast_error, promoted_error = errors
    assert promoted_error < 1e-3 < fast_error


@thorough
@pytest.mark.parametrize("tile", [("90a", 1, 1, 128), ("89", 64, 64)], ids=lambda tile: tile[0])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite(tile: tuple[Any, ...], value: float) -> None:
    a, b, one = torch.ones(40, 48), torch.ones(35, 48), torch.tensor(1.0)
    a[7, 5] = value
    operands = [part for x in (a, b) for part in aligned_operand(x.to(E5M2 if x is a else E4M3), one, Layout.TENSOR)]
    with multiplying(*tile):
        out = scaled_mm(*operands, Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32))
    torch.testing.assert_close(out, a @ b.t(), equal_nan=True, rtol=0.0, atol=0.0)


@thorough
@pytest.mark.parametrize("tile", [("90a", 1, 1, 128), ("89", 64, 64)], ids=lambda tile: tile[0])
def test_more_than_2_31_elements(tile: tuple[Any, ...], emulator: Emulator) -> None:
    """Rows of A, and of the result that is added to, as many apart: addresses do not wrap."""
    emulator.races = False
    a, b = (
        operand(numbers(3, 128, 0, True), E4M3, Layout.TENSOR, True),
        operand(numbers(16, 128, 1, True), E4M3, Layout.TENSOR, True),
    )
    # Memory that is never touched is never taken.
    far = torch.empty(2 * 2**31 + 128, dtype=torch.uint8).as_strided((3, 128), (2**31, 1))
    far.copy_(a.data.view(torch.uint8))
    out = torch.empty(2 * 2**30 + 16).as_strided((3, 16), (2**30, 1)).fill_(1.0)
    with multiplying(*tile):
        gemm = Gemm(a.layout, b.layout, torch.float32)
        scaled_mm_accumulate(out, far.view(E4M3), a.scale_inv, b.data, b.scale_inv, gemm)
    assert torch.equal(out, a.dequantize() @ b.dequantize().t() + 1)


def test_operands_that_lie_anywhere(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, transposed views and scales in another order are laid out first; what lies beside a slice is not read."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "numba")
    plans.clear_plan_cache()
    layouts = (40, Layout.BLOCK_1X128), (30, Layout.BLOCK_128X128)
    a, b = (operand(torch.randn(rows, 203), E4M3, layout, True) for rows, layout in layouts)
    right = (a.dequantize().double() @ b.dequantize().double().t()).float()
    wide = torch.full((40, 300), 0x7F, dtype=torch.uint8)  # NaN
    wide[:, 5:208] = a.data.view(torch.uint8)
    places = [wide.view(E4M3)[:, 5:208], a.data.t().contiguous().t(), a.data]
    gemm = Gemm(a.layout, b.layout, torch.float32)
    for data in places:
        actual = scaled_mm(data, a.scale_inv, b.data, b.scale_inv.t().contiguous().t(), gemm)
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    assert len(emulator.launched) == 3
    plans.clear_plan_cache()


@pytest.mark.parametrize("stride", [2, 0])
def test_scales_of_rows_that_are_not_side_by_side(
    stride: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "numba")
    plans.clear_plan_cache()
    a, b = (operand(torch.randn(64, 64), E4M3, Layout.ROW, True) for _ in range(2))
    wide = torch.full((128, 1), torch.nan)
    scale = wide[::2].copy_(a.scale_inv) if stride else a.scale_inv[:1].expand(64, 1)
    assert scale.stride(0) == stride
    right = (a.data.double() * scale.double()) @ b.dequantize().double().t()
    actual = scaled_mm(a.data, scale, b.data, b.scale_inv, Gemm(Layout.ROW, Layout.ROW, torch.float32))
    torch.testing.assert_close(actual, right.float(), rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    assert len(emulator.launched) == 1
    plans.clear_plan_cache()
