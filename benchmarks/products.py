"""Suite ``products``: FP8 matrix products and layers, beside cuBLASLt's and beside BF16, in one run.

Every plan that is legal for a problem is timed, so that the choice among them can be looked up later. Results are
compared with float64 on some of their rows first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.plan import Plan
from benchmarks.record import OURS, Result
from benchmarks.timing import Contender, clock_of, measure
from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.formats import E4M3
from lightning_fp8.ops import jobs, reference
from lightning_fp8.ops.how import how_to_multiply
from lightning_fp8.ops.multiply import multiplier
from lightning_fp8.scaled import Layout, ScaledTensor

if TYPE_CHECKING:
    from cuda_kernels.gemm.config import Problem

SECONDS = 0.2
"""Of measuring, for each contender."""
CUBLASLT, BF16 = "cuBLASLt", "BF16"

PAIRS = {"tensorwise": ("tensor", "tensor"), "rowwise": ("row", "row"), "block": ("1x128", "128x128"),
         "blocks": ("1x128", "1x128")}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A product of E4M3 operands ``[m, k]`` and ``[n, k]``; ``fast``: with the tensor core's shorter accumulator."""

    name: str
    m: int
    n: int
    k: int
    scaling: str = "tensorwise"
    fast: bool = False
    target: dict[str, float] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


class Layer(NamedTuple):
    """Linear layers that are run forward and backward, one after the other."""

    name: str
    sizes: tuple[tuple[int, int], ...]
    tokens: int
    target: dict[str, float]


LLAMA_8B = {"QKV": (4096, 6144), "proj": (4096, 4096), "fc1": (4096, 28672), "fc2": (14336, 4096)}
"""in and out features; fc1 is the gated MLP's two."""
PEAK = 1979.0
"""Dense FP8 TFLOP/s of H100 and H200 (NVIDIA's data sheets)."""


def _of_layer(name: str, inputs: int, outputs: int, tokens: int) -> list[Work]:
    return [
        Work(f"{name} fprop", tokens, outputs, inputs, fast=True),
        Work(f"{name} dgrad", tokens, inputs, outputs),
        Work(f"{name} wgrad", outputs, inputs, tokens),
    ]


FULL = (
    Work("fprop", 8192, 8192, 8192, fast=True, target={f"over {CUBLASLT}": 1.2, f"over {BF16}": 1.75}),
    Work("dgrad", 8192, 8192, 8192),
    Work("fprop rowwise", 8192, 8192, 8192, "rowwise", fast=True),
    Work("fprop blockwise", 4096, 7168, 16384, "block", target={"teraflops": 0.7 * PEAK}),
    Work("wgrad blockwise", 4096, 7168, 16384, "blocks", target={"teraflops": 0.6 * PEAK}),
    *(work for name, sizes in LLAMA_8B.items() for work in _of_layer(name, *sizes, tokens=8192)),
    Work("decode", 16, 14336, 4096, fast=True),
)
TINY = (Work("fprop", 48, 32, 64, fast=True), Work("fprop blockwise", 40, 48, 160, "block"))

LAYERS = (
    Layer("Linear, forward and backward", ((4096, 14336),), 8192, {f"over {BF16}": 1.4}),
    Layer("Llama-8B layer's Linears, forward and backward", tuple(LLAMA_8B.values()), 8192, {f"over {BF16}": 1.6}),
)
TINY_LAYERS = (Layer("Linear, forward and backward", ((32, 48),), 16, {f"over {BF16}": 1.4}),)


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tables of layers
    works = TINY if plan.dry else FULL
    if plan.device.type == "cuda":
        _compile([_job(work, plan).problem for work in works], plan)
    for work in works:
        plan.say(f"products: {work.name} {work.m}x{work.n}x{work.k}")
        yield from _timed(plan, list(_contenders(work, plan)))
    for layer in TINY_LAYERS if plan.dry else LAYERS:
        plan.say(f"products: {layer.name}")
        yield from _timed(plan, list(_layers(layer, plan)))


def _compile(problems: Sequence[Problem], plan: Plan) -> None:
    """All plans of all problems, on all processors: one after the other they would take longer than what is timed."""
    from cuda_kernels.ahead import compile_ahead, missing
    from cuda_kernels.gemm.tuning import builds_of
    from cuda_kernels.launch import architecture_of

    architecture = architecture_of(plan.device)
    builds = missing([build for problem in problems for build in builds_of(problem)], architecture)
    plan.say(f"products: compiling {len(builds)} kernels")
    for _ in compile_ahead(builds, architecture):
        pass


class Candidate(NamedTuple):
    result: Result
    contender: Contender | None


def _timed(plan: Plan, candidates: Sequence[Candidate]) -> Iterator[Result]:
    """Results with times and with ratios to those of others; of ours, the first is the one with targets."""
    running = [(result, contender) for result, contender in candidates if contender is not None]
    times = measure(clock_of(plan.device), [contender for _, contender in running], plan.seconds(SECONDS))
    seconds = {result.by: each.median for (result, _), each in zip(running, times) if result.by in (CUBLASLT, BF16)}
    for (result, _), each in zip(running, times):
        over = {by: other / each.median for by, other in seconds.items() if by != result.by}
        yield replace(result, times=each, over=over)
    yield from (result for result, contender in candidates if contender is None)


# --- Products ---------------------------------------------------------------------------------------------------------


def _contenders(work: Work, plan: Plan) -> Iterator[Candidate]:
    from cuda_kernels.gemm.config import Library, estimated, plans
    from cuda_kernels.gemm.tuning import Measured, to_json
    from cuda_kernels.launch import EXECUTORS

    left, right = (_operand(rows, work.k, layout, plan) for rows, layout in zip((work.m, work.n), PAIRS[work.scaling]))
    exact, shape = _some_rows(left, right), (work.m, work.n, work.k)
    a, b = left.dequantize(torch.bfloat16), right.dequantize(torch.bfloat16)
    yield Candidate(Result(work.name, BF16, shape, "bfloat16", flops=work.flops), Contender(lambda: a @ b.t()))

    job = _job(work, plan)
    best, runs_kernels = estimated(job.problem), plan.device.type in ("cuda", *EXECUTORS)
    for each in sorted(plans(job.problem), key=lambda each: each != best):
        if each is Library.BF16 or not (runs_kernels or each is Library.CUBLASLT):
            continue
        by = CUBLASLT if each is Library.CUBLASLT else OURS if each == best else f"{OURS}, {each}"
        target = work.target if by == OURS else {}
        choice = to_json(Measured(str(job.problem.product), shape, each))
        result = Result(work.name, by, shape, "float8_e4m3fn", flops=work.flops, target=target, choice=choice)
        operands = left.data, left.scale_inv, right.data, right.scale_inv, job.how, None, None, None
        try:
            call = partial(multiplier(job, each), *operands)
            result = replace(result, correct=_close(call(), exact))
            yield Candidate(result, Contender(call))
        except Exception as error:  # one that does not start shall not take the others' numbers along
            note = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield Candidate(replace(result, correct=False, note=note), None)


def _job(work: Work, plan: Plan) -> jobs.Job:
    a, b = (Layout(layout) for layout in PAIRS[work.scaling])
    left, right = (
        jobs.Operand.promised(layout, E4M3.dtype, rows, work.k) for layout, rows in ((a, work.m), (b, work.n))
    )
    return jobs.job_of(plan.device, left, right, how_to_multiply(a, b, torch.bfloat16, work.fast))


def _operand(rows: int, k: int, layout: str, plan: Plan) -> ScaledTensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)).bfloat16().to(plan.device)
    how = f"e4m3 {layout} power_2 rowwise"
    data, scale_inv, *_ = torch.ops.lightning_fp8.quantize(x, how) if x.is_cuda else reference.quantize(x, how)
    return ScaledTensor(*jobs.laid_out(data, scale_inv, Layout(layout)), Layout(layout))


def _some_rows(left: ScaledTensor, right: ScaledTensor) -> tuple[Tensor, Tensor]:
    """Indices of some rows of the result, and these in float64."""
    rows = torch.linspace(0, left.data.shape[0] - 1, 16).long().unique()
    values = left.dequantize()[rows.to(left.data.device)].double()
    parts = [values @ part.double().t() for part in right.dequantize().split(4096)]
    return rows, torch.cat(parts, 1).cpu()


def _close(actual: Tensor, exact: tuple[Tensor, Tensor]) -> bool:
    """Within what a bfloat16 and, of a fast accumulator, 13 bits leave."""
    rows, right = exact
    apart = (actual[rows.to(actual.device)].double().cpu() - right).abs()
    return bool((apart <= 2.0**-8 * right.abs() + 2.0**-6 * right.square().mean().sqrt()).all())


# --- Layers -----------------------------------------------------------------------------------------------------------


def _layers(layer: Layer, plan: Plan) -> Iterator[Candidate]:
    shape = (layer.tokens, *layer.sizes[0]) if len(layer.sizes) == 1 else (layer.tokens,)
    flops = sum(6 * layer.tokens * inputs * outputs for inputs, outputs in layer.sizes)
    for recipe in (None, "delayed", "tensorwise", "rowwise", "blockwise"):
        by = BF16 if recipe is None else OURS if recipe == "delayed" else f"{OURS}, {recipe}"
        result = Result(layer.name, by, shape, "bfloat16", flops=flops, target=layer.target if by == OURS else {})
        try:
            call = _step(layer, recipe, plan)
            call()
        except Exception as error:
            note = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield Candidate(replace(result, correct=False, note=note), None)
            continue
        yield Candidate(result, Contender(call))


def _step(layer: Layer, recipe: str | None, plan: Plan) -> Callable[[], None]:
    """Forward and backward of each layer."""
    model = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in layer.sizes).to(plan.device, torch.bfloat16)
    plugin = FP8FabricPrecision(recipe=recipe, first_last_layers_bf16=False) if recipe else None  # type: ignore[arg-type]
    if plugin is not None:
        plugin.convert_module(model)

    def data(features: int) -> Tensor:
        return torch.randn(layer.tokens, features, device=plan.device, dtype=torch.bfloat16)

    inputs = [data(size).requires_grad_() for size, _ in layer.sizes]
    gradients = [data(size) for _, size in layer.sizes]

    def forward_and_backward() -> None:
        for linear, x, dy in zip(model, inputs, gradients):
            linear(x).backward(dy)

    def step() -> None:
        if plugin is None:
            forward_and_backward()
        else:
            with plugin.forward_context():
                forward_and_backward()
            plugin.update_scales()
        for tensor in (*inputs, *model.parameters()):
            tensor.grad = None

    return step
