"""Attention's ops on a device that runs kernels, from a model's tensors to gradients, against those on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils import deterministic

from lightning_fp8.attention.ops import (
    Attention,
    AttentionCall,
    Band,
    Gradients,
    Kept,
    attention_tables,
)
from lightning_fp8.attention.ops.attention import reference_attention_backward, reference_attention_forward
from lightning_fp8.attention.ops.cuda import attention_backward_on_cuda, attention_forward_on_cuda
from lightning_fp8.ops.plans import clear_plan_cache
from tests.cuda_kernels.cases.attention_backward_cases import CODES_THAT_MOVE, error
from tests.cuda_kernels.cases.kernel_cases import Case, assert_same

ALL = Band()
BF16_ROUNDING = 2.0**-8


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """What no kernel writes is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]


def drawn(
    shape: tuple[int, ...], heads: int, channels: int, seed: int, *, mean: float = 0.0, device: str = "cpu"
) -> Tensor:
    """In BF16, channels side by side but rows not next to each other, as a slice of one projection is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 2 * heads, channels, generator=generator) + mean
    return x.bfloat16().to(device)[..., heads:, :]


@dataclass(frozen=True)
class Problem:
    """One call of both ops.

    Attributes:
        lengths: of queries and keys of each sequence.
        heads: of queries, and of keys.
        tail: rows of a padded batch, or behind the last sequence of ``thd``, that belong to no sequence.
        uniform: without ``cu_seqlens``.
        shared: tables are made before both ops, as layers share them.
    """

    qkv_format: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (1, 1)
    channels: int = 64
    band: Band = ALL
    tail: int = 0
    uniform: bool = False
    shared: bool = False

    def shape(self, which: int) -> tuple[int, ...]:
        """Of queries or of keys, but for heads and channels."""
        lengths = [each[which] for each in self.lengths]
        rows = (sum(lengths) if self.qkv_format == "thd" else max(lengths)) + self.tail
        return {"thd": (rows,), "bshd": (len(lengths), rows), "sbhd": (rows, len(lengths))}[self.qkv_format]

    def rows(self, which: int) -> int:
        """L of queries or of keys, or T."""
        return self.shape(which)[1 if self.qkv_format == "bshd" else 0]

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q, K, V and dO."""
        q, k, v, do = (
            drawn(self.shape(which), self.heads[which], self.channels, seed, mean=seed == 1, device=device)
            for seed, which in enumerate((0, 1, 1, 0))
        )
        return q, k, v, do

    def call(self, device: str) -> AttentionCall:
        config = Attention(self.qkv_format, self.band)
        if self.uniform:
            return AttentionCall(config)
        queries, keys = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
            for each in zip(*self.lengths)
        )
        tables = None
        if self.shared:
            tables = attention_tables(queries, keys, config, self.rows(0), self.rows(1), queries.device)
        return AttentionCall(config, None, queries, keys, tables)


def run_ops(problem: Problem, device: str) -> tuple[Tensor, Kept, Gradients]:
    """Both ops as ``device`` runs them, the second with what the first kept."""
    (q, k, v, do), call = problem.tensors(device), problem.call(device)
    clear_plan_cache()
    with nan_in_new_memory():
        o, kept = attention_forward_on_cuda(q, k, v, call)
        gradients = attention_backward_on_cuda(do, o, kept, problem.rows(1), call)
    clear_plan_cache()
    return o, kept, gradients


def check_ops(problem: Problem, device: str) -> None:
    """What the CPU gives, its second op also of what the first one kept on ``device``."""
    (q, k, v, do), call = problem.tensors("cpu"), problem.call("cpu")
    o, kept, gradients = run_ops(problem, device)
    o, kept = o.cpu(), Kept(*(each.cpu() for each in kept))
    right_o, right = reference_attention_forward(q, k, v, call)
    tolerance = BF16_ROUNDING + CODES_THAT_MOVE[torch.device(device).type]
    assert o.is_contiguous()
    assert error(o, right_o) <= tolerance
    for name in ("q8", "q_scale_inv", "v8", "v_scale_inv"):
        assert_same(getattr(kept, name), getattr(right, name), name)
    assert (kept.k8.view(torch.uint8) != right.k8.view(torch.uint8)).float().mean() < 1e-3, "sums in another order"
    torch.testing.assert_close(kept.k_scale_inv, right.k_scale_inv)
    moves = 1e-3 if device == "cpu" else 2e-2
    torch.testing.assert_close(kept.m, right.m, rtol=moves, atol=moves)
    torch.testing.assert_close(kept.l, right.l, rtol=20 * moves, atol=moves)

    expected = reference_attention_backward(do, o, kept, problem.rows(1), call)
    for name, actual, truth in zip(("dq", "dk", "dv"), gradients, expected):
        assert actual.is_contiguous()
        assert error(actual, truth) <= tolerance, name
    if problem.qkv_format == "thd":
        of_queries, of_keys = (sum(each) for each in zip(*problem.lengths))
        tails = o[of_queries:], gradients[0][of_queries:], gradients[1][of_keys:], gradients[2][of_keys:]
        assert not any(each.any() for each in tails)


PROBLEMS = {
    "bshd grouped bottom right": Problem(
        "bshd", ((100, 200),), heads=(2, 1), band=Band(right=0, bottom_right=True), uniform=True
    ),
    "sbhd window": Problem("sbhd", ((140, 20), (60, 130)), channels=128, band=Band(left=40, right=20), tail=2),
    "thd": Problem(
        "thd", ((1, 60), (130, 3), (0, 5), (40, 129)), heads=(2, 2), band=Band(right=0), tail=140, shared=True
    ),
}
CASES = [Case(f"attention_ops-{name}", partial(check_ops, problem)) for name, problem in PROBLEMS.items()]
KERNELS = [
    "quantize_heads", "sum_heads", "mean_heads", "quantize_heads", "quantize_heads", "attention_forward",
    "transpose_heads", "transpose_heads", "quantize_heads", "attention_delta", "attention_dq", "attention_dkv",
]  # fmt: skip
"""What both ops start, in this order."""
