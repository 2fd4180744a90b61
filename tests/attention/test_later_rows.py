"""Causal FP8 attention: later rows reach the output of a row inside its block of 128, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fp8 import DotProductAttention, fp8_autocast

ROWS, HEADS, CHANNELS = 320, 2, 64


def output(qkv: Tensor, enabled: bool = True, cu_seqlens: Tensor | None = None) -> Tensor:
    """``[rows, heads * channels]`` of ``[3, rows, heads, channels]``: one sequence, or several packed ones."""
    packed = cu_seqlens is not None
    core = DotProductAttention(
        HEADS, CHANNELS, qkv_format="thd" if packed else "bshd", attn_mask_type="padding_causal" if packed else "causal"
    )
    q, k, v = qkv if packed else qkv[:, None]
    with fp8_autocast(enabled=enabled, fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        o: Tensor = core(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    assert core.reason == ""
    return o if packed else o[0]


def changed(qkv: Tensor, rows: slice, factor: float = 1) -> Tensor:
    other = qkv.clone()
    other[:, rows] = torch.randn_like(other[:, rows]) * factor
    return other


@pytest.mark.parametrize("cut", [40, 100, 128 + 40])
def test_in_a_block_by_about_the_error_of_fp8(cut: int) -> None:
    """By less than twice the error against attention in high precision, which later rows do not reach."""
    qkv = torch.randn(3, ROWS, HEADS, CHANNELS)
    other = changed(qkv, slice(cut, None))
    before, after, exact = output(qkv), output(other), output(qkv, enabled=False)
    torch.testing.assert_close(output(other, enabled=False)[:cut], exact[:cut])
    block = slice(cut // 128 * 128, cut)
    assert torch.equal(before[: block.start], after[: block.start])
    error = (before - exact)[block].norm()
    assert 0.2 * error < (after - before)[block].norm() < 2 * error


@pytest.mark.parametrize("factor", [1, 37])
@pytest.mark.parametrize("cut", [128, 256])
def test_not_at_all_in_other_blocks(cut: int, factor: float) -> None:
    qkv = torch.randn(3, ROWS, HEADS, CHANNELS)
    assert torch.equal(output(changed(qkv, slice(cut, None), factor))[:cut], output(qkv)[:cut])


@pytest.mark.parametrize("factor", [1, 37])
def test_not_at_all_in_other_packed_sequences(factor: float) -> None:
    """Earlier ones neither, nor the gradients."""
    starts = [0, 40, 190, ROWS]
    qkv, do = torch.randn(3, ROWS, HEADS, CHANNELS), torch.randn(ROWS, HEADS * CHANNELS)
    others = [slice(0, 40), slice(190, ROWS)]
    found = []
    for given in (qkv, changed(changed(qkv, others[0], factor), others[1], factor)):
        given.requires_grad_()
        o = output(given, cu_seqlens=torch.tensor(starts))
        (gradient,) = torch.autograd.grad(o, given, do)
        found.append((o[40:190], gradient[:, 40:190]))
    assert all(map(torch.equal, *found))
