"""What attention's backward kernels are tested with: masks, lengths and shared heads, against the specification.

A case runs on the CPU, where kernels are emulated, and on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cuda_kernels.attention.backward import statistics as fields
from cuda_kernels.attention.backward.memory import FLUSH
from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.host.backward import BackwardLaunch, GradientLaunch, Operands
from cuda_kernels.attention.host.forward import AttentionProblem
from cuda_kernels.attention.host.tiles import PackedRows, Visible, cast_table
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from lightning_fp8.attention.ops import Band, Codes, Lengths, backward, cast, forward, pack
from lightning_fp8.proofs.cases import Case
from tests.attention.ops.attention_cases import visible_keys
from tests.cuda_kernels.cases.attention_kernel_cases import cumulated, in_packed_rows, moved, rows_of

ALL, CAUSAL, BOTTOM_RIGHT = Band(), Band(right=0), Band(right=0, bottom_right=True)
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}
CODES_THAT_MOVE = {"cpu": 2.0**-11, "cuda": 2.0**-7}
"""What float32's last bits make of a result, since they move some codes; on a card also about 14 bits of sums."""


@dataclass(frozen=True)
class Problem:
    """One call of attention.

    Attributes:
        queries, keys: rows of each sequence.
        heads, sharing: of queries, and how many of them share a head of keys.
        ragged: the sequences lie one after the other; else in a padded batch.
        offset: what is added to V and dO, so that sums have a sign.
        magnitude: a factor of Q and dO, as of a scaled loss; K is divided by it, so that scores stay the same.
        flush: see :data:`cuda_kernels.attention.backward.memory.FLUSH`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 1
    sharing: int = 1
    head_dim: int = 128
    band: Band = ALL
    out: str = "float32"
    ragged: bool = False
    offset: float = 0.0
    magnitude: float = 1.0
    flush: int = FLUSH

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def lengths(self) -> Lengths:
        return Lengths(torch.tensor(self.queries), torch.tensor(self.keys))

    def rows(self, device: str = "cpu") -> tuple[PackedRows, PackedRows]:
        """Of queries and of keys."""
        queries, keys = (rows_of(each, None if self.ragged else int(each.max()), device) for each in self.lengths)
        return queries, keys


@dataclass(frozen=True)
class Given:
    """What the backward pass gets, and what the specification makes of it; nothing of it is written to.

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

    def in_rows(self, x: Tensor, gap: float) -> Tensor:
        """Numbers of queries ``[B, H, L]`` in packed rows, ``[H, R]``."""
        rows, _ = self.problem.rows()
        out = torch.full((x.shape[1], rows.space.total), gap)
        for sequence, (length, start) in enumerate(zip(self.problem.queries, rows.starts.tolist())):
            out[:, start : start + length] = x[sequence, :, :length]
        return out

    def statistics(self) -> Tensor:
        """By their definitions, in float64; see :mod:`cuda_kernels.attention.backward.statistics`."""
        rows, _ = self.problem.rows()
        do, q, k, v = (x.dequantize().double() for x in self.operands)
        k, v = (x.repeat_interleave(self.problem.sharing, 1) for x in (k, v))
        total = torch.where(self.l == 0, torch.inf, self.m.double() + self.l.double().log2())
        delta = (do * self.o.double()).sum(3)
        see = torch.zeros(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
        for sequence, (queries, keys) in enumerate(zip(self.problem.queries, self.problem.keys)):
            see[sequence, 0, :queries, :keys] = visible_keys(queries, keys, self.problem.band)
        scores = (q @ k.mT * (self.problem.scale * math.log2(math.e))).masked_fill(~see, -torch.inf)
        p = torch.exp2(scores - total[..., None])
        rest = (p * (do @ v.mT - delta[..., None])).sum(3)
        blocks = (in_packed_rows(each, rows).scale_inv.repeat_interleave(ROWS, 1) for each in self.operands[:2])
        found = dict(zip((fields.GRADIENT_SCALE_INV, fields.QUERY_SCALE_INV), blocks))
        found |= {fields.DELTA: self.in_rows(delta, 0.0), fields.TOTAL: self.in_rows(total, torch.inf)}
        found[fields.CORRECTED] = self.in_rows(delta + rest, 0.0)
        return torch.stack([found[which] for which in range(fields.STATISTICS)], 1)


@cache
def given(problem: Problem) -> Given:
    generator = torch.Generator().manual_seed(sum(problem.queries) + problem.head_dim)
    lengths, shared = problem.lengths, problem.heads // problem.sharing

    def drawn(heads: int, of: Tensor, offset: float = 0.0, centered: bool = False, factor: float = 1.0) -> Codes:
        shape = len(of), heads, int(of.max()), problem.head_dim
        return cast((torch.randn(shape, generator=generator) + offset) * factor, centered, of)

    q = drawn(problem.heads, lengths.queries, factor=problem.magnitude)
    k = drawn(shared, lengths.keys, centered=True, factor=1 / problem.magnitude)
    v = drawn(shared, lengths.keys, problem.offset)
    do = drawn(problem.heads, lengths.queries, problem.offset, factor=problem.magnitude)
    return with_results(problem, (do, q, k, v))


def with_results(problem: Problem, operands: tuple[Codes, Codes, Codes, Codes]) -> Given:
    do, q, k, v = operands
    o, m, l = forward(q, k, v, problem.scale, problem.band, problem.lengths)  # noqa: E741
    right = backward(do, q, k, v, o, m, l, problem.scale, problem.band, problem.lengths, torch.float32)
    return Given(problem, operands, o, m, l, right)


def with_nan(problem: Problem, which: int) -> Given:
    """Key 0 takes all of every query, so that other weights are 0; and one number of operand ``which`` is NaN."""
    assert problem.sharing == len(problem.queries) == 1
    generator = torch.Generator().manual_seed(which)
    of_queries, of_keys = ((1, problem.heads, rows[0], problem.head_dim) for rows in (problem.queries, problem.keys))
    do, q, k, v = (
        torch.randn(shape, generator=generator) for shape in (of_queries, of_queries, of_keys, of_keys)
    )  # fmt: skip
    q, k = 8 + q, k / 8
    k[:, :, 0] = 8
    operands = [cast(x) for x in (do, q, k, v)]
    data, scale_inv = operands[which]
    data[0, -1, 100, 5] = torch.nan
    operands[which] = Codes(data, scale_inv)
    do_codes, *others = operands
    return with_results(problem, (do_codes, *others))  # type: ignore[arg-type]


def with_faint_key(problem: Problem) -> Given:
    """Key 0 has nearly no weight for the first 64 queries, 2**-106, and the most for the others."""
    generator = torch.Generator().manual_seed(problem.head_dim)
    shapes = ((1, problem.heads, rows[0], problem.head_dim) for rows in (problem.queries, problem.keys))
    q, k = (torch.zeros(shape) for shape in shapes)
    do, v = (torch.randn(x.shape, generator=generator) for x in (q, k))
    q[:, :, :64, 0], q[:, :, 64:, 0] = 16, -16
    k[:, :, 0, 0] = -106 / (16 * problem.scale * math.log2(math.e))
    return with_results(problem, (cast(do), cast(q), cast(k), cast(v)))


def nan_by_definition(given: Given) -> list[Tensor]:
    """Where dQ, dK and dV are NaN by torch's own attention in float64; without a mask."""
    do, *operands = (x.dequantize().double() for x in given.operands)
    q, k, v = (x.requires_grad_() for x in operands)
    o = scaled_dot_product_attention(q, k, v, scale=given.problem.scale)
    return [x.isnan() for x in torch.autograd.grad(o, (q, k, v), do)]


class OnDevice:
    """The launch of a problem's kernels on a device, their operands, and memory for the results."""

    def __init__(self, given: Given, device: str) -> None:
        self.given, self.problem, self.device = given, given.problem, device
        problem = given.problem
        queries, keys = problem.rows()
        self.dq, self.dk, self.dv = (self.empty(x, getattr(torch, problem.out)) for x in given.right)
        self.operands = Operands(*(
            moved(in_packed_rows(x, rows), device) for x, rows in zip(given.operands, (queries, queries, keys, keys))
        ))  # fmt: skip
        self.visible = Visible(problem.band.left, problem.band.right, problem.band.bottom_right)
        self.launch = BackwardLaunch(
            AttentionProblem(
                AttentionSpec(problem.head_dim, problem.out), (problem.heads, problem.heads // problem.sharing),
                queries.space, keys.space, self.visible, problem.scale,
            ),
            self.strides(self.dq), self.strides(self.dk), self.dq.device, problem.flush,
        )  # fmt: skip

    def packed(self, x: Tensor) -> Tensor:
        """``[B, H, L, D]`` as a model has it: ``[B, L, H, D]``, or ``[T, H, D]``."""
        if self.problem.ragged:
            lengths = self.problem.lengths
            of = lengths.queries if x.shape[1:3] == self.given.o.shape[1:3] else lengths.keys
            return pack(x, cumulated(of))
        return x.transpose(1, 2).contiguous()

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Nothing in it is 0."""
        return torch.full_like(self.packed(like), torch.nan, dtype=dtype, device=self.device)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """From a sequence, a row and a head to the next."""
        return (0 if self.problem.ragged else x.stride(0), x.stride(-3), x.stride(-2))

    def delta(self) -> Tensor:
        """Casts dO again, and returns the statistics."""
        do, o = (self.packed(x).to(self.device) for x in (self.given.operands[0].dequantize(), self.given.o))
        m, l = self.given.in_rows(self.given.m, -torch.inf), self.given.in_rows(self.given.l, 0.0)  # noqa: E741
        rows, _ = self.problem.rows(self.device)
        launch = GradientLaunch(
            HeadsSpec(do.shape[-1], "float32", 4),
            do.shape[-2],
            rows.space,
            self.strides(do),
            self.strides(o),
            do.device,
        )
        codes, statistics = launch.run(do, cast_table(rows), o, m.to(self.device), l.to(self.device), self.operands.q)
        self.operands = self.operands._replace(do=codes)
        return statistics

    def run_dq(self, statistics: Tensor) -> None:
        tiles = self.visible.tiles_of_queries(*self.problem.rows(self.device))
        self.launch.run_dq(tiles, self.operands, statistics, self.dq)

    def run_dkv(self, statistics: Tensor) -> None:
        queries, keys = self.problem.rows(self.device)
        self.launch.run_dkv(self.visible.tiles_of_keys(keys, queries), self.operands, statistics, self.dk, self.dv)

    def assert_near(self, *names: str) -> None:
        for name, right in zip(("dq", "dk", "dv"), self.given.right):
            if name in names:
                actual = getattr(self, name)
                assert actual.dtype == getattr(torch, self.problem.out)
                tolerance = ROUNDING[self.problem.out] + CODES_THAT_MOVE[self.device.split(":")[0]]
                found = error(actual, self.packed(right))
                assert found <= tolerance, f"{name}: {found}"


def error(actual: Tensor, right: Tensor) -> float:
    """Relative, by Frobenius' norm; NaN if one of them has some."""
    return float((actual.cpu().double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))


def check_delta(problem: Problem, device: str, has_nan: bool = False) -> None:
    """The codes and statistics; with ``has_nan`` of a dO in which one number is NaN."""
    numbers = with_nan(problem, 0) if has_nan else given(problem)
    on = OnDevice(numbers, device)
    before = on.operands.do
    actual, right = on.delta().cpu(), numbers.statistics()
    for found, given_codes in zip(on.operands.do[:2], before[:2]):
        assert found is not None
        assert given_codes is not None
        assert torch.equal(found.cpu(), given_codes.cpu())
    for which in (fields.DELTA, fields.TOTAL, fields.GRADIENT_SCALE_INV, fields.QUERY_SCALE_INV):
        torch.testing.assert_close(actual[:, which], right[:, which], rtol=1e-5, atol=1e-5, equal_nan=True)


def check_dq(problem: Problem, device: str) -> None:
    on = OnDevice(given(problem), device)
    right = given(problem).statistics()
    statistics = right.to(device, copy=True)
    statistics[:, fields.CORRECTED] = torch.nan
    on.run_dq(statistics)
    on.assert_near("dq")
    near = 1e-4 if device == "cpu" else 2e-3  # a GPU's tensor cores keep about 14 bits of sums
    tolerance = near * float(right[:, fields.CORRECTED].abs().max())
    torch.testing.assert_close(statistics.cpu(), right, rtol=near, atol=tolerance)


def check_dkv(problem: Problem, device: str) -> None:
    on = OnDevice(given(problem), device)
    on.run_dkv(given(problem).statistics().to(device))
    on.assert_near("dk", "dv")


def run_all(given: Given, device: str) -> OnDevice:
    """All kernels of the backward pass, one after the other."""
    on = OnDevice(given, device)
    statistics = on.delta()
    on.run_dq(statistics)
    on.run_dkv(statistics)
    return on


def check_all(problem: Problem, device: str) -> None:
    on = run_all(given(problem), device)
    on.assert_near("dq", "dk", "dv")


def check_faint(problem: Problem, device: str) -> None:
    on = run_all(with_faint_key(problem), device)
    on.assert_near("dq", "dk", "dv")


def check_nan(problem: Problem, device: str, which: int = 0) -> None:
    """NaN in operand ``which``, dO by default, goes where torch's attention in float64 has it."""
    damaged = with_nan(problem, which)
    on = run_all(damaged, device)
    for actual, truth in zip((on.dq, on.dk, on.dv), nan_by_definition(damaged)):
        assert truth.any()
        assert torch.equal(actual.cpu().isnan(), on.packed(truth))


def _case(check: Callable[[Problem, str], None], kernel: str, words: str, problem: Problem) -> Case:
    return Case(f"attention_{kernel}-{problem.head_dim}-{words}", partial(check, problem))


WINDOW = Band(left=40, right=20, bottom_right=True)
CASES = [
    _case(check_all, "backward", "causal", Problem((256,), (256,), band=CAUSAL, out="bfloat16")),
    _case(check_all, "backward", "grouped causal", Problem((200,), (200,), 4, 2, band=CAUSAL, out="bfloat16")),
    _case(check_all, "backward", "empty", Problem((0, 70, 50), (60, 0, 130), band=CAUSAL, out="bfloat16")),
    _case(check_all, "backward", "ragged", Problem((1, 140), (260, 3), 2, band=WINDOW, out="bfloat16", ragged=True)),
    _case(check_all, "backward", "cross", Problem((300,), (130,), 2, 2, head_dim=96, out="float16", flush=128)),
    _case(check_all, "backward", "window", Problem((150,), (140,), head_dim=256, band=WINDOW, out="bfloat16")),
    _case(check_all, "backward", "large", Problem((192,), (197,), head_dim=64, band=BOTTOM_RIGHT, magnitude=1e4)),
    _case(check_all, "backward", "large", Problem((192,), (197,), head_dim=128, band=BOTTOM_RIGHT, magnitude=1e4)),
    _case(check_all, "backward", "large", Problem((192,), (197,), head_dim=256, band=BOTTOM_RIGHT, magnitude=1e4)),
    _case(check_faint, "backward", "faint", Problem((128,), (128,), head_dim=64)),
    _case(check_faint, "backward", "faint", Problem((128,), (128,), head_dim=256)),
    _case(check_nan, "backward", "nan", Problem((130,), (140,), out="bfloat16")),
    _case(check_delta, "delta", "padded", Problem((200, 130), (30, 90), 2, 2, head_dim=64)),
    _case(partial(check_delta, has_nan=True), "delta", "nan", Problem((130,), (140,), head_dim=64)),
    _case(check_dq, "dq", "many keys", Problem((128,), (1160,), head_dim=64)),
    _case(check_dq, "dq", "many keys", Problem((128,), (1160,), head_dim=96)),
    _case(check_dq, "dq", "many keys", Problem((128,), (1160,), head_dim=128)),
    _case(check_dkv, "dkv", "many queries", Problem((780,), (128,), 2, 2, head_dim=64)),
    _case(check_dq, "dq", "many keys", Problem((20,), (400,), head_dim=256)),
    _case(check_dkv, "dkv", "many queries", Problem((300,), (20,), 2, 2, head_dim=256, flush=128)),
    _case(check_dq, "dq", "window", Problem((200, 130), (300, 90), 2, 2, head_dim=64, band=WINDOW)),
    _case(check_dkv, "dkv", "window", Problem((200, 130), (300, 90), 2, 2, head_dim=64, band=WINDOW)),
]
"""The last ones are of one kernel each."""
