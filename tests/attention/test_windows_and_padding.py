"""Windows, padding masks and packed sequences of DotProductAttention."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from lightning_fp8 import DotProductAttention, fp8_autocast
from lightning_fp8.attention.modules.arguments import said
from lightning_fp8.attention.ops import Band
from tests.attention.attention_modules import (
    EVEN,
    RAGGED,
    cu_seqlens,
    drawn_batch,
    laid_out,
    of_definition,
    run,
)
from tests.attention.near import assert_near, in_fp8
from tests.attention.ops.attention_cases import exact

WINDOWS = [
    ("causal", (30, 0), None, Band(30, 0)),
    ("causal", (30, 5), None, Band(30, 0)),
    ("causal_bottom_right", (30, 0), None, Band(30, 0, True)),
    ("no_mask", (20, 10), None, Band(20, 10, True)),
    ("no_mask", (20, 10), False, Band(20, 10)),
    ("no_mask", (-1, 10), True, Band(None, 10, True)),
    ("no_mask", (-1, 0), None, Band()),
    ("no_mask", (0, 0), False, Band(0, 0)),
]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("index", range(len(WINDOWS)))
def test_windows(index: int, enabled: bool) -> None:
    """Of the constructor or of forward, in turns."""
    (mask, window, bottom_right, band), in_forward = WINDOWS[index], index % 2 == enabled
    x = drawn_batch(EVEN, 2, 1, 64)
    said: dict[str, Any] = {
        "attn_mask_type": mask, "window_size": window, "bottom_right_diagonal": bottom_right
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DotProductAttention(2, 64, num_gqa_groups=1, qkv_format="bshd", **({} if in_forward else said))
        with fp8_autocast(enabled, fp8_recipe={"name": "rowwise", "fp8_dpa": True}):
            found = run(module, x, "bshd", **(said if in_forward else {}))
    assert_near([each.flatten(0, 1) for each in found], of_definition(x, band), 0.11 if enabled else 0.02)


def test_windows_that_are_taken_otherwise_are_told() -> None:
    x = drawn_batch(EVEN, 1, 1, 32)
    for mask, window, told in (("no_mask", (-1, 0), "taken for"), ("causal", (4, 3), r"taken for \(4, 0\)")):
        with pytest.warns(UserWarning, match=told):
            run(DotProductAttention(1, 32, qkv_format="bshd", attn_mask_type=mask, window_size=window), x, "bshd")


def test_a_window_is_fitted_to_the_constructors_mask_type() -> None:
    """As ``check_set_window_size`` does in Transformer Engine's constructor, before forward has its own type."""
    with pytest.warns(UserWarning, match=r"window_size=\(5, 3\) .* is taken for \(5, 0\)"):
        module = DotProductAttention(1, 32, qkv_format="bshd", attn_mask_type="causal", window_size=(5, 3))
    x = drawn_batch([(40, 40)], 1, 1, 32, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(module, x, "bshd", attn_mask_type="no_mask")
    assert_near([each[0] for each in found], of_definition(x, Band(5, 0, True)), 0.001)


def test_true_in_a_mask_is_masked_out() -> None:
    """As in Transformer Engine; torch's own attention means the opposite."""
    x = drawn_batch([(5, 5)], 2, 2, 64)
    hidden = torch.rand(1, 1, 5, 5) < 0.5
    module = DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type="arbitrary")
    found = run(module, x, "bshd", attention_mask=hidden)
    q, k, v, do = (each[0].transpose(0, 1)[None] for each in x)
    truth = exact(q, k, v, do, ~hidden[0, 0])
    assert_near([each.transpose(1, 2) for each in found], truth, 0.02)
    padding = torch.tensor([[False, False, True], [False, True, True]])[:, None, None]
    y = drawn_batch([(3, 3), (3, 3)], 2, 2, 64)
    module = DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type="padding")
    both = [in_fp8(module, *(laid_out(each, "bshd") for each in y[:3]), **given) for given in (
        {"attention_mask": padding},
        {"attention_mask": (padding, padding)},
        {"cu_seqlens_q": torch.tensor([0, 2, 3]), "cu_seqlens_kv": torch.tensor([0, 2, 3])},
    )]  # fmt: skip
    assert torch.equal(both[0], both[1])
    assert torch.equal(both[0], both[2])
    alone = in_fp8(module, *(each[1][None, :1] for each in y[:3]), attn_mask_type="no_mask")
    assert torch.equal(both[0][1, :1], alone[0])


@pytest.mark.parametrize("window", [None, (3, 2)])
@pytest.mark.parametrize("enabled", [True, False])
def test_arbitrary_without_a_mask_hides_no_key(window: tuple[int, int] | None, enabled: bool) -> None:
    """As in Transformer Engine, and it is told."""
    said.clear()
    module = DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="arbitrary", window_size=window)
    q, k, v = torch.randn(2, 7, 2, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    region = fp8_autocast(enabled=enabled, fp8_recipe={"name": "tensorwise", "fp8_dpa": True})
    with region, pytest.warns(UserWarning, match="'arbitrary' without attention_mask hides no key: pass the mask, or"):
        found = module(q, k, v)
    distance = torch.arange(9) - torch.arange(7)[:, None] - 2  # the diagonal ends in the bottom right corner
    seen = (distance >= -3) & (distance <= 2) if window else torch.ones(7, 9, dtype=torch.bool)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    truth = torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).flatten(2)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "no_mask", "causal_bottom_right"])
@pytest.mark.parametrize("name", ["attention_mask", "cu_seqlens"])
def test_a_mask_without_effect_is_told(name: str, mask: str) -> None:
    module, (q, k, v) = DotProductAttention(1, 32, qkv_format="bshd"), torch.randn(3, 2, 4, 1, 32)
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])[:, None, None]
    given = {"attention_mask": padding} if name == "attention_mask" else {"cu_seqlens_kv": cu_seqlens([3, 2])}
    right = {"no_mask": "padding", "causal": "padding_causal"}.get(mask, "padding_causal_bottom_right")
    with pytest.warns(UserWarning, match=f"{name} without effect: .*'{mask}'.*pass attn_mask_type='{right}'") as told:
        o = module(q, k, v, attn_mask_type=mask, **given)
    assert len(told) == 1
    assert torch.equal(o, module(q, k, v, attn_mask_type=mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(q, k, v, attn_mask_type=right, **given)


@pytest.mark.parametrize("qkv_format", ["sbhd", "thd"])
def test_a_padding_mask_that_contradicts_the_lengths_is_refused(qkv_format: str) -> None:
    module = DotProductAttention(1, 32, qkv_format=qkv_format, attn_mask_type="padding_causal")
    q, k, v = torch.randn(3, 6, 1, 32) if qkv_format == "thd" else torch.randn(3, 4, 2, 1, 32)
    lengths = {"cu_seqlens_q": cu_seqlens([4, 2]), "cu_seqlens_kv": cu_seqlens([4, 2])}
    right = (torch.arange(4) >= torch.tensor([[4], [2]]))[:, None, None]
    o = module(q, k, v, **lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (right, right[:, 0, 0], (right, right)):
            assert torch.equal(module(q, k, v, mask, **lengths), o)
        with torch.device("meta"):  # what stands on the host is compared there
            assert torch.equal(module(q, k, v, right, **lengths), o)
    for other, message in (
        (
            torch.arange(4) >= torch.tensor([[4], [3]]),
            "shows 3 rows of sequence 1, and cu_seqlens_q say .* first 2 count",
        ),
        ((torch.arange(4) >= torch.tensor([[4], [2]])).flip(1), "shows 2 rows of sequence 1, and cu_seqlens_q say"),
        ((right, torch.zeros_like(right)), "shows 4 rows of sequence 1, and cu_seqlens_kv say that its first 2 count"),
    ):
        with pytest.raises(ValueError, match=f"attention_mask {message}.*; pass one of the two"):
            module(q, k, v, other, **lengths)
    said.clear()
    with pytest.warns(UserWarning, match=r"attention_mask has no effect:.* torch.bool \[2, 1, 4, 4\]"):
        assert torch.equal(module(q, k, v, right.expand(-1, -1, 4, -1), **lengths), o)


def test_a_mask_on_a_card_is_not_waited_for() -> None:
    """Meta tensors, whose values nobody can ask for, stand for a card's."""
    module = DotProductAttention(1, 32, qkv_format="bshd", attn_mask_type="padding")
    q, k, v = torch.randn(3, 2, 4, 1, 32)
    lengths = {"cu_seqlens_q": cu_seqlens([4, 2]), "cu_seqlens_kv": cu_seqlens([4, 2])}
    mask = torch.zeros(2, 1, 1, 4, dtype=torch.bool, device="meta")
    assert torch.equal(module(q, k, v, mask, **lengths), module(q, k, v, **lengths))


def test_a_padding_mask_that_hides_no_end_is_refused() -> None:
    module = DotProductAttention(1, 32, qkv_format="bshd", attn_mask_type="padding")
    q, k, v = torch.randn(3, 2, 4, 1, 32)
    left = torch.tensor([[True, False, False, False]] * 2)[:, None, None]
    with pytest.raises(ValueError, match="mask out the end of each sequence.*'arbitrary'"):
        module(q, k, v, left)
    with pytest.raises(ValueError, match=r"2 sequences of 4 rows must be bool \[2, 1, 1, 4\]"):
        module(q, k, v, left[..., :3])
    end = left.flip(-1)
    assert torch.equal(module(q, k, v, end), module(q, k, v, end[:, 0, 0]))
    for turned in (end[:, 0, 0].T, end[:, 0], end.flatten()):
        with pytest.raises(
            ValueError, match=r"must be bool \[2, 1, 1, 4\] or \[2, 4\], True where masked out; this is"
        ):
            module(q, k, v, turned)
    with pytest.raises(ValueError, match="'padding' needs attention_mask, or cu_seqlens_q"):
        module(q, k, v)


@pytest.mark.parametrize("enabled", [True, False])
def test_packed_sequences_with_padding_between_them(enabled: bool) -> None:
    queries, keys = zip(*RAGGED)
    x = drawn_batch(RAGGED, 2, 1, 64)
    gap = [torch.full((7, *each[0].shape[1:]), math.nan, dtype=each[0].dtype) for each in x]
    spaced = type(x)(*([torch.cat([s, g]) for s in each] for each, g in zip(x, gap)))
    module = DotProductAttention(2, 64, num_gqa_groups=1, qkv_format="thd", attn_mask_type="padding_causal")
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    with fp8_autocast(enabled, fp8_recipe={"name": "mxfp8", "fp8_dpa": True}):
        plain = run(module, x, "thd", **given)
        spread = run(
            module,
            spaced,
            "thd",
            **given,
            cu_seqlens_q_padded=cu_seqlens([n + 7 for n in queries]),
            cu_seqlens_kv_padded=cu_seqlens([n + 7 for n in keys]),
        )
    for one, other, n in zip(plain, spread, (queries, queries, keys, keys)):
        rows = other.split([n + 7 for n in n])
        assert torch.equal(torch.cat([each[:-7] for each in rows]), one)
        assert not any(each[-7:].any() for each in rows)


@pytest.mark.parametrize("enabled", [True, False])
def test_keys_that_share_the_lengths_of_queries_share_their_gaps(enabled: bool) -> None:
    module, (q, k, v) = DotProductAttention(1, 32, qkv_format="thd"), torch.randn(3, 9, 1, 32)
    starts, spread = cu_seqlens([3, 4]), cu_seqlens([5, 4])
    with fp8_autocast(enabled, fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        both = module(q, k, v, None, None, starts, starts, spread, spread)
        assert torch.equal(module(q, k, v, cu_seqlens_q=starts, cu_seqlens_q_padded=spread), both)
        assert torch.equal(module(q, k, v, cu_seqlens_kv=starts, cu_seqlens_kv_padded=spread), both)
        rows = torch.tensor([0, 1, 2, 5, 6, 7, 8])
        alone = module(q[rows], k[rows], v[rows], cu_seqlens_q=starts)
    assert torch.equal(both[rows], alone)
