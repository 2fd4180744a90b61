"""Arguments of DotProductAttention and of recipes: what is refused says what would do."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from lightning_fp8 import DotProductAttention, MultiheadAttention, TransformerLayer, fp8_autocast, make_recipe
from lightning_fp8.attention.ops import Band
from lightning_fp8.numerics.recipes import RECIPES

FP8: dict[str, Any] = {"fp8_recipe": {"name": "tensorwise", "fp8_dpa": True}}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads=0 must be a positive integer"),
        ({"kv_channels": 1.5}, ValueError, "kv_channels=1.5 must be a positive integer"),
        ({"kv_channels": (1, 2, 3)}, ValueError, r"kv_channels=\(1, 2, 3\) must be one number, or a pair"),
        ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups=3 does not divide num_attention_heads=4"),
        ({"tp_size": 3}, ValueError, "num_attention_heads=4 does not divide into tp_size=3 equal parts"),
        ({"tp_size": 4, "num_gqa_groups": 2}, ValueError, "num_gqa_groups=2 does not divide into tp_size=4 equal"),
        ({"tp_group": object()}, TypeError, "tp_group=.* must be a process group of torch.distributed"),
        ({"attention_dropout": 1.5}, ValueError, "attention_dropout=1.5 must be .* at most 1"),
        ({"qkv_format": "bhsd"}, ValueError, "qkv_format='bhsd' is unknown; use one of 'sbhd', 'bshd', 'thd'"),
        ({"attn_mask_type": "causal_top"}, ValueError, "attn_mask_type='causal_top' is unknown; use one of 'no_mask'"),
        ({"attention_type": "both"}, ValueError, "attention_type='both' is unknown; use one of 'self', 'cross'"),
        ({"softmax_type": "sink"}, ValueError, "softmax_type='sink' is unknown; use one of 'vanilla', 'off-by-one'"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale='1' must be a number"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale=inf must be finite"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale=0.0 must be finite and above 0; pass None for 1 / sqrt"),
        ({"softmax_scale": -0.5}, ValueError, "softmax_scale=-0.5 .*; pass None .* or negate the queries"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale=nan must be finite and above 0"),
        ({"window_size": (4,)}, ValueError, r"window_size=\(4,\) must be two integers"),
        ({"window_size": (4, -2)}, ValueError, r"window_size=\(4, -2\) must be two integers"),
        ({"sequence_parallel": "no"}, TypeError, "sequence_parallel='no' must be True or False"),
        ({"cp_group": object()}, TypeError, "cp_group is object; pass a torch.distributed.ProcessGroup"),
        ({"cp_comm_type": "p2q"}, ValueError, "cp_comm_type='p2q' is unknown; use one of 'p2p', 'all_gather', 'a2a'"),
        ({"cp_comm_type": "a2a+p2p"}, NotImplementedError, "with two groups, is not supported; pass one cp_group"),
        ({"cp_global_ranks": [0, 1]}, ValueError, r"cp_global_ranks=\[0, 1\] without cp_group"),
        ({"num_splits": 2}, NotImplementedError, "num_splits=2 is not supported: leave it at 1"),
    ],
)
def test_a_wrong_constructor_says_what_would_do(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DotProductAttention(**{"num_attention_heads": 4, "kv_channels": 16, **arguments})


@pytest.mark.parametrize(
    "made",
    [
        functools.partial(DotProductAttention, 4, 16),
        functools.partial(MultiheadAttention, 64, 4),
        functools.partial(TransformerLayer, 64, 128, 4),
    ],
)
def test_a_group_is_a_process_group_everywhere(made: Any) -> None:
    group = object()
    for asked in (lambda: made(tp_group=group), lambda: made().set_tensor_parallel_group(group)):
        with pytest.raises(TypeError, match="must be a process group"):
            asked()
    made(tp_size=1, tp_group=None).set_tensor_parallel_group(None)


def test_every_spelling_of_a_mask_type() -> None:
    for name in ("padding_causal", "causal,padding", "padding,causal", "causal_padding"):
        assert DotProductAttention(1, 1, attn_mask_type=name).attn_mask_type == "padding_causal"


X = torch.randn(2, 3, 4, 16)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_layer": [1]}, TypeError, "takes tensors; query_layer is list"),
        ({"query_layer": X.int()}, TypeError, r"query_layer is torch\.int32"),
        ({"query_layer": X.to_sparse()}, TypeError, "dense floating-point tensors; query_layer is .*sparse"),
        ({"query_layer": X[0]}, ValueError, r"\[b, s, h, d\], here with 4 heads of 16 channels; query_layer has shape"),
        ({"key_layer": X[:, :, :2]}, ValueError, r"4 heads of 16 channels; key_layer has shape \[2, 3, 2, 16\]"),
        ({"value_layer": X[:, :2]}, ValueError, "there is one value for each key"),
        ({"query_layer": X[:1]}, ValueError, "1 sequences of queries and 2 of keys"),
        ({"qkv_format": "xyz"}, ValueError, "qkv_format='xyz' is unknown"),
        ({"attn_mask_type": "xyz"}, ValueError, "attn_mask_type='xyz' is unknown"),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(3, 3)},
            ValueError,
            "takes one attention_mask, a bool tensor",
        ),
        ({"core_attention_bias_type": "xyz"}, ValueError, "core_attention_bias_type='xyz' is unknown"),
        ({"core_attention_bias_type": "pre_scale_bias"}, ValueError, "with no core_attention_bias"),
        ({"core_attention_bias": X}, ValueError, "with a core_attention_bias; pass 'post_scale_bias'"),
        ({"alibi_slopes": X}, ValueError, "alibi_slopes with core_attention_bias_type='no_bias'; pass 'alibi'"),
        ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes is list; it must be a tensor, or None"),
        (
            {"alibi_slopes": torch.ones(3), "core_attention_bias_type": "alibi"},
            ValueError,
            r"alibi_slopes has shape \[3\]; it must be \[h\] or \[b, h\], here \[2, 4\]",
        ),
        (
            {"core_attention_bias": torch.ones(3, 3).bool(), "core_attention_bias_type": "post_scale_bias"},
            TypeError,
            "core_attention_bias is torch.bool; .* must be of floating point.*attention_mask.*'arbitrary'",
        ),
        (
            {"attention_mask": torch.ones(4, 3).bool(), "attn_mask_type": "arbitrary"},
            ValueError,
            r"attention_mask has shape \[4, 3\]; it must broadcast to \[b, h, sq, skv\], here \[2, 4, 3, 3\]",
        ),
        (
            {"attention_mask": [True] * 3},
            TypeError,
            "attention_mask is list of bool, bool, bool; it must be a bool tensor",
        ),
        ({"attention_mask": (X, None)}, TypeError, "attention_mask is tuple of Tensor, NoneType; .* a pair of them"),
        ({"cu_seqlens_q": [0, 3, 6]}, TypeError, "cu_seqlens_q is list; it must be a tensor, or None"),
        ({"inference_params": object()}, NotImplementedError, "inference_params=.*causal_bottom_right"),
        ({"score_mod": abs}, NotImplementedError, "flex_attention"),
        ({"fp8_output": True}, NotImplementedError, "fp8_output=True is not supported"),
        ({"bf16_backward": True}, NotImplementedError, "bf16_backward=True is not supported"),
        (
            {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 3])},
            ValueError,
            "cu_seqlens_q has 2 values for 2 sequences; it must have one more",
        ),
        (
            {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0.0, 3, 6])},
            ValueError,
            r"cu_seqlens_q is torch.float32 \[3\]; it must be int32 or int64",
        ),
        (
            {
                **{"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 3, 6])},
                **{"key_layer": X[:, :2], "value_layer": X[:, :2]},
            },
            ValueError,
            "3 rows of queries and 2 of keys with only one of cu_seqlens_q and cu_seqlens_kv; pass both",
        ),
    ],
)
def test_a_wrong_forward_says_what_would_do(
    arguments: Any, error: type[Exception], message: str, enabled: bool
) -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd")
    with pytest.raises(error, match=message), fp8_autocast(enabled, **FP8):
        module(**{"query_layer": X, "key_layer": X, "value_layer": X, **arguments})


def test_lengths_that_do_not_fit() -> None:
    module, x = DotProductAttention(4, 16, qkv_format="thd"), torch.randn(6, 4, 16)
    with pytest.raises(ValueError, match="qkv_format='thd' needs cu_seqlens_q, where each sequence starts"):
        module(x, x, x)
    for wrong, message in (([0, 7], "ends at row 7"), ([1, 6], "does not rise"), ([0, 4, 2, 6], "does not rise")):
        for enabled in (True, False):
            with pytest.raises(ValueError, match=message), fp8_autocast(enabled, **FP8):
                module(x, x, x, cu_seqlens_q=torch.tensor(wrong))
    cu = torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match="cu_seqlens_q has 3 values and cu_seqlens_kv 2; both need as many"):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"do not fit between \[0, 2, 6\]"):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_q_padded=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="has a sequence of length 9; the tensor has 3 rows"), fp8_autocast(**FP8):
        module(X, X, X, qkv_format="bshd", attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 9, 10]))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_whether_attention_runs_in_fp8(name: str) -> None:
    plain = make_recipe(name)
    assert (plain.fp8_dpa, plain.fp8_mha) == (False, False)
    for field, key in (("fp8_dpa", "fp8_dot_product_attention"), ("fp8_mha", "fp8_multi_head_attention")):
        recipe = make_recipe({"name": name, field: True})
        assert getattr(recipe, field) is True
        assert recipe == RECIPES[name](**{field: True}) != plain
        assert recipe == make_recipe({"fp8_recipe": name, "fp8": plain.fp8_format.name.lower(), key: True})
        with pytest.raises(TypeError, match=f"{field}='yes' must be True or False"):
            make_recipe({"name": name, field: "yes"})
    assert make_recipe({"fp8_format": "mxfp8", "fp8_dot_product_attention": True}).fp8_dpa


def test_a_band_is_what_the_words_say() -> None:
    assert Band(bottom_right=True).limited is False
