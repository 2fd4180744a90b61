"""Plain torch that is compiled on GPUs: the fallback of casts without kernels, in few passes over memory.

Compiled code must give the same bits as eager torch. It multiplies, compares and shifts, and divides in float64. Sums,
multiply-adds, exponentials and square roots are not compiled, because Inductor contracts, reorders or approximates
them. Norms and activations therefore compute their values in eager torch, and compiled code casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from lightning_fp8.ops.plans import warn_once

P = ParamSpec("P")
T = TypeVar("T")


def compiled_on_cards(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function of tensors and options, which runs :func:`compiled` if its first tensor is on a GPU."""
    fast = compiled(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        on_card = args[0].is_cuda and not torch.compiler.is_compiling()  # type: ignore[attr-defined]
        return (fast if on_card else function)(*args, **kwargs)

    return run


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` of tensors and hashable options, compiled once for each set of options, with dynamic shapes.

    It has no gradient. If ``torch.compile`` is not available or fails, it warns once and runs ``function`` in eager
    mode from then on.
    """
    variants: dict[Hashable, Callable[P, T]] = {}
    failed = False

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal failed
        if not failed:
            variant = *_state(), *(isinstance(arg, Tensor) or arg for arg in args)
            try:
                if variant not in variants:
                    variants[variant] = _compile(function)
                with torch.no_grad():
                    return variants[variant](*args, **kwargs)
            except (_NoCompiler, TorchDynamoException) as error:
                failed = True
                _warn(args[0], error)
        return function(*args, **kwargs)

    return run


def _state() -> tuple[Hashable, ...]:
    """Global state that Dynamo guards on besides options and shapes. It differs in forward and backward passes."""
    return torch.get_default_dtype(), torch.is_autocast_enabled("cuda"), torch.is_inference_mode_enabled()


class _NoCompiler(Exception):
    """torch.compile is not available."""


def _compile(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a copy of ``function``, because Dynamo limits the recompilations of a code object."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    try:
        return torch.compile(copied, fullgraph=True, dynamic=True)
    except RuntimeError as error:  # this Python is too new for torch.compile
        raise _NoCompiler(str(error)) from error


def _warn(x: object, error: Exception) -> None:
    assert isinstance(x, Tensor)
    first_line = str(error).strip().partition("\n")[0]
    warn_once(
        x.device,
        f"torch.compile fails on {x.device}: {first_line}. Casts without kernels run uncompiled, which is slower",
    )
