"""Masks, shared heads, ragged sequences and edges of FP8 attention's specification, against torch's own attention."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.attention_data import Inputs
from lightning_fp8.attention.ops import (
    Band,
    Lengths,
    pack,
    unpack,
)
from tests.attention.ops.attention_cases import CAUSAL, NAMES, drawn, error, exact, fp8, rounded, visible_keys

# ------------------------------------------------------------------------------------------------------------ masks

BANDS = {
    "all": Band(),
    "causal": CAUSAL,
    "causal, bottom right": Band(right=0, bottom_right=True),
    "window": Band(left=70, right=0),
    "window both ways": Band(left=40, right=90, bottom_right=True),
    "itself": Band(left=0, right=0),
}
LENGTHS = [(1, 1), (1, 300), (300, 1), (130, 130), (257, 140), (64, 321)]


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_a_row_sees_exactly_the_masks_keys(queries: int, keys: int, band: Band) -> None:
    """Queries of 0 give every visible key the same weight: ``l`` counts them, dV spreads ``do`` evenly."""
    see = visible_keys(queries, keys, band)
    x = drawn(2, 2, queries, keys)
    x = x._replace(q=torch.zeros_like(x.q), do=torch.ones_like(x.do))
    o, _, _, dv, m, l = fp8(x, band)  # noqa: E741
    count = see.sum(1)
    assert torch.equal(l, count.float().expand(1, 2, -1))
    assert torch.equal(m, torch.where(count > 0, 0.0, -math.inf).expand(1, 2, -1))
    weights = see / count.clamp(min=1)[:, None]
    torch.testing.assert_close(o, weights.float() @ rounded(x, band).v, rtol=1e-5, atol=1e-5)
    # a power of two would be exact; E4M3 rounds 1 / count by up to 1/16, tile by tile
    torch.testing.assert_close(dv, weights.float().mT @ torch.ones_like(x.do).float(), rtol=0.07, atol=1e-6)


def sdpa(x: Inputs, see: Tensor) -> tuple[Tensor, ...]:
    """torch's attention in float32 with a mask; rows that see nothing see all and are set to 0 after."""
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = (y.float().requires_grad_() for y in x[:3])
    blind = ~see.any(-1, keepdim=True)
    k_all, v_all = (y.repeat_interleave(group, 1) for y in (k, v))
    o = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=see | blind).masked_fill(blind, 0)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), x.do.float())


CHANNELS, HEADS = (64, 96, 128, 256), ((2, 2), (4, 2), (3, 1))
PAIRS = [
    pytest.param(band, lengths, CHANNELS[(i + j) % 4], HEADS[(i + 2 * j) % 3], id=f"{name}-{lengths}")
    for (i, (name, band)), (j, lengths) in itertools.product(enumerate(BANDS.items()), enumerate(LENGTHS))
]
"""Each value of one column meets each of every other."""


@pytest.mark.parametrize(("band", "lengths", "channels", "heads"), PAIRS)
def test_masks_lengths_channels_and_heads_against_torch(
    band: Band, lengths: tuple[int, int], channels: int, heads: tuple[int, int]
) -> None:
    x = drawn(*heads, *lengths, channels, batch=2)
    see = visible_keys(*lengths, band)
    found, truth = fp8(x, band), sdpa(x, see)
    nearer = sdpa(rounded(x, band), see)
    for name, ours, right, right_of_rounded in zip(NAMES, found, truth, nearer):
        assert ours.shape == right.shape
        # of one visible key the gradients of scores are 0 in theory
        small = 1e-4 * math.sqrt(right.numel())
        assert (ours - right).norm() <= 0.11 * right.norm() + small * 30, name
        assert (ours - right_of_rounded).norm() <= 0.06 * right_of_rounded.norm() + small * 30, name


# ------------------------------------------------------------------------------------------------- ragged sequences

RAGGED = torch.tensor([0, 5, 5, 140, 141, 400])


def test_packing_goes_there_and_back() -> None:
    x = torch.randn(400, 2, 8)
    padded, lengths = unpack(x, RAGGED)
    assert lengths.tolist() == [5, 0, 135, 1, 259]
    assert padded.shape == (5, 2, 259, 8)
    assert torch.equal(padded[2, :, :135], x[5:140].transpose(0, 1))
    assert not padded[2, :, 135:].any()
    assert torch.equal(pack(padded, RAGGED), x)
    with pytest.raises(ValueError, match="does not rise from 0 to at most the tensor's 400 rows"):
        unpack(x, torch.tensor([0, 5, 3, 400]))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
def test_packed_sequences_are_each_on_its_own(band: Band) -> None:
    keys_of = torch.tensor([0, 130, 140, 200, 200, 330])
    q, do = torch.randn(2, 400, 4, 64).bfloat16()
    k, v = torch.randn(2, 330, 2, 64).bfloat16()
    (q_padded, queries), (do_padded, _) = unpack(q, RAGGED), unpack(do, RAGGED)
    (k_padded, keys), (v_padded, _) = unpack(k, keys_of), unpack(v, keys_of)
    together = fp8(Inputs(q_padded, k_padded, v_padded, do_padded), band, lengths=Lengths(queries, keys))
    for index, (start, stop, first, last) in enumerate(zip(RAGGED, RAGGED[1:], keys_of, keys_of[1:])):
        x = Inputs(*(y.transpose(0, 1)[None] for y in (q[start:stop], k[first:last], v[first:last], do[start:stop])))
        for which, (alone, found) in enumerate(zip(fp8(x, band), together)):
            rows = last - first if which in (2, 3) else stop - start
            assert not found[index, :, rows:].nan_to_num(neginf=0).any()
            # additions in another order may round a probability the other way
            torch.testing.assert_close(found[index, :, :rows], alone[0], rtol=1e-3, atol=2e-3)


def test_padding_may_hold_anything() -> None:
    x = drawn(2, 2, 150, 150, batch=2)
    lengths = Lengths(torch.tensor([150, 33]), torch.tensor([131, 0]))
    right = fp8(x, CAUSAL, lengths=lengths)
    for y, length in zip(x, (lengths.queries, lengths.keys, lengths.keys, lengths.queries)):
        y[0, :, length[0] :] = math.nan
        y[1, :, length[1] :] = 1e30
    for ours, before in zip(fp8(x, CAUSAL, lengths=lengths), right):
        assert torch.equal(ours, before)


# ------------------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 5), (2, 4, 2, 0, 7), (2, 4, 2, 7, 0), (2, 0, 0, 7, 7), (1, 1, 1, 0, 0)])
def test_nothing_in_gives_nothing_or_0(shape: tuple[int, ...]) -> None:
    batch, heads, shared, queries, keys = shape
    x = drawn(heads, shared, queries, keys, batch=batch)
    o, dq, dk, dv, m, l = fp8(x, CAUSAL)  # noqa: E741
    assert (o.shape, dq.shape, dk.shape, dv.shape) == (x.q.shape, x.q.shape, x.k.shape, x.v.shape)
    assert m.shape == l.shape == x.q.shape[:3]
    for tensor in (o, dq, dk, dv, l):
        assert not tensor.any()


def test_rows_that_see_no_key_are_0_and_give_nothing() -> None:
    x = drawn(2, 1, 200, 70)
    band = Band(right=0, bottom_right=True)  # the first 130 rows see nothing
    o, dq, dk, dv, m, l = fp8(x, band)  # noqa: E741
    assert not o[:, :, :130].any()
    assert not dq[:, :, :130].any()
    assert m[:, :, :130].eq(-math.inf).all()
    assert not l[:, :, :130].any()
    x.do[:, :, :130] = 100
    x.q[:, :, :130] = 100
    other = fp8(Inputs(*x), band)
    alone = fp8(Inputs(x.q[:, :, 130:], x.k, x.v, x.do[:, :, 130:]), band)
    for which in (2, 3):
        see = visible_keys(200, 70, band)
        assert error(other[which], exact(*x, see)[which]) < 0.3, "large rows share blocks with others, no more"
        assert error(alone[which], exact(*x, see)[which]) < 0.1
    for tensor in (dk, dv):
        assert tensor.any()


@pytest.mark.parametrize("group", [1, 2])
def test_a_sequence_of_one_copies_its_value(group: int) -> None:
    x = drawn(2 * group, 2, 1, 1, batch=3)
    o, dq, dk, dv, _, l = fp8(x, CAUSAL)  # noqa: E741
    near = rounded(x, CAUSAL)
    torch.testing.assert_close(o, near.v.repeat_interleave(group, 1))
    shares = near.do.unflatten(1, (2, group))
    # the second head's weight of 1 is rounded in the first one's units
    assert ((dv - shares.sum(2)).abs() <= 1e-6 + (shares[:, :, 1:].abs() / 16).sum(2)).all()
    assert l.eq(1).all()
    # exactly 0 but for D, which is of O in BF16
    assert dq.abs().max() < 0.02
    assert dk.abs().max() < 0.02


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", Inputs._fields)
def test_what_is_not_finite_reaches_the_output_and_only_those_it_concerns(which: str, value: float) -> None:
    x = drawn(2, 2, 300, 300)
    right = fp8(x, CAUSAL)
    getattr(x, which)[0, 1, 140, 5] = value
    o, dq, dk, dv, _, _ = fp8(x, CAUSAL)
    if which == "do":
        assert torch.isnan(dv[0, 1, :141, 5]).all()
        assert torch.isfinite(o).all()
    elif which == "q":
        assert torch.isnan(o[0, 1, 140]).all()
        assert torch.isfinite(o[0, 1, 141:]).all()
    else:
        assert torch.isnan(o[0, 1, 140:] if which == "k" else o[0, 1, 140:, 5]).all()
    for gradient in (dq, dk):
        assert torch.isnan(gradient[0, 1]).any()
    if which == "k":
        assert torch.isnan(dv[0, 1]).all(), "later rows have no weights"
    for ours, before in zip((o, dq, dk, dv), right):
        assert torch.equal(ours[:, 0], before[:, 0]), "the other head"
        earlier = ours[0, 1, :128] if ours is o or ours is dq else ours[0, 1, 256:]
        if not (which in ("k", "v") and (ours is dk or ours is dv)):
            assert torch.isfinite(earlier).all(), "tiles that see nothing of it"


def test_an_overflow_inside_is_not_hidden() -> None:
    x = drawn(1, 1, 64, 64)
    x.v.mul_(1e30)
    x.do.mul_(1e30)
    _, dq, dk, _, _, _ = fp8(x, CAUSAL)
    assert not torch.isfinite(dq).all()
    assert not torch.isfinite(dk).all()


@pytest.mark.parametrize("exponent", [-60, -13, 30])
def test_gradients_of_any_size(exponent: int) -> None:
    x = drawn(2, 1, 150, 150)
    scaled = fp8(x._replace(do=torch.ldexp(x.do, torch.tensor(exponent))), CAUSAL)
    for ours, one in zip(scaled[1:4], fp8(x, CAUSAL)[1:4]):
        assert torch.equal(torch.ldexp(ours, torch.tensor(-exponent)), one)
