"""What the kernels of attention's backward pass are tested with: masks, lengths and shared heads, against the reference.

A case runs on the CPU, where kernels are emulated, and on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.attention.delta import attention_delta_kernel
from cuda_kernels.attention.dkv import FLUSH, QUERIES, attention_dkv_kernel, scratch_floats
from cuda_kernels.attention.dq import attention_dq_kernel
from cuda_kernels.attention.spec import ORDER_A, ROWS, AttentionSpec
from cuda_kernels.attention.statistics import CORRECTED, DELTA, GRADIENT_SCALE, QUERY_SCALE, STATISTICS, TOTAL
from cuda_kernels.host.attention_tiles import PackedRows, limits, padded_rows, tile_table
from cuda_kernels.host.launch import Launch, address_on
from cuda_kernels.host.tensor_maps import Box, map_on
from lightning_fp8.ops.attention import Band, Codes, Lengths, backward, cast, forward
from lightning_fp8.ops.attention.tiles import LOG2_E
from tests.kernel_cases import Case


@dataclass(frozen=True)
class Problem:
    """One call of attention.

    Attributes:
        heads, sharing: query heads, and how many of them share a head of keys.
        queries, keys: rows of each sequence, as many sequences as numbers.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 1
    sharing: int = 1
    head_dim: int = 128
    band: Band = Band()
    out: str = "float32"
    flush: int = FLUSH
    seed: int = 0


@dataclass(frozen=True)
class Packed:
    """An operand as kernels take it, on a device: see :mod:`cuda_kernels.attention.spec`."""

    codes: Tensor
    transposed: Tensor
    scale_inv: Tensor


def packed(codes: Codes, rows: PackedRows, device: str) -> Packed:
    """Of a padded batch; what lies in the gaps are codes 0 and scales 1."""
    batch, heads, length, channels = codes.data.shape
    data = torch.zeros(heads, rows.total, channels, dtype=torch.uint8)
    scales = torch.ones(heads, rows.total // ROWS)
    for sequence, start in enumerate(rows.starts.tolist()):
        data[:, start : start + length] = codes.data[sequence].view(torch.uint8)
        blocks = codes.scale_inv.shape[2]
        scales[:, start // ROWS : start // ROWS + blocks] = codes.scale_inv[sequence]
    order = (torch.arange(0, rows.total, 16)[:, None] + torch.tensor(ORDER_A)).flatten()
    return Packed(data.to(device), data[:, order].mT.contiguous().to(device), scales.to(device))


def by_row(x: Tensor, rows: PackedRows, gap: float) -> Tensor:
    """``[B, H, L]`` to ``[H, R]``."""
    out = torch.full((x.shape[1], rows.total), gap)
    for sequence, start in enumerate(rows.starts.tolist()):
        out[:, start : start + x.shape[2]] = x[sequence]
    return out


class Backward:
    """A problem, what the reference makes of it, and the kernels' launches on ``device``."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, torch.device(device)
        generator = torch.Generator().manual_seed(problem.seed)
        batch, width, shared = len(problem.queries), problem.head_dim, problem.heads // problem.sharing

        def drawn(heads: int, length: int) -> Tensor:
            return torch.randn(batch, heads, length, width, generator=generator)

        lengths = Lengths(torch.tensor(problem.queries), torch.tensor(problem.keys))
        q, do = drawn(problem.heads, max(problem.queries)), drawn(problem.heads, max(problem.queries))
        k, v = drawn(shared, max(problem.keys)), drawn(shared, max(problem.keys))
        self.operands = cast(q, False, lengths.queries), cast(k, True, lengths.keys), cast(v, False, lengths.keys)
        self.gradient = cast(do, False, lengths.queries)
        self.scale = width**-0.5
        self.o, self.m, self.l = forward(*self.operands, self.scale, problem.band, lengths)
        self.right = backward(
            self.gradient, *self.operands, self.o, self.m, self.l, self.scale, problem.band, lengths, torch.float32
        )
        self.rows = padded_rows(batch, q.shape[2], lengths.queries)
        self.others = padded_rows(batch, k.shape[2], lengths.keys)
        self.q, self.do = packed(self.operands[0], self.rows, device), packed(self.gradient, self.rows, device)
        self.k, self.v = (packed(each, self.others, device) for each in self.operands[1:])
        self.statistics = torch.full((problem.heads, STATISTICS, self.rows.total), torch.nan, device=device)
        self.address = address_on(self.device)

    def table(self, tile: int = ROWS) -> Tensor:
        band = self.problem.band
        if tile == ROWS:
            found = tile_table(self.rows, self.others, band.left, band.right, band.bottom_right)
        else:
            found = tile_table(self.others, self.rows, band.right, band.left, band.bottom_right, tile)
        return found.to(self.device)

    def codes(self, x: Packed) -> Any:
        """The argument for row copies."""
        return map_on(self.device, Box(ROWS, 128))(x.codes.flatten(0, 1))

    def transposed(self, x: Packed) -> Any:
        return map_on(self.device, Box(self.problem.head_dim, 128))(x.transposed.flatten(0, 1))

    def empty_like(self, x: Tensor) -> Tensor:
        """As ``[B, H, L, D]``, but with heads beside each other as a model has them; nothing is 0."""
        batch, heads, length, width = x.shape
        out = torch.full((batch, length, heads, width), torch.nan, dtype=getattr(torch, self.problem.out))
        return out.to(self.device).transpose(1, 2)

    def delta(self) -> None:
        heads, table = self.problem.heads, self.table()
        o, m, l = self.o, by_row(self.m, self.rows, -torch.inf), by_row(self.l, self.rows, 0.0)  # noqa: E741
        launch = Launch(
            attention_delta_kernel(self.problem.head_dim),
            len(table) * heads,
            (heads, self.rows.total, *strides(o)),
            self.device,
        )
        tensors = table, self.do.codes, self.do.scale_inv, self.q.scale_inv, o, m, l, self.statistics
        launch.start(*(self.address(each.to(self.device)) for each in tensors))

    def scalars(self, heads: int, left: int | None, right: int | None, out: Tensor) -> tuple[int | float, ...]:
        numbers = heads, self.problem.sharing, self.rows.total, self.others.total, *limits(left, right)
        return (*numbers, self.scale * LOG2_E, self.scale, *strides(out))

    def dq(self) -> Tensor:
        problem, table = self.problem, self.table()
        out = self.empty_like(self.right[0])
        kernel = attention_dq_kernel(AttentionSpec(problem.head_dim, problem.out))
        scalars = self.scalars(problem.heads, problem.band.left, problem.band.right, out)
        maps = (*(self.codes(each) for each in (self.q, self.do, self.k, self.v)), self.transposed(self.k))
        tensors = table, self.k.scale_inv, self.v.scale_inv, self.statistics, out
        Launch(kernel, len(table) * problem.heads, scalars, self.device).start(*maps, *map(self.address, tensors))
        return out

    def dkv(self) -> tuple[Tensor, Tensor]:
        problem, table = self.problem, self.table(QUERIES)
        dk, dv = self.empty_like(self.right[1]), self.empty_like(self.right[2])
        spec, heads = AttentionSpec(problem.head_dim, problem.out), problem.heads // problem.sharing
        kernel = attention_dkv_kernel(spec, problem.flush)
        scalars = self.scalars(heads, problem.band.right, problem.band.left, dk)
        maps = (
            *(self.codes(each) for each in (self.k, self.v, self.q, self.do)),
            *(self.transposed(each) for each in (self.q, self.do)),
            map_on(self.device, Box(STATISTICS - CORRECTED, ROWS, swizzle=False))(self.statistics.flatten(0, 1)),
        )
        scratch = torch.full((len(table) * heads * scratch_floats(spec),), torch.nan, device=self.device)
        tensors = table, self.k.scale_inv, self.v.scale_inv, dk, dv, scratch
        Launch(kernel, len(table) * heads, scalars, self.device).start(*maps, *map(self.address, tensors))
        return dk, dv


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of ``[B, H, L, D]``: sequences, rows, heads."""
    return x.stride(0), x.stride(2), x.stride(1)


def error(actual: Tensor, right: Tensor) -> float:
    return float((actual.cpu().double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))


def check(problem: Problem, device: str) -> None:
    work = Backward(problem, device)
    work.delta()
    dq = work.dq()
    dk, dv = work.dkv()
    for name, actual, right in zip(("dq", "dk", "dv"), (dq, dk, dv), work.right):
        assert error(actual, right) < 1e-3, f"{name}: {error(actual, right)}"
