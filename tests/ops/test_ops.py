"""Quantize and scaled GEMM against float64, block by block."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product as product_of

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Cast, Layout, Role, ScaledTensor
from lightning_fp8.ops.bf16_products import bf16_products
from lightning_fp8.ops.cast import decode
from lightning_fp8.ops.gemm import Gemm
from tests.float8_reference import MAX, cast, value_of_code

BLOCKS = {
    Layout.TENSOR: (10**6, 10**6),
    Layout.ROW: (1, 10**6),
    Layout.BLOCK_1X128: (1, 128),
    Layout.BLOCK_128X128: (128, 128),
    Layout.MX_1X32: (1, 32),
}
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
POWER_2 = (Layout.ROW, Layout.BLOCK_1X128, Layout.BLOCK_128X128)


def scale_of(block: np.ndarray, layout: Layout) -> float:
    """The scale of one block by the recipe's formula, in float64."""
    amax = float(np.abs(block).max())
    if layout is Layout.MX_1X32:
        return 2.0**127 if amax == 0 else 2.0 ** -math.ceil(math.log2(amax / MAX["E4M3"]))
    scale = 1.0 if amax == 0 else MAX["E4M3"] / amax
    return 2.0 ** math.floor(math.log2(scale)) if layout in POWER_2 else float(np.float32(scale))


def values_of(codes: np.ndarray) -> np.ndarray:
    table = np.array([value_of_code("E4M3", code) for code in range(256)])
    return table[codes]


def expected(x: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the values they stand for, of a K-major operand."""
    codes, dequantized = np.zeros(x.shape, np.uint8), np.zeros(x.shape)
    rows, columns = BLOCKS[layout]
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            where = np.s_[top : top + rows, left : left + columns]
            scale = scale_of(x[where], layout)
            codes[where] = cast(x[where], scale, "E4M3")
            dequantized[where] = values_of(codes[where]) / scale
    return codes, dequantized


def spread(rows: int, columns: int) -> Tensor:
    """Values whose magnitude changes by powers of ten along both dimensions, one block of zeros among them."""
    x = torch.randn(rows, columns) * torch.logspace(-2, 2, rows)[:, None] * torch.logspace(1, -3, columns)
    x[: rows // 3, : columns // 3] = 0
    return x.bfloat16()


def check(operand: ScaledTensor | None, x: Tensor, layout: Layout) -> None:
    assert operand is not None
    codes, dequantized = expected(x.float().numpy(), layout)
    assert np.array_equal(operand.data.view(torch.uint8).numpy(), codes)
    np.testing.assert_allclose(operand.dequantize().double().numpy(), dequantized, rtol=2e-7)


@LAYOUTS
@pytest.mark.parametrize("shape", [(70, 100), (130, 257), (128, 128), (1, 1), (5, 33), (257, 3)])
def test_quantize_both_ways(layout: Layout, shape: tuple[int, int]) -> None:
    x = spread(*shape)
    power_2 = layout in POWER_2
    quantized = ops.quantize(x, Cast(E4M3, layout, power_2), columnwise=True)
    check(quantized.rowwise, x, layout)
    check(quantized.columnwise, x.t(), layout)
    only_columns = ops.quantize(x, Cast(E4M3, layout, power_2), rowwise=False, columnwise=True)
    assert only_columns.rowwise is None
    check(only_columns.columnwise, x.t(), layout)


@LAYOUTS
def test_quantize_reads_any_strides(layout: Layout) -> None:
    x = spread(64, 200)[::2, 3:150:3]
    assert not x.is_contiguous()
    check(ops.quantize(x, Cast(E4M3, layout, layout in POWER_2)).rowwise, x, layout)


def product(a: ScaledTensor, b: ScaledTensor) -> tuple[Tensor, Tensor]:
    """``a @ bᵀ`` and ``|a| @ |b|ᵀ`` in float64."""
    left, right = a.dequantize().double(), b.dequantize().double()
    return left @ right.t(), left.abs() @ right.abs().t()


@LAYOUTS
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("power_2", [False, True])
def test_scaled_mm(layout: Layout, out_dtype: torch.dtype, bias: bool, power_2: bool) -> None:
    weight_layout = Layout.BLOCK_128X128 if layout is Layout.BLOCK_1X128 else layout
    a = ops.quantize(torch.randn(70, 300), Cast(E4M3, layout, power_2)).rowwise
    b = ops.quantize(torch.randn(50, 300), Cast(E5M2, weight_layout, power_2)).rowwise
    assert a is not None
    assert b is not None
    added = torch.randn(50) if bias else None
    out = ops.scaled_mm(a, b, bias=added, out_dtype=out_dtype)
    exact, magnitude = product(a, b)
    rounded_bias = 0 if added is None else (added.bfloat16() if out_dtype == torch.bfloat16 else added).double()
    rounding = torch.finfo(out_dtype).eps / 2
    allowed = 1e-6 * magnitude + (rounding + 1e-6) * (exact + rounded_bias).abs()
    if added is not None:  # a bias of another dtype than the output is rounded to it first
        allowed += torch.finfo(out_dtype).eps * added.double().abs()
    assert out.dtype == out_dtype
    assert ((out.double() - exact - (0 if added is None else added.double())).abs() <= allowed).all()


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0**-20, 1.3 * 2.0**-60, 1.3 * 2.0**-100])
@pytest.mark.parametrize("shape", [(96, 144, 80), (1, 7, 13)])
def test_one_scale_each_multiplies_exact_sums_in_float32(shape: tuple[int, int, int], factor: float) -> None:
    """Sums of whole numbers are exact, then scaled, then the bias is added, and the result is rounded once."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, size).astype(np.float32) for size in ((m, k), (n, k)))
    scales = np.float32(2.0**-10 * 1.7), np.float32(factor / (2.0**-10 * 1.7))
    operands = [
        ScaledTensor(torch.from_numpy(codes).to(E4M3.dtype), torch.tensor(scale), Layout.TENSOR)
        for codes, scale in zip((a, b), scales)
    ]
    scaled = torch.from_numpy((a @ b.T) * (scales[0] * scales[1]))
    bias = torch.from_numpy(rng.standard_normal(n).astype(np.float32)).bfloat16()
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(ops.scaled_mm(*operands), scaled.bfloat16())
    assert torch.equal(ops.scaled_mm(*operands, bias=bias), (scaled + bias.float()).bfloat16())
    operands = [ScaledTensor(each.data.t().contiguous().t(), each.scale_inv, each.layout) for each in operands]
    assert torch.equal(ops.scaled_mm(*operands, bias=bias.float()), (scaled + bias.float()).bfloat16())
    assert torch.equal(ops.scaled_mm(*operands), scaled.bfloat16())


def test_scaled_mm_accumulates_into_float32() -> None:
    a = ops.quantize(torch.randn(20, 64), Cast(E4M3, Layout.TENSOR)).rowwise
    b = ops.quantize(torch.randn(10, 64), Cast(E4M3, Layout.TENSOR)).rowwise
    assert a is not None
    assert b is not None
    start = torch.randn(20, 10)
    out = start.clone()
    ops.scaled_mm_accumulate(out, a, b)
    torch.testing.assert_close(out.double(), start.double() + product(a, b)[0], rtol=1e-5, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_operands(layout: Layout, shape: tuple[int, int]) -> None:
    quantized = ops.quantize(torch.randn(shape), Cast(E4M3, layout), columnwise=True)
    weight = ops.quantize(torch.randn(7, shape[1]), Cast(E4M3, layout)).rowwise
    assert quantized.rowwise is not None
    assert quantized.columnwise is not None
    assert weight is not None
    assert quantized.columnwise.data.shape == shape[::-1]
    assert torch.equal(ops.scaled_mm(quantized.rowwise, weight).float(), torch.zeros(shape[0], 7))


def test_nan_and_inf_stay_what_they_are() -> None:
    x = torch.tensor([[1.0, math.nan, -2.0, math.inf]])
    quantized = ops.quantize(x, Cast(E4M3, Layout.TENSOR), scale=torch.tensor(2.0)).rowwise
    assert quantized is not None
    values = quantized.dequantize().flatten().tolist()
    assert math.isnan(values[1])
    assert [values[0], values[2], values[3]] == [1.0, -2.0, 224.0]


def test_a_scale_of_zero_takes_the_tensors_own_and_seen_is_a_maximum() -> None:
    x, amax = torch.tensor([[1.0, -7.0]]), torch.tensor(3.0)
    quantized = ops.quantize(x, Cast(E4M3, Layout.TENSOR), scale=torch.tensor(0.0), amax=amax).rowwise
    assert quantized is not None
    assert quantized.scale_inv.item() == pytest.approx(7 / 448)
    assert amax.item() == 7.0
    ops.observe(torch.tensor([[2.0]]), amax)
    assert amax.item() == 7.0
    ops.observe(torch.empty(0, 4), amax)
    assert amax.item() == 7.0


def test_a_cast_as_arguments_of_an_op() -> None:
    cast = Cast(E4M3, Layout.BLOCK_1X128, True, 0.5)
    assert cast.flat == (E4M3.dtype, "1x128", True, 0.5, True, False, False)
    usages = [cast.usage(*usage) for usage in product_of((False, True), repeat=3)]
    assert len(set(usages)) == 8
    for usage, asked in zip(product_of((False, True), repeat=3), usages):
        assert (asked.rowwise, asked.columnwise, asked.scale_is_nonzero) == usage
        assert asked.flat == (*cast.flat[:4], *usage)
        assert Cast.from_flat(*asked.flat) == asked == Cast(E4M3, Layout.BLOCK_1X128, True, 0.5, *usage)
        assert asked.usage(True, False) == cast
    quantize, x = torch.ops.lightning_fp8.quantize, torch.ones(2, 2)
    usage = True, False, False
    for dtype, layout, message in (
        (torch.int8, "tensor", "dtype=torch.int8 is not an FP8 format; use one of torch.float8_e4m3fn"),
        (E4M3.dtype, "", "'' is not a valid Layout"),
        (E5M2.dtype, "1x64", "'1x64' is not a valid Layout"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(x, dtype, layout, False, 0.0, *usage)


@contextmanager
def flushing_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
def test_codes_keep_their_values_where_subnormal_numbers_are_flushed(float8: Float8) -> None:
    """FP8's subnormals are ordinary float32 numbers."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[torch.isfinite(codes.view(float8.dtype).float())].view(float8.dtype)
    exact = torch.tensor([value_of_code(float8.name, code) for code in codes.view(torch.uint8).tolist()]).bfloat16()
    with flushing_subnormals():
        decoded = decode(codes)
    assert torch.equal(decoded.view(torch.int16), exact.view(torch.int16))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_do_not_depend_on_whether_subnormal_numbers_are_flushed(recipe: str) -> None:
    a, b = torch.randn(64, 96) * torch.logspace(-4, 4, 96, base=2.0), torch.randn(32, 96)
    cast = make_recipe(recipe).cast
    results = []
    for surroundings in (nullcontext, flushing_subnormals):
        with surroundings():
            operands = [ops.quantize(x, cast(role)).rowwise for x, role in ((a, Role.INPUT), (b, Role.WEIGHT))]
            assert (operands[0].data.float().abs() < 2.0**-6).any()  # type: ignore[union-attr]  # there are some
            results.append(ops.scaled_mm(*operands, out_dtype=torch.float32))  # type: ignore[arg-type]
    assert torch.equal(*results)


def test_a_gemm_as_arguments_of_an_op() -> None:
    gemm = Gemm(Layout.BLOCK_1X128, Layout.BLOCK_128X128, torch.bfloat16, True)
    assert gemm.flat == ("1x128", "128x128", torch.bfloat16, True)
    assert Gemm.from_flat(*gemm.flat) == gemm
    codes, one = torch.ones(2, 2).to(E4M3.dtype), torch.ones(())
    for layouts, out_dtype, error, message in (
        (("", "tensor"), torch.float32, ValueError, "'' is not a valid Layout"),
        (("tensor", "slow"), torch.float32, ValueError, "'slow' is not a valid Layout"),
        (("tensor", "tensor"), torch.float64, TypeError, "out_dtype=torch.float64 must be one of torch.bfloat16"),
    ):
        with pytest.raises(error, match=message):
            torch.ops.lightning_fp8.scaled_mm(codes, one, codes, one, *layouts, out_dtype, False)


def test_ops_pass_torchs_own_checks() -> None:
    library, x = torch.ops.lightning_fp8, torch.randn(33, 40)
    for layout in Layout:
        for usage in [(True, True), (True, False), (False, True)]:
            flat = Cast(E4M3, layout, True, 0.5).usage(*usage).flat
            torch.library.opcheck(library.quantize, (x, *flat))
            torch.library.opcheck(library.quantize_unobserved, (x, *flat))
    scale, amax = torch.tensor(2.0), torch.tensor(0.0)
    torch.library.opcheck(library.quantize, (x, *Cast(E5M2, Layout.TENSOR, columnwise=True).flat, scale, amax))
    torch.library.opcheck(library.observe, (x, amax))
    a, s = torch.randn(5, 8).to(E4M3.dtype), torch.tensor(1.0)
    b = torch.randn(6, 8).to(E4M3.dtype)
    # The schema check multiplies its inputs by numbers, which torch cannot do with FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operands = a, s, b, s, *Gemm(Layout.TENSOR, Layout.TENSOR, torch.bfloat16).flat
    torch.library.opcheck(library.scaled_mm, (*operands, torch.randn(6)), test_utils=checks)
    arguments = torch.zeros(5, 6), a, s, b, s, *Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32).flat
    torch.library.opcheck(library.scaled_mm_accumulate, arguments, test_utils=checks)
    rows = [torch.rand(3), torch.rand(4, 3), torch.rand(3), torch.full((3,), 448.0)]
    torch.library.opcheck(library.update_scales, (*rows, 0.0, "max"))


def test_errors_say_what_fits() -> None:
    with pytest.raises(TypeError, match="int64.*bfloat16"):
        ops.quantize(torch.ones(2, 2, dtype=torch.int64), Cast(E4M3, Layout.TENSOR))
    with pytest.raises(TypeError, match=r"2-D.*\(2, 2, 2\)"):
        ops.quantize(torch.ones(2, 2, 2), Cast(E4M3, Layout.TENSOR))
    with pytest.raises(ValueError, match="'row' computes the scale of each block"):
        ops.quantize(torch.ones(2, 2), Cast(E4M3, Layout.ROW), scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="amax needs scale"):
        ops.quantize(torch.ones(2, 2), Cast(E4M3, Layout.TENSOR), amax=torch.tensor(1.0))
    operands = [ops.quantize(torch.ones(2, k), Cast(E4M3, Layout.TENSOR)).rowwise for k in (3, 4)]
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        ops.scaled_mm(*operands)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'1x128' cannot be transposed"):
        ScaledTensor(torch.ones(2, 2), torch.ones(2, 1), Layout.BLOCK_1X128).t()


@pytest.mark.parametrize("power_2", [True, False])
@LAYOUTS
def test_products_do_not_depend_on_autocast(layout: Layout, power_2: bool) -> None:
    """Which would round float32 factors, where scales are no powers of two, and a float32 result."""
    cast = Cast(E4M3, layout, power_2)
    a, b = (ops.quantize(torch.randn(rows, 256), cast).rowwise for rows in (64, 48))
    assert a is not None
    assert b is not None
    with torch.autocast("cpu", torch.bfloat16):
        inside = ops.scaled_mm(a, b, out_dtype=torch.float32)
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    assert (inside - exact).abs().max() < 1e-5 * exact.abs().max()


def test_threads_that_multiply_leave_torchs_setting_as_it_was() -> None:
    def setting() -> str:
        backend = torch.backends.mkldnn
        return backend.matmul.fp32_precision if hasattr(backend, "matmul") else torch.get_float32_matmul_precision()

    before, first, second = setting(), threading.Event(), threading.Event()

    def multiply_longer() -> None:
        with bf16_products():
            first.set()
            assert second.wait(30)

    thread = threading.Thread(target=multiply_longer)
    with bf16_products():
        thread.start()
        assert first.wait(30)
    second.set()  # the one that began first has ended first
    thread.join()
    assert setting() == before
