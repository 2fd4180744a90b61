"""Implementations of attention: our ops, our kernels alone, torch's back ends in BF16, FlashAttention-3.

Each is *prepared* for a problem and a pass: a function that returns the results of the pass, ``[B, L, H, D]``. All have
the same memory layout, with the heads of a row contiguous, as in models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Inputs, Problem
from lightning_fp8.attention.ops import (
    Attention,
    AttentionCall,
    Band,
    attention_backward,
    attention_forward,
)
from lightning_fp8.ops.plans import clear_plan_cache

CUDNN, FLASH, EFFICIENT = "cuDNN (BF16)", "flash (BF16)", "efficient (BF16)"
BACKENDS = {
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}
"""Back ends of torch's ``scaled_dot_product_attention``, selected one at a time."""

_REFUSALS = "No available kernel", "No viable backend"
"""torch's errors if the selected back end does not support the tensors."""

Call = Callable[[], tuple[Tensor, ...]]


class NoKernel(RuntimeError):
    """Only the specification supports this here."""


class Refused(RuntimeError):
    """A library does not support this."""


# --- Ours -------------------------------------------------------------------------------------------------------------


@contextmanager
def only_kernels() -> Iterator[None]:
    """Context in which ops raise instead of falling back to the specification.

    Raises:
        NoKernel: with the warning of the op.
    """
    clear_plan_cache()  # cached plans would not warn again
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            yield
        except RuntimeWarning as warning:
            clear_plan_cache()
            raise NoKernel(str(warning)) from warning


class Ops:
    """The ops of FP8 attention, casts included."""

    def __init__(self, problem: Problem, given: Inputs) -> None:
        self._given = given
        self._call = AttentionCall(Attention("bshd", Band(right=0) if problem.causal else Band()))

    def prepared(self, passing: str) -> Call:
        q, k, v, do = self._given
        with only_kernels():
            if passing == FORWARD:
                attention_forward(q, k, v, self._call)
                return lambda: attention_forward(q, k, v, self._call)[:1]
            o, kept = attention_forward(q, k, v, self._call)
            attention_backward(do, o, kept, k.shape[1], self._call)
        return partial(attention_backward, do, o, kept, k.shape[1], self._call)


# --- Others -----------------------------------------------------------------------------------------------------------


class Sdpa:
    """A back end of torch's ``scaled_dot_product_attention``; backward is autograd's whole call."""

    def __init__(self, backend: SDPBackend, problem: Problem, given: Inputs) -> None:
        self._backend = backend
        self._causal, self._shared = problem.causal, problem.sharing > 1
        self._leaves = [x.detach().transpose(1, 2).requires_grad_() for x in given[:3]]
        self._do = given.do.transpose(1, 2)

    def prepared(self, passing: str) -> Call:
        o = self._asked()
        if passing == FORWARD:
            return lambda: (self._forward().detach().transpose(1, 2),)
        call = partial(_gradients, o, self._leaves, self._do)
        return lambda: tuple(x.transpose(1, 2) for x in call())

    def _forward(self) -> Tensor:
        q, k, v = self._leaves
        with sdpa_kernel(self._backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, enable_gqa=self._shared)

    def _asked(self) -> Tensor:
        """The first call; if torch refuses, its reasons are raised."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                return self._forward()
            except RuntimeError as error:
                if not any(words in str(error) for words in _REFUSALS):
                    raise
                reasons = [str(warning.message).split(" (Triggered")[0] for warning in said]
                raise Refused(" ".join(reasons or [str(error)])[:200]) from error


class FlashAttention3:
    """FlashAttention-3's own interface, in BF16; raises ImportError if it is not installed."""

    def __init__(self, problem: Problem, given: Inputs) -> None:
        self._attend = partial(import_module("flash_attn_interface").flash_attn_func, causal=problem.causal)
        self._leaves = [x.detach().requires_grad_() for x in given[:3]]
        self._do = given.do

    def prepared(self, passing: str) -> Call:
        o = self._forward()
        return (lambda: (self._forward().detach(),)) if passing == FORWARD else self._backward(o)

    def _forward(self) -> Tensor:
        out = self._attend(*self._leaves)
        return out[0] if isinstance(out, tuple) else out  # versions differ

    def _backward(self, o: Tensor) -> Call:
        return partial(_gradients, o, self._leaves, self._do)


class FlashAttention3Fp8(FlashAttention3):
    """FlashAttention-3's forward pass on given codes, without scales; it has no FP8 backward pass."""

    def __init__(self, problem: Problem, given: Inputs) -> None:
        super().__init__(problem, given)
        self._leaves = [x.to(torch.float8_e4m3fn) for x in given[:3]]

    def prepared(self, passing: str) -> Call:
        if passing == BACKWARD:
            raise Refused("FlashAttention-3 does not support FP8 in the backward pass")
        return super().prepared(passing)


def _gradients(o: Tensor, leaves: list[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o, leaves, do, retain_graph=True)


class Other(NamedTuple):
    """A library's attention.

    Attributes:
        by: its name.
        make: from a problem and its inputs; raises ImportError if the library is not installed.
        judged: whether its results are checked; otherwise their errors are only recorded.
    """

    by: str
    make: Callable[[Problem, Inputs], Any]
    judged: bool = True


OTHERS = (
    *(Other(by, partial(Sdpa, backend)) for by, backend in BACKENDS.items()),
    Other("FlashAttention-3 (BF16)", FlashAttention3),
    Other("FlashAttention-3 (FP8, no casts)", FlashAttention3Fp8, judged=False),
)
