"""The kernels of attention's ops, for launching them again without the host's other work."""

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
"""Number of products of scores that a kernel computes; the backward pass computes scores and dP twice."""


class Started(NamedTuple):
    """A kernel's launch with its arguments."""

    launch: Launch
    addresses: tuple[Any, ...]

    @property
    def kernel(self) -> str:
        """The name of the kernel's function, the same for all GPUs."""
        return self.launch.kernel.function.__name__.removeprefix("mma_")

    def __call__(self) -> None:
        self.launch.run(*self.addresses)


class Launches:
    """The launches of the ops for a problem, in order, for each pass; their memory is kept alive with this object.

    Without ``backward`` only the forward pass, which more GPUs support.

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
        """All launches of each kernel, by its name."""
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
    """Appends to ``started`` the kernels launched in this context, and to ``kept`` the results of torch's functions."""
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
