"""The plan cache: what an op does with tensors of one key is decided once; without kernels a fallback does it.

:func:`planned` chooses: where a card runs no kernel, a warning names the reason, and the op's reference serves, in
plain torch; of casts it is compiled (``ops/compiled.py``). A GEMM tries ``torch._scaled_mm`` first
(``ops/gemm_cuda.py``); attention is not called where it has no kernel: its layers ask before and run in BF16.
:func:`fallbacks` says what runs so. On the CPU nothing is planned and nothing warns: the reference is what ops are
there.

The reason is a launch's exception: ``NoKernels`` where a device runs none (too old, no bindings), which is not asked
again; ``KernelError`` where a kernel cannot be made (no compiler), which a plan for another key tries anew.

A *plan* is the decision of an op for tensors of certain dtypes, shapes, strides and alignments: a function of those
tensors that only allocates results and starts kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import _lru_cache_wrapper, lru_cache, partial, wraps
from typing import Any, TypeVar

import torch

from cuda_kernels.host.launch import NoKernels
from cuda_kernels.host.proofs import Unproven
from cuda_kernels.kernel import KernelError
from lightning_fp8.ops.proving import prove

Run = Callable[..., Any]
T = TypeVar("T")

MAX_PLANS = 4096
"""Plans that are kept of each op: one for every key of a model's tensors."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Gives the index of the current CUDA device, without a frame of Python where torch has CUDA; it is initialized."""

_without_kernels: dict[torch.device, KernelError] = {}
_warned: dict[tuple[torch.device, str], None] = {}
_plan_caches: list[Any] = []


class EmptyTensor(Exception):
    """The tensor has no elements; the fallback gives the results."""


class Fallback:
    """What serves where a kernel does not; its first call warns.

    Attributes:
        error: why the kernel does not.
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
    """Leave a planner that has nothing to plan.

    Raises:
        EmptyTensor: ``shape`` holds no element.
    """
    if 0 in shape:
        raise EmptyTensor


def planned(
    fallback: Run, planner_without_kernels: Callable[..., Run] | None = None, *, name: str = ""
) -> Callable[[Callable[..., Run]], Callable[..., Run]]:
    """Decorate a planner: memoise ``plan(device, *plan_key) -> op``.

    It becomes ``(device, current, *plan_key) -> op``. ``plan_key`` says what the plan depends on of the tensors.
    ``current`` is the index of the current CUDA device, or False for tensors that are not on one. ``op`` takes the
    arguments of ``fallback``, which is the op itself where tensors are empty. Where the device runs no kernels, or one
    cannot be made, it is a :class:`Fallback`.

    Args:
        planner_without_kernels: a planner for devices that run no kernels, which is asked before ``fallback`` serves.
        name: of the cases that prove its kernels, in :mod:`lightning_fp8.proofs.cases`.
    """

    def decorate(plan: Callable[..., Run]) -> Callable[..., Run]:
        @lru_cache(MAX_PLANS)
        @wraps(plan)
        def op_for(device: torch.device, current: int | bool, *plan_key: Hashable) -> Run:
            if current is not False and current != device.index:
                return _on_device(op_for, device, plan_key)
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
    """What ``build`` makes of kernels that this card has proven, or proves now.

    Args:
        name, key: of the plan whose cases start the same kernels.

    Raises:
        KernelError: a kernel cannot be made, or failed its proof.
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
    """Decorate a function that puts together plans of ops, or asks for them: memoise it until the cache is cleared."""
    cache = lru_cache(MAX_PLANS)(plan)
    _plan_caches.append(cache)
    return cache


def runs_kernels(device: torch.device) -> bool:
    """Whether the device runs kernels; True until it was found not to."""
    return device not in _without_kernels


def clear_plan_cache() -> None:
    """Plan everything anew from now on, also where kernels did not run.

    For a changed environment variable, or new measurements of GEMMs.
    """
    _without_kernels.clear()
    _warned.clear()
    replan()


def replan() -> None:
    """Plan everything anew from now on, by what is known of devices."""
    for cache in _plan_caches:
        cache.cache_clear()


def fallbacks() -> tuple[str, ...]:
    """What has run instead of kernels, and why, in the order of the warnings, since the plan cache was cleared."""
    return tuple(message for _, message in _warned)


def warn_of_fallback(device: torch.device, error: KernelError) -> None:
    """Warn once that an op runs without its kernel."""
    what = "FP8 kernels do" if isinstance(error, NoKernels) else "An FP8 kernel does"
    instead = (
        "plain torch operations, slower; casts compiled where torch.compile works, a GEMM in torch._scaled_mm where "
        "that takes it"
    )
    warn_once(device, f"{what} not run on {device}: {error}. What needs it runs as {instead}.")


def warn_once(device: torch.device, message: str) -> None:
    """Warn of what a planner found on ``device``, once until the plan cache is cleared."""
    if (device, message) not in _warned:
        _warned[device, message] = None
        warnings.warn(message, RuntimeWarning, stacklevel=5)


def _on_device(op_for: Callable[..., Run], device: torch.device, plan_key: Sequence[Hashable]) -> Run:
    """An op that makes ``device`` the current one while it runs."""

    def op(*args: Any) -> Any:
        with torch.cuda.device(device):
            return op_for(device, device.index, *plan_key)(*args)

    return op
