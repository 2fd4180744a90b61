"""How ops are registered in ``torch.ops.lightning_fp8``, and how this package calls them.

| of an operation | registers |
|---|---|
| ``schema.py`` | an op's signature, and its implementation for fake and meta tensors, marked ``@fake`` |
| ``reference.py``, of attention ``cpu.py`` | what runs on the CPU |
| ``cuda.py`` | what runs on a GPU |

The shapes that casts give on fake tensors are in ``ops/quantize/outputs.py``. The operation's ``__init__`` calls what
:func:`op` gives: past torch's dispatcher where that has nothing to add, since it costs the host more than a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.autograd.profiler as _profiler
from torch import Tensor
from torch.nn import Parameter

from lightning_fp8.arguments import TRANSFORM_WAYS_OUT

NAMESPACE = "lightning_fp8"

_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
_gradients: Callable[[], bool] = torch.is_grad_enabled
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_wrapped: Callable[[Tensor], bool] = torch._C._dispatch_isTensorSubclassLike
_increment_version: Callable[[tuple[Tensor]], None] = torch._C._increment_version

_TENSORS: frozenset[type] = frozenset({Tensor, Parameter})
_OPTIONAL_TENSORS: frozenset[type] = frozenset({Tensor, Parameter, type(None)})
_SCALARS: frozenset[type] = frozenset({str, int, float, bool, torch.device, type(None)})

_implementations: dict[str, dict[str, Callable[..., Any]]] = {}
_vmap_refusals = torch.library.Library(NAMESPACE, "IMPL")


def define(name: str, schema: str) -> None:
    """Define ``torch.ops.lightning_fp8.<name>`` by a schema, such as ``"(Tensor x) -> Tensor"``."""
    torch.library.define(f"{NAMESPACE}::{name}", schema)


def fake(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the ops' implementation for fake and meta tensors; it gives tensors without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            torch.library.register_fake(f"{NAMESPACE}::{name}", function)
        return function

    return register


def implement(name: str, device_type: str, function: Callable[..., Any]) -> None:
    """Register what computes the op on ``"cpu"`` or ``"cuda"``."""
    torch.library.impl(f"{NAMESPACE}::{name}", device_type, function)
    _implementations.setdefault(name, {})[device_type] = function


def refuse_vmap(*names: str) -> None:
    """Make vmap refuse ops, with a RuntimeError; its own loop is closed to ops that write to an argument."""

    def refuse(*args: object) -> None:
        raise RuntimeError(
            f"FP8 ops do not run under vmap, is_grads_batched=True or vectorize=True; {TRANSFORM_WAYS_OUT}"
        )

    for name in names:
        _vmap_refusals.impl(name, refuse, "FuncTorchBatched")
        _vmap_refusals.impl(name, refuse, "Batched")  # torch.autograd.grad(is_grads_batched=True)


def op(name: str) -> Callable[..., Any]:
    """The op ``torch.ops.lightning_fp8.<name>``, to be called with its arguments in the schema's order, all of them."""
    return past_dispatcher(getattr(getattr(torch.ops, NAMESPACE), name).default, _implementations[name])


def past_dispatcher(overload: torch._ops.OpOverload, by_device: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """An op that calls its implementation itself where all that the dispatcher would do is to choose it by device.

    That is where no compiler, tracer, profiler, mode or transform is at work and no gradient is recorded, as inside an
    ``autograd.Function``, and all tensors are plain ones. The versions of what the op writes advance, as there. What
    else may be put between torch and an op misses it: a kernel that overrides ours in a ``torch.library.Library``, and
    observers that torch's profilers do not know of, such as ``ExecutionTraceObserver`` alone.

    Args:
        overload: the op. Its first argument is a tensor, and all are on that tensor's device; only the first may be a
            view that is negated when it is read.
        by_device: what computes it on ``"cpu"`` and ``"cuda"``.
    """
    on_cpu, on_cuda = by_device["cpu"], by_device["cuda"]
    parameters = overload._schema.arguments
    written = tuple(i for i, p in enumerate(parameters) if p.alias_info is not None and p.alias_info.is_write)
    expected = [_types(str(parameter.type)) for parameter in parameters]
    known: set[tuple[type, ...]] = set()  # types of arguments that were found to be as expected

    def are_plain(types: tuple[type, ...]) -> bool:
        if len(types) == len(expected) and all(given in allowed for given, allowed in zip(types, expected)):
            known.add(types)
            return True
        return False

    def call(*args: Any) -> Any:
        if (
            _compiling()
            or _gradients()
            or ((types := tuple(map(type, args))) not in known and not are_plain(types))
            or _dispatch_modes()
            or _function_modes()
            or _transform() is not None
            or _profiler._is_profiler_enabled  # on any thread
            or _tracing() is not None
        ):
            return overload(*args)
        x = args[0]
        if _wrapped(x) or x.is_neg():  # as is_grads_batched wraps it; a view of torch.conj is negated when it is read
            return overload(*args)
        if x.is_cuda:
            results = on_cuda(*args)
        elif x.is_cpu:
            results = on_cpu(*args)
        else:
            return overload(*args)
        for index in written:
            if args[index] is not None:
                _increment_version((args[index],))
        return results

    return call


def _types(declared: str) -> frozenset[type]:
    """The types of plain arguments for a parameter of a schema."""
    if not declared.removeprefix("Optional[").startswith("Tensor"):
        return _SCALARS
    return _OPTIONAL_TENSORS if declared.startswith("Optional[") else _TENSORS
