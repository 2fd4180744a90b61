"""The specification of FP8 attention against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import attention_data
from benchmarks.attention_data import Inputs
from lightning_fp8.ops.attention import (
    BLOCK,
    KEYS,
    QUERIES,
    Band,
    Lengths,
    backward,
    cast,
    forward,
)
from lightning_fp8.ops.attention.casts import round_rows, round_rows_running
from tests.attention.attention_cases import CAUSAL, NAMES, drawn, error, exact, fp8, quantized, rounded, visible_keys
from tests.float8_reference import cast as cast_by_definition

# --------------------------------------------------------------------------------------------------------- numerics


@pytest.fixture(scope="module")
def distributions() -> dict[str, list[Inputs]]:
    found = {name: [getattr(attention_data, name)(4, 512)] for name in ("gauss", "outlier", "channel")}
    found["sink"] = [attention_data.sink(1024, 10.0)]
    first, last = attention_data.trained(40, width=128, heads=1, depth=2, length=512).values()
    return {**found, "gpt middle": first, "gpt end": last}


@pytest.mark.parametrize("name", ["gauss", "outlier", "channel", "sink", "gpt middle", "gpt end"])
def test_errors_are_near_those_of_rounding_the_inputs_alone(name: str, distributions: dict[str, list[Inputs]]) -> None:
    squares = torch.zeros(2, 4)
    for x in distributions[name]:
        see = torch.ones(x.q.shape[2], x.q.shape[2], dtype=torch.bool).tril()
        truth = exact(*x, see)
        for row, found in enumerate((fp8(x, CAUSAL), exact(*rounded(x, CAUSAL), see))):
            squares[row] += torch.tensor([error(a, b) ** 2 for a, b in zip(found, truth)])
    ours, least = squares.sqrt()
    assert (least > 0.005).all(), "the inputs lose digits, or there is nothing to compare with"
    assert (ours <= least * (1.7 if name == "sink" else 1.35)).all(), dict(zip(NAMES, ours / least))


@pytest.mark.parametrize("name", ["gauss", "outlier", "channel", "sink", "gpt end"])
def test_logsumexp_is_that_of_the_rounded_inputs(name: str, distributions: dict[str, list[Inputs]]) -> None:
    for x in distributions[name]:
        *_, m, l = fp8(x, CAUSAL)  # noqa: E741
        q, k = (y.double() for y in rounded(x, CAUSAL)[:2])
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        truth = scores.logsumexp(-1)
        found = m.double() * math.log(2) + l.double().log()
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(m.double() * math.log(2), scores.amax(-1), rtol=1e-5, atol=1e-5)


def test_gradients_are_the_slopes_of_the_unquantized_formula() -> None:
    """Along each gradient the loss ``<do, o>`` changes by the gradient's length: central differences in float64."""
    x = drawn(2, 1, 96, 160)
    _, *gradients, _, _ = fp8(x, Band(right=0, bottom_right=True))
    see = visible_keys(96, 160, Band(right=0, bottom_right=True))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        scores = (q @ k.mT / 8.0).masked_fill(~see, -math.inf)
        return (x.do.double() * (scores.softmax(-1) @ v)).sum()

    for which, gradient in enumerate(gradients):
        direction, step = gradient.double() / gradient.double().norm(), 1e-4
        moved = [[y.double() for y in x[:3]] for _ in range(2)]
        moved[0][which] += step * direction
        moved[1][which] -= step * direction
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert slope.item() == pytest.approx(gradient.double().norm().item(), rel=0.03), NAMES[which + 1]


def test_centered_keys_save_digits_and_change_nothing_else() -> None:
    x = attention_data.channel(4, 512)
    see = torch.ones(512, 512, dtype=torch.bool).tril()
    truth = exact(*x, see)
    with_mean, without = (fp8(x, CAUSAL, centered) for centered in (False, True))
    for name, most, ours, other, right in zip(NAMES, (0.8, 0.8, 1, 0.8), without, with_mean, truth):
        assert error(ours, right) < most * error(other, right), name


def e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    """The nearest multiples of ``1 / scale`` that E4M3 holds, in float64."""
    return (x * scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-300)


def doubled(fit: Tensor, x: Tensor) -> Tensor:
    """The largest value of a row's first tile that is not 0, doubled as often as later ones need."""
    times = torch.ceil(torch.log2(largest(x) / fit)).clamp(min=0)
    return torch.where(fit > 1e-300, fit * torch.exp2(times), largest(x))


def by_the_rules(x: Inputs, band: Band) -> tuple[Tensor, ...]:
    """The same rounding, said again in float64: one head of keys, whose queries' heads come one after the other."""
    see = visible_keys(x.q.shape[2], x.k.shape[2], band)
    q_codes, _, _, do_codes = quantized(x, band)
    q, k, v, do = (codes.dequantize().double()[0] for codes in quantized(x, band))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale / math.log(2)).masked_fill(~see, -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp2(scores - top)
    total = p.sum(-1, keepdim=True)
    o = torch.zeros_like(q)
    running = torch.full_like(top, -math.inf)
    for at in (slice(j, j + 128) for j in range(0, k.shape[1], 128)):
        tile_top = scores[..., at].amax(-1, keepdim=True)
        running = torch.maximum(running, tile_top)
        unit = torch.maximum(tile_top, running - 40)
        o += e4m3(torch.exp2(scores[..., at] - unit), 256) * torch.exp2(unit - top) @ v[:, at]
    o /= total
    p /= total
    ds = p * (do @ v.mT - (do * o.bfloat16().double()).sum(-1, keepdim=True))
    dq = torch.zeros_like(q)
    for at in (slice(j, j + 128) for j in range(0, k.shape[1], 128)):
        dq += e4m3(ds[..., at], 448 / largest(ds[..., at])) @ k[:, at] * scale
    ds -= p * ds.sum(-1, keepdim=True)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    fit_p = fit_ds = torch.full((k.shape[1], 1), 1e-300, dtype=torch.float64)
    for head in range(len(q)):
        for rows in (slice(i, i + 64) for i in range(0, q.shape[1], 64)):
            of_do, of_q = (scales[0, head, rows.start // 128].double() for scales in (do_codes[1], q_codes[1]))
            p_tile, ds_tile = p[head, rows].mT * of_do, ds[head, rows].mT * of_q
            fit_p, fit_ds = doubled(fit_p, p_tile), doubled(fit_ds, ds_tile)
            dv += e4m3(p_tile, 448 / fit_p) @ do[head, rows] / of_do
            dk += e4m3(ds_tile, 448 / fit_ds) @ q[head, rows] / of_q * scale
    return o, dq, dk, dv


@pytest.mark.parametrize("rising", [1.0, -1.0])
def test_every_rounding_is_where_the_rules_say(rising: float) -> None:
    """Gradients that grow or shrink along the sequence: rows' scales change, or stay where they were."""
    x = drawn(2, 1, 320, 300)
    growth = torch.exp2(rising * torch.arange(-4, 6, 10 / 320))[:, None]
    x = x._replace(q=x.q * 2, do=(x.do * growth).bfloat16())
    for name, ours, right in zip(NAMES, fp8(x, CAUSAL), by_the_rules(x, CAUSAL)):
        assert error(ours[0], right) < 5e-4, name


@pytest.mark.parametrize("strength", [14.0, 26.0])
def test_a_sink_silences_no_other_tile(strength: float) -> None:
    """Relative to the sink the other probabilities are below E4M3's smallest; relative to their tile they are not."""
    q, k, v, do = drawn(1, 1, 128, 2 * KEYS)
    q[..., 0] = 8
    k[..., 0] = k[..., 0, :] = 0
    k[..., 0, 0] = strength
    v[..., :KEYS, :] = 0  # the sink's tile has no part in the output
    x = Inputs(q, k, v, do)
    o, *_ = fp8(x, Band(), centered=False)
    near = rounded(x, Band(), centered=False)
    weights = (near.q.double() @ near.k.double().mT / 8).softmax(-1)
    assert error(o, weights @ near.v.double()) < 0.05


def test_every_product_is_of_e4m3_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    original, operands = torch.bmm, []

    def kept(left: Tensor, right: Tensor) -> Tensor:
        operands.extend((left, right))
        return original(left, right)

    monkeypatch.setattr(torch, "bmm", kept)
    fp8(drawn(1, 1, QUERIES, KEYS), Band())
    assert len(operands) == 2 * (2 + 3 + 4), "S and PV; S, dP, dQ; S, dP, dV, dK"
    for operand in operands:
        assert torch.equal(operand, operand.to(torch.float8_e4m3fn).float())


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


def test_a_running_scale_stays_or_halves() -> None:
    rows = {
        (0.0, 3.0, 2.9, 3.1, 5.9, 6.0, 6.1): (0.0, 3.0, 3.0, 6.0, 6.0, 6.0, 12.0),
        (1.0, 2.0, 4.0, 33.0): (1.0, 2.0, 4.0, 64.0),
        (1e-44, 1e-3, 1e-3): (1e-44, 1e-3, 1e-3),  # a ratio beyond float32
        (2.0, math.nan, 1.0): (2.0, math.nan, 1.0),  # the sum holds NaN by then
        (2.0, math.inf, 1.0): (2.0, math.inf, math.inf),
    }
    for values, expected in rows.items():
        fitted, found = torch.zeros(1, 1), []
        for value in values:
            codes, inverse = round_rows_running(torch.tensor([[value, -value / 4]]), fitted)
            found.append(fitted.item())
            if value == found[-1] >= 1e-30 and math.isfinite(value):
                assert (codes * inverse)[0, 0].item() == pytest.approx(value, rel=1e-6), "448, with no error"
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_a_mean_that_overflows_is_not_taken() -> None:
    x = torch.full((1, 1, 64, 64), 3e38)
    torch.testing.assert_close(cast(x, centered=True).dequantize(), x)


def test_a_row_with_an_inf_is_nan_not_saturated() -> None:
    x = torch.tensor([[1.0, math.inf], [3.0, -1.0]])
    for codes, inverse in (round_rows(x.clone()), round_rows_running(x.clone(), torch.zeros(2, 1))):
        assert torch.isnan(codes * inverse).all(1).tolist() == [True, False]
        torch.testing.assert_close((codes * inverse)[1], x[1], rtol=0.07, atol=0)


# ------------------------------------------------------------------------------------------------ how it is called


def test_twice_is_the_same_to_the_bit() -> None:
    x = drawn(4, 2, 200, 200)
    for first, second in zip(fp8(x, CAUSAL), fp8(x, CAUSAL)):
        assert torch.equal(first, second)


def test_the_output_is_saved_in_bfloat16() -> None:
    x = drawn(2, 1, 100, 100)
    q, k, v, do = quantized(x, CAUSAL)
    o, m, l = forward(q, k, v, 0.125, CAUSAL, dtype=torch.float32)  # noqa: E741
    for full, saved in zip(*(backward(do, q, k, v, y, m, l, 0.125, CAUSAL) for y in (o, o.bfloat16()))):
        assert full.dtype == torch.bfloat16
        assert torch.equal(full, saved)


@pytest.fixture(params=["float64", "bfloat16", "meta", "inference", "gradients", "autocast", "matmul precision"])
def surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "meta":
        with torch.device("meta"):
            yield
    elif request.param == "inference":
        with torch.inference_mode():
            yield
    elif request.param == "gradients":
        with torch.enable_grad():
            yield
    elif request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
    elif request.param == "matmul precision":
        torch.set_float32_matmul_precision("medium")
        yield
        torch.set_float32_matmul_precision("highest")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
        yield
        torch.set_default_dtype(torch.float32)


OF_THE_CALLER = drawn(2, 1, 140, 200)


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, ...]:
    return fp8(OF_THE_CALLER, CAUSAL, lengths=Lengths(torch.tensor([133]), torch.tensor([200])))


def test_the_callers_settings_change_nothing(plain: tuple[Tensor, ...], surroundings: None) -> None:
    lengths = Lengths(torch.tensor([133], device="cpu"), torch.tensor([200], device="cpu"))
    x = Inputs(*(y.clone().requires_grad_() for y in OF_THE_CALLER))
    for ours, before in zip(fp8(x, CAUSAL, lengths=lengths), plain):
        assert ours.dtype == torch.float32
        assert not ours.requires_grad
        assert torch.equal(ours, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_inputs_and_outputs_of_any_dtype_and_order(dtype: torch.dtype) -> None:
    x = drawn(2, 2, 64, 64)
    right = fp8(x, CAUSAL, dtype=dtype)
    turned = Inputs(*(y.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for y in x))
    kept = [y.clone() for y in turned]
    for ours, before in zip(fp8(turned, CAUSAL, dtype=dtype)[:4], right):
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, before)
    assert all(torch.equal(y, before) for y, before in zip(turned, kept)), "inputs are only read"


def test_wrong_calls_are_named() -> None:
    q, k, v, _ = quantized(drawn(3, 2, 8, 8), CAUSAL)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 heads"):
        forward(q, k, v, 1.0)
    q, k, v, _ = quantized(drawn(2, 2, 8, 8), CAUSAL)
    with pytest.raises(ValueError, match=r"lengths of keys \[9\] are not 0 to 8"):
        forward(q, k, v, 1.0, lengths=Lengths(torch.tensor([8]), torch.tensor([9])))
    with pytest.raises(ValueError, match="2 lengths of queries for a batch of 1"):
        forward(q, k, v, 1.0, lengths=Lengths(torch.tensor([8, 8]), torch.tensor([8])))
    with pytest.raises(ValueError, match="left=-1 is negative"):
        Band(left=-1)
