"""Suite ``sizes``: where FP8 begins to pay on a GPU: short attention, small Linears, and blockwise products of a Llama.

Attention and Linears alternate with BF16; Linears also as a CUDA graph, which shows what the host costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from benchmarks.suites import attention, products
from benchmarks.suites.layers import BF16, LLAMA_8B, Layer, layers
from benchmarks.suites.products import Work

SECONDS = 0.05
"""Measuring time per contender."""
TOKENS = 8192
LENGTHS, CHANNELS = (512, 1024, 1536, 2048), (128, 64)
WIDTHS = 512, 1024, 2048, 4096
RECIPES = None, "delayed"


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tables of layers
    for work in _blockwise(plan):
        plan.say(f"sizes: {work.name}")
        yield from timed(plan, list(products.contenders(work, plan, every=False)), work.yardsticks, SECONDS)
    for width in (32,) if plan.dry else WIDTHS:
        layer = Layer("Linear, forward and backward", ((width, width),), 16 if plan.dry else TOKENS, {})
        plan.say(f"sizes: Linear of {width} features")
        yield from timed(plan, list(_eager_and_captured(layer, plan)), (BF16, f"{BF16}, captured"), SECONDS)
    for problem in attention.TINY if plan.dry else _short():
        plan.say(f"sizes: attention, {problem.name(str(list(problem.shape)))}")
        yield from attention.of_problem(problem, plan)


def _short() -> list[attention.Problem]:
    return [
        attention.problem(length, channels, 4, causal)
        for channels in CHANNELS
        for causal in (True, False)
        for length in LENGTHS
    ]


def _blockwise(plan: Plan) -> list[Work]:
    if plan.dry:
        return [Work("fprop blockwise", 48, 144, 272, "block")]
    works = []
    for name, (inputs, outputs) in LLAMA_8B.items():
        works += [
            Work(f"{name} fprop blockwise", TOKENS, outputs, inputs, "block"),
            Work(f"{name} dgrad blockwise", TOKENS, inputs, outputs, "block"),
            Work(f"{name} wgrad blockwise", outputs, inputs, TOKENS, "blocks"),
        ]
    return works


def _eager_and_captured(layer: Layer, plan: Plan) -> Iterator[Candidate]:
    for result, contender in layers(layer, plan, RECIPES):
        yield Candidate(result, contender)
        if contender is None or plan.device.type != "cuda":
            continue
        captured = replace(result, by=f"{result.by}, captured", target={})
        try:
            yield Candidate(captured, Contender(_captured(contender.call)))
        except Exception as error:
            yield Candidate(replace(captured, correct=False, note=said(error)), None)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
        for _ in range(4):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
