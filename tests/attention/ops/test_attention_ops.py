"""Attention's ops and their autograd function: shapes, what is kept, gradients, determinism, refusals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fp8.attention.function import fp8_attention
from lightning_fp8.attention.ops import (
    FORMATS,
    Attention,
    AttentionCall,
    Band,
    Kept,
    attention_backward,
    attention_forward,
    cuda,
)
from lightning_fp8.ops.plans import clear_plan_cache
from tests.attention.attention_modules import EVEN, RAGGED, cu_seqlens, drawn_batch, laid_out
from tests.attention.ops.attention_cases import CAUSAL, NAMES, drawn, fp8, visible_keys


def given(qkv_format: str, packed: bool) -> tuple[list[Tensor], dict[str, Any]]:
    lengths = RAGGED if packed or qkv_format == "thd" else EVEN
    x = drawn_batch(lengths, 4, 2, 64)
    queries, keys = (cu_seqlens(n) for n in zip(*lengths))
    ragged = lengths is RAGGED
    return [laid_out(each, qkv_format) for each in x], {
        "cu_seqlens_q": queries,
        "cu_seqlens_kv": keys,
    } if ragged else {}


def rows_of(x: Tensor, qkv_format: str) -> int:
    return x.shape[1 if qkv_format == "bshd" else 0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("qkv_format", FORMATS)
def test_fake_kernels_say_what_the_ops_give(qkv_format: str, packed: bool) -> None:
    def lies(x: Tensor) -> Any:
        return x.shape, x.stride(), x.dtype

    (q, k, v, do), sequences = given(qkv_format, packed)
    call, key_rows = AttentionCall(Attention(qkv_format, CAUSAL), **sequences), rows_of(k, qkv_format)
    o, kept = attention_forward(q, k, v, call)
    gradients = attention_backward(do, o, kept, key_rows, call)
    assert all(each.is_contiguous() for each in (o, *gradients))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in (q, k, v, do)]
        sequences = {name: mode.from_tensor(each) for name, each in sequences.items()}
        call = AttentionCall(call.attention, **sequences)
        o_fake, kept_fake = attention_forward(*fake[:3], call)
        gradients_fake = attention_backward(fake[3], o_fake, kept_fake, key_rows, call)
    for real, said in zip((o, *kept, *gradients), (o_fake, *kept_fake, *gradients_fake)):
        assert lies(real) == lies(said)


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_the_ops_are_the_specification(qkv_format: str) -> None:
    """Bit for bit, forward and backward, whatever the order of dimensions."""
    x = drawn(4, 2, 200, 150)
    o, dq, dk, dv, _, _ = fp8(x, CAUSAL, dtype=torch.bfloat16)
    to = {
        "bshd": lambda y: y.transpose(1, 2),
        "sbhd": lambda y: y.permute(2, 0, 1, 3),
        "thd": lambda y: y[0].transpose(0, 1),
    }[qkv_format]
    q, k, v = (to(y).requires_grad_() for y in x[:3])
    sequences = {"cu_seqlens_q": cu_seqlens([200]), "cu_seqlens_kv": cu_seqlens([150])} if qkv_format == "thd" else {}
    found = fp8_attention(q, k, v, qkv_format=qkv_format, band=CAUSAL, **sequences)
    gradients = torch.autograd.grad(found, (q, k, v), to(x.do))
    for name, ours, right in zip(NAMES, (found, *gradients), map(to, (o, dq, dk, dv))):
        assert torch.equal(ours, right), name


def kept_bytes(function: Callable[[], Tensor]) -> int:
    """Of all memory that autograd holds for the backward pass, counted once."""
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = function()
    assert o.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("channels", [64, 96, 128, 256])
@pytest.mark.parametrize("qkv_format", FORMATS)
def test_what_is_kept_takes_at_most_65_percent_of_bf16(qkv_format: str, channels: int) -> None:
    """Packed sequences have room for 128 rows more each."""
    lengths = [(4096, 4096)] if qkv_format == "thd" else [(384, 384)] * 2
    q, k, v = (laid_out(each, qkv_format).requires_grad_() for each in drawn_batch(lengths, 2, 2, channels)[:3])
    queries, _ = (cu_seqlens(n) for n in zip(*lengths))
    sequences = {"cu_seqlens_q": queries, "cu_seqlens_kv": queries} if qkv_format == "thd" else {}
    ours = kept_bytes(lambda: fp8_attention(q, k, v, qkv_format=qkv_format, band=Band(100, 0), **sequences))
    rows = 2 * sum(n for n, _ in lengths)
    bf16 = rows * (4 * 2 * channels + 4)  # q, k, v, o and the sum of exponentials
    assert ours <= 0.65 * bf16
    if qkv_format == "bshd":
        of_torch = kept_bytes(
            lambda: F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        )
        assert ours <= 0.65 * of_torch


@pytest.mark.parametrize(("heads", "groups", "channels"), [(4, 1, 128), (8, 2, 64), (16, 1, 128)])
def test_what_is_kept_with_shared_keys(heads: int, groups: int, channels: int) -> None:
    """A byte for each element of Q, K and V, two of O, 8 for each row of a head, and a scale for 128 rows: up to 3 / 4
    of BF16's, since O and Q are most of it.
    """
    q, k, v = (
        laid_out(each, "bshd").requires_grad_() for each in drawn_batch([(384, 384)] * 2, heads, groups, channels)[:3]
    )
    ours = kept_bytes(lambda: fp8_attention(q, k, v, band=CAUSAL))
    of_o, of_codes = (2 * heads * channels, (heads + 2 * groups) * channels)
    rows, scales = (2 * 384, 4 * (heads + 2 * groups) * 2 * 384 // 128)
    assert ours <= rows * (of_o + of_codes + 8 * heads) + scales
    bf16 = rows * (of_o + 2 * of_codes + 4 * heads)  # and the sum of exponentials
    assert (heads, groups) != (4, 1) or round(100 * ours / bf16) == 71, "docs/attention.md says so"


def test_gradients_are_the_slopes_of_the_unquantized_formula() -> None:
    """Along each gradient the loss ``<do, o>`` changes by the gradient's length: central differences in float64."""
    x = drawn(2, 1, 96, 160)
    band = Band(right=0, bottom_right=True)
    see = visible_keys(96, 160, band)
    leaves = [each.transpose(1, 2).requires_grad_() for each in x[:3]]
    o = fp8_attention(*leaves, band=band)
    gradients = [each.transpose(1, 2).double() for each in torch.autograd.grad(o, leaves, x.do.transpose(1, 2))]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        scores = (q @ k.mT / 8.0).masked_fill(~see, -math.inf)
        return (x.do.double() * (scores.softmax(-1) @ v)).sum()

    for which, gradient in enumerate(gradients):
        direction, step = gradient / gradient.norm(), 1e-4
        moved = [[y.detach().double() for y in x[:3]] for _ in range(2)]
        moved[0][which] += step * direction
        moved[1][which] -= step * direction
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert slope.item() == pytest.approx(gradient.norm().item(), rel=0.03), NAMES[which + 1]


def test_twice_is_the_same_to_the_bit_and_of_any_strides() -> None:
    (q, k, v, do), _ = given("bshd", False)
    results = []
    for turned in (False, True, True):
        leaves = [(x.transpose(0, 2).contiguous().transpose(0, 2) if turned else x).requires_grad_() for x in (q, k, v)]
        o = fp8_attention(*leaves, band=CAUSAL)
        results.append([o, *torch.autograd.grad(o, leaves, do)])
    for first, *others in zip(*results):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("channels", [1, 8, 40, 80, 255])
def test_heads_of_any_width(channels: int) -> None:
    q, k, v, do = torch.randn(4, 2, 100, 2, channels)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = fp8_attention(*leaves, band=CAUSAL)
    plain = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=True).transpose(1, 2)
    for ours, right in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(plain, leaves, do)):
        assert (ours - right).norm() < 0.12 * right.norm()


def test_one_tensor_for_all_three() -> None:
    x = torch.randn(2, 50, 2, 64, requires_grad=True)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    for leaves in ([x] * 3, parts):
        fp8_attention(*leaves).square().sum().backward()
    torch.testing.assert_close(x.grad, sum(part.grad for part in parts))


def test_only_gradients_that_are_asked_for_are_given() -> None:
    (q, k, v, do), _ = given("bshd", False)
    q.requires_grad_()
    o = fp8_attention(q, k, v)
    o.backward(do)
    assert q.grad is not None
    assert k.grad is None


def test_without_a_kernel_a_card_runs_the_specification_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v, do), _ = given("bshd", False)
    call = AttentionCall(Attention("bshd", CAUSAL))
    monkeypatch.setattr(cuda, "architecture_of", lambda device: "100")
    clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [cuda.attention_forward_on_cuda(q, k, v, call) for _ in range(2)]
        gradients = cuda.attention_backward_on_cuda(do, *found[0], k.shape[1], call)
    clear_plan_cache()
    (message,) = (str(each.message) for each in caught)
    assert f"FP8 attention has no kernel for heads of {q.shape[-1]} channels on cpu (sm_100)" in message
    assert "only for 64, 96, 128, 256 channels on sm_90a, sm_89, sm_120; fp8_dpa=False" in message
    assert "Plain torch operations are used instead" in message
    o, kept = attention_forward(q, k, v, call)
    expected = attention_backward(do, o, kept, k.shape[1], call)
    for ours, right in zip((*found[0][1], *gradients), (*kept, *expected)):
        assert torch.equal(ours, right)


def test_second_derivatives_are_refused_with_the_way_out() -> None:
    q = torch.randn(1, 20, 2, 32, requires_grad=True)
    o = fp8_attention(q, q, q)
    with pytest.raises(RuntimeError, match=r"no second derivatives.*create_graph=True.*fp8_autocast\(enabled=False\)"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_transforms_and_vmap_are_refused_with_the_way_out() -> None:
    q = torch.randn(3, 1, 20, 2, 32)
    with pytest.raises(RuntimeError, match=r"^Attention does not run in FP8 under torch.func.*one at a time"):
        torch.vmap(lambda x: fp8_attention(x, x, x))(q)
    call = AttentionCall(Attention("bshd"))
    with pytest.raises(RuntimeError, match="FP8 ops do not run under vmap"):
        torch.vmap(lambda x: attention_forward(x, x, x, call)[0])(q)
    leaf = q[0].clone().requires_grad_()
    o = fp8_attention(leaf, leaf, leaf)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.*one at a time"):
        torch.autograd.grad(o, leaf, torch.randn(2, *o.shape), is_grads_batched=True)


X = torch.randn(2, 5, 4, 32)


@pytest.mark.parametrize(
    ("q", "k", "v", "others", "error", "message"),
    [
        (X, X, X, {"qkv_format": "bhsd"}, ValueError, "qkv_format='bhsd' is unknown; use one of sbhd, bshd, thd"),
        (X, X[..., :16], X[..., :16], {}, ValueError, "queries have 32 channels and keys 16; both must have as many"),
        (X, X[:, :, :3], X[:, :, :3], {}, ValueError, "4 query heads cannot share 3 heads of keys and values evenly"),
        (X, X.bfloat16(), X, {}, TypeError, "q, k and v are torch.float32, torch.bfloat16 and torch.float32"),
        (X, X.to("meta"), X, {}, ValueError, "q, k and v are on cpu, meta and cpu; move them to one device"),
    ],
)
def test_a_wrong_call_says_what_would_do(
    q: Tensor, k: Tensor, v: Tensor, others: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fp8_attention(q, k, v, **others)


@pytest.mark.parametrize("qkv_format", ["bhsd", "bshd left=3", ""])
def test_an_op_refuses_an_unknown_format(qkv_format: str) -> None:
    with pytest.raises(ValueError, match=f"qkv_format={qkv_format!r} is unknown; use one of sbhd, bshd, thd"):
        attention_forward(X, X, X, AttentionCall(Attention(qkv_format)))


@pytest.mark.parametrize("band", [(-1, None), (None, -2)])
def test_an_op_refuses_a_negative_limit(band: tuple[int | None, int | None]) -> None:
    op = torch.ops.lightning_fp8.attention_forward
    with pytest.raises(ValueError, match="=-[12] is negative; pass None for no limit"):
        op(X, X, X, "bshd", *band, False, True, None)


def test_lengths_of_queries_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="come together; pass both or neither"):
        attention_forward(X, X, X, AttentionCall(Attention("bshd"), None, cu_seqlens([5, 5])))


def test_a_gradient_of_another_shape_is_refused() -> None:
    call = AttentionCall(Attention("bshd"))
    o, kept = attention_forward(X, X, X, call)
    with pytest.raises(ValueError, match=r"o has shape \(2, 5, 4, 32\) and its gradient \(2, 4, 4, 32\)"):
        attention_backward(X[:, :4], o, kept, 5, call)


ATTENTIONS = [
    Attention("bshd"),
    Attention("sbhd", Band(left=3, right=0, bottom_right=True), centered=False),
    Attention("thd", Band(right=7), longest_query=256),
]


def leading_rows_first(x: Tensor, attention: Attention) -> tuple[Tensor, int]:
    """``bshd`` in the format of ``attention``, contiguous, and its rows."""
    if attention.qkv_format == "thd":
        x = x.flatten(0, 1)
    elif attention.qkv_format == "sbhd":
        x = x.transpose(0, 1).contiguous()
    return x, rows_of(x, attention.qkv_format)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=["bshd", "sbhd", "thd"])
def test_options_are_the_arguments_of_the_dispatchers_ops(attention: Attention) -> None:
    call = AttentionCall(attention, 0.25, cu_seqlens([5, 5]), cu_seqlens([5, 5]))
    assert Attention.from_flat(*attention.flat) == attention
    assert AttentionCall.from_flat(*call.flat) == call
    assert AttentionCall.from_flat(*attention.flat) == AttentionCall(attention)
    x, rows = leading_rows_first(X, attention)
    o, kept = attention_forward(x, x, x, call)
    flat = torch.ops.lightning_fp8.attention_forward(x, x, x, *call.flat)
    gradients = attention_backward(x, o, kept, rows, call)
    of_flat = torch.ops.lightning_fp8.attention_backward(x, *flat, rows, *call.flat)
    for one, other in zip((o, *kept, *gradients), (*flat, *of_flat), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=["bshd", "sbhd", "thd"])
def test_the_dispatchers_ops_are_well_defined(attention: Attention) -> None:
    checks = "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic"  # torch compares no FP8 inputs
    call = AttentionCall(attention, None, cu_seqlens([5, 5]), cu_seqlens([5, 5]))
    x, rows = leading_rows_first(X, attention)
    op = torch.ops.lightning_fp8.attention_forward
    torch.library.opcheck(op.default, (x, x.clone(), x.clone(), *call.flat), test_utils=checks)
    arguments = x, *op(x, x, x, *call.flat), rows, *call.flat
    torch.library.opcheck(torch.ops.lightning_fp8.attention_backward.default, arguments, test_utils=checks)


def test_the_dispatcher_is_asked_where_any_tensor_is_not_plain() -> None:
    """Those within a call, too."""
    asked: list[Any] = []

    class Noted(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    op, starts = torch.ops.lightning_fp8.attention_forward.default, cu_seqlens([5, 3])
    with torch.no_grad():
        right, _ = attention_forward(X, X, X, AttentionCall(Attention("bshd"), None, starts, starts))
        noted = starts.as_subclass(Noted)
        o, kept = attention_forward(X, X, X, AttentionCall(Attention("bshd"), None, noted, noted))
    assert op in asked
    assert torch.equal(o.as_subclass(Tensor), right)
    assert type(kept) is Kept
