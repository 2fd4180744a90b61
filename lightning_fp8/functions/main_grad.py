"""Gradients of weights that go elsewhere than to ``grad``: to Megatron's ``main_grad``, or to a later call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_fp8 import ops
from lightning_fp8.numerics.scaled import ScaledTensor

Delayed = deque[Callable[[], "Tensor | None"]]
"""Delayed gradients of a weight, oldest first, as functions. One returns None if it adds to ``main_grad`` itself."""

_STALE = "_fp8_stale"
"""The attribute that marks a ``main_grad`` as stale: the next wgrad overwrites it."""


class MainGrad(NamedTuple):
    """Accumulates the gradient of a weight ``[N, K]`` in ``weight.main_grad`` instead of ``weight.grad``.

    It supports the attributes that Megatron sets on a weight. With ``overwrite_main_grad=True`` each gradient
    overwrites ``main_grad``. An existing ``grad_added_to_main_grad`` is set to True after an addition.
    """

    weight: Tensor
    tensor: Tensor

    def add_product(self, a: ScaledTensor, b: ScaledTensor) -> Tensor | None:
        """Add ``a @ bᵀ``, and return the value that the backward pass returns as the weight's gradient."""
        if self.tensor.dtype is not torch.float32:
            return self.add(ops.scaled_mm(a, b, out_dtype=torch.float32))
        self._forget_stale()
        ops.scaled_mm_accumulate(self.tensor, a, b)
        return self.replacement()

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add ``gradient``, rounded once, and return the value that the backward pass returns in its place."""
        self._forget_stale()
        self.tensor.add_(gradient)
        return self.replacement()

    def _forget_stale(self) -> None:
        stale = not torch.compiler.is_compiling() and self.tensor.__dict__.pop(_STALE, False)
        if stale or getattr(self.weight, "overwrite_main_grad", False):
            self.tensor.zero_()

    def replacement(self) -> Tensor | None:
        """Zeros if the weight has ``grad_added_to_main_grad``, since Megatron's hooks only run if there is a gradient.

        With ``zero_out_wgrad`` Megatron adds this gradient to ``main_grad``, and other code may add to it before, so it
        is a new tensor. Otherwise all weights of the same shape share one tensor.
        """
        weight = self.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if torch.compiler.is_compiling() or getattr(weight, "zero_out_wgrad", False):
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return _shared_zeros(weight.shape, weight.dtype, weight.device).detach()


@lru_cache(maxsize=32)
def _shared_zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class RedirectedFunction(torch.autograd.Function):
    """Identity on a weight in high precision. Its backward adds the gradient to ``main_grad``, or delays it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad | None, delayed: Delayed | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad, ctx.delayed = main_grad, delayed
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, None, None]:
        main_grad: MainGrad | None = ctx.main_grad
        if dw is None:  # the loss does not depend on the weight
            return None, None, None
        return redirect(lambda: dw if main_grad is None else main_grad.add(dw), main_grad, ctx.delayed), None, None


def redirect(
    compute: Callable[[], Tensor | None], main_grad: MainGrad | None, delayed: Delayed | None
) -> Tensor | None:
    """Compute a weight's gradient, or delay it. Returns what the backward pass returns as the gradient."""
    if delayed is None:
        return compute()
    delayed.append(compute)
    return None if main_grad is None else main_grad.replacement()


def mark_stale(main_grad: Tensor) -> None:
    """Mark ``main_grad`` so that the next wgrad overwrites it.

    In Transformer Engine each wgrad of a first micro-batch overwrites it, so a shared layer keeps only its last one.
    """
    setattr(main_grad, _STALE, True)
