"""Suite ``casts``: the ops that cast, on large tensors, compared with a plain copy and with other implementations.

Everything is checked against the reference first. The input repeats a few rows, so that the reference computes only
these, and the results must repeat the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.contenders import operations
from benchmarks.contenders.operations import Call, Operation
from benchmarks.contenders.peers import Peer, peers
from benchmarks.measuring.check import close, poisoned, same
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.timing import Clock, Contender, clock_of, measure, measure_on_host
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.ops import plans

SECONDS, SECONDS_ON_HOST = 0.1, 0.02
"""Measuring time per contender, on the device and on the host."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of tensors to cast, and the period of their rows; histories of ``update_scales``; bytes of copies."""

    casts: tuple[tuple[int, int], ...]
    period: int
    windows: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]


FULL = Sizes(
    casts=((8192, 8192), (16384, 4096), (4096, 14336), (8192, 8200)),
    period=256,
    windows=((1024, 1000), (1024, 10_000)),
    copies=(2**30, 2**28, 2**26, 2**24, 2**22),
)
TINY = Sizes(casts=((256, 256), (256, 200)), period=128, windows=((8, 10), (8, 100)), copies=(2**12, 2**11))

UPDATE_MILLISECONDS = 0.020
"""Limit for the first of the histories."""


def unavailable(plan: Plan) -> str | None:
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    sizes, clock = TINY if plan.dry else FULL, clock_of(plan.device)
    copied = [torch.randn(size // 2, device=plan.device).bfloat16() for size in sizes.copies]
    yield from _timed(plan, clock, [_copy(x, f"copy of {x.nbytes / 2**20:g} MiB") for x in copied])
    del copied
    for rows, columns in sizes.casts:
        plan.say(f"casts of [{rows}, {columns}]: comparing with the reference")
        few = _values(sizes.period, columns).bfloat16()
        x = few.to(plan.device).repeat(rows // sizes.period, 1)
        yield from _timed(plan, clock, [_copy(x), *_ours(x, few), *_others(x, few)])
    for amax_history, target in zip(sizes.windows, ({"milliseconds": UPDATE_MILLISECONDS}, {})):
        x = _values(*amax_history)
        update = _checked(operations.update_scales(target), x.to(plan.device), x)
        yield from _timed(plan, clock, [_copy(x.to(plan.device)), update])


def _values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


# --- What is timed ----------------------------------------------------------------------------------------------------


def _copy(x: Tensor, name: str = "copy") -> Candidate:
    y = torch.empty_like(x)
    result = Result(name, "torch", tuple(x.shape), _name(x.dtype), operations.bytes_moved([x], [y]))
    return Candidate(result, Contender(lambda: y.copy_(x)))


def _ours(x: Tensor, few: Tensor) -> Iterator[Candidate]:
    one_format = operations.OBSERVE, *operations.fused(E4M3.dtype)
    for operation in (*operations.casts(E4M3.dtype), *operations.casts(E5M2.dtype), *one_format):
        yield _checked(operation, x, few)


def _checked(operation: Operation, x: Tensor, few: Tensor) -> Candidate:
    """``operation`` on ``x``, which is ``few`` repeated."""
    result = Result(operation.name, OURS, tuple(x.shape), _name(operation.dtype), target=operation.target)
    try:
        call = Call(operation, x)
        actual = poisoned(call.outcome)
        if not plans.runs_kernels(x.device):
            raise RuntimeError("the reference ran instead of the kernels")
        expected = reference_outcome(operation, few)
        result = replace(result, bytes=call.bytes(), correct=_is_right(operation, actual, expected))
    except Exception as error:  # a kernel that fails to start must not discard the others' numbers
        return Candidate(replace(result, correct=False, note=said(error)), None)
    return Candidate(result, Contender(call, call.restore))


def _is_right(operation: Operation, actual: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(actual[: operation.repeating], expected[: operation.repeating])
    if operation.exact:
        return len(actual) == len(expected) and all(same(*pair) for pair in pairs)
    return len(actual) == len(expected) and all(close(*pair, share=0.999) for pair in pairs)


def reference_outcome(operation: Operation, x: Tensor) -> list[Tensor]:
    """The expected results for the CPU tensor ``x``; on the CPU, the op runs the reference."""
    return Call(operation, x).outcome()


def _others(x: Tensor, few: Tensor) -> Iterator[Candidate]:
    by_name = {operation.name: operation for operation in operations.casts(E4M3.dtype)}
    for peer in peers():
        yield _peer(peer, by_name[peer.name], x, few)


def _peer(peer: Peer, operation: Operation, x: Tensor, few: Tensor) -> Candidate:
    result = Result(peer.name, peer.by, tuple(x.shape), _name(E4M3.dtype))
    try:
        call = peer.prepare(x)
        codes, expected = call()[0], reference_outcome(operation, few)[0]
        correct = close(codes, expected, share=0.95) if peer.same_codes else None
        result = replace(result, bytes=Call(operation, x).bytes(), correct=correct)
    except ImportError as error:
        return Candidate(replace(result, note=f"absent: {error}"), None)
    except Exception as error:  # other compilers may raise anything
        return Candidate(replace(result, note=said(error)), None)
    return Candidate(result, Contender(call))


# --- Timing -----------------------------------------------------------------------------------------------------------


def _timed(plan: Plan, clock: Clock, candidates: Sequence[Candidate]) -> Iterator[Result]:
    """The candidates' results with times, measured alternately; the first is the copy that all are compared with."""
    results = [result for result, contender in candidates if contender is not None]
    contenders = [contender for _, contender in candidates if contender is not None]
    plan.say(f"{list(results[0].shape)}: timing {len(contenders)} contenders")
    with torch.no_grad():  # as in an autograd.Function
        on_device = measure(clock, contenders, plan.seconds(SECONDS))
        on_host = measure_on_host([each.call for each in contenders], plan.seconds(SECONDS_ON_HOST), plan.device)
    ceiling = (results[0].bytes or 0) / on_device[0].median
    for result, times, host in zip(results, on_device, on_host):
        yield replace(result, times=times, copy_bandwidth=ceiling, host_microseconds=1e6 * host.median)
    yield from (result for result, contender in candidates if contender is None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
