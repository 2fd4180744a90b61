"""Attention on a GPU: the emulated cases, the ops against their specification on the CPU, and training of modules."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Exam, Inputs, inputs
from benchmarks.contenders.attention_problems import Problem as Measured
from cuda_kernels.host.launch import architecture_of
from lightning_fp8 import DotProductAttention, fp8_autocast
from lightning_fp8.attention.ops import (
    Attention,
    AttentionCall,
    Band,
    attention_backward,
    attention_forward,
    missing_kernel,
)
from lightning_fp8.ops import plans
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.kernel_cases import BF16, FP16, FP32
from tests.cuda_kernels.run_case import ATTENTION, fits
from tests.tiers import every_row

pytestmark = every_row

CARD = torch.device("cuda", 0)
CASES = [case for module in ATTENTION for case in module.CASES]
CAUSAL, WINDOW = Band(right=0), Band(left=100, right=30, bottom_right=True)
NEAR = 2e-2
"""Relative (Frobenius): float32's last bits and the tensor cores' sums of about 14 bits change some FP8 codes."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    if not fits(case.name, architecture_of(CARD)):
        pytest.skip("for other GPUs")
    case.run("cuda")


# --- The ops ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A call of both ops.

    Attributes:
        queries, keys: rows of each sequence; in a padded batch each sequence has the memory of the longest one.
        heads: of queries, and of keys.
        own: the sequences of a padded batch have their own lengths, which are passed as ``cu_seqlens``.
    """

    head_dim: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    qkv_format: str = "bshd"
    heads: tuple[int, int] = (2, 2)
    band: Band | None = None
    dtype: torch.dtype = BF16
    own: bool = False

    def drawn(self, lengths: tuple[int, ...], heads: int, seed: int) -> Tensor:
        batch, rows = len(lengths), max(lengths)
        shape = {"bshd": (batch, rows), "sbhd": (rows, batch), "thd": (sum(lengths),)}[self.qkv_format]
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, heads, self.head_dim, generator=generator).to(self.dtype)

    def outcome(self, device: torch.device | str) -> dict[str, Tensor]:
        """The output and the gradients, copied to the CPU."""
        of_queries, of_keys = self.heads
        q, do = (self.drawn(self.queries, of_queries, seed).to(device) for seed in (0, 3))
        k, v = (self.drawn(self.keys, of_keys, seed).to(device) for seed in (1, 2))
        starts: tuple[Tensor | None, ...] = (None, None)
        if self.own or self.qkv_format == "thd":
            starts = tuple(
                torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
                for each in (self.queries, self.keys)
            )
        call = AttentionCall(Attention(self.qkv_format, self.band or Band()), None, *starts)
        o, kept = attention_forward(q, k, v, call)
        gradients = attention_backward(do, o, kept, k.shape[1 if self.qkv_format == "bshd" else 0], call)
        return {name: x.cpu() for name, x in zip(("o", "dq", "dk", "dv"), (o, *gradients))}


PROBLEMS = [
    Problem(64, (200, 200), (200, 200), "bshd", (4, 2), CAUSAL),
    Problem(64, (1500,), (700,), "sbhd", (4, 1), WINDOW, FP16),
    Problem(64, (130, 0, 257), (1, 90, 257), "thd", (2, 2), CAUSAL),
    Problem(96, (300, 300), (130, 130), "sbhd", (2, 1), None, FP32),
    Problem(96, (70, 200), (200, 70), "bshd", (2, 2), CAUSAL, own=True),
    Problem(96, (1, 140), (260, 3), "thd", (4, 2), WINDOW),
    Problem(128, (128,), (128,)),
    Problem(128, (1, 129), (1, 129), "sbhd", (2, 2), CAUSAL, own=True),
    Problem(128, (1200, 1200), (1200, 1200), "bshd", (8, 2), CAUSAL),
    Problem(128, (2300,), (2300,), "bshd", (2, 2), Band(left=500, right=0)),
    Problem(128, (333, 40, 128), (128, 333, 40), "thd", (4, 4), Band(right=0, bottom_right=True), FP16),
    Problem(128, (150, 256), (256, 31), "sbhd", (4, 1), WINDOW, FP32, own=True),
    Problem(256, (200,), (420,), "bshd", (4, 1), CAUSAL),
    Problem(256, (129, 64), (300, 5), "thd", (2, 2), WINDOW),
    Problem(256, (300,), (300,), "sbhd", (2, 1), None, FP16),
]


@contextmanager
def only_kernels(head_dim: int) -> Iterator[None]:
    """Makes fallbacks to the specification errors if the GPU has kernels for both passes."""
    plans.clear_plan_cache()
    with warnings.catch_warnings():
        if not missing_kernel(CARD, head_dim):
            warnings.filterwarnings("error", "An FP8 kernel|FP8 kernels", RuntimeWarning)
        yield


def poison() -> None:
    """Fills free memory with NaN, so that results show elements that are not written."""
    held = torch.full((1 << 24,), torch.nan, device=CARD)
    del held


def assert_near(actual: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, x in right.items():
        assert actual[name].dtype == x.dtype
        assert actual[name].shape == x.shape
        a, b = actual[name].double(), x.double()
        assert float((a - b).norm()) <= NEAR * float(b.norm()), name


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_ops_are_the_specification(problem: Problem) -> None:
    right = problem.outcome("cpu")
    poison()
    with only_kernels(problem.head_dim):
        assert_near(problem.outcome(CARD), right)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_are_the_same_bits_each_time(head_dim: int) -> None:
    """The results do not depend on the order of blocks. A race would show in some of the runs."""
    problem = Problem(head_dim, (2050,) * 4, (2050,) * 4, "bshd", (8, 2), CAUSAL)
    with only_kernels(head_dim):
        first = problem.outcome(CARD)
        for _ in range(10):
            poison()
            again = problem.outcome(CARD)
            assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_is_exact_attention(causal: bool) -> None:
    """Compared with float64: the sums of dK and dV leave the tensor cores several times, and 1,024 blocks run."""
    problem = Measured(2, 8192, 8, 128, sharing=4, causal=causal)
    q, k, v, do = given = inputs(problem, CARD)
    exam = Exam(problem, given)
    call = AttentionCall(Attention("bshd", CAUSAL if causal else Band()))
    with only_kernels(128):
        o, kept = attention_forward(q, k, v, call)
        gradients = attention_backward(do, o, kept, k.shape[1], call)
    assert exam.passes(FORWARD, (o,), fp8=True), exam.errors(FORWARD, (o,))
    assert exam.passes(BACKWARD, gradients, fp8=True), exam.errors(BACKWARD, gradients)


# --- Around the ops ---------------------------------------------------------------------------------------------------


def gradients_of_module(device: torch.device | str, given: Inputs) -> dict[str, Tensor]:
    module = DotProductAttention(num_attention_heads=4, kv_channels=128, num_gqa_groups=2, qkv_format="bshd")
    q, k, v = (x.detach().clone().to(device).requires_grad_() for x in given[:3])
    recipe: Any = {"name": "tensorwise", "fp8_dpa": True}
    with fp8_autocast(fp8_recipe=recipe):
        o = module(q, k, v)
    o.backward(given.do.to(device).flatten(2))
    return {"o": o.detach().cpu(), "dq": q.grad.cpu(), "dk": k.grad.cpu(), "dv": v.grad.cpu()}  # type: ignore[union-attr]


def test_a_module_trains_as_on_the_cpu() -> None:
    """The backward pass runs in an autograd thread."""
    given = inputs(Measured(2, 300, 4, 128, sharing=2), torch.device("cpu"))
    right = gradients_of_module("cpu", given)
    with only_kernels(128):
        assert_near(gradients_of_module(CARD, given), right)


def test_both_passes_in_a_graph() -> None:
    problem = Measured(1, 512, 4, 128, sharing=2, causal=True)
    fixed, call = inputs(problem, CARD), AttentionCall(Attention("bshd", CAUSAL))

    def both(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        o, kept = attention_forward(q, k, v, call)
        return o, *attention_backward(do, o, kept, k.shape[1], call)

    with only_kernels(128):
        both(*fixed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = both(*fixed)
        for x in fixed:
            x.copy_(x.flip(1))
        graph.replay()
        assert all(map(torch.equal, out, both(*fixed)))
