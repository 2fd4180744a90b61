"""Casts and GEMMs of experts on the CPU: against each expert alone, and against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Cast, Layout, Role, ScaledTensor
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.grouped import (
    grouped_mm_op,
    grouped_wgrad_in_high_precision_op,
    grouped_wgrad_op,
    quantize_experts_op,
)
from tests.float8_reference import cast as reference_cast
from tests.small import assert_raises

library = torch.ops.lightning_fp8
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
SIZES = pytest.mark.parametrize(("n", "k"), [(96, 160), (50, 23), (1, 130), (128, 1)])

GROUPS: dict[str, list[int]] = {
    "ragged": [37, 0, 130, 1, 128],
    "all to one": [0, 0, 40, 0, 0],
    "one row": [0, 1, 0, 0, 0],
    "nothing": [0, 0, 0, 0, 0],
}
"""The rows of each group."""


def offsets(groups: str) -> Tensor:
    return torch.tensor(GROUPS[groups]).cumsum(0).to(torch.int32)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of very unlike sizes, so that neighbouring blocks have unlike scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(one: ScaledTensor, other: ScaledTensor) -> bool:
    return torch.equal(bits(one.data), bits(other.data)) and torch.equal(bits(one.scale_inv), bits(other.scale_inv))


def of_expert(w: ScaledTensor, expert: int) -> ScaledTensor:
    one = w.layout.has_one_scale
    return ScaledTensor(w.data[expert], w.scale_inv if one else w.scale_inv[expert], w.layout)


def groups_of(offs: Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def tokens(t: int, k: int, recipe: str, role: Role, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Values ``[t, k]``, and their operand."""
    x = drawn(t, k, dtype=dtype, seed=seed)
    return x, ops.quantize(x, make_recipe(recipe).cast(role)).rowwise


def is_product(y: Tensor, a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether ``y`` is ``a bᵀ`` of float64, but for sums in float32 and one rounding."""
    one, two = (each.dequantize(torch.float64) for each in (a, b))
    error, allowed = (y.double() - one @ two.t()).abs(), 2e-6 * (one.abs() @ two.abs().t())
    return bool((error <= allowed + (2.0**-8 * y.double().abs() if y.dtype is torch.bfloat16 else 0)).all())


# --- Casts ------------------------------------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[int, int, torch.dtype], Tensor]] = {
    "contiguous": lambda n, k, dtype: drawn(5, n, k, dtype=dtype),
    "transposed": lambda n, k, dtype: drawn(5, k, n, dtype=dtype).mT,
    "every second": lambda n, k, dtype: drawn(10, n, 2 * k, dtype=dtype)[::2, :, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
@SIZES
@pytest.mark.parametrize("power_2", [False, True])
@LAYOUTS
def test_each_expert_is_cast_alone(
    layout: Layout, power_2: bool, n: int, k: int, view: str, dtype: torch.dtype
) -> None:
    w = VIEWS[view](n, k, dtype)
    cast = Cast(E4M3, layout, power_2)
    both = ops.quantize_experts(w, cast, columnwise=True)
    assert both.rowwise is not None
    assert both.columnwise is not None
    given = None  # layout tensor: one scale for all experts, by hand
    if layout is Layout.TENSOR:
        amax = w.double().abs().max()
        given = torch.tensor(448 / float(amax), dtype=torch.float32)
        given = torch.exp2(torch.floor(torch.log2(given))) if power_2 else given
        assert float(both.rowwise.scale_inv) == pytest.approx(float(1 / given), rel=1e-6)
        codes = reference_cast(w.float().numpy(), 1 / float(both.rowwise.scale_inv), "E4M3")
        assert np.array_equal(both.rowwise.data.view(torch.uint8).numpy(), codes) or not power_2
        given = 1 / both.rowwise.scale_inv
    for expert, each in enumerate(w):
        alone = ops.quantize(each.contiguous(), cast, scale=given, columnwise=True)
        if layout is Layout.TENSOR and not power_2:  # the reciprocal of the reciprocal may differ in its last bit
            assert torch.allclose(
                of_expert(both.rowwise, expert).dequantize(),
                alone.rowwise.dequantize(),
                rtol=1e-6,  # type: ignore[union-attr]
            )
            continue
        assert same(of_expert(both.rowwise, expert), alone.rowwise)  # type: ignore[arg-type]
        assert same(of_expert(both.columnwise, expert), alone.columnwise)  # type: ignore[arg-type]
    for usage in ((True, False), (False, True)):
        one = ops.quantize_experts(w, cast, rowwise=usage[0], columnwise=usage[1])
        assert (one.rowwise is not None, one.columnwise is not None) == usage
        operand, whole = (one.rowwise, both.rowwise) if usage[0] else (one.columnwise, both.columnwise)
        assert same(operand, whole)  # type: ignore[arg-type]


@LAYOUTS
def test_results_of_the_op_that_are_not_asked_for_are_empty(layout: Layout) -> None:
    """Of a transposed view, too."""
    w = drawn(3, 40, 48).mT
    for usage in ((True, True), (True, False), (False, True)):
        made = Cast(E4M3, layout).usage(*usage)
        data, _, data_t, scale_inv_t = quantize_experts_op(w, made, None, None)
        assert data.is_contiguous()
        assert data.shape == ((3, 48, 40) if usage[0] else (0,))
        assert data_t.shape == ((3, 40, 48) if usage[1] else (0,))
        if usage == (True, True):
            alone = ops.quantize(w[1], Cast(E4M3, layout), rowwise=False, columnwise=True).columnwise
            assert alone is not None
            if layout is not Layout.TENSOR:
                assert torch.equal(bits(data_t[1]), bits(alone.data))
                assert torch.equal(bits(scale_inv_t[1]), bits(alone.scale_inv))
            else:
                assert torch.equal(bits(data_t), bits(data).mT)
                assert scale_inv_t.numel() == 0


@pytest.mark.parametrize("given", [0.0, 3.0])
def test_all_experts_share_a_given_scale_and_an_amax(given: float) -> None:
    w, scale, amax = drawn(4, 24, 40), torch.tensor(given), torch.tensor(1.5)
    w[2] *= 100
    made = ops.quantize_experts(w, Cast(E4M3, Layout.TENSOR), scale=scale, amax=amax, columnwise=True)
    largest = w.double().abs().max()
    assert amax == largest.float()
    assert made.rowwise is not None
    used = given or 448 / float(largest)
    assert float(made.rowwise.scale_inv) == pytest.approx(1 / used, rel=1e-6)
    if given:
        codes = reference_cast(w.numpy(), given, "E4M3")
        assert np.array_equal(made.rowwise.data.view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize("layout", [Layout.ROW, Layout.BLOCK_128X128, Layout.MX_1X32], ids=lambda layout: layout.value)
def test_nan_in_an_expert_stays_there(layout: Layout) -> None:
    w = drawn(3, 130, 140)
    w[1, 5, 7] = torch.nan
    made = ops.quantize_experts(w, Cast(E4M3, layout), columnwise=True)
    for operand in (made.rowwise, made.columnwise):
        assert operand is not None
        finite = [bool(of_expert(operand, expert).dequantize().isfinite().all()) for expert in range(3)]
        assert finite == [True, False, True]


# --- GEMMs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SIZES
@pytest.mark.parametrize("groups", GROUPS)
@RECIPE
def test_fprop_and_dgrad(recipe: str, groups: str, n: int, k: int, dtype: torch.dtype) -> None:
    """Of rows in a group those of the GEMM of its expert, to the bit; others are zeros, whatever their codes are."""
    offs = offsets(groups)
    t = int(offs[-1]) + 9
    w8 = ops.quantize_experts(drawn(5, n, k, seed=1), make_recipe(recipe).cast(Role.WEIGHT), columnwise=True)
    for role, weight, width in ((Role.INPUT, w8.rowwise, k), (Role.GRAD_OUTPUT, w8.columnwise, n)):
        assert weight is not None
        _, a = tokens(t, width, recipe, role)
        bits(a.data)[-9:] = 0x7F  # NaN
        y = ops.grouped_mm(a, weight, offs, out_dtype=dtype, fast_accum=role is Role.INPUT)
        assert y.shape == (t, n if role is Role.INPUT else k)
        assert y.dtype is dtype
        assert not y[-9:].any()
        for expert, rows in enumerate(groups_of(offs)):
            of_a = ScaledTensor(a.data[rows], a.scale_inv[rows] if a.scale_inv.dim() else a.scale_inv, a.layout)
            of_w = of_expert(weight, expert)
            assert is_product(y[rows], of_a, of_w)
            if y[rows].numel():
                alone = ops.scaled_mm(of_a, of_w, out_dtype=dtype, fast_accum=role is Role.INPUT)
                assert torch.equal(y[rows], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SIZES
@pytest.mark.parametrize("groups", GROUPS)
@RECIPE
def test_wgrad(recipe: str, groups: str, n: int, k: int, dtype: torch.dtype) -> None:
    """Blocks along the rows begin with each group; rows of nobody are read by none; an empty group has zeros."""
    made, offs = make_recipe(recipe), offsets(groups)
    t = int(offs[-1]) + 9
    casts = ops.Casts(made.cast(Role.GRAD_OUTPUT), made.cast(Role.INPUT))
    dy, dy8 = tokens(t, n, recipe, Role.GRAD_OUTPUT, dtype, seed=1)
    x, x8 = tokens(t, k, recipe, Role.INPUT, dtype, seed=2)
    one_scale = dy8.layout.has_one_scale
    for values in (dy, x, bits(dy8.data), bits(x8.data)):
        values[-9:] = 0x7F if values.dtype is torch.uint8 else torch.nan
    dw = ops.grouped_wgrad(*((dy8, x8) if one_scale else (dy, x)), offs, casts, out_dtype=dtype)
    assert dw.shape == (5, n, k)
    assert dw.dtype is dtype
    for expert, rows in enumerate(groups_of(offs)):
        if rows.start == rows.stop:
            assert not dw[expert].any()
            continue
        if one_scale:
            parts = [ScaledTensor(each.data[rows].t().contiguous(), each.scale_inv, each.layout) for each in (dy8, x8)]
        else:
            parts = [
                ops.quantize(values[rows].contiguous(), cast, rowwise=False, columnwise=True).columnwise
                for values, cast in ((dy, casts.dy), (x, casts.x))
            ]
        assert is_product(dw[expert], *parts)
        assert torch.equal(dw[expert], ops.scaled_mm(*parts, out_dtype=dtype))


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "every second", "expanded"])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "rowwise", "high precision"])
def test_wgrad_of_values_with_strides(recipe: str, strides: str) -> None:
    """A gradient may be a view, or one row for all."""
    offs = offsets("ragged")
    t = int(offs[-1])
    view: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda v: v,
        "transposed": lambda v: v.t().contiguous().t(),
        "every second": lambda v: v.repeat_interleave(2, 1)[:, ::2],
        "expanded": lambda v: v[:1].expand_as(v),
    }
    dy, x = view[strides](drawn(t, 48)), view[strides](drawn(t, 40, seed=1))
    if recipe == "high precision":
        one, other = (
            ops.grouped_wgrad_in_high_precision(*pair, offs, out_dtype=torch.float32)
            for pair in ((dy, x), (dy.contiguous(), x.contiguous()))
        )
    else:
        casts = ops.Casts(*(make_recipe(recipe).cast(role) for role in (Role.GRAD_OUTPUT, Role.INPUT)))
        one, other = (
            ops.grouped_wgrad(*pair, offs, casts, out_dtype=torch.float32)
            for pair in ((dy, x), (dy.contiguous(), x.contiguous()))
        )
    assert torch.allclose(one, other, rtol=1e-5, atol=float(other.abs().max()) * 1e-6)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_in_high_precision(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    rows = torch.randint(0, 5, (70,), generator=torch.Generator().manual_seed(0))
    offs = rows.cumsum(0).to(torch.int32)
    t = int(offs[-1]) + 9
    dy, x = drawn(t, 23, dtype=dtype), drawn(t, 17, dtype=dtype, seed=1)
    dy[-9:] = x[-9:] = torch.nan
    dw = ops.grouped_wgrad_in_high_precision(dy, x, offs, out_dtype=out_dtype)
    assert dw.dtype is out_dtype
    exact = torch.stack([dy[rows].double().t() @ x[rows].double() for rows in groups_of(offs)])
    near = 2.0**-8 if torch.bfloat16 in (dtype, out_dtype) else 1e-5
    assert torch.allclose(dw.double(), exact, rtol=near, atol=float(exact.abs().max()) * 1e-6)


# --- As ops of torch --------------------------------------------------------------------------------------------------

# The schema check multiplies its inputs by numbers, which torch cannot do with FP8.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@RECIPE
def test_ops_pass_torchs_own_checks(recipe: str) -> None:
    made, offs = make_recipe(recipe), torch.tensor([3, 3, 7], dtype=torch.int32)
    layouts = [made.cast(role).layout for role in (Role.INPUT, Role.WEIGHT)]
    w = drawn(3, 6, 10)
    for usage in ((True, True), (True, False), (False, True)):
        flat = made.cast(Role.WEIGHT).usage(*usage).flat
        torch.library.opcheck(library.quantize_experts_unobserved, (w, *flat))
        if layouts[1] is Layout.TENSOR:
            torch.library.opcheck(library.quantize_experts, (w, *flat, torch.tensor(2.0), torch.tensor(0.0)))
    w8 = ops.quantize_experts(w, made.cast(Role.WEIGHT)).rowwise
    assert w8 is not None
    x, x8 = tokens(9, 10, recipe, Role.INPUT)
    dy, dy8 = tokens(9, 6, recipe, Role.GRAD_OUTPUT)
    gemm = Gemm(*layouts, torch.bfloat16).flat
    torch.library.opcheck(
        library.grouped_mm, (x8.data, x8.scale_inv, w8.data, w8.scale_inv, offs, *gemm), test_utils=CHECKS
    )
    casts = ops.Casts(made.cast(Role.GRAD_OUTPUT), made.cast(Role.INPUT)).flat
    of_dy, of_x = (dy, None), (x, None)
    if layouts[0] is Layout.TENSOR:
        of_dy, of_x = (dy8.data, dy8.scale_inv), (x8.data, x8.scale_inv)
    torch.library.opcheck(library.grouped_wgrad, (*of_dy, *of_x, offs, *casts, torch.float32), test_utils=CHECKS)
    torch.library.opcheck(library.grouped_wgrad_in_high_precision, (dy, x, offs, torch.float32))


def test_casts_as_arguments_of_an_op() -> None:
    made = make_recipe("blockwise")
    casts = ops.Casts(made.cast(Role.GRAD_OUTPUT).usage(False, True), made.cast(Role.INPUT))
    assert ops.Casts.from_flat(*casts.flat) == casts
    assert len(casts.flat) == casts.schema.count(",") + 1  # type: ignore[attr-defined]


@RECIPE
def test_the_dispatcher_and_its_shortcut_compute_alike(recipe: str) -> None:
    made, offs = make_recipe(recipe), offsets("ragged")
    w, (dy, _) = drawn(5, 33, 40), tokens(300, 33, recipe, Role.GRAD_OUTPUT)
    x, x8 = tokens(300, 40, recipe, Role.INPUT)

    def run() -> list[Tensor]:
        w8 = ops.quantize_experts(w, made.cast(Role.WEIGHT), columnwise=True)
        assert w8.rowwise is not None
        assert w8.columnwise is not None
        y = ops.grouped_mm(x8, w8.rowwise, offs, out_dtype=torch.bfloat16)
        dw = ops.grouped_wgrad_in_high_precision(dy, x, offs, out_dtype=torch.bfloat16)
        return [w8.rowwise.data, w8.columnwise.data, w8.columnwise.scale_inv, y, dw]

    with torch.no_grad():
        past = run()
    through = run()  # with gradients enabled
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")()
    for one, two, three in zip(past, through, compiled, strict=True):
        assert torch.equal(bits(one), bits(two))
        assert torch.equal(bits(one), bits(three))
        assert one.stride() == two.stride() == three.stride()


@LAYOUTS
def test_fake_tensors_have_the_shapes_of_a_card(layout: Layout) -> None:
    """On a GPU the operand of the transpose is a copy."""
    with FakeTensorMode():
        w = torch.empty(3, 144, 80, device="cuda", dtype=torch.bfloat16)
        made = ops.quantize_experts(w, Cast(E4M3, layout), columnwise=True)
        assert made.rowwise is not None
        assert made.columnwise is not None
        for operand, shape in ((made.rowwise, (144, 80)), (made.columnwise, (80, 144))):
            assert operand.data.shape == (3, *shape)
            assert operand.data.is_contiguous()
            scales = () if layout.has_one_scale else (3, *layout.scale_shape(*shape))
            assert operand.scale_inv.shape == scales
            assert operand.scale_inv.dtype is layout.scale_dtype


def test_flops() -> None:
    t, n, k, offs = 20, 6, 10, torch.tensor([3, 3, 7], dtype=torch.int32)
    x, x8 = tokens(t, k, "tensorwise", Role.INPUT)
    dy, dy8 = tokens(t, n, "tensorwise", Role.GRAD_OUTPUT)
    w8 = ops.quantize_experts(drawn(3, n, k), Cast(E4M3, Layout.TENSOR)).rowwise
    casts = ops.Casts(Cast(E4M3, Layout.TENSOR), Cast(E4M3, Layout.TENSOR))
    runs: list[Callable[[], Tensor]] = [
        lambda: ops.grouped_mm(x8, w8, offs, out_dtype=torch.float32),  # type: ignore[arg-type]
        lambda: ops.grouped_wgrad(dy8, x8, offs, casts, out_dtype=torch.float32),
        lambda: ops.grouped_wgrad_in_high_precision(dy, x, offs, out_dtype=torch.float32),
    ]
    for run in runs:
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == 2 * t * n * k


# --- Wrong arguments --------------------------------------------------------------------------------------------------

W, OFFS, X, DY = torch.ones(3, 32, 64), torch.tensor([4, 4, 9], dtype=torch.int32), torch.ones(9, 64), torch.ones(9, 32)
A, B = X.to(E4M3.dtype), W.to(E4M3.dtype)
ONE, CAST = torch.ones(()), Cast(E4M3, Layout.TENSOR)
ROWS = Cast(E4M3, Layout.ROW)
GEMM = Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32)


def product(a: Tensor = A, b: Tensor = B, offs: Tensor = OFFS) -> Any:
    return grouped_mm_op(a, ONE, b, ONE, offs, GEMM)


def wgrad(dy: Tensor = DY, x: Tensor = X, offs: Tensor = OFFS, of_dy: Any = None, of_x: Any = None) -> Any:
    return grouped_wgrad_op(dy, of_dy, x, of_x, offs, ops.Casts(ROWS, ROWS), torch.float32)


def high_precision(dy: Tensor = DY, x: Tensor = X, offs: Tensor = OFFS) -> Any:
    return grouped_wgrad_in_high_precision_op(dy, x, offs, torch.float32)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a matrix": (lambda: ops.quantize_experts(W[0], CAST), TypeError, r"\[E, N, K\], not shape \(32, 64\)"),
    "integers": (lambda: ops.quantize_experts(W.int(), CAST), TypeError, "cannot quantize torch.int32"),
    "a scale of rows": (lambda: ops.quantize_experts(W, ROWS, scale=ONE), ValueError, "'row' computes the scale"),
    "amax alone": (lambda: ops.quantize_experts(W, CAST, amax=ONE.clone()), ValueError, "amax needs scale"),
    "contractions": (lambda: product(a=A[:, :32]), ValueError, r"a is \(9, 32\), b is \(3, 32, 64\)"),
    "one expert": (lambda: product(b=B[0]), ValueError, r"b \[E, N, K\]"),
    "long offs": (lambda: product(offs=OFFS.long()), TypeError, "offs is torch.int64; it must be torch.int32"),
    "few offs": (lambda: product(offs=OFFS[:2]), ValueError, r"offs has shape \[2\]; it must have \[3\]"),
    "offs elsewhere": (lambda: product(offs=OFFS.to("meta")), ValueError, "offs is on meta"),
    "wgrad, rows": (lambda: wgrad(x=X[:8]), ValueError, r"dy is \(9, 32\), x is \(8, 64\)"),
    "wgrad, a vector": (lambda: wgrad(dy=DY[0]), ValueError, r"dy is \(32,\)"),
    "wgrad, long offs": (lambda: wgrad(offs=OFFS.long()), TypeError, "offs is torch.int64; it must be torch.int32"),
    "wgrad, offs of two dimensions": (lambda: wgrad(offs=OFFS[None]), ValueError, r"offs has shape \[1, 3\]"),
    "wgrad in high precision, rows": (lambda: high_precision(x=X[:8]), ValueError, r"dy is \(9, 32\), x is \(8, 64\)"),
    "wgrad in high precision, offs": (lambda: high_precision(offs=OFFS.long()), TypeError, "offs is torch.int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    with torch.no_grad():
        assert_raises(*WRONG[case])
    assert_raises(*WRONG[case])


def test_what_fits_is_taken() -> None:
    for run in (product, wgrad, high_precision):
        run()
