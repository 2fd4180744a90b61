"""Casts to FP8, for every BF16 value there is, against the formats' definitions."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from cuda_kernels.device.codec import FP8_MAX
from lightning_fp8 import Format, ops
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8, float8_of
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import decode
from tests.float8_reference import MAX, cast, value_of_code

FORMATS = pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
SCALES = [1.0, 2.0, 3.3, 1e-3, 0.0078125, 2.0**20, 2.0**-30, 1.7e38]


def all_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def quantized_codes(x: Tensor, scale: float, float8: Float8) -> Tensor:
    quantized = ops.quantize(x, Cast(float8, Layout.TENSOR), scale=torch.tensor(scale)).rowwise
    assert quantized is not None
    return quantized.data.view(torch.uint8)


def assert_same_codes(codes: Tensor, expected: np.ndarray, name: str) -> None:
    nan = np.isnan([value_of_code(name, int(code)) for code in codes.flatten().tolist()])
    expected = expected.reshape(-1)
    is_nan = np.array([math.isnan(value_of_code(name, int(code))) for code in expected.tolist()])
    assert np.array_equal(nan, is_nan)
    assert np.array_equal(codes.flatten().numpy()[~nan], expected[~nan])


def test_kernels_have_the_same_largest_values() -> None:
    largest = {name: max(filter(math.isfinite, (value_of_code(name, code) for code in range(256)))) for name in MAX}
    assert {name.upper(): float(value) for name, value in FP8_MAX.items()} == largest
    assert {float8.name: float8.max for float8 in (E4M3, E5M2)} == largest


@FORMATS
@pytest.mark.parametrize("scale", SCALES)
def test_cast_of_every_bf16_value(float8: Float8, scale: float) -> None:
    x = all_bf16()
    assert_same_codes(quantized_codes(x, scale, float8), cast(x.float().numpy(), scale, float8.name), float8.name)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cast_of_wider_inputs(float8: Float8, dtype: torch.dtype) -> None:
    x = (torch.randn(64, 513) * torch.logspace(-6, 4, 513)).to(dtype)
    assert_same_codes(quantized_codes(x, 3.3, float8), cast(x.float().numpy(), 3.3, float8.name), float8.name)


@FORMATS
def test_ties_go_to_the_even_code_and_overflow_saturates(float8: Float8) -> None:
    finite = [code for code in range(128) if math.isfinite(value_of_code(float8.name, code))]
    values = [value_of_code(float8.name, code) for code in finite]
    halfway = torch.tensor([[(low + high) / 2 for low, high in zip(values, values[1:])]])
    even = [low if low % 2 == 0 else low + 1 for low in finite[:-1]]
    assert quantized_codes(halfway, 1.0, float8).flatten().tolist() == even
    beyond = torch.tensor([[float8.max * 1.01, -float8.max * 4, math.inf, -math.inf]])
    top = finite[-1]
    assert quantized_codes(beyond, 1.0, float8).flatten().tolist() == [top, top | 0x80, top, top | 0x80]


@FORMATS
def test_decode_of_every_code(float8: Float8) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = torch.tensor([value_of_code(float8.name, code) for code in range(256)])
    whole = decode(codes.view(float8.dtype).view(16, 16)).float().flatten()  # with NaN among them
    torch.testing.assert_close(whole, numbers, rtol=0, atol=0, equal_nan=True)
    finite = codes[torch.isfinite(numbers)]
    alone = decode(finite.view(float8.dtype)[None]).float().flatten()
    assert torch.equal(alone, numbers[torch.isfinite(numbers)])
    assert torch.equal(torch.signbit(alone), torch.signbit(numbers[torch.isfinite(numbers)]))


@FORMATS
def test_formats_state_their_largest_value(float8: Float8) -> None:
    assert float8.max == MAX[float8.name] == torch.finfo(float8.dtype).max
    assert float8_of(float8.dtype) is float8


def test_hybrid_casts_gradients_to_e5m2() -> None:
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (E4M3, E5M2)
    assert (Format.E4M3.forward, Format.E4M3.backward) == (E4M3, E4M3)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448.0, 57344.0)


def test_a_dtype_that_is_no_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match="torch.bfloat16 is not an FP8 format"):
        float8_of(torch.bfloat16)


@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
def test_copies_and_pickles_of_a_format_are_the_format(float8: Float8) -> None:
    assert copy.deepcopy(float8) is float8
    assert pickle.loads(pickle.dumps(float8)) is float8
