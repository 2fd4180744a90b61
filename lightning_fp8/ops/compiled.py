"""Plain torch that a card runs compiled: what a cast without its kernel does there, in few passes over memory.

What is compiled gives the bits that it gives when torch runs it operation by operation: it multiplies, compares and
shifts, and divides in float64. Sums, products that are added, exponentials and square roots are not compiled, which
Inductor contracts, reorders or approximates: norms and activations compute their values operation by operation, and
compiled code casts them.
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
    """Decorate a function of tensors and options: where its first tensor is on a card, it runs :func:`compiled`."""
    fast = compiled(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        on_card = args[0].is_cuda and not torch.compiler.is_compiling()  # type: ignore[attr-defined]
        return (fast if on_card else function)(*args, **kwargs)

    return run


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` of tensors and hashable options, compiled whole and for all shapes, once for each set of options.

    It has no gradient. Where ``torch.compile`` is missing or fails, one warning says so, and ``function`` runs as it is
    from then on.
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
    """What Dynamo compiles for anew beside options and shapes: forward and backward passes differ in it."""
    return torch.get_default_dtype(), torch.is_autocast_enabled("cuda"), torch.is_inference_mode_enabled()


class _NoCompiler(Exception):
    """torch.compile does not run here."""


def _compile(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a copy of ``function``: Dynamo counts recompilations by code objects, and soon has too many."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    try:
        return torch.compile(copied, fullgraph=True, dynamic=True)
    except RuntimeError as error:  # on a Python that is too new
        raise _NoCompiler(str(error)) from error


def _warn(x: object, error: Exception) -> None:
    assert isinstance(x, Tensor)
    first_line = str(error).strip().partition("\n")[0]
    warn_once(
        x.device, f"torch.compile fails on {x.device}: {first_line}. Casts without kernels run uncompiled, slower"
    )
