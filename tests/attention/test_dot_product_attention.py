"""DotProductAttention in FP8: mask types, formats, heads and dtypes against attention's definition in float64."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch

from lightning_fp8 import DotProductAttention, fp8_autocast, make_recipe
from lightning_fp8.attention.ops import Band
from lightning_fp8.numerics.recipes import RECIPES
from tests.attention.attention_modules import (
    EVEN,
    MASKS,
    RAGGED,
    cu_seqlens,
    drawn_batch,
    laid_out,
    of_definition,
    padding_of,
    run,
    taken_apart,
)
from tests.attention.near import assert_near, fp8, in_fp8
from tests.attention.ops.attention_cases import error
from tests.small import update_all_scales

FORMATS = ("sbhd", "bshd", "thd")


CHANNELS, HEADS = (64, 96, 128, 256), ((2, 2), (4, 2), (3, 1))
PAIRS = [
    (FORMATS[(i + j) % 3], mask, HEADS[(i + 2 * j) % 3], channels)
    for (i, mask), (j, channels) in itertools.product(enumerate(MASKS), enumerate(CHANNELS))
]
"""Each value of one column meets each of every other."""


@pytest.mark.parametrize(("qkv_format", "mask", "heads", "channels"), PAIRS)
def test_every_mask_format_and_head_is_attentions_definition(
    qkv_format: str, mask: str, heads: tuple[int, int], channels: int
) -> None:
    ragged = qkv_format == "thd" or "padding" in mask
    lengths = RAGGED if ragged else EVEN
    queries, keys = zip(*lengths)
    x = drawn_batch(lengths, *heads, channels)
    module = DotProductAttention(
        heads[0], channels, num_gqa_groups=heads[1], qkv_format=qkv_format, attn_mask_type=mask
    )
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)} if ragged else {}
    with fp8():
        found = run(module, x, qkv_format, **given)
    assert module.record.fp8 == 1
    assert not module.reason
    apart = [taken_apart(each, n, qkv_format) for each, n in zip(found, (queries, queries, keys, keys))]
    assert_near(map(torch.cat, apart), of_definition(x, MASKS[mask]))
    for each, n in zip(found, (queries, queries, keys, keys)):
        assert not any(rows.any() for rows in padding_of(each, n, qkv_format)), "padding is 0 and takes no gradient"
        assert each.dtype == torch.bfloat16


CONSTRUCTOR = (
    "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size "
    "bottom_right_diagonal sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type "
    "cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name"
)
FORWARD = (
    "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
    "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal "
    "checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
    "inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod"
)


@pytest.mark.parametrize(("method", "names"), [("__init__", CONSTRUCTOR), ("forward", FORWARD)])
def test_arguments_are_in_transformer_engines_order(method: str, names: str) -> None:
    own = list(inspect.signature(getattr(DotProductAttention, method)).parameters.values())[1:]
    assert " ".join(each.name for each in own).startswith(names)
    assert {each.kind for each in own} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_arguments_by_position() -> None:
    module = DotProductAttention(4, 16, 2, 0.25, "bshd", "no_mask")
    assert (module.sizes.groups, module.attention_dropout, module.attn_mask_type) == (2, 0.25, "no_mask")
    q, k = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 2, 16)
    plain = DotProductAttention(4, 16, 2)
    assert torch.equal(plain(q, k, k, None, "bshd"), plain(q, k, k, qkv_format="bshd"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
def test_every_recipe_runs_the_same_attention(recipe: str, field: str) -> None:
    x = drawn_batch(EVEN, 2, 2, 64)
    module, found = DotProductAttention(2, 64, qkv_format="sbhd"), []
    for name, fields in ((recipe, {field: True}), ("tensorwise", {"fp8_dpa": True})):
        with fp8_autocast(fp8_recipe={"name": name, **fields}):
            found.append(run(module, x, "sbhd"))
    assert all(torch.equal(*pair) for pair in zip(*found))
    with fp8_autocast(fp8_recipe=recipe):
        plain = run(module, x, "sbhd")
    assert not torch.equal(plain[0], found[0][0])
    assert_near([each.transpose(0, 1).flatten(0, 1) for each in plain], of_definition(x, Band(right=0)), 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_and_gradients_have_the_inputs_dtype(dtype: torch.dtype) -> None:
    x = drawn_batch(EVEN, 2, 1, 64, dtype)
    with fp8():
        found = run(DotProductAttention(2, 64, num_gqa_groups=1, qkv_format="bshd"), x, "bshd")
    assert {each.dtype for each in found} == {dtype}
    assert_near([each.flatten(0, 1) for each in found], of_definition(x, Band(right=0)))


def test_under_torch_autocast() -> None:
    x = drawn_batch(EVEN, 2, 2, 64, torch.float32)
    q, k, v = (laid_out(each, "bshd").requires_grad_() for each in x[:3])
    module = DotProductAttention(2, 64, qkv_format="bshd")
    with torch.autocast("cpu", torch.bfloat16), fp8():
        o = module(q, k, v)
    o.float().sum().backward()
    assert o.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    near = in_fp8(module, *(each.bfloat16() for each in (q, k, v)))
    assert torch.equal(o, near)


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_no_rows_and_one_row(qkv_format: str) -> None:
    module = DotProductAttention(2, 64, qkv_format=qkv_format, attn_mask_type="padding_causal")
    for lengths in ([(0, 0)], [(0, 0), (0, 0)], [(1, 1)], [(0, 5), (5, 0)]):
        x = drawn_batch(lengths, 2, 2, 64)
        queries, keys = zip(*lengths)
        with fp8():
            found = run(module, x, qkv_format, cu_seqlens_q=cu_seqlens(queries), cu_seqlens_kv=cu_seqlens(keys))
        if lengths == [(1, 1)]:
            assert error(found[0].flatten(), laid_out(x.v, qkv_format).flatten().double()) < 0.05
        else:
            assert not any(each.any() for each in found), "no query sees a key"


@pytest.mark.parametrize("enabled", [True, False])
def test_queries_that_see_no_key(enabled: bool) -> None:
    x = drawn_batch([(200, 70)], 2, 1, 64)
    module = DotProductAttention(2, 64, num_gqa_groups=1, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    with fp8_autocast(enabled, fp8_recipe={"name": "rowwise", "fp8_dpa": True}):
        o, dq, dk, dv = run(module, x, "bshd")
    assert not o[:, :130].any()
    assert not dq[:, :130].any()
    truth = of_definition(x, Band(right=0, bottom_right=True))
    assert_near([each[0] for each in (o, dq, dk, dv)], truth)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "do"])
def test_what_is_not_finite_reaches_the_output_and_no_scale(which: str, value: float) -> None:
    recipe = make_recipe({"name": "delayed", "fp8_dpa": True, "amax_history_len": 4})
    module, x = DotProductAttention(2, 64, qkv_format="bshd"), drawn_batch(EVEN, 2, 2, 64)
    with fp8_autocast(fp8_recipe=recipe):
        right = run(module, x, "bshd")
    update_all_scales(recipe)
    scales = module.history.scale.clone()
    assert (scales[[0, 2, 3, 4]] > 0).all()
    getattr(x, which)[0][50, 1, 3] = value
    with fp8_autocast(fp8_recipe=recipe):
        o, dq, dk, dv = run(module, x, "bshd")
    assert torch.isnan(dv if which == "do" else o).any()
    assert torch.isnan(dq).any()
    for ours, before in zip((o, dq, dk, dv), right):
        assert torch.equal(ours[1], before[1]), "the other sequence"
        assert torch.equal(ours[0, :, 0], before[0, :, 0]), "the other head"
    update_all_scales(recipe)
    assert torch.isfinite(module.history.scale).all()
    touched = {"q": [0, 2, 3], "k": [0, 2, 3], "v": [0, 2, 3], "do": [3, 4]}[which]
    assert torch.equal(module.history.scale[touched], scales[touched])


def test_a_bias_of_another_shape_is_named() -> None:
    attention, q, k = DotProductAttention(2, 8, qkv_format="bshd"), torch.randn(3, 5, 2, 8), torch.randn(3, 7, 2, 8)
    for shape in ((5, 7), (1, 2, 5, 7), (3, 1, 1, 7)):
        attention(q, k, k, core_attention_bias_type="post_scale_bias", core_attention_bias=torch.zeros(shape))
    for shape in ((3, 3), (7, 5), (1, 3, 2, 5, 7), (4, 2, 5, 7)):
        with pytest.raises(
            ValueError, match=r"core_attention_bias has shape .* \[b, h, sq, skv\], here \[3, 2, 5, 7\]"
        ):
            attention(q, k, k, core_attention_bias_type="post_scale_bias", core_attention_bias=torch.zeros(shape))
