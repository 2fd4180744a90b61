"""RMSNorms of other libraries, such as Hugging Face's, in one kernel forward and one backward."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.convert.fused import liger
from lightning_fp8.convert.fused.fused import FusedModule, computes, fuse, original_class, why_not_input
from lightning_fp8.functions.rms_norm import RMSNormFunction
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.traced import note_traced

_GEMMA_4 = "LigerRMSNormForGemma4.forward"


class Formula(NamedTuple):
    """How a norm computes ``x rstd weight`` from ``x [..., K]``.

    Attributes:
        eps: the name of its attribute.
        zero_centered: whether its weight is gamma - 1.
        rounds_first: whether x rstd is rounded to x's dtype before the product, which is not rounded to it again.
    """

    eps: str
    zero_centered: bool = False
    rounds_first: bool = False


# --- Templates, of which only the code is read ------------------------------------------------------------------------


def _rounds_first(self: Any, x: Any) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(dtype)


def _rounds_last(self: Any, x: Any) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * x).to(dtype)


def _rounds_last_wide(self: Any, x: Any) -> Any:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight.to(torch.float32) * x).to(dtype)


def _zero_centered(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _norm(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def formula_of(norm: nn.Module) -> Formula | None:
    """The formula of ``norm``, also if it is fused already; None if it is not known."""
    cls = original_class(norm)
    forward: Any = getattr(cls, "forward", None)  # TorchScript's class raises
    if computes(forward, _rounds_first):
        return Formula("variance_epsilon", rounds_first=True)
    if computes(forward, _rounds_last, _rounds_last_wide):
        return Formula("variance_epsilon")
    if computes(forward, _zero_centered) and computes(getattr(cls, "_norm", None), _norm):
        return Formula("eps", zero_centered=True)
    by_liger = computes(forward, liger.rms_norm) or getattr(forward, "__qualname__", "") == _GEMMA_4
    if by_liger and norm.offset in (0.0, 1.0) and norm.casting_mode in ("llama", "gemma", "none"):
        return Formula("variance_epsilon", bool(norm.offset), norm.casting_mode == "llama")
    if forward is nn.RMSNorm.forward and len(norm.normalized_shape) == 1:  # type: ignore[arg-type]
        return Formula("eps")
    return None


# --- The module -------------------------------------------------------------------------------------------------------


class FusedNorm(FusedModule):
    """An RMSNorm that takes one kernel each way in an FP8 context."""

    weight: Tensor
    _formula: Formula

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., K]`` to the same shape."""
        if torch.compiler.is_compiling():  # Inductor makes one kernel of it
            note_traced(*self.features)
            return super().forward(x)  # type: ignore[misc, no-any-return]
        weight = self.weight
        if not self._fuses(lambda _: _why_not(x, weight)):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        formula = self._formula
        eps = getattr(self, formula.eps)
        if eps is None:  # torch.nn.RMSNorm's default
            eps = torch.finfo(torch.float32).eps
        promotes = formula.rounds_first and x.dtype is not weight.dtype
        dtype = torch.promote_types(x.dtype, weight.dtype) if promotes else x.dtype
        if isinstance(self, nn.RMSNorm) and autocast_dtype(x.device.type):
            dtype = _dtype_under_autocast(x.device.type, x.dtype, weight.dtype)
        settings = dtype, eps, *formula[1:]
        if (order := _order_in_memory(x)) is not None:  # as the model's own: no copy, and y has the strides of x
            stored = x.permute(order)
            y: Tensor = RMSNormFunction.apply(stored, weight, *settings)  # type: ignore[no-untyped-call]
            return y.view(stored.shape).permute(sorted(range(x.dim()), key=order.__getitem__))
        y = RMSNormFunction.apply(x, weight, *settings)  # type: ignore[no-untyped-call]
        return y if x.dim() == 2 else y.view(x.shape)  # views that an autograd function returns cannot be changed

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)


@cache
def _dtype_under_autocast(device_type: str, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of torch's RMSNorm under autocast, which depends on the device and on torch's version."""
    x, weight = (torch.empty(1, dtype=each, device=device_type) for each in (x_dtype, weight_dtype))
    return torch.rms_norm(x, (1,), weight).dtype


def _order_in_memory(x: Tensor) -> list[int] | None:
    """The order of dimensions in which ``x`` is contiguous, if that is another one and keeps the last dimension.

    Such an input is that of a norm of queries after ``transpose(1, 2)``.
    """
    if x.is_contiguous() or x.stride(-1) != 1:
        return None
    order = [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]
    return order if x.permute(order).is_contiguous() else None


def _why_not(x: Any, weight: Any) -> str:
    """The reason why no kernel computes the norm of ``x``; an empty string if one does."""
    if reason := why_not_input(x):
        return reason
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}"
    if x.dtype not in ops.HIGH_PRECISION or weight.dtype not in ops.HIGH_PRECISION:
        return f"no kernel computes it in {x.dtype} with a weight in {weight.dtype}"
    return "" if x.shape[-1:] == weight.shape else "its input has another number of features than its weight"


def fuse_norm(norm: nn.Module) -> None:
    """Make ``norm``, whose formula is known, take one kernel each way, in place."""
    formula = formula_of(norm)
    fuse(norm, FusedNorm)
    norm._formula = formula  # type: ignore[assignment]
