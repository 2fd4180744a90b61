"""What DotProductAttention does not run in FP8: right all the same, told once, and with a reason."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import DotProductAttention, fp8_autocast
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


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4)])
def test_arbitrary_masks_with_rows_that_see_nothing(shape: tuple[int, int]) -> None:
    module = DotProductAttention(4, 16, qkv_format="bshd", attn_mask_type="arbitrary")
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


@pytest.mark.parametrize("longest", [(None, None), (70, 90)])
@pytest.mark.parametrize("what", ["bias", "mask"])
def test_packed_sequences_with_a_bias_or_a_mask(what: str, longest: tuple[int | None, int | None]) -> None:
    """It is that of each sequence from its first row on, of the longest sequences or of what ``max_seqlen`` say."""
    lengths = [(5, 60), (33, 7), (0, 3)]
    queries, keys = zip(*lengths)
    x = drawn_batch(lengths, 4, 2, 16, torch.float32)
    given: dict[str, Any] = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    given |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest))
    shape = (4, longest[0] or 33, longest[1] or 60)
    bias = torch.randn(shape) if what == "bias" else torch.zeros(shape).masked_fill(torch.rand(shape) < 0.3, -math.inf)
    if what == "bias":
        given |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    else:
        given |= {"attn_mask_type": "arbitrary", "attention_mask": bias.isinf()}
    module = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding")
    o, *_ = run(module, x, "thd", **given)
    for found, q, k, v in zip(o.split(list(queries)), *x[:3]):
        q, k, v = (each.transpose(0, 1) for each in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        truth = weighed(q, k, v, bias[:, : q.shape[1], : k.shape[1]]).nan_to_num(0).transpose(0, 1)
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)
    name, _ = given.popitem()
    given[name] = (bias if what == "bias" else bias.isinf())[:, :32]
    way_out = "" if longest == (None, None) else ", or max_seqlen_q and max_seqlen_kv in place of sq and skv"
    message = re.escape(
        f"{name} has shape [4, 32, {shape[2]}]; it must broadcast to [b, h, sq, skv], here [3, 4, 33, 60]"
    )
    with pytest.raises(ValueError, match=f"^{message}{way_out}$"):
        run(module, x, "thd", **given)


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
