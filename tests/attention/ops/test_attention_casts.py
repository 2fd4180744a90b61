"""The casts of FP8 attention: codes, scales, means, and what is not finite."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from lightning_fp8.attention.ops import (
    BLOCK,
    Band,
    cast,
)
from lightning_fp8.attention.ops.casts import START, round_rows, round_rows_running
from tests.attention.ops.attention_cases import CAUSAL, NAMES, drawn, error, fp8
from tests.float8_reference import cast as cast_by_definition

# ------------------------------------------------------------------------------------------------------------ casts


def test_codes_and_scales_are_those_of_the_formats_definition() -> None:
    x = torch.randn(2, 3, 300, 64).bfloat16() * torch.logspace(-6, 6, 300)[:, None]
    codes = cast(x)
    assert codes.data.shape == x.shape
    assert codes.scale_inv.shape == (2, 3, 3)
    for batch, head, block in itertools.product(range(2), range(3), range(3)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        values = x[batch, head, rows].float()
        scale = np.float32(448) / values.abs().max().numpy()
        expected = cast_by_definition(values.numpy(), scale, "E4M3")
        assert torch.equal(codes.data[batch, head, rows].view(torch.uint8), torch.from_numpy(expected))
        assert codes.scale_inv[batch, head, block].numpy() == np.float32(1) / scale


@pytest.mark.parametrize("mean_rows", [None, 128])
def test_a_centered_cast_is_that_of_keys_without_their_mean(mean_rows: int | None) -> None:
    x = torch.randn(2, 2, 200, 64) + 5 * torch.randn(64)
    lengths = torch.tensor([200, 77])
    found = cast(x, centered=True, lengths=lengths, mean_rows=mean_rows)
    for batch, length in enumerate(lengths.tolist()):
        keys = x[batch : batch + 1, :, :length]
        expected = cast(keys - keys[:, :, :mean_rows].double().mean(2, keepdim=True).float())
        assert error(found.dequantize()[batch, :, :length], expected.dequantize()[0]) < 1e-3, "a tie may fall otherwise"
        assert not found.data[batch, :, length:].float().any()
    assert found.scale_inv[1, :, 1].eq(1).all(), "a block of padding"


@pytest.mark.parametrize("band", [CAUSAL, Band(left=64, right=3, bottom_right=True)])
def test_where_later_keys_are_hidden_none_of_another_block_moves_a_digit(band: Band) -> None:
    """Rows that do not see them stay as they are, whatever the last blocks of keys are."""
    x = drawn(2, 1, 384, 384)
    other = x._replace(k=x.k.clone())
    other.k[..., 256:, :] = 1e4 * torch.randn(128, 64)
    do = x.do.clone()
    do[..., 128:, :] = 0
    results = [fp8(each._replace(do=do), band) for each in (x, other)]
    for name, one, same in zip(NAMES, *results):
        assert torch.equal(one[..., :128, :], same[..., :128, :]), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_and_leaves_scales_alone(value: float) -> None:
    x = torch.randn(1, 2, 256, 64)
    broken = x.clone()
    broken[0, 1, 130, 3] = value
    for centered in (False, True):
        right, found = cast(x, centered), cast(broken, centered)
        wrong = torch.isnan(found.dequantize())
        assert wrong.sum() == 1
        assert wrong[0, 1, 130, 3]
        torch.testing.assert_close(found.scale_inv, right.scale_inv, rtol=0.01, atol=0)
        assert (found.dequantize() - right.dequantize())[~wrong].abs().mean() < 0.01


def test_a_running_scale_starts_with_headroom_then_stays_or_halves() -> None:
    rows = {
        (0.0, 3.0, 2.9, 24.0, 24.1, 48.0, 48.1): (START, 24.0, 24.0, 24.0, 48.0, 48.0, 96.0),
        (1.0, 16.0, 32.0, 257.0): (8.0, 16.0, 32.0, 512.0),
        (1e-44, 1e-36, 1e-3, 1e-3): (START, START, 8e-3, 8e-3),
        (1e-30, 1e20): (8e-30, 8e20),  # a ratio beyond float32
        (2.0, math.nan, 1.0): (16.0, math.nan, 8.0),  # the sum holds NaN by then
        (2.0, math.inf, 1.0): (16.0, math.inf, math.inf),
        (1e38,): (math.inf,),  # told by NaN
    }
    for values, expected in rows.items():
        fitted, found = torch.full((1, 1), START), []
        for value in values:
            codes, inverse = round_rows_running(torch.tensor([[value, -value / 4]]), fitted)
            found.append(fitted.item())
            if found[-1] in (value, 8 * value) and value >= 1e-30 and math.isfinite(found[-1]):
                assert (codes * inverse)[0, 0].item() == pytest.approx(value, rel=1e-6), "448 or 56, with no error"
            if value == 1e38:
                assert math.isnan((codes * inverse)[0, 0].item())
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_a_mean_that_overflows_is_not_taken() -> None:
    x = torch.full((1, 1, 64, 64), 3e38)
    torch.testing.assert_close(cast(x, centered=True).dequantize(), x)


def test_a_faint_row_has_the_scale_of_the_least_amax() -> None:
    codes, inverse = round_rows(torch.tensor([[1e-38, 2.0**-119], [1e-38, -1e-38]]))
    torch.testing.assert_close(inverse, torch.full((2, 1), 2.0**-119 / 448), rtol=1e-6, atol=0)
    assert codes.tolist() == [[3.0, 448.0], [3.0, -3.0]]  # 1e-38 is 2.98 units


def test_a_row_with_an_inf_is_nan_not_saturated() -> None:
    x = torch.tensor([[1.0, math.inf], [3.0, -1.0]])
    for codes, inverse in (round_rows(x.clone()), round_rows_running(x.clone(), torch.full((2, 1), START))):
        assert torch.isnan(codes * inverse).all(1).tolist() == [True, False]
        torch.testing.assert_close((codes * inverse)[1], x[1], rtol=0.07, atol=0)
