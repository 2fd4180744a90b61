"""What DotProductAttention does not run in FP8: right all the same, told once, and with a reason."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import DotProductAttention, fp8_autocast, make_recipe
from lightning_fp8.functions.attention import fp8_attention
from lightning_fp8.ops.attention import Band
from lightning_fp8.recipes import RECIPES
from tests.attention.attention_modules import RAGGED, cu_seqlens, drawn_batch, run

FP8: dict[str, Any] = {"fp8_recipe": {"name": "tensorwise", "fp8_dpa": True}}


def weighed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, sink: Tensor | None = None, see: Tensor | None = None
) -> Tensor:
    """``[B, H, L, D]`` in float64, ``bias`` added to the scaled scores, ``exp(sink)`` to the sums."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    weights = torch.exp(scores if see is None else scores.masked_fill(~see, -math.inf))
    return weights @ v / (weights.sum(-1, keepdim=True) + (0 if sink is None else sink.double().exp()))


def heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def same(o: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(o.unflatten(-1, truth.shape[1::2]).double(), heads(truth), rtol=1e-4, atol=1e-5)


Q, K, V = (torch.randn(2, 30, 4, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
CAUSAL = torch.ones(30, 30, dtype=torch.bool).tril()
LEFT_OF = torch.arange(30)[:, None] - torch.arange(30)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 4)])
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_biases(kind: str, shape: tuple[int, int]) -> None:
    bias = torch.randn(*shape, 30, 30, requires_grad=True)
    module = DotProductAttention(4, 16, qkv_format="bshd")
    with pytest.warns(UserWarning, match=f"high precision: core_attention_bias_type='{kind}'"), fp8_autocast(**FP8):
        o = module(Q, K, V, core_attention_bias_type=kind, core_attention_bias=bias)
    truth = weighed(heads(Q), heads(K), heads(V), bias / 4 if kind.startswith("pre") else bias, see=CAUSAL)
    same(o.detach(), truth.detach())
    (found,), (right,) = (torch.autograd.grad(y.sum(), bias) for y in (o, truth))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)
    assert module.reason == f"core_attention_bias_type={kind!r}"
    assert (module.record.fp8, module.record.high_precision) == (0, 1)


def test_alibi() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd")
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
    o = module(Q, K, V, core_attention_bias_type="alibi")
    same(o, weighed(heads(Q), heads(K), heads(V), -slopes[:, None, None] * LEFT_OF, see=CAUSAL))
    given = torch.rand(2, 4)
    o = module(Q, K[:, :20], V[:, :20], attn_mask_type="no_mask", core_attention_bias_type="alibi", alibi_slopes=given)
    distance = (torch.arange(30)[:, None] - torch.arange(20) - 10).abs()  # the diagonal ends at the bottom right
    same(o, weighed(heads(Q), heads(K[:, :20]), heads(V[:, :20]), -given[..., None, None] * distance))
    six = DotProductAttention(6, 16, qkv_format="bshd", attn_mask_type="no_mask")
    q = torch.randn(1, 9, 6, 16)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    same(six(q, q, q, core_attention_bias_type="alibi"), weighed(*[heads(q)] * 3, -slopes[:, None, None] * distance))


def test_softmax_with_a_sink() -> None:
    off_by_one = DotProductAttention(4, 16, qkv_format="bshd", softmax_type="off-by-one")
    same(off_by_one(Q, K, V), weighed(heads(Q), heads(K), heads(V), sink=torch.zeros(1), see=CAUSAL))
    assert off_by_one.reason == "softmax_type='off-by-one'", "known before a forward"
    assert not off_by_one.state_dict()
    learnable = DotProductAttention(4, 16, qkv_format="bshd", softmax_type="learnable", num_gqa_groups=2)
    assert {name: tuple(p.shape) for name, p in learnable.named_parameters()} == {"softmax_offset": (4,)}
    with torch.no_grad():
        learnable.softmax_offset.copy_(torch.randn(4))
    k, v = K[:, :, :2], V[:, :, :2]
    with fp8_autocast(**FP8), pytest.warns(UserWarning, match="softmax_type='learnable'"):
        o = learnable(Q, k, v)
    sink = learnable.softmax_offset.detach().double().requires_grad_()
    k, v = (heads(x).repeat_interleave(2, 1) for x in (k, v))
    truth = weighed(heads(Q), k, v, sink=sink[:, None, None], see=CAUSAL)
    same(o.detach(), truth.detach())
    o.sum().backward()
    (right,) = torch.autograd.grad(truth.sum(), sink)
    torch.testing.assert_close(learnable.softmax_offset.grad.double(), right, rtol=1e-3, atol=1e-4)


def test_a_learnable_sink_loads_as_transformer_engine_stores_it_and_as_we_did() -> None:
    module = DotProductAttention(4, 16, softmax_type="learnable")
    for shape in ((4,), (1, 4, 1, 1)):
        stored = torch.randn(shape)
        given = {"softmax_offset": stored}
        module.load_state_dict(given)
        assert torch.equal(module.softmax_offset, stored.flatten())
        assert given["softmax_offset"] is stored
    with pytest.raises(RuntimeError, match="size mismatch for softmax_offset"):
        module.load_state_dict({"softmax_offset": torch.randn(1, 3, 1, 1)})


def test_arbitrary_masks_with_rows_that_see_nothing() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd", attn_mask_type="arbitrary")
    for shape in ((1, 1), (2, 1), (2, 4)):
        hidden = torch.rand(*shape, 30, 30) < 0.7
        hidden[..., 7, :] = True
        with fp8_autocast(**FP8), pytest.warns(UserWarning, match="attn_mask_type='arbitrary'"):
            o = module(Q, K, V, hidden)
        same(o, weighed(heads(Q), heads(K), heads(V), see=~hidden).nan_to_num(0))
    windowed = module(Q, K, V, hidden, window_size=(4, 4))
    same(windowed, weighed(heads(Q), heads(K), heads(V), see=~hidden & (LEFT_OF.abs() <= 4)).nan_to_num(0))


def test_dropout_is_of_training_alone() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd", attention_dropout=0.5)
    assert module.reason == "attention_dropout=0.5 in training"
    with pytest.warns(UserWarning, match="attention_dropout=0.5 in training"), fp8_autocast(**FP8):
        first, second = module(Q, K, V), module(Q, K, V)
    assert not torch.equal(first, second)
    many = torch.stack([module(Q, K, V) for _ in range(400)]).mean(0)
    exact = F.scaled_dot_product_attention(*map(heads, (Q, K, V)), is_causal=True)
    assert (many - heads(exact).flatten(-2)).abs().mean() < 0.06
    module.eval()
    with warnings.catch_warnings(), fp8_autocast(**FP8):
        warnings.simplefilter("error")
        third, fourth = module(Q, K, V), module(Q, K, V)
    assert torch.equal(third, fourth)
    assert not module.reason
    assert not torch.equal(third, module(Q, K, V)), "in FP8"


def test_a_state_tracker_is_forked_around_dropout() -> None:
    forks = []

    class Tracker:
        def fork(self) -> Any:
            forks.append(1)
            return torch.random.fork_rng(devices=[])

    dropping = DotProductAttention(4, 16, qkv_format="bshd", attention_dropout=0.5, get_rng_state_tracker=Tracker)
    state = torch.get_rng_state()
    first, second = dropping(Q, K, V), dropping(Q, K, V)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(forks) == 2
    dropping.eval()(Q, K, V)
    assert len(forks) == 2


def test_the_reason_may_be_the_recipe_or_the_module() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd")
    for fp8, recipe, reason in (
        (True, {"name": "tensorwise"}, "the recipe has fp8_dpa=False"),
        (False, {"name": "tensorwise"}, "this module has fp8=False"),
        (False, FP8["fp8_recipe"], "this module has fp8=False"),
        (True, FP8["fp8_recipe"], ""),
    ):
        module.fp8 = fp8
        with warnings.catch_warnings(), fp8_autocast(fp8_recipe=recipe):
            warnings.simplefilter("error")
            module(Q, K, V)
        assert module.reason == reason
        assert (module.record.fp8 == 1) == (not reason)
        module(Q, K, V)
        assert module.reason == reason, "outside fp8_autocast nobody asked"
    module.attention_dropout = 0.5
    with pytest.warns(UserWarning, match="attention_dropout=0.5"), fp8_autocast(**FP8):
        module(Q, K, V)
    assert module.reason == "attention_dropout=0.5 in training"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_ragged_sequences_with_alibi(qkv_format: str, bias: bool) -> None:
    """Diagonals end at the bottom right of each sequence."""
    queries, keys = zip(*RAGGED)
    x = drawn_batch(RAGGED, 4, 2, 16, torch.float32)
    module = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format=qkv_format, attn_mask_type="padding")
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    o, *_ = run(module, x, qkv_format, core_attention_bias_type="alibi" if bias else "no_bias", **given)
    apart = o.split(list(queries)) if qkv_format == "thd" else (o if qkv_format == "bshd" else o.transpose(0, 1))
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])
    for found, q, k, v in zip(apart, *x[:3]):
        distance = (torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))).abs()
        q, k, v = (each.transpose(0, 1) for each in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        truth = weighed(q, k, v, -slopes[:, None, None] * distance if bias else 0.0).transpose(0, 1)
        torch.testing.assert_close(found[: len(truth)].double(), truth, rtol=1e-4, atol=1e-5)
        assert not found[len(truth) :].any()


@pytest.mark.parametrize(
    ("channels", "reason"),
    [
        (257, "a head has 257 channels, more than 256"),
        ((32, 48), "a head of values has 48 channels and one of keys 32"),
    ],
)
def test_heads_that_do_not_run_in_fp8(channels: Any, reason: str) -> None:
    module = DotProductAttention(2, channels, qkv_format="bshd")
    assert module.reason == reason
    of_keys, of_values = (channels, channels) if isinstance(channels, int) else channels
    q, k, v = torch.randn(1, 9, 2, of_keys), torch.randn(1, 9, 2, of_keys), torch.randn(1, 9, 2, of_values)
    with pytest.warns(UserWarning, match=reason), fp8_autocast(**FP8):
        same(module(q, k, v), weighed(heads(q), heads(k), heads(v), see=CAUSAL[:9, :9]))


def test_float64_is_computed_in_float64() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd")
    with pytest.warns(UserWarning, match=r"queries are torch\.float64"), fp8_autocast(**FP8):
        o = module(Q.double(), K.double(), V.double())
    torch.testing.assert_close(o, heads(weighed(*map(heads, (Q, K, V)), see=CAUSAL)).flatten(-2))


def test_softmax_scale() -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd", softmax_scale=1.0)
    truth = weighed(4 * heads(Q), heads(K), heads(V), see=CAUSAL)
    same(module(Q, K, V), truth)
    with fp8_autocast(**FP8):
        o = module(Q, K, V).unflatten(-1, (4, 16))
    assert (o - heads(truth)).norm() < 0.12 * truth.norm()


# ------------------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads=0 must be a positive integer"),
        ({"kv_channels": 1.5}, ValueError, "kv_channels=1.5 must be a positive integer"),
        ({"kv_channels": (1, 2, 3)}, ValueError, r"kv_channels=\(1, 2, 3\) must be one number, or a pair"),
        ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups=3 does not divide num_attention_heads=4"),
        ({"tp_size": 3}, ValueError, "tp_size=3 does not divide num_attention_heads=4"),
        ({"tp_size": 4, "num_gqa_groups": 2}, ValueError, "tp_size=4 does not divide num_gqa_groups=2"),
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
        ({"cp_group": object()}, NotImplementedError, "cp_group=.* is not here: context parallelism"),
        ({"return_max_logit": True}, NotImplementedError, "return_max_logit=True is not here"),
        ({"num_splits": 2}, NotImplementedError, "num_splits=2 is not here: leave it at 1"),
    ],
)
def test_a_wrong_constructor_says_what_would_do(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DotProductAttention(**{"num_attention_heads": 4, "kv_channels": 16, **arguments})


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
        ({"attn_mask_type": "arbitrary"}, ValueError, "needs attention_mask, a bool tensor"),
        ({"core_attention_bias_type": "xyz"}, ValueError, "core_attention_bias_type='xyz' is unknown"),
        ({"core_attention_bias_type": "pre_scale_bias"}, ValueError, "with no core_attention_bias"),
        ({"core_attention_bias": X}, ValueError, "with a core_attention_bias; pass 'post_scale_bias'"),
        ({"alibi_slopes": X}, ValueError, "alibi_slopes with core_attention_bias_type='no_bias'; pass 'alibi'"),
        ({"inference_params": object()}, NotImplementedError, "inference_params=.*causal_bottom_right"),
        ({"score_mod": abs}, NotImplementedError, "flex_attention"),
        ({"fp8_output": True}, NotImplementedError, "fp8_output=True is not here"),
        ({"bf16_backward": True}, NotImplementedError, "bf16_backward=True is not here"),
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
        (
            {"cu_seqlens_q_padded": torch.tensor([0, 3, 6])},
            ValueError,
            "of qkv_format='thd', not 'bshd'; pass cu",
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
    with pytest.raises(ValueError, match=r"do not fit between \[0, 2, 6\]"):
        module(x, x, x, cu_seqlens_q=cu, cu_seqlens_q_padded=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="has a sequence of length 9; the tensor has 3 rows"), fp8_autocast(**FP8):
        module(X, X, X, qkv_format="bshd", attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 9, 10]))


@pytest.mark.parametrize("scale", [0.0, -0.5, math.nan, math.inf])
def test_the_function_refuses_the_same_scales(scale: float) -> None:
    with pytest.raises(ValueError, match=f"softmax_scale={scale} must be finite and above 0"):
        fp8_attention(X, X, X, softmax_scale=scale)
    with pytest.raises(TypeError, match="softmax_scale='1' must be a number"):
        fp8_attention(X, X, X, softmax_scale="1")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_whether_attention_runs_in_fp8(name: str) -> None:
    plain = make_recipe(name)
    assert (plain.fp8_dpa, plain.fp8_mha) == (False, False)
    for field, key in (("fp8_dpa", "fp8_dot_product_attention"), ("fp8_mha", "fp8_multi_head_attention")):
        recipe = make_recipe({"name": name, field: True})
        assert getattr(recipe, field) is True
        assert recipe == RECIPES[name](**{field: True}) != plain
        assert recipe == make_recipe(
            {"fp8_recipe": name, "fp8": "e4m3" if name == "blockwise" else "hybrid", key: True}
        )
        with pytest.raises(TypeError, match=f"{field}='yes' must be True or False"):
            make_recipe({"name": name, field: "yes"})
    assert make_recipe({"fp8_format": "mxfp8", "fp8_dot_product_attention": True}).fp8_dpa


def test_a_band_is_what_the_words_say() -> None:
    assert Band(bottom_right=True).limited is False
