"""Attention's ops on a device with kernels, from q, k, v to gradients, compared with the specification on the CPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp8.attention.ops import Attention, AttentionCall, Band, Gradients, Kept, attention_tables
from lightning_fp8.attention.ops.attention import reference_attention_backward, reference_attention_forward
from lightning_fp8.attention.ops.codes import (
    QueriesKept,
    reference_attention_cast,
    reference_attention_forward_of_codes,
)
from lightning_fp8.attention.ops.cuda import (
    attention_backward_on_cuda,
    attention_cast_on_cuda,
    attention_forward_of_codes_on_cuda,
    attention_forward_on_cuda,
)
from lightning_fp8.proofs.comparing import assert_same, assert_within, nan_in_new_memory, relative_error, require
from lightning_fp8.proofs.drawing import repeated

ALL = Band()
CODES_THAT_MOVE = {"cpu": 2.0**-11, "cuda": 2.0**-7}
"""Relative error from codes that differ by float32's last bits; on a GPU also from sums of about 14 bits."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}


MOST_HEADS = 3
"""Heads that are drawn. Those of larger tensors repeat them, so that the specification computes these only."""


def drawn(
    shape: tuple[int, ...], heads: int, channels: int, seed: int, *, mean: float = 0.0, device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16, shifted: int = 0, most_heads: int = MOST_HEADS,
) -> Tensor:  # fmt: skip
    """Random ``[*shape, heads, channels]`` with contiguous channels and strided rows, as a slice of one projection.

    ``shifted``: elements before the first one, so that no vector is aligned. More heads than ``most_heads`` repeat
    these.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, most_heads if heads > most_heads else 2 * heads, channels, generator=generator) + mean
    x = repeated(x, 2 * heads, -2)
    memory = torch.empty(x.numel() + shifted, dtype=dtype, device=device)
    return memory[shifted:].view(x.shape).copy_(x)[..., heads:, :]


@dataclass(frozen=True)
class Problem:
    """One call of the ops.

    Attributes:
        lengths: the numbers of queries and of keys in each sequence.
        heads: the number of query heads, and of key heads.
        tail: padding rows of a padded batch, or after the last sequence of ``thd``.
        uniform: without ``cu_seqlens``.
        shared: tables are computed before both ops, as when layers share them.
        centered: subtract a mean from keys before the cast.
        dtype: the dtype of q, k, v and the gradient.
        shifted: an argument of :func:`drawn` for each of q, k, v and the gradient.
        scale: the factor of the scores; None is ``1 / sqrt(channels)``.
        magnitude: a factor of q and the gradient, as of a scaled loss; k is divided by it.
        longest_query: upper bound of the query sequences' lengths, if given.
        most_heads: an argument of :func:`drawn`. It must not divide the number of heads of a section: if it did,
            equal places of two sections would hold the same operands.
    """

    qkv_format: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (1, 1)
    channels: int = 64
    band: Band = ALL
    tail: int = 0
    uniform: bool = False
    shared: bool = False
    centered: bool = True
    dtype: torch.dtype = torch.bfloat16
    shifted: tuple[int, int, int, int] = (0, 0, 0, 0)
    scale: float | None = None
    magnitude: float = 1.0
    longest_query: int | None = None
    most_heads: int = MOST_HEADS

    @property
    def distinct_heads(self) -> int:
        """The number of query heads after which heads repeat; all of them if they share heads of keys."""
        heads, key_heads = self.heads
        return min(heads, self.most_heads) if heads == key_heads else heads

    def shape(self, which: int) -> tuple[int, ...]:
        """Shape of queries (0) or keys (1), without heads and channels."""
        lengths = [each[which] for each in self.lengths]
        rows = (sum(lengths) if self.qkv_format == "thd" else max(lengths)) + self.tail
        return {"thd": (rows,), "bshd": (len(lengths), rows), "sbhd": (rows, len(lengths))}[self.qkv_format]

    def rows(self, which: int) -> int:
        """L of queries (0) or keys (1), or T."""
        return self.shape(which)[1 if self.qkv_format == "bshd" else 0]

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q, K, V and dO."""
        q, k, v, do = (
            drawn(
                self.shape(which), self.heads[which], self.channels, seed, mean=seed == 1, device=device,
                dtype=self.dtype, shifted=self.shifted[seed], most_heads=self.most_heads,
            )
            for seed, which in enumerate((0, 1, 1, 0))
        )  # fmt: skip
        return q.mul_(self.magnitude), k.div_(self.magnitude), v, do.mul_(self.magnitude)

    def call(self, device: str) -> AttentionCall:
        config = Attention(self.qkv_format, self.band, self.centered, self.longest_query)
        if self.uniform:
            return AttentionCall(config, self.scale)
        queries, keys = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
            for each in zip(*self.lengths)
        )
        tables = None
        if self.shared:
            tables = attention_tables(queries, keys, config, self.rows(0), self.rows(1), queries.device)
        return AttentionCall(config, self.scale, queries, keys, tables)

    def tolerance(self, device: str) -> float:
        """The largest relative error allowed."""
        return ROUNDING[self.dtype] + CODES_THAT_MOVE[torch.device(device).type]


def check_forward(problem: Problem, device: str) -> tuple[Tensor, Kept]:
    """Compare the forward op with the CPU; returns the results from ``device``, on the CPU."""
    (q, k, v, _), call = problem.tensors("cpu"), problem.call("cpu")
    on = problem.tensors(device)[:3]
    with nan_in_new_memory():
        o, kept = attention_forward_on_cuda(*on, problem.call(device))
    o, kept = o.cpu(), Kept(*(each.cpu() for each in kept))
    right_o, right = _right_forward(problem, q, k, v, call)
    require(o.is_contiguous(), "o is not contiguous")
    _require_near("o", o, right_o, problem.tolerance(device))
    for name in ("q8", "q_scale_inv", "v8", "v_scale_inv"):
        assert_same(getattr(kept, name), getattr(right, name), name)
    moved = (kept.k8.view(torch.uint8) != right.k8.view(torch.uint8)).float().mean().item()
    require(moved < 1e-3, f"k8: {moved:.1%} of the codes differ, more than sums in another order explain")
    assert_within(kept.k_scale_inv, right.k_scale_inv, 1.3e-6, 1e-5, "k_scale_inv")
    _require_statistics(kept.m, kept.l, right.m, right.l, device)
    if problem.qkv_format == "thd":
        require(not o[sum(each for each, _ in problem.lengths) :].any(), "o is not 0 after the last sequence")
    return o, kept


def check_backward(problem: Problem, device: str, forward: tuple[Tensor, Kept] | None = None) -> None:
    """Compare the backward op with the CPU, given the results ``forward``, or else the CPU's."""
    (q, k, v, do), call = problem.tensors("cpu"), problem.call("cpu")
    o, kept = forward or _right_forward(problem, q, k, v, call)
    do_on, rows = problem.tensors(device)[3], problem.rows(1)
    with nan_in_new_memory():
        gradients = attention_backward_on_cuda(
            do_on, o.to(device), Kept(*(each.to(device) for each in kept)), rows, problem.call(device)
        )
    few, heads = problem.distinct_heads, problem.heads
    of_few = Kept(*(each[:few] for each in kept)) if few < heads[0] else kept
    expected: Gradients = reference_attention_backward(do[..., :few, :], o[..., :few, :], of_few, rows, call)
    for name, which, actual, truth in zip(("dq", "dk", "dv"), (0, 1, 1), gradients, expected):
        require(actual.is_contiguous(), f"{name} is not contiguous")
        _require_near(name, actual.cpu(), repeated(truth, heads[which], -2), problem.tolerance(device))
        if problem.qkv_format == "thd":
            tail = actual[sum(each[which] for each in problem.lengths) :]
            require(not tail.any(), f"{name} is not 0 after the last sequence")


def check_cast(x: Tensor, device: str) -> None:
    """Compare the cast of keys or values ``[B, L, H, D]`` to codes; they are :func:`drawn`."""
    few = reference_attention_cast(x[..., :MOST_HEADS, :])
    for name, actual, expected in zip(("codes", "scale_inv"), attention_cast_on_cuda(x.to(device)), few):
        assert_same(actual, repeated(expected, x.shape[-2], 0), name)


def check_forward_of_codes(problem: Problem, device: str) -> None:
    """Compare the forward op over codes of keys and values."""
    (q, k, v, _), call, rows = problem.tensors("cpu"), problem.call("cpu"), problem.rows(1)
    few, (heads, key_heads) = problem.distinct_heads, problem.heads
    k, v = (x[..., : min(few, key_heads), :] for x in (k, v))
    codes = *reference_attention_cast(k), *reference_attention_cast(v)
    k8, k_scale_inv, v8, v_scale_inv = (repeated(each, key_heads, 0).to(device) for each in codes)
    on = k8, k_scale_inv, v8, v_scale_inv
    with nan_in_new_memory():
        o, kept = attention_forward_of_codes_on_cuda(problem.tensors(device)[0], *on, rows, problem.call(device))
    right_o, of_few = reference_attention_forward_of_codes(q[..., :few, :], *codes, rows, call)
    right_o, right = repeated(right_o, heads, -2), QueriesKept(*(repeated(each, heads, 0) for each in of_few))
    _require_near("o", o.cpu(), right_o, problem.tolerance(device))
    _require_statistics(kept.m, kept.l, right.m, right.l, device)
    assert_same(kept.q8, right.q8, "q8")
    assert_same(kept.q_scale_inv, right.q_scale_inv, "q_scale_inv")


def _right_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """The specification's results of the forward op."""
    few, heads = problem.distinct_heads, problem.heads[0]
    if few == heads:
        return reference_attention_forward(q, k, v, call)
    o, kept = reference_attention_forward(q[..., :few, :], k[..., :few, :], v[..., :few, :], call)
    return repeated(o, heads, -2), Kept(*(repeated(each, heads, 0) for each in kept))


def _require_statistics(m: Tensor, l: Tensor, right_m: Tensor, right_l: Tensor, device: str) -> None:  # noqa: E741
    """Compare the maxima, and the base-2 logarithms of the sums of exponentials."""
    moves = 1e-3 if device == "cpu" else 2e-2
    assert_within(m, right_m, moves, moves, "m")
    assert_within(m.cpu() + l.cpu().log2(), right_m + right_l.log2(), moves, 2 * moves, "m + log2 l")


def _require_near(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare the whole tensor, and each row of each head, with tolerance for rows of small norm."""
    off = relative_error(actual, expected)
    require(off <= tolerance, f"{what} has an error of {off:.2%}, but rounding explains only {tolerance:.2%}")
    rows, right = actual.double(), expected.double()
    sizes = right.norm(dim=-1)
    wrong = (rows - right).norm(dim=-1) > sizes / 4 + sizes.square().mean().sqrt() / 20
    require(
        not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} rows have larger errors than rounding explains"
    )
