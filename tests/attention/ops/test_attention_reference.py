"""The specification of FP8 attention against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import attention_data
from benchmarks.contenders.attention_data import Inputs
from lightning_fp8.attention.ops import (
    KEYS,
    QUERIES,
    Band,
    Lengths,
    backward,
    forward,
)
from tests.attention.ops.attention_cases import (
    CAUSAL,
    NAMES,
    drawn,
    error,
    exact,
    fp8,
    quantized,
    rounded,
    visible_keys,
)
from tests.tiers import thorough

# --------------------------------------------------------------------------------------------------------- numerics


TRAINED = "gpt middle", "gpt end"
DRAWN = "gauss", "outlier", "channel", "sink"


@pytest.fixture(scope="module")
def distributions() -> dict[str, list[Inputs]]:
    found = {name: [getattr(attention_data, name)(4, 512)] for name in ("gauss", "outlier", "channel")}
    return {**found, "sink": [attention_data.sink(1024, 10.0)]}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Inputs]]:
    return dict(zip(TRAINED, attention_data.trained(40, width=128, heads=1, depth=2, length=512).values(), strict=True))


@pytest.mark.parametrize("name", DRAWN)
def test_errors_are_near_those_of_rounding_the_inputs_alone(name: str, distributions: dict[str, list[Inputs]]) -> None:
    check_errors(distributions[name], 1.7 if name == "sink" else 1.35)


@thorough
@pytest.mark.parametrize("name", TRAINED)
def test_errors_of_trained_layers_are_near_those_of_rounding_their_inputs_alone(
    name: str, trained: dict[str, list[Inputs]]
) -> None:
    check_errors(trained[name], 1.35)


def check_errors(of: list[Inputs], most: float) -> None:
    squares = torch.zeros(2, 4)
    for x in of:
        see = torch.ones(x.q.shape[2], x.q.shape[2], dtype=torch.bool).tril()
        truth = exact(*x, see)
        for row, found in enumerate((fp8(x, CAUSAL), exact(*rounded(x, CAUSAL), see))):
            squares[row] += torch.tensor([error(a, b) ** 2 for a, b in zip(found, truth)])
    ours, least = squares.sqrt()
    assert (least > 0.005).all(), "the inputs lose digits, or there is nothing to compare with"
    assert (ours <= least * most).all(), dict(zip(NAMES, ours / least))


@pytest.mark.parametrize("name", DRAWN)
def test_logsumexp_is_that_of_the_rounded_inputs(name: str, distributions: dict[str, list[Inputs]]) -> None:
    check_logsumexp(distributions[name])


@thorough
def test_logsumexp_of_a_trained_layer_is_that_of_the_rounded_inputs(trained: dict[str, list[Inputs]]) -> None:
    check_logsumexp(trained["gpt end"])


def check_logsumexp(of: list[Inputs]) -> None:
    for x in of:
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
