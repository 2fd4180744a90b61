"""Loops that cast and decode on the CPU: the specification's bits, and where the specification runs instead."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.formats import E4M3, E5M2, Float8
from lightning_fp8.ops import cast as casts
from lightning_fp8.ops import cpu, gemm
from lightning_fp8.scaled import Cast, Layout, ScaledTensor
from tests import float8_reference
from tests.tiers import thorough

pytest.importorskip("numba")

FORMATS = pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
MORE_DTYPES = [pytest.param(dtype, marks=thorough) for dtype in (torch.float32, torch.float16)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)


def numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many binades; a part of one block, a whole one and a row are zeros, and a row is subnormal."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 8, (rows, columns), generator=generator).float()
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(exponents)
    x[:, :40] = 0
    x[1] = 0
    x[2] = torch.randn(columns, generator=generator) * torch.finfo(dtype).smallest_normal
    x[3, 3] = torch.finfo(dtype).max
    return x.to(dtype)


def bits(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


def check_cast(x: Tensor, cast: Cast, scale: float | None, amax: float | None) -> None:
    tensors = [[None if each is None else torch.tensor(each) for each in (scale, amax)] for _ in range(2)]
    results: Any = casts._quantize_by_loops(x, cast, *tensors[0])
    expected: Any = casts._quantize_to_bytes(x, cast, *tensors[1], None)
    assert results is not None
    for actual, wanted in zip((*results, *tensors[0]), (*expected, *tensors[1])):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert (actual.shape, actual.dtype, actual.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
            assert torch.equal(bits(actual), bits(wanted)), (tuple(x.shape), cast, scale, amax)  # type: ignore[arg-type]


@FORMATS
@LAYOUTS
@pytest.mark.parametrize("shape", [(260, 512), (301, 333), pytest.param((1000, 40), marks=thorough)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=thorough) for d in (torch.float32, torch.float16))], ids=str
)
def test_codes_and_scales_are_the_specifications(
    dtype: torch.dtype, shape: tuple[int, int], layout: Layout, float8: Float8
) -> None:
    x = numbers(*shape, dtype)
    for options, usage in product(((False, 0.0), (True, 1e-3)), ((True, True), (True, False), (False, True))):
        cast = Cast(float8, layout, *options, *usage)
        check_cast(x, cast, None, None)
        if layout.has_one_scale:
            for scale, amax in product((0.37, 0.0, 5e4), (None, 0.5)):
                check_cast(x, cast, scale, amax)


@FORMATS
@DTYPES
def test_codes_are_the_nearest(dtype: torch.dtype, float8: Float8) -> None:
    """Of all finite numbers of 16 bits; in float32 of what lies beside them, too."""
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(half)
    x = x[x.isfinite()]
    if dtype == torch.float32:
        middle = x.float().view(torch.int32)
        x = torch.cat([middle + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]).view(torch.float32)
    x = torch.cat([x, x.new_zeros(-len(x) % 256)]).view(-1, 256)
    for scale in (1.0, 0.37, 2.0**-9):
        cast = Cast(float8, Layout.TENSOR, scale_is_nonzero=True)
        results = casts._quantize_by_loops(x, cast, torch.tensor(scale), None)
        assert results is not None
        assert results.data is not None
        expected = float8_reference.cast(x.float().numpy(), scale, float8.name)
        assert np.array_equal(results.data.numpy(), expected)


@FORMATS
@LAYOUTS
@pytest.mark.parametrize("shape", [(260, 512), (301, 333)], ids=str)
def test_values_are_the_specifications(shape: tuple[int, int], layout: Layout, float8: Float8) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[codes & 0x7F >= (0x7F if float8 is E4M3 else 0x7C)] = 3
    for data in (codes.view(float8.dtype), codes.view(float8.dtype).t()):
        plain = data.to(torch.bfloat16)
        decoded = cpu.decode(data)
        assert decoded is not None
        assert torch.equal(decoded.view(torch.int16), plain.view(torch.int16))
        scale_shape = layout.scale_shape(*data.shape)
        for low, high in ((-20, 20), (-126, -100), (100, 128)):  # the products of the second are subnormal
            scale_inv = torch.exp2(torch.randint(low, high, scale_shape, generator=generator).float())
            scales = scale_inv.view(1, 1) if layout.has_one_scale else scale_inv
            values = cpu.decode_scaled(data, scales, layout.block_shape(*data.shape))
            assert values is not None
            expected = gemm._scaled(plain.clone(), scale_inv, layout)
            assert torch.equal(values.view(torch.int16), expected.view(torch.int16))
            assert values.stride() == data.stride()


def test_scales_of_mxfp8_are_the_specifications() -> None:
    codes = torch.arange(255, dtype=torch.uint8).repeat(5)
    values = cpu.e8m0_decode(codes)
    assert values is not None
    assert values.tolist() == [2.0 ** (int(code) - 127) for code in codes]
    assert cpu.e8m0_decode(torch.cat([codes, torch.tensor([255], dtype=torch.uint8)])) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@LAYOUTS
def test_what_is_not_finite_is_the_specifications_work(layout: Layout, value: float) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[7, 9] = value
    cast = Cast(E4M3, layout)
    assert casts._quantize_by_loops(x, cast, None, None) is None
    operand = ops.quantize(x, cast).rowwise
    assert operand is not None
    saturates = not np.isnan(value)
    assert operand.data.view(torch.uint8)[7, 9] & 0x7F == (0x7E if saturates else 0x7F)
    assert ops.scaled_mm(operand, operand)[7].isnan().all() != saturates


def test_infinite_codes_are_the_specifications_work() -> None:
    codes = torch.full((256, 256), 0x7C, dtype=torch.uint8).view(E5M2.dtype)
    assert cpu.decode(codes) is None
    assert casts.decode(codes).isinf().all()


def test_a_scale_that_is_not_finite_is_the_specifications_work() -> None:
    x, cast = torch.ones(256, 256), Cast(E4M3, Layout.TENSOR)
    for scale in (torch.nan, torch.inf, -1.0):
        amax = torch.tensor(0.0)
        assert casts._quantize_by_loops(x, cast, torch.tensor(scale), amax) is None
        assert amax == 0


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "OF_A_THREAD", 2**12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    x = numbers(301, 333, torch.bfloat16)
    for layout in Layout:
        check_cast(x, Cast(E4M3, layout, rowwise=True, columnwise=True), None, None)
    shares: list[tuple[int, int]] = []
    cpu._over_rows(x, 128, lambda start, stop: shares.append((start, stop)))
    assert sorted(shares) == [(0, 128), (128, 256), (256, 301)]


@LAYOUTS
def test_products_are_the_same_without_numba(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(256, 384, generator=generator).bfloat16() for _ in range(2)]
    tensors[0][100:] *= torch.arange(156)[:, None] % 2  # blocks of zeros
    results = []
    for has_numba in (True, False):
        if not has_numba:
            monkeypatch.setattr(cpu, "_loops", lambda: None)
        a, b = (ops.quantize(x, Cast(E4M3, layout, True)).rowwise for x in tensors)
        assert isinstance(a, ScaledTensor)
        assert isinstance(b, ScaledTensor)
        results.append((a.data.view(torch.uint8), ops.scaled_mm(a, b), ops.scaled_mm(a, b, out_dtype=torch.float32)))
    assert all(map(torch.equal, *results))


def test_small_tensors_are_cast_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than they do."""
    monkeypatch.setattr(cpu, "_loops", lambda: pytest.fail("Numba is asked for"))
    for layout in Layout:
        a = ops.quantize(torch.randn(64, 64).bfloat16(), Cast(E4M3, layout)).rowwise
        assert isinstance(a, ScaledTensor)
        assert ops.scaled_mm(a, a).shape == (64, 64)


@FORMATS
@pytest.mark.parametrize("rows", [16, 260])
def test_a_copied_format_is_the_same_format(float8: Float8, rows: int) -> None:
    """A deep copy of a model has one of its own."""
    x, cast = numbers(rows, 512, torch.bfloat16), Cast(float8, Layout.TENSOR, power_2_scale=True)
    for each in (cast, copy.deepcopy(cast)):
        operand = ops.quantize(x, each, rowwise=True, columnwise=False).rowwise
        assert operand is not None
        expected = float8_reference.cast(x.float().numpy(), 1 / operand.scale_inv.item(), float8.name)
        assert np.array_equal(operand.data.view(torch.uint8).numpy(), expected)


def test_memory_can_be_resized_after_a_cast() -> None:
    """FSDP frees gathered parameters so."""
    x = numbers(260, 512, torch.bfloat16)
    operand = ops.quantize(x, Cast(E4M3, Layout.BLOCK_1X128), rowwise=True, columnwise=False).rowwise
    assert operand is not None
    cpu.decode(operand.data)
    for each in (x, operand.data, operand.scale_inv):
        each.untyped_storage().resize_(0)
        assert each.untyped_storage().nbytes() == 0
