"""Suite ``hardware``: undocumented properties of Hopper that attention's design depends on.

How many bits the tensor cores' accumulators keep, and the cost of accumulating elsewhere; the rate of products with A
in registers; the benefit of two warpgroups taking turns; the rate of the tensor memory accelerator's additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.contenders.attention_contenders import NoKernel, Ops
from benchmarks.contenders.attention_launches import Launches
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Exam, Inputs, Problem, inputs
from benchmarks.contenders.hardware_kernels import (
    CHAIN,
    COPY_COLUMNS,
    COPY_ROWS,
    THREADS,
    copy_rate_kernel,
    product_rate_kernel,
)
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from cuda_kernels.attention import forward, forward_tiles
from cuda_kernels.attention.host import kernels as attention_kernels
from cuda_kernels.attention.host.backward import BackwardLaunch
from cuda_kernels.device.language import device
from cuda_kernels.host.launch import Box, Launch, address_on, architecture_of, multiprocessors
from cuda_kernels.host.tensor_maps import map_on
from cuda_kernels.kernel import KernelError
from lightning_fp8.attention.ops import cuda as launches
from lightning_fp8.ops import plans

SECONDS = 0.1
"""Measuring time per contender."""
NEVER = 1 << 20
FLUSHES = 128, 1024, NEVER
"""Number of queries after which dK's and dV's sums are flushed from the tensor cores."""
REPETITIONS = 2000
TINY = Problem(1, 40, 1, 128)


def unavailable(plan: Plan) -> str | None:
    if plan.dry:
        return None
    if plan.device.type != "cuda" or architecture_of(plan.device) != "90a":
        return "needs a GPU of sm_90a"
    return None if plan.kernels else "launches our kernels"


def run(plan: Plan) -> Iterator[Result]:
    one, many = (TINY, TINY) if plan.dry else (Problem(1, 16_384, 4, 128), Problem(2, 16_384, 16, 128))
    plan.say("hardware: sums of one sign")
    yield from timed(plan, list(_sums(one, plan)), (), SECONDS)
    plan.say("hardware: turns")
    yield from timed(plan, list(_turns(many, plan)), (IN_TURNS,), SECONDS)
    plan.say("hardware: rates")
    for n in (64, 128, 256):
        yield from timed(plan, [_product(n, registers, plan) for registers in (False, True)], (SHARED,), SECONDS)
    yield from timed(plan, [_copy(add, plan) for add in (False, True)], (STORED,), SECONDS)


def _started(result: Result, contender: Callable[[], Contender]) -> Candidate:
    """A failure to start is recorded, and must not discard the others' numbers."""
    try:
        return Candidate(result, contender())
    except (NoKernel, KernelError) as error:
        return Candidate(replace(result, note=f"no kernel: {said(error)}"), None)


# --- Sums -------------------------------------------------------------------------------------------------------------


def _sums(problem: Problem, plan: Plan) -> Iterator[Candidate]:
    """O, and dV by its flush interval, of positive values, whose rounding errors do not cancel.

    A truncated sum is too small: by 12 % in 16,384 products if 13 fractional bits are kept.
    """
    q, k, v, do = inputs(problem, plan.device)
    given = Inputs(q, k, v.abs(), do.abs())
    exam = Exam(problem, given)
    yield _sum(problem, given, exam, FORWARD, "O", "each 128 apart")
    for flush in FLUSHES:
        apart = f"each {flush} apart" if flush < NEVER else "never apart"
        with patch.object(launches, "BackwardLaunch", partial(BackwardLaunch, flush=flush)):
            yield _sum(problem, given, exam, BACKWARD, "dV", apart)
    plans.clear_plan_cache()  # it has plans with all these intervals


def _sum(problem: Problem, given: Inputs, exam: Exam, passing: str, name: str, apart: str) -> Candidate:
    work = f"{name} of {problem.length} products above 0"
    result = Result(work, f"{OURS}, {apart}", problem.shape, "float8_e4m3fn")
    try:
        errors = exam.errors(passing, Ops(problem, given).prepared(passing)())
    except (NoKernel, KernelError) as error:
        return Candidate(replace(result, note=f"no kernel: {said(error)}"), None)

    def contender() -> Contender:  # launches of its own: a later call of the op would plan others
        return Contender(Launches(problem, given, backward=passing == BACKWARD).products(passing))

    return _started(replace(result, errors={name: errors[name]}), contender)


# --- Turns ------------------------------------------------------------------------------------------------------------

IN_TURNS = f"{OURS}, in turns"


@contextmanager
def without_turns() -> Iterator[None]:
    """Forward kernels made in this context let both warpgroups multiply without waiting for turns."""
    nothing = device(lambda barrier, threads: None)
    with (
        patch.multiple(forward_tiles, named_barrier=nothing, named_barrier_arrive=nothing),
        patch.object(attention_kernels, "attention_forward_kernel", forward.attention_forward_kernel.__wrapped__),
    ):
        yield


def _turns(problem: Problem, plan: Plan) -> Iterator[Candidate]:
    """The forward kernel, and a variant without its two named barriers."""
    given = inputs(problem, plan.device)
    alone = Result("attention_forward", IN_TURNS, problem.shape, "float8_e4m3fn", flops=problem.flops(2))

    def contender() -> Contender:
        return Contender(Launches(problem, given, backward=False).products(FORWARD))

    yield _started(alone, contender)
    with without_turns():
        yield _started(replace(alone, by=f"{OURS}, without turns"), contender)


# --- Rates ------------------------------------------------------------------------------------------------------------

SHARED, STORED = "A in shared memory", "stored"


def _product(n: int, from_registers: bool, plan: Plan) -> Candidate:
    """Two warpgroups on every multiprocessor, ``n`` columns at a time."""
    blocks, often = multiprocessors(plan.device), 2 if plan.dry else REPETITIONS
    by = "A in registers" if from_registers else SHARED
    flops = 2 * blocks * 2 * 64 * n * CHAIN * often
    result = Result(f"wgmma m64n{n}k32", by, (128, n, CHAIN), "float8_e4m3fn", flops=flops)

    def contender() -> Contender:
        launch = Launch(product_rate_kernel(n, from_registers), blocks, (often,), plan.device)
        out = torch.zeros(blocks, THREADS, device=plan.device)
        address = address_on(plan.device)
        return Contender(lambda: launch.run(address(out)))

    return _started(result, contender)


def _copy(add: bool, plan: Plan) -> Candidate:
    """Each multiprocessor copies 32 KB at a time to its own memory, which stays in L2."""
    blocks, often = multiprocessors(plan.device), 2 if plan.dry else REPETITIONS
    out = torch.zeros(blocks * COPY_ROWS, COPY_COLUMNS, device=plan.device)
    moved, by = out.nbytes * often, "added" if add else STORED
    result = Result("32 KB from shared memory by TMA", by, tuple(out.shape), "float32", bytes=moved)

    def contender() -> Contender:
        launch = Launch(copy_rate_kernel(add), blocks, (often,), plan.device)
        place = map_on(plan.device, Box(COPY_ROWS, COPY_COLUMNS, swizzle=False))
        return Contender(lambda: launch.run(place(out)))

    return _started(result, contender)
