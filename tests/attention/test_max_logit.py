"""``return_max_logit``: the largest score of each head, against all scores in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_fp8 import DotProductAttention, fp8_autocast

LENGTHS = torch.tensor([0, 5, 205])


@pytest.mark.parametrize("recipe", [None, {"name": "tensorwise", "fp8_dpa": True}])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal"])
@pytest.mark.parametrize("biased", [False, True])
def test_largest_scores(mask_type: str, biased: bool, recipe: Any) -> None:
    core = DotProductAttention(4, 8, 2, qkv_format="bshd", attn_mask_type=mask_type, return_max_logit=True)
    q, k, v = (torch.randn(2, 200, heads, 8) for heads in (4, 2, 2))
    call: dict[str, Any] = {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS} if "padding" in mask_type else {}
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 8**0.5
    if biased:
        bias = torch.randn(1, 4, 200, 200)
        call |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        scores = scores + bias.double()
    if "causal" in mask_type:
        scores = scores.masked_fill(torch.ones(200, 200, dtype=torch.bool).triu(1), -torch.inf)
    if "padding" in mask_type:
        scores[0, :, 5:], scores[0, :, :, 5:] = -torch.inf, -torch.inf
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        output, largest = core(q, k, v, **call)
    assert output.shape == (2, 200, 32)
    assert largest.dtype == output.dtype == torch.float32
    torch.testing.assert_close(largest.double(), scores.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [None, {"name": "tensorwise", "fp8_dpa": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_the_outputs(dtype: torch.dtype, recipe: Any) -> None:
    """The largest score in float64, rounded once; also where torch.autocast sets the dtype."""
    core = DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="no_mask", return_max_logit=True)
    q, k, v = (torch.randn(2, 40, 2, 16).to(dtype) for _ in range(3))
    exact = (torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4).amax((0, 2, 3))
    for given in ((q, k, v), (q.float(), k.float(), v.float())):
        in_region = fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)
        with in_region, torch.autocast("cpu", dtype, enabled=given[0].dtype != dtype):
            output, largest = core(*given)
        assert largest.dtype == output.dtype == dtype
        torch.testing.assert_close(largest.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
