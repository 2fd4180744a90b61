"""Suite ``attention``: FP8 attention, forward and backward, compared with torch's back ends in BF16 in the same run.

For each problem, the last head of keys and the query heads that share it are first checked against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.contenders.attention_contenders import BACKENDS, CUDNN, OTHERS, NoKernel, Ops, Other, Refused
from benchmarks.contenders.attention_launches import PRODUCTS, Launches
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Exam, Inputs, Problem, inputs
from benchmarks.measuring.check import poisoned
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from cuda_kernels.host.launch import architecture_of

SECONDS = 0.1
"""Measuring time per contender."""
TOKENS, WIDTH = 32_768, 2048
"""Rows of a batch, and channels of all heads: all lengths have the same work except for the scores."""
COUNTED = {FORWARD: 2, BACKWARD: 5}
"""Products per pass in FlashAttention's count."""
TARGETS = {FORWARD: {f"over {CUDNN}": 1.6}, BACKWARD: {f"over {CUDNN}": 1.25}}
"""For 16,384 rows and 128 channels, on Hopper."""
KERNELS_ALONE = f"{OURS}, kernels alone"


def problem(length: int, head_dim: int, sharing: int, causal: bool) -> Problem:
    main = (length, head_dim, sharing) == (16_384, 128, 1)
    return Problem(TOKENS // length, length, WIDTH // head_dim, head_dim, sharing, causal, TARGETS if main else {})


LENGTHS = 16_384, 2048, 4096, 8192, 32_768
"""Those with targets come first."""
FULL = tuple(
    problem(length, head_dim, sharing, causal)
    for head_dim, sharing in ((128, 1), (128, 4), (64, 1), (256, 1))
    for length in LENGTHS
    for causal in (False, True)
)
TINY = (
    Problem(2, 130, 2, 64, causal=True, target=TARGETS),
    Problem(1, 40, 4, 64, sharing=4),
)


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    of_targets = architecture_of(plan.device) == "90a"
    for each in TINY if plan.dry else FULL:
        each = each if of_targets else replace(each, target={})
        plan.say(f"attention: {each.name(str(list(each.shape)))}")
        yield from of_problem(each, plan)


def of_problem(problem: Problem, plan: Plan) -> Iterator[Result]:
    given = inputs(problem, plan.device)
    exam = Exam(problem, given)
    for passing in (FORWARD, BACKWARD):
        candidates = [_library(problem, passing, given, exam, other) for other in OTHERS]
        if plan.kernels:
            candidates += [_op(problem, passing, given, exam), _kernels(problem, passing, given)]
        yield from timed(plan, candidates, tuple(BACKENDS), SECONDS)
    if plan.kernels and problem.target:
        yield from timed(plan, list(_each_kernel(problem, given)), (), SECONDS)


def _result(problem: Problem, passing: str, by: str, dtype: str, **more: Any) -> Result:
    flops = problem.flops(COUNTED[passing])
    return Result(problem.name(passing), by, problem.shape, dtype, flops=flops, **more)


def _library(problem: Problem, passing: str, given: Inputs, exam: Exam, other: Other) -> Candidate:
    dtype = "float8_e4m3fn" if "FP8" in other.by else "bfloat16"
    result = _result(problem, passing, other.by, dtype)
    try:
        call = other.make(problem, given).prepared(passing)
        outcome = call()
        correct = exam.passes(passing, outcome, fp8=False) if other.judged else None
        result = replace(result, correct=correct, errors=exam.errors(passing, outcome))
    except ImportError as error:
        return Candidate(replace(result, note=f"absent: {error}"), None)
    except Refused as error:
        return Candidate(replace(result, note=f"refused: {error}"), None)
    except Exception as error:  # libraries may raise anything
        return Candidate(replace(result, note=said(error)), None)
    return Candidate(result, Contender(call))


def _op(problem: Problem, passing: str, given: Inputs, exam: Exam) -> Candidate:
    """Our op, including its casts."""
    result = _result(problem, passing, OURS, "float8_e4m3fn", target=problem.target.get(passing, {}))

    def candidate() -> Candidate:
        call = Ops(problem, given).prepared(passing)
        outcome = tuple(poisoned(lambda: list(call())))
        correct, errors = exam.passes(passing, outcome, fp8=True), exam.errors(passing, outcome)
        return Candidate(replace(result, correct=correct, errors=errors), Contender(call))

    return _started(result, candidate)


def _kernels(problem: Problem, passing: str, given: Inputs) -> Candidate:
    result = _result(problem, passing, KERNELS_ALONE, "float8_e4m3fn")

    def candidate() -> Candidate:
        launches = Launches(problem, given, backward=passing == BACKWARD)
        return Candidate(result, Contender(launches.products(passing)))

    return _started(result, candidate)


def _each_kernel(problem: Problem, given: Inputs) -> Iterator[Candidate]:
    """Casts, that of dO with D, copies, dQ, and dK with dV; TFLOP/s count the products that a kernel computes."""
    try:
        calls = Launches(problem, given).by_kernel()
    except Exception:  # reported by the whole passes
        return
    for kernel, call in calls.items():
        flops = problem.flops(PRODUCTS[kernel]) if kernel in PRODUCTS else None
        result = Result(problem.name(kernel), OURS, problem.shape, "float8_e4m3fn", flops=flops)
        yield Candidate(result, Contender(call))


def _started(result: Result, candidate: Callable[[], Candidate]) -> Candidate:
    """A failure to start is recorded, and must not discard the others' numbers. With targets, kernels must exist."""
    try:
        return candidate()
    except NoKernel as error:
        return Candidate(replace(result, correct=False if result.target else None, note=f"no kernel: {error}"), None)
    except Exception as error:
        return Candidate(replace(result, correct=False, note=said(error)), None)
