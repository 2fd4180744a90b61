"""What attention's backward kernels are tested with: masks, lengths and shared heads, against the reference.

A case runs on the CPU, where kernels are emulated, and on a card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_kernels.attention.dkv import FLUSH
from cuda_kernels.attention.spec import ORDER_A, ROWS, AttentionSpec
from cuda_kernels.host.attention import PackedCodes, Visible
from cuda_kernels.host.attention_backward import BackwardLaunch
from cuda_kernels.host.attention_tiles import PackedRows, padded_rows
from lightning_fp8.ops.attention import Band, Codes, Lengths, backward, cast, forward
from tests.kernel_cases import Case

TOLERANCES = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-10}
"""Of gradients, by Frobenius' norm: their rounding, and codes that the last bit of a sum or an exponential moves."""

ALL, CAUSAL = Band(), Band(right=0)


@dataclass(frozen=True)
class Problem:
    """One call of attention.

    Attributes:
        queries, keys: rows of each sequence of a padded batch.
        heads, sharing: of queries, and how many of them share a head of keys.
        flush: see :data:`cuda_kernels.attention.dkv.FLUSH`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 1
    sharing: int = 1
    head_dim: int = 128
    band: Band = ALL
    out: str = "float32"
    flush: int = FLUSH

    @property
    def lengths(self) -> Lengths:
        return Lengths(torch.tensor(self.queries), torch.tensor(self.keys))


@dataclass(frozen=True)
class Tensors:
    """What the backward pass gets, and what it must give.

    Attributes:
        operands: dO, Q, K, V.
        right: dQ, dK, dV in float32.
    """

    problem: Problem
    operands: tuple[Codes, Codes, Codes, Codes]
    o: Tensor
    m: Tensor
    l: Tensor  # noqa: E741
    right: tuple[Tensor, ...]


def tensors(problem: Problem, offset: float = 0.0) -> Tensors:
    """Normal numbers; ``offset`` is added to dO and V, so that sums have a sign."""
    generator = torch.Generator().manual_seed(sum(problem.queries) + problem.head_dim)
    lengths = problem.lengths

    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(len(problem.queries), heads, length, problem.head_dim, generator=generator)

    shared, queries, keys = problem.heads // problem.sharing, max(problem.queries), max(problem.keys)
    q, k, v = (
        cast(drawn(problem.heads, queries), False, lengths.queries),
        cast(drawn(shared, keys), True, lengths.keys),
        cast(drawn(shared, keys) + offset, False, lengths.keys),
    )
    do = cast(drawn(problem.heads, queries) + offset, False, lengths.queries)
    return with_results(problem, (do, q, k, v))


def with_results(problem: Problem, operands: tuple[Codes, Codes, Codes, Codes]) -> Tensors:
    do, q, k, v = operands
    scale, lengths = problem.head_dim**-0.5, problem.lengths
    o, m, l = forward(q, k, v, scale, problem.band, lengths)  # noqa: E741
    right = backward(do, q, k, v, o, m, l, scale, problem.band, lengths, torch.float32)
    return Tensors(problem, operands, o, m, l, right)


def packed(codes: Codes, rows: PackedRows, device: str) -> PackedCodes:
    """As kernels take them; in the gaps lie codes 0 and scales 1."""
    _, heads, length, channels = codes.data.shape
    data = torch.zeros(heads, rows.total, channels, dtype=torch.uint8)
    scales = torch.ones(heads, rows.total // ROWS)
    for sequence, start in enumerate(rows.starts.tolist()):
        data[:, start : start + length] = codes.data[sequence].view(torch.uint8)
        scales[:, start // ROWS :][:, : codes.scale_inv.shape[2]] = codes.scale_inv[sequence]
    order = (torch.arange(0, rows.total, 16)[:, None] + torch.tensor(ORDER_A)).flatten()
    return PackedCodes(data.to(device), data[:, order].mT.contiguous().to(device), scales.to(device))


def packed_statistic(x: Tensor, rows: PackedRows, gap: float, device: str) -> Tensor:
    """``[B, H, L]`` to ``[H, R]``."""
    out = torch.full((x.shape[1], rows.total), gap)
    for sequence, start in enumerate(rows.starts.tolist()):
        out[:, start : start + x.shape[2]] = x[sequence]
    return out.to(device)


def rows_of(problem: Problem) -> tuple[PackedRows, PackedRows]:
    """Of queries and of keys."""
    queries, keys = (padded_rows(len(each), max(each), torch.tensor(each)) for each in (problem.queries, problem.keys))
    return queries, keys


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of ``[B, H, L, D]``: sequences, rows, heads."""
    return x.stride(0), x.stride(2), x.stride(1)


def run(given: Tensors, device: str) -> tuple[Tensor, ...]:
    """dQ, dK, dV as kernels compute them, ``[B, H, L, D]``, heads side by side in memory."""
    problem = given.problem
    queries, keys = rows_of(problem)

    def side_by_side(x: Tensor, dtype: torch.dtype) -> Tensor:
        batch, heads, length, width = x.shape
        return torch.full((batch, length, heads, width), torch.nan, dtype=dtype, device=device).transpose(1, 2)

    o = side_by_side(given.o, torch.bfloat16).copy_(given.o)
    dq, dk, dv = (side_by_side(each, getattr(torch, problem.out)) for each in given.right)
    launch = BackwardLaunch(
        AttentionSpec(problem.head_dim, problem.out),
        (problem.heads, problem.heads // problem.sharing),
        queries, keys, Visible(problem.band.left, problem.band.right, problem.band.bottom_right),
        problem.head_dim**-0.5, strides(dq), strides(dk), torch.device(device), problem.flush,
    )  # fmt: skip
    do, q, k, v = (packed(x, rows, device) for x, rows in zip(given.operands, (queries, queries, keys, keys)))
    m = packed_statistic(given.m, queries, -torch.inf, device)
    l = packed_statistic(given.l, queries, 0.0, device)  # noqa: E741
    launch.start(do, q, k, v, o, m, l, dq, dk, dv)
    return dq, dk, dv


def error(actual: Tensor, right: Tensor) -> float:
    difference = (actual.cpu().double() - right.double()).norm()
    return float(difference / right.double().norm().clamp(min=1e-30))


def check(problem: Problem, device: str) -> None:
    given = tensors(problem)
    for name, actual, right in zip(("dq", "dk", "dv"), run(given, device), given.right):
        assert actual.dtype == getattr(torch, problem.out)
        assert error(actual, right) < TOLERANCES[problem.out], f"{name}: {error(actual, right)}"


PROBLEMS = {
    "causal": Problem((256,), (256,), band=CAUSAL, out="bfloat16"),
    "ragged-causal-shared": Problem((200,), (200,), heads=4, sharing=2, band=CAUSAL, out="bfloat16"),
    "empty": Problem((0, 70, 50), (60, 0, 130), band=CAUSAL, out="bfloat16"),
    "window-padded-shared": Problem(
        (200, 130), (300, 90), heads=2, sharing=2, head_dim=64, band=Band(left=40, right=20, bottom_right=True)
    ),
    "cross-flushed": Problem((300,), (130,), heads=2, sharing=2, head_dim=96, out="float16", flush=128),
}
CASES = [
    Case(f"attention_backward-{name}", lambda device, problem=problem: check(problem, device))  # type: ignore[misc]
    for name, problem in PROBLEMS.items()
]
