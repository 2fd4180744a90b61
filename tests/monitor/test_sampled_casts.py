"""What is counted of casts equals a count of the same tensors in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Cast, Layout, Role
from lightning_fp8.ops.sample import COUNTS, LOSSES, MOST_ELEMENTS, SAMPLED_RECIPES, largest_rounded

LARGEST_ROUNDED = {E4M3: 464.0, E5M2: 61440.0}


def values(rows: int = 300, columns: int = 200, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of many binades, with zeros and, in float32, numbers that round."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 3, columns)
    x[::7, ::5] = 0
    return x.to(dtype)


def expected(x: Tensor, data: Tensor, scale_inv: Tensor, float8: Float8) -> dict[str, float]:
    """The counts of a cast of one scale for each element, ``[R, K]``, in float64."""
    wide, codes = x.double().numpy(), data.float().double().numpy()
    back = codes * scale_inv.double().numpy()
    finite = np.isfinite(wide)
    return {
        "elements": wide.size,
        "zeros": (wide == 0).sum(),
        "nonfinite": (~finite).sum(),
        "clipped": (finite & (np.abs(wide) > LARGEST_ROUNDED[float8] * scale_inv.double().numpy())).sum(),
        "flushed": ((wide != 0) & (codes == 0)).sum(),
        "signal": np.square(wide[finite]).sum(),
        "noise": np.square((back - wide)[finite]).sum(),
        "casts": 1,
    }


def sampled(x: Tensor, operand: Any, **transposed: bool) -> dict[str, float]:
    counts = torch.zeros(len(COUNTS), dtype=torch.float64)
    with torch.no_grad():
        ops.sample_cast(x, operand, counts, **transposed)
    return dict(zip(COUNTS, counts.tolist()))


def assert_counts(found: dict[str, float], wanted: dict[str, float]) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-6 if name in ("signal", "noise") else 0), name


def expanded(scale_inv: Tensor, layout: Layout, rows: int, columns: int) -> Tensor:
    """One inverse scale for each element, by index."""
    if layout.has_one_scale:
        return scale_inv.float().expand(rows, columns)
    block_rows, block_columns = layout.block_shape(rows, columns)
    row, column = torch.arange(rows) // block_rows, torch.arange(columns) // block_columns
    return scale_inv.float()[row][:, column]


@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.code)
def test_counts_equal_those_in_float64(layout: Layout, float8: Float8) -> None:
    x = values()
    q = ops.quantize(x, Cast(float8, layout), columnwise=True)
    assert q.rowwise is not None
    assert q.columnwise is not None
    inverse = expanded(q.rowwise.scale_inv, layout, *x.shape)
    wanted = expected(x, q.rowwise.data, inverse, float8)
    assert_counts(sampled(x, q.rowwise), wanted)
    inverse = expanded(q.columnwise.scale_inv, layout, *x.t().shape).t()
    wanted = expected(x, q.columnwise.data.t(), inverse, float8)
    assert_counts(sampled(x, q.columnwise, transposed=True), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda each: each.name)
def test_what_a_given_scale_clips_is_counted(float8: Float8, dtype: torch.dtype) -> None:
    x = values(dtype=dtype)
    x[3, 4], x[5, 6], x[7, 8] = torch.inf, -torch.inf, torch.nan
    scale = torch.tensor(3.1)
    q = ops.quantize(x, Cast(float8, Layout.TENSOR), scale=scale).rowwise
    assert q is not None
    wanted = expected(x, q.data, (1 / scale).expand(x.shape), float8)
    assert wanted["clipped"] > 0 or float8 is E5M2
    assert wanted["nonfinite"] == 3
    assert_counts(sampled(x, q), wanted)


@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda each: each.name)
def test_the_largest_magnitude_that_rounds(float8: Float8) -> None:
    """Half a step beyond the largest value ties to it, which is even; anything more is of the next step."""
    codes = torch.arange(0, 127 if float8 is E4M3 else 124, dtype=torch.uint8).view(float8.dtype).double()
    step = float(codes[-1] - codes[-2])
    assert largest_rounded(float8) == float(codes[-1]) + step / 2 == LARGEST_ROUNDED[float8]


@pytest.mark.parametrize("magnitude", [1e-22, 1e20])
def test_squares_do_not_leave_the_range_of_float32(magnitude: float) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * magnitude
    operand = ops.quantize(x, Cast(E4M3, Layout.TENSOR)).rowwise
    assert operand is not None
    inverse = expanded(operand.scale_inv, Layout.TENSOR, *x.shape)
    assert_counts(sampled(x, operand), expected(x, operand.data, inverse, E4M3))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda each: each.code)
def test_of_a_large_tensor_blocks_of_rows_are_counted(layout: Layout, transposed: bool) -> None:
    rows, columns = 128 * 33 + 5, 512  # two million, of which every ninth block counts
    x = values(rows, columns)
    q = ops.quantize(x, Cast(E4M3, layout), rowwise=not transposed, columnwise=transposed)
    operand = q.columnwise if transposed else q.rowwise
    assert operand is not None
    taken = torch.arange(rows)[: 128 * 33].view(-1, 128)[::9].flatten()
    assert len(taken) * columns <= MOST_ELEMENTS
    if transposed:
        inverse, data = expanded(operand.scale_inv, layout, columns, rows).t(), operand.data.t()
    else:
        inverse, data = expanded(operand.scale_inv, layout, rows, columns), operand.data
    part = data.view(torch.uint8)[taken].view(data.dtype)
    assert_counts(sampled(x, operand, transposed=transposed), expected(x[taken], part, inverse[taken], E4M3))


@pytest.mark.parametrize("role", LINEAR_ROLES, ids=lambda each: each.value)
def test_recipes_lose_what_their_casts_lose(role: Role) -> None:
    x = values()
    losses, exponents = torch.zeros(len(SAMPLED_RECIPES), len(LOSSES)).double(), torch.zeros(256).double()
    with torch.no_grad():
        ops.sample_recipes(x, role, losses, exponents)
        ops.sample_recipes(x, role, losses, exponents)  # they add up
    for recipe, found in zip(SAMPLED_RECIPES, losses):
        cast = recipe.cast(role)
        q = ops.quantize(x, cast, columnwise=True)
        assert q.rowwise is not None
        assert q.columnwise is not None
        both = [
            expected(x, q.rowwise.data, expanded(q.rowwise.scale_inv, cast.layout, *x.shape), cast.float8),
            expected(
                x, q.columnwise.data.t(), expanded(q.columnwise.scale_inv, cast.layout, *x.t().shape).t(), cast.float8
            ),
        ]
        wanted = [
            int((x != 0).sum()),
            max(each["flushed"] for each in both),
            both[0]["signal"],
            max(each["noise"] for each in both),
        ]
        assert (found / 2).tolist() == pytest.approx(wanted, rel=1e-6), recipe.name
    _, exponent = np.frexp(x.double().numpy())
    biased = np.where(x.double().numpy() == 0, 0, exponent - 1 + 127)
    assert (exponents / 2).tolist() == np.bincount(biased.ravel(), minlength=256).tolist()


def test_recipes_have_the_scales_of_the_whole_tensor() -> None:
    """An outlier outside the sampled rows flushes the others under one scale, and its column under one per row."""
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[200, 5] = 1e6  # of every eighth block of 128 rows, the first is sampled
    losses, exponents = torch.zeros(len(SAMPLED_RECIPES), len(LOSSES)).double(), torch.zeros(256).double()
    ops.sample_recipes(x, Role.INPUT, losses, exponents)
    shares = dict(zip((each.name for each in SAMPLED_RECIPES), (losses[:, 1] / losses[:, 0]).tolist()))
    taken = torch.arange(4096).view(-1, 128)[::8].flatten()
    whole = (x[taken].double().abs() * 448 / 1e6 <= 2.0**-10).double()
    assert shares["tensorwise"] == pytest.approx(float(whole.mean()), rel=1e-2)
    assert shares["tensorwise"] > 0.9
    assert shares["rowwise"] == pytest.approx(float(whole[:, 5].mean()) / 512, rel=0.1)
    assert shares["blockwise"] < 1e-4


def test_the_ops_fit_torchs_contract() -> None:
    x = values(20, 40)
    q = ops.quantize(x, Cast(E4M3, Layout.BLOCK_1X128)).rowwise
    assert q is not None
    library = torch.ops.lightning_fp8
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # torch compares no FP8
    counts = torch.zeros(8, dtype=torch.float64)
    torch.library.opcheck(
        library.sample_cast, (x, q.data, q.scale_inv, q.layout.code, False, counts), test_utils=checks
    )
    torch.library.opcheck(
        library.sample_recipes, (x, "input", torch.zeros(4, 4).double(), torch.zeros(256, dtype=torch.float64))
    )


def test_tensors_without_elements_count_nothing() -> None:
    x = torch.empty(0, 32)
    for layout in Layout:
        q = ops.quantize(x, Cast(E4M3, layout)).rowwise
        found = sampled(x, q)
        assert found.pop("casts") == 1
        assert not any(found.values())
    losses, exponents = torch.zeros(4, 4).double(), torch.zeros(256).double()
    with torch.no_grad():
        ops.sample_recipes(x, Role.INPUT, losses, exponents)
    assert not losses.any()
    assert not exponents.any()


def test_what_is_no_cast_is_refused() -> None:
    q = ops.quantize(values(), Cast(E4M3, Layout.TENSOR)).rowwise
    with pytest.raises(TypeError, match="float64"):
        sampled(values().double(), q)
