"""Angles of packed sequences: each is turned as if it were alone, whatever padding lies behind and between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import MultiheadAttention, RotaryPositionEmbedding
from lightning_fp8.transformer import apply_rotary_pos_emb

CU_SEQLENS = torch.tensor([0, 4, 7])
PADDED = torch.tensor([0, 6, 10])
ROWS = 14
"""Of the packed tensor, more than the sequences have."""


def attention() -> MultiheadAttention:
    return MultiheadAttention(32, 2, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")


def angles(positions: int) -> Tensor:
    angles: Tensor = RotaryPositionEmbedding(16)(positions)
    return angles


@pytest.mark.parametrize("padded", [False, True], ids=["behind", "between"])
def test_padding_has_no_position(padded: bool) -> None:
    """There are as many angles as the longest sequence has rows, and no more."""
    module, x = attention(), torch.randn(ROWS, 32)
    starts = PADDED if padded else CU_SEQLENS
    lengths = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS}
    gaps = {"cu_seqlens_q_padded": PADDED, "cu_seqlens_kv_padded": PADDED} if padded else {}
    y = module(x, rotary_pos_emb=angles(4), **lengths, **gaps)
    for sequence, length in enumerate(CU_SEQLENS.diff().tolist()):
        rows = slice(int(starts[sequence]), int(starts[sequence]) + length)
        ends = torch.tensor([0, length])
        alone = module(x[rows], rotary_pos_emb=angles(length), cu_seqlens_q=ends, cu_seqlens_kv=ends)
        torch.testing.assert_close(y[rows], alone)
    with pytest.raises(ValueError, match="has 3 positions, fewer than the 4 of the sequence"):
        module(x, rotary_pos_emb=angles(3), **lengths, **gaps)


@pytest.mark.parametrize("given", ["q", "kv"])
def test_lengths_that_are_given_alone_hold_for_both(given: str) -> None:
    module, x = attention(), torch.randn(ROWS, 32)
    both: dict[str, Any] = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS}
    expected = module(x, rotary_pos_emb=angles(4), **both)
    assert torch.equal(module(x, rotary_pos_emb=angles(4), **{f"cu_seqlens_{given}": CU_SEQLENS}), expected)


def test_later_rows_of_a_sequence_need_their_angles() -> None:
    t, starts = torch.randn(ROWS, 2, 16), torch.tensor([2, 0])
    turned = apply_rotary_pos_emb(t, angles(6), "thd", start_positions=starts, cu_seqlens=CU_SEQLENS)
    assert torch.equal(turned[:4], apply_rotary_pos_emb(t[:4, None], angles(6)[2:], "sbhd")[:, 0])
    with pytest.raises(ValueError, match="has 5 positions, fewer than the 6"):
        apply_rotary_pos_emb(t, angles(5), "thd", start_positions=starts, cu_seqlens=CU_SEQLENS)
