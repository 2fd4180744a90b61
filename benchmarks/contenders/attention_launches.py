"""The kernels of attention's ops, to be started again without what the host does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.contenders.attention_contenders import only_kernels
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Inputs, Problem
from cuda_kernels.host.launch import Launch
from lightning_fp8.attention.ops import Attention, AttentionCall, Band, cuda

PRODUCTS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}
"""Products of scores that a kernel computes; the backward pass computes scores and dP twice."""


class Started(NamedTuple):
    """A kernel that was started, with what it was started with."""

    launch: Launch
    addresses: tuple[Any, ...]

    @property
    def kernel(self) -> str:
        """Its function's name, the same for all cards."""
        return self.launch.kernel.function.__name__.removeprefix("mma_")

    def __call__(self) -> None:
        self.launch.run(*self.addresses)


class Launches:
    """What the ops start for a problem, in order, for each pass; their memory is kept.

    Without ``backward`` the forward pass alone, which more cards have kernels for.

    Started again, dK's and dV's sums in global memory go on where they were: their results are for nobody.

    Raises:
        NoKernel: an op would fall back to the specification.
    """

    def __init__(self, problem: Problem, given: Inputs, backward: bool = True) -> None:
        call = AttentionCall(Attention("bshd", Band(right=0) if problem.causal else Band()))
        q, k, v, do = given
        self._kept: list[Any] = []
        self.started: dict[str, list[Started]] = {FORWARD: [], BACKWARD: []}
        with only_kernels(), _noted(self.started[FORWARD], self._kept):
            o, kept = cuda.attention_forward_on_cuda(q, k, v, call)
        self._kept.append((given, o, kept))
        if backward:
            with only_kernels(), _noted(self.started[BACKWARD], self._kept):
                cuda.attention_backward_on_cuda(do, o, kept, k.shape[1], call)

    def products(self, passing: str) -> Callable[[], None]:
        """The pass without casts and copies."""
        return in_turn(each for each in self.started[passing] if each.kernel.startswith("attention_"))

    def by_kernel(self) -> dict[str, Callable[[], None]]:
        """Each kernel by its name, all launches of it."""
        found: dict[str, list[Started]] = {}
        for started in self.started.values():
            for each in started:
                found.setdefault(each.kernel, []).append(each)
        return {kernel: in_turn(launches) for kernel, launches in found.items()}


def in_turn(started: Iterable[Started]) -> Callable[[], None]:
    launches = list(started)

    def start_all() -> None:
        for each in launches:
            each()

    return start_all


@contextmanager
def _noted(started: list[Started], kept: list[Any]) -> Iterator[None]:
    """``started`` gets the kernels that start meanwhile, ``kept`` what torch's functions give."""
    run = Launch.run

    def noted(launch: Launch, *addresses: Any) -> None:
        started.append(Started(launch, addresses))
        run(launch, *addresses)

    class Keep(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                kept.append(result)
            return result

    with torch.no_grad(), patch.object(Launch, "run", noted), Keep():
        yield
