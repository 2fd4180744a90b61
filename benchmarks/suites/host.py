"""Suite ``host``: what the host does for one call of an op, and what part is what; needs no card.

The ops' CUDA side runs on CPU tensors, in a namespace of its own, as if they were on a card whose driver starts
nothing. What is missing of the whole is the driver's part of a launch, and CUDA's allocator, which serves a tensor from
its cache about as fast as the CPU's does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.contenders import operations
from benchmarks.contenders.operations import Call, Operation
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import measure_on_host
from lightning_fp8.formats import E4M3
from lightning_fp8.ops.activation import cuda as activation
from lightning_fp8.ops.core import dispatch
from lightning_fp8.ops.core.registration import past_dispatcher
from lightning_fp8.ops.gemm import cuda as gemm
from lightning_fp8.ops.norm import cuda as norm
from lightning_fp8.ops.norm import cuda_backward as norm_backward
from lightning_fp8.ops.quantize import cuda as quantize
from lightning_fp8.ops.quantize.outputs import CastOutputs
from lightning_fp8.ops.quantize.schema import UNOBSERVED
from lightning_fp8.ops.scales import cuda as scales

NAMESPACE = "lightning_fp8_host"
SECONDS = 0.05
"""Of measuring, for each op and each of its parts, in each pass."""
PASSES = 8
"""Over all ops, of which the one with the least median counts: what else the machine does meanwhile only adds."""

CUDA_SIDES = quantize, gemm, norm, norm_backward, activation, scales

Step = Callable[[], object]


def unavailable(plan: Plan) -> str | None:
    return None if find_spec("numba_cuda") else "needs numba-cuda"


@torch.no_grad()  # as inside an autograd.Function
def run(plan: Plan) -> Iterator[Result]:
    plan.say("host: time of an op's call without the device")
    yield _yardstick(plan)
    x, amax_history = torch.randn(256, 256).bfloat16(), torch.randn(16, 256)
    dtype = E4M3.dtype
    casts = *operations.casts(dtype), operations.OBSERVE, *operations.fused(dtype)
    work = [(operation, x) for operation in (*casts, *operations.products(dtype))]
    work.append((operations.update_scales({}), amax_history))
    passes = [[_measured(plan, *each) for each in work] for _ in range(1 if plan.dry else PASSES)]
    yield from (min(each, key=lambda result: result.host_microseconds or 0.0) for each in zip(*passes))


def _yardstick(plan: Plan) -> Result:
    """A small op of torch's own: how fast this host is."""
    x = torch.ones(8, 8)
    (times,) = measure_on_host([partial(torch.add, x, x)], plan.seconds(SECONDS), torch.device("cpu"))
    return Result("add of [8, 8]", "torch", (8, 8), "float32", host_microseconds=1e6 * times.median)


def _measured(plan: Plan, operation: Operation, x: torch.Tensor) -> Result:
    implementation = _implementation(operation.op)
    call = Call(operation, x, _as_on_a_card(operation.op))
    launches: list[Step] = []
    with _a_card():
        dispatch.clear_plan_cache()
        with _noted_launches(launches), _noted() as makings:
            call()  # what is made once is made now
            launches.clear()
            makings.clear()
            implementation(*call.args)
        dispatch.clear_plan_cache()  # plans that note
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


def _implementation(name: str) -> Callable[..., Any]:
    """The CUDA side of an op."""
    name = name.removesuffix(UNOBSERVED)  # one function serves both
    return next(getattr(module, name) for module in CUDA_SIDES if name in vars(module))


@cache
def _as_on_a_card(name: str) -> Callable[..., Any]:
    """The op, called as the package calls it, whose CUDA side is for CPU tensors, too."""
    implementation = _implementation(name)
    schema = str(getattr(torch.ops.lightning_fp8, name).default._schema).split("::", 1)[1]
    torch.library.define(f"{NAMESPACE}::{name}", schema.removeprefix(name))
    torch.library.impl(f"{NAMESPACE}::{name}", "cpu", implementation)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return past_dispatcher(overload, {"cpu": implementation, "cuda": implementation})


@contextmanager
def _a_card() -> Iterator[None]:
    """CPU tensors are on a card whose driver starts nothing."""
    from cuda_kernels.host import gemm_selection, launch, tensor_maps

    driver = SimpleNamespace(cuLaunchKernel=lambda *args: (0,), cuMemsetD32Async=lambda *args: (0,))
    replaced: dict[str, Any] = {
        "is_cuda_device": lambda device: True,
        "_driver": lambda: driver,
        "_load": lambda kernel, index: 0,
        "enter_context": lambda index: None,
    }
    stream = patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)
    backend = patch.dict(os.environ, {gemm_selection.CHOICE_VARIABLE: "numba"})
    maps = patch.multiple(tensor_maps, is_cuda_device=lambda device: True, _encoded=lambda tensor, box: bytes(128))
    with patch.multiple(launch, **replaced), maps, stream, backend:
        yield


@contextmanager
def _noted_launches(launches: list[Step]) -> Iterator[None]:
    """``launches`` gets what starts kernels that are planned meanwhile."""
    from cuda_kernels.host.launch import Launch

    run = Launch.run

    def noted(launch: Launch, *addresses: Any) -> None:
        launches.append(partial(run, launch, *addresses))
        run(launch, *addresses)

    with patch.object(Launch, "run", noted):
        yield


@contextmanager
def _noted() -> Iterator[list[Step]]:
    """A list of what makes tensors meanwhile: allocations of operands, and torch's functions that give a tensor."""
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
