"""Suite ``products``: FP8 matrix products and layers, compared with libraries and with BF16 in the same run.

Every legal choice for a problem is timed, so that the fastest can be stored. Results are first checked against float64
on some of their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import libraries
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender, clock_of, measure
from benchmarks.suites.layers import BF16, LAYERS, LLAMA_8B, TINY_LAYERS, layers
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.cast import quantize_op, reference_quantize
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import BoundGemm, GemmOperand, aligned_operand, bind_gemm, build_gemm
from lightning_fp8.ops.memory import TensorKey

if TYPE_CHECKING:
    from cuda_kernels.host.gemm_configs import GemmProblem

SECONDS, TRIAL_SECONDS = 0.05, 0.01
"""Measuring time per contender, and per candidate of cuBLASLt, to find the fastest."""

PAIRS = {
    "tensorwise": (Layout.TENSOR, Layout.TENSOR),
    "rowwise": (Layout.ROW, Layout.ROW),
    "block": (Layout.BLOCK_1X128, Layout.BLOCK_128X128),
    "blocks": (Layout.BLOCK_1X128, Layout.BLOCK_1X128),
}


def torch_with(sums: str) -> str:
    return f"torch._scaled_mm ({sums})"


def cublaslt_with(sums: str, which: str) -> str:
    return f"cuBLASLt ({sums}, {which})"


@dataclass(frozen=True)
class Work:
    """A product of E4M3 operands ``[m, k]`` and ``[n, k]``.

    Attributes:
        fast: whether to use the tensor core's shorter accumulator.
        out: dtype of the result.
        accumulate: whether the product is added to the result.
    """

    name: str
    m: int
    n: int
    k: int
    scaling: str = "tensorwise"
    fast: bool = False
    target: dict[str, float] = field(default_factory=dict)
    out: torch.dtype = torch.bfloat16
    accumulate: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """Contenders that others are compared with; they use the same accumulation."""
        sums = "fast" if self.fast else "full"
        return BF16, torch_with(sums), cublaslt_with(sums, "fastest")


PEAK = 1979.0
"""Dense FP8 TFLOP/s of H100 and H200 (NVIDIA's data sheets)."""


def _of_layer(name: str, inputs: int, outputs: int, tokens: int) -> list[Work]:
    return [
        Work(f"{name} fprop", tokens, outputs, inputs, fast=True),
        Work(f"{name} dgrad", tokens, inputs, outputs),
        Work(f"{name} wgrad", outputs, inputs, tokens),
    ]


FULL = (
    Work("fprop", 8192, 8192, 8192, fast=True, target={f"over {torch_with('fast')}": 1.2, f"over {BF16}": 1.75}),
    Work("dgrad", 8192, 8192, 8192),
    Work("fprop rowwise", 8192, 8192, 8192, "rowwise", fast=True),
    Work("fprop blockwise", 4096, 7168, 16384, "block", target={"teraflops": 0.7 * PEAK}),
    Work("wgrad blockwise", 4096, 7168, 16384, "blocks", target={"teraflops": 0.6 * PEAK}),
    *(work for name, sizes in LLAMA_8B.items() for work in _of_layer(name, *sizes, tokens=8192)),
    Work("decode", 16, 14336, 4096, fast=True),
    Work("wgrad in float32", 8192, 8192, 8192, out=torch.float32),
    Work("wgrad added in float32", 8192, 8192, 8192, out=torch.float32, accumulate=True),
)
TINY = (
    Work("fprop", 48, 32, 64, fast=True),
    Work("fprop rowwise", 32, 48, 64, "rowwise", fast=True),
    Work("fprop blockwise", 48, 144, 272, "block"),
    Work("wgrad added in float32", 48, 32, 64, out=torch.float32, accumulate=True),
)


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tables of layers
    works = TINY if plan.dry else FULL
    if plan.device.type == "cuda" and plan.kernels:
        _compile([_bound_gemm(work, plan).problem for work in works], plan)
    for work in works:
        plan.say(f"products: {work.name} {work.m}x{work.n}x{work.k}")
        yield from timed(plan, list(contenders(work, plan)), work.yardsticks, SECONDS)
    for layer in (TINY_LAYERS if plan.dry else LAYERS) if plan.kernels else ():
        plan.say(f"products: {layer.name}")
        yield from timed(plan, list(layers(layer, plan)), (BF16,), SECONDS)


def _compile(problems: Sequence[GemmProblem], plan: Plan) -> None:
    """Compile all plans of all problems on all processors; sequentially it would take longer than the measurement."""
    from cuda_kernels.host.gemm_selection import builds_of
    from cuda_kernels.host.launch import architecture_of
    from cuda_kernels.host.precompile import compile_ahead, missing

    architecture = architecture_of(plan.device)
    builds = missing([build for problem in problems for build in builds_of(problem)], architecture)
    plan.say(f"products: compiling {len(builds)} kernels")
    for _ in compile_ahead(builds, architecture):
        pass


# --- Products ---------------------------------------------------------------------------------------------------------


class Exam(NamedTuple):
    """Some rows of a product in float64.

    Attributes:
        rows: their indices.
        right: their values.
        k: number of products in each sum.
        out: the tensor that results are added to, if any.
    """

    rows: Tensor
    right: Tensor
    k: int
    out: Tensor | None = None

    def passes(self, call: Callable[[], Tensor]) -> bool:
        if self.out is None:
            return self._close(call(), self.right)
        across = torch.arange(self.out.shape[1], device=self.out.device)
        self.out.copy_(across % 11 - torch.arange(len(self.out), device=self.out.device)[:, None] % 7)
        before = self.out[self.rows.to(self.out.device)].double().cpu()
        return self._close(call(), before + self.right)

    def _close(self, actual: Tensor, right: Tensor) -> bool:
        """Check within the rounding of bfloat16 and of an accumulator of 13 bits.

        It is truncated every 32 products: of a sum of k products, k / 32 times 2^-13 of the sum's magnitude are lost.
        """
        apart = (actual[self.rows.to(actual.device)].double().cpu() - right).abs()
        lost = max(2.0**-6, self.k / 32 * 2.0**-13)
        return bool((apart <= 2.0**-8 * right.abs() + lost * right.square().mean().sqrt()).all())


def contenders(work: Work, plan: Plan, every: bool = True) -> Iterator[Candidate]:
    """Libraries and our kernels: every legal tile, or only the one that is estimated to be the fastest."""
    left, right = operands(work, plan)
    out = torch.empty(work.m, work.n, dtype=work.out, device=plan.device) if work.accumulate else None
    exam = Exam(*_some_rows(left, right), work.k, out)
    yield from _libraries(work, left, right, exam, plan)
    if plan.kernels:
        yield from _kernels(work, left, right, exam, plan, every)


def _checked(result: Result, make: Callable[[], Callable[[], Tensor]], exam: Exam) -> Candidate:
    """Check the result of ``make``; a failure to start is recorded, and must not discard the others' numbers."""
    try:
        call = make()
        return Candidate(replace(result, correct=exam.passes(call)), Contender(call))
    except Exception as error:
        return Candidate(replace(result, correct=False if result.by.startswith(OURS) else None, note=said(error)), None)


def _libraries(work: Work, left: ScaledTensor, right: ScaledTensor, exam: Exam, plan: Plan) -> Iterator[Candidate]:
    """BF16; torch and cuBLASLt, with and without fast accumulation; with scales along k only without."""
    from cuda_kernels.host.gemm_configs import Library, cublaslt_takes
    from cuda_kernels.host.gemm_measurements import Measurement, to_json

    shape, out = (work.m, work.n, work.k), exam.out
    a, b = left.dequantize(torch.bfloat16), right.dequantize(torch.bfloat16)
    call = (lambda: a @ b.t()) if out is None else (lambda: out.add_(a @ b.t()))
    yield Candidate(Result(work.name, BF16, shape, "bfloat16", flops=work.flops), Contender(call))

    problem = _bound_gemm(work, plan).problem
    for fast in (True, False) if work.scaling in ("tensorwise", "rowwise") else (False,):
        sums = "fast" if fast else "full"
        result = Result(work.name, torch_with(sums), shape, "float8_e4m3fn", flops=work.flops)
        if fast == work.fast and cublaslt_takes(problem):  # the call that training makes
            result = replace(result, choice=to_json(Measurement(str(problem.spec), shape, Library.CUBLASLT)))
        yield _checked(result, partial(libraries.scaled_mm, left, right, work.out, fast, out), exam)
        result = replace(result, choice=None)
        try:
            matmul = libraries.cublaslt(left, right, work.out, fast, out)
            calls = _running([partial(matmul, candidate) for candidate in range(len(matmul))])
            contenders = [Contender(call) for call in calls.values()]
            trial = measure(clock_of(plan.device), contenders, plan.seconds(TRIAL_SECONDS))
        except Exception as error:
            yield Candidate(replace(result, by=cublaslt_with(sums, "first"), note=said(error)), None)
            continue
        medians = {candidate: each.median for candidate, each in zip(calls, trial)}
        for which, candidate in (("first", min(calls)), ("fastest", min(medians, key=medians.__getitem__))):
            note = f"cuBLASLt {matmul.version}, candidate {candidate + 1} of {len(matmul)}, {len(calls)} of which run"
            named = replace(result, by=cublaslt_with(sums, which), note=note)
            yield _checked(named, partial(partial, matmul, candidate), exam)


def _running(calls: Sequence[Callable[[], Tensor]]) -> dict[int, Callable[[], Tensor]]:
    """The calls that succeed, by index. A failing one is skipped.

    Raises:
        Exception: none succeeds; the first one's error.
    """
    running, failed = {}, []
    for index, call in enumerate(calls):
        try:
            call()
            running[index] = call
        except Exception as error:
            failed.append(error)
    if failed and not running:
        raise failed[0]
    return running


def _kernels(
    work: Work, left: ScaledTensor, right: ScaledTensor, exam: Exam, plan: Plan, every: bool
) -> Iterator[Candidate]:
    """Every legal tile of our kernels, or only the best by estimate."""
    from cuda_kernels.host.gemm_configs import Library, fastest_by_estimate, legal_choices
    from cuda_kernels.host.gemm_measurements import Measurement, to_json
    from cuda_kernels.host.launch import EXECUTORS

    bound, shape = _bound_gemm(work, plan), (work.m, work.n, work.k)
    if plan.device.type not in ("cuda", *EXECUTORS):
        return
    best = fastest_by_estimate(bound.problem)
    operands = left.data, left.scale_inv, right.data, right.scale_inv, bound.gemm, None, exam.out
    for each in sorted(legal_choices(bound.problem), key=lambda each: each != best) if every else [best]:
        if not isinstance(each, Library):
            by = OURS if each == best else f"{OURS}, {each}"
            choice = to_json(Measurement(str(bound.problem.spec), shape, each))
            target = work.target if by == OURS else {}
            result = Result(work.name, by, shape, "float8_e4m3fn", flops=work.flops, target=target, choice=choice)
            yield _checked(result, lambda each=each: partial(build_gemm(bound, each), *operands), exam)  # type: ignore[misc]


def _bound_gemm(work: Work, plan: Plan) -> BoundGemm:
    layout_a, layout_b = PAIRS[work.scaling]
    a = GemmOperand.canonical(layout_a, E4M3.dtype, work.m, work.k)
    b = GemmOperand.canonical(layout_b, E4M3.dtype, work.n, work.k)
    out_key = TensorKey(torch.float32, (work.m, work.n), (work.n, 1), 0, plan.device) if work.accumulate else None
    return bind_gemm(plan.device, a, b, Gemm(layout_a, layout_b, work.out, work.fast), out_key=out_key)


def operands(work: Work, plan: Plan) -> tuple[ScaledTensor, ScaledTensor]:
    layout_a, layout_b = PAIRS[work.scaling]
    return _operand(work.m, work.k, layout_a, plan, seed=0), _operand(work.n, work.k, layout_b, plan, seed=1)


def _operand(rows: int, k: int, layout: Layout, plan: Plan, seed: int) -> ScaledTensor:
    generator = torch.Generator(plan.device).manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device=plan.device).bfloat16()
    quantize = quantize_op.call if x.is_cuda and plan.kernels else reference_quantize
    data, scale_inv, *_ = quantize(x, Cast(E4M3, layout, power_2_scale=True), None, None)
    return ScaledTensor(*aligned_operand(data, scale_inv, layout), layout)


def _some_rows(left: ScaledTensor, right: ScaledTensor) -> tuple[Tensor, Tensor]:
    """Indices of some rows of the result, and these in float64."""
    rows = torch.linspace(0, left.data.shape[0] - 1, 16).long().unique()
    values = left.dequantize()[rows.to(left.data.device)].double()
    parts = [values @ part.double().t() for part in right.dequantize().split(4096)]
    return rows, torch.cat(parts, 1).cpu()
