"""The plan cache: an op is planned once for each key of tensors, and runs a fallback if it has no kernel.

A *plan* is an op for tensors of certain dtypes, shapes, strides and alignments: a function of those tensors that only
allocates results and launches kernels.

If a GPU cannot run a kernel, :func:`planned` warns with the reason and uses the op's reference in plain torch, which is
compiled for casts (``ops/compiled.py``). A GEMM tries ``torch._scaled_mm`` first (``ops/gemm_cuda.py``). Attention
layers check for a kernel first, and run in BF16 without one. :func:`fallbacks` lists all fallbacks. On the CPU, the
reference is the implementation, without plans and warnings.

The reason is an exception of a launch: ``NoKernels`` if the device does not run kernels (too old, no bindings), which
is final, or ``KernelError`` if a kernel cannot be compiled, which is tried again for other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import _lru_cache_wrapper, lru_cache, partial, wraps
from typing import Any, TypeVar

import torch

from cuda_kernels.host.launch import NoKernels
from cuda_kernels.host.proofs import Unproven
from cuda_kernels.kernel import KernelError
from lightning_fp8.capture import is_capturing
from lightning_fp8.notices import say_once
from lightning_fp8.ops.proving import prove

Run = Callable[..., Any]
T = TypeVar("T")

MAX_PLANS = 4096
"""The maximum number of cached plans of each op. A model has one for every key of its tensors."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the current CUDA device, without a Python frame if torch has CUDA. CUDA must be initialized."""

generation = 0
"""The number of times that plans were cleared. Layers keep a plan for one generation."""
_without_kernels: dict[torch.device, KernelError] = {}
_said: dict[Any, str] = {}
_plan_caches: list[Any] = []


class EmptyTensor(Exception):
    """The tensor is empty; the fallback computes the result."""


class Fallback:
    """An op that replaces a kernel. Its first call warns.

    Attributes:
        error: the reason why the kernel cannot run.
    """

    def __init__(self, run: Run, device: torch.device, error: KernelError) -> None:
        self._run, self._device, self.error = run, device, error
        self._told = False

    def __call__(self, *args: Any) -> Any:
        if not self._told:
            self._told = True
            warn_of_fallback(self._device, self.error)
        return self._run(*args)


def check_not_empty(shape: Sequence[int]) -> None:
    """Raise :class:`EmptyTensor` if a tensor of ``shape`` is empty."""
    if 0 in shape:
        raise EmptyTensor


def planned(
    fallback: Run, planner_without_kernels: Callable[..., Run] | None = None, *, name: str = ""
) -> Callable[[Callable[..., Run]], Callable[..., Run]]:
    """Decorator that caches the plans of a planner ``plan(device, *plan_key) -> op``.

    The decorated function is ``(device, current, *plan_key) -> op``. ``plan_key`` holds all properties of the tensors
    that the plan depends on. ``current`` is the index of the current CUDA device, or False for tensors that are not on
    a GPU. ``op`` has the arguments of ``fallback``. It is ``fallback`` itself for empty tensors, and a
    :class:`Fallback` if the device does not run kernels or a kernel cannot be compiled.

    Args:
        planner_without_kernels: a planner for devices that do not run kernels, which is tried before ``fallback``.
        name: the name of the cases that prove its kernels, in :mod:`lightning_fp8.proofs.cases`.
    """

    def decorate(plan: Callable[..., Run]) -> Callable[..., Run]:
        @lru_cache(MAX_PLANS)
        @wraps(plan)
        def op_for(device: torch.device, current: int | bool, *plan_key: Hashable) -> Run:
            if current is not False and current != device.index:
                return _on_device(op_for, device, plan_key)
            if is_capturing():
                raise RuntimeError(f"a CUDA graph captures {name or plan.__name__} of a new shape: run the step before")
            refused = _without_kernels.get(device)
            planners = (planner_without_kernels,) if refused else (plan, planner_without_kernels)
            run = fallback
            for planner in filter(None, planners):
                try:
                    run = proven(name, partial(planner, device, *plan_key), device, plan_key)
                    break
                except EmptyTensor:
                    return fallback
                except KernelError as error:
                    refused = error
                    if isinstance(error, NoKernels):
                        _without_kernels[device] = error
            return run if refused is None else Fallback(run, device, refused)

        _plan_caches.append(op_for)
        return op_for

    return decorate


def proven(name: str, build: Callable[[], Run], device: torch.device, key: Sequence[Hashable]) -> Run:
    """The result of ``build``, after proving those of its kernels that this GPU has not proven yet.

    Args:
        name, key: the name and key of the plan, whose cases launch the same kernels.

    Raises:
        KernelError: If a kernel cannot be compiled, or failed its proof.
    """
    asked: set[str] = set()
    while True:
        try:
            return build()
        except Unproven as unproven:
            if unproven.key in asked:
                raise
            asked.add(unproven.key)
            prove(name, device, key, unproven)


def cached(plan: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Decorator of a function that combines plans of ops. It is cached until the plan cache is cleared."""
    cache = lru_cache(MAX_PLANS)(plan)
    _plan_caches.append(cache)
    return cache


def runs_kernels(device: torch.device) -> bool:
    """Whether the device runs kernels. It is True until a plan has failed with ``NoKernels``."""
    return device not in _without_kernels


def clear_plan_cache() -> None:
    """Clear all plans, and also the devices and kernels that failed.

    Call it after an environment variable was changed, or after new measurements of GEMMs.
    """
    _without_kernels.clear()
    _said.clear()
    replan()


def outdate() -> None:
    """Start a new generation: layers look their plans up again."""
    global generation
    generation += 1


def replan() -> None:
    """Clear all plans, but keep the devices that do not run kernels."""
    outdate()
    for cache in _plan_caches:
        cache.cache_clear()


def fallbacks() -> tuple[str, ...]:
    """The warnings about fallbacks since the plan cache was cleared, in their order."""
    return tuple(_said.values())


def warn_of_fallback(device: torch.device, error: KernelError) -> None:
    """Warn once that an op runs without its kernel."""
    what = "FP8 kernels do" if isinstance(error, NoKernels) else "An FP8 kernel does"
    instead = (
        "which is slower. Casts are compiled if torch.compile works, and GEMMs run in torch._scaled_mm if it supports "
        "them"
    )
    warn_once(device, f"{what} not run on {device}: {error}. Plain torch operations are used instead, {instead}.")


def warn_once(device: torch.device, message: str, key: str = "") -> None:
    """Warn about ``device``. The same warning is repeated only after the plan cache was cleared.

    Warnings with the same ``key``, if it is not empty, are the same.
    """
    say_once(_said, message, (device, key or message), category=RuntimeWarning, stacklevel=5)


def _on_device(op_for: Callable[..., Run], device: torch.device, plan_key: Sequence[Hashable]) -> Run:
    """An op that makes ``device`` the current one while it runs."""

    def op(*args: Any) -> Any:
        with torch.cuda.device(device):
            return op_for(device, device.index, *plan_key)(*args)

    return op
