"""Masks of transformers while a CUDA graph is captured: nothing is read, and what cannot be checked is asserted."""

from __future__ import annotations

import pytest
import torch

from lightning_fp8.convert.attention_calls.bands import from_carried, is_carried
from lightning_fp8.convert.attention_calls.hf import mask
from tests.captures import NothingIsRead, capture


@pytest.mark.parametrize("lengths", [(8, 8), (8, 5)])
def test_a_captured_mask_is_an_eager_one(lengths: tuple[int, int]) -> None:
    keep = torch.arange(8) < torch.tensor(lengths)[:, None]
    with capture(), NothingIsRead():
        captured = mask(2, 8, 8, attention_mask=keep)
    assert captured is not None
    assert is_carried(captured)
    assert torch.equal(from_carried(captured).key_mask, keep)
    eager = mask(2, 8, 8, attention_mask=keep)
    if eager is not None:  # without padding
        assert torch.equal(from_carried(eager).key_mask, keep)
        assert from_carried(eager).band == from_carried(captured).band


def test_padding_at_the_start_is_asserted() -> None:
    keep = torch.arange(8) >= torch.tensor([0, 3])[:, None]
    with capture(), pytest.raises(RuntimeError, match="a compiled or captured model supports FP8 attention only with"):
        mask(2, 8, 8, attention_mask=keep)
