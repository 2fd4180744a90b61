"""Suite ``host``: host time of a call of an op, by parts, and of a layer; needs no GPU.

The ops' CUDA implementations run on CPU tensors, with a stub driver that launches nothing. The driver's part of a
launch is missing, as is CUDA's allocator, which serves a tensor from its cache about as fast as the CPU's.
:mod:`benchmarks.suites.layer_host` measures layers, also of another version of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.contenders import operations
from benchmarks.contenders.operations import Call, Operation
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import measure_on_host
from benchmarks.suites import layer_host
from benchmarks.suites.layer_host import a_card, cuda_sides_on_cpu
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast_cuda import CastOutputs

SECONDS = 0.05
"""Measuring time per op and part, in each pass."""
PASSES = 8
"""Passes over all ops; the least median counts, because other load on the machine only adds time."""

Step = Callable[[], object]


def unavailable(plan: Plan) -> str | None:
    return None if find_spec("numba_cuda") else "needs numba-cuda"


def run(plan: Plan) -> Iterator[Result]:
    plan.say("host: time of an op's call without the device")
    yield _yardstick(plan)
    with torch.no_grad():  # as in an autograd.Function
        yield from _ops(plan)
    plan.say("host: time of a layer")
    yield from _layers(plan)


def _ops(plan: Plan) -> list[Result]:
    x, amax_history = torch.randn(256, 256).bfloat16(), torch.randn(16, 256)
    dtype = E4M3.dtype
    casts = *operations.casts(dtype), operations.OBSERVE, *operations.fused(dtype)
    work = [(operation, x) for operation in (*casts, *operations.products(dtype))]
    work.append((operations.update_scales({}), amax_history))
    passes = [[_measured(plan, *each) for each in work] for _ in range(1 if plan.dry else PASSES)]
    return [min(each, key=lambda result: result.host_microseconds or 0.0) for each in zip(*passes)]


def _layers(plan: Plan) -> Iterator[Result]:
    for each in layer_host.layer_times(1, 1) if plan.dry else layer_host.layer_times():
        for way, microseconds in (("forward", each.forward), ("backward", each.backward)):
            name = f"{each.name} {way}"
            yield Result(name, each.by, each.shape, "bfloat16", host_microseconds=microseconds, note=each.note)


def _yardstick(plan: Plan) -> Result:
    """A small op of torch, as a measure of this host's speed."""
    x = torch.ones(8, 8)
    (times,) = measure_on_host([partial(torch.add, x, x)], plan.seconds(SECONDS), torch.device("cpu"))
    return Result("add of [8, 8]", "torch", (8, 8), "float32", host_microseconds=1e6 * times.median)


def _measured(plan: Plan, operation: Operation, x: torch.Tensor) -> Result:
    call = Call(operation, x)
    launches: list[Step] = []
    with a_card(), cuda_sides_on_cpu():
        implementation = operation.op.implementations["cuda"]
        with _noted_launches(launches), _noted() as makings:
            call()  # so that one-time work is done
            launches.clear()
            makings.clear()
            implementation(*call.args)
        plans.clear_plan_cache()  # plans made above record launches
        call()
        called = partial(call.function, *call.args)
        implemented = partial(implementation, *call.args)
        steps: list[Step] = [called, implemented, *(partial(_replay, s) for s in (makings, launches))]
        times = measure_on_host(steps, plan.seconds(SECONDS), torch.device("cpu"))
    whole, without_dispatch, allocation, launching = (1e6 * each.median for each in times)
    parts = {
        "dispatch": whole - without_dispatch,
        "allocation": allocation,
        "launch": launching,
        "python": without_dispatch - allocation - launching,
    }
    shape, dtype = tuple(x.shape), str(operation.dtype).removeprefix("torch.")
    return Result(operation.name, OURS, shape, dtype, target=operations.HOST, host_microseconds=whole, parts=parts)


@contextmanager
def _noted_launches(launches: list[Step]) -> Iterator[None]:
    """Appends to ``launches`` functions that repeat the kernel launches planned in this context."""
    from cuda_kernels.host.launch import Launch

    run = Launch.run

    def noted(launch: Launch, *addresses: Any) -> None:
        launches.append(partial(run, launch, *addresses))
        run(launch, *addresses)

    with patch.object(Launch, "run", noted):
        yield


@contextmanager
def _noted() -> Iterator[list[Step]]:
    """A list of functions that repeat this context's allocations of operands and calls of torch that return tensors."""
    steps: list[Step] = []
    allocate = CastOutputs.allocate

    def noted_allocate(outputs: CastOutputs) -> Any:
        steps.append(partial(allocate, outputs))
        with torch._C.DisableTorchFunction():
            return allocate(outputs)

    class Note(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                steps.append(partial(func, *args, **(kwargs or {})))
            return result

    with patch.object(CastOutputs, "allocate", noted_allocate), Note():
        yield steps


def _replay(steps: list[Step]) -> None:
    for step in steps:
        step()
