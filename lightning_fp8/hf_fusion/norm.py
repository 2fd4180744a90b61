"""RMSNorms of other libraries, such as Hugging Face's, in one kernel forward and one backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.functions.rms_norm import RMSNorm, RMSNormFunction
from lightning_fp8.hf_fusion.fused import FusedModule, computes, forward_of, fuse, in_transform, original_class

if TYPE_CHECKING:  # calls of imported names are compiled differently, so a template imports what its model does
    from liger_kernel.ops import LigerRMSNormFunction

# ruff: noqa: ANN001, ANN202, D103  (templates, of which only the code is read)
# mypy: ignore-errors


class Formula(NamedTuple):
    """The formula of an RMSNorm.

    Attributes:
        eps: added to the mean of squares.
        zero_centered: whether the weight stores gamma - 1.
        rounds_first: whether ``x rstd`` is rounded to x's dtype before it is multiplied by gamma.
        keeps_dtype: whether the output has x's dtype where that and the weight's differ, although it rounds first.
    """

    eps: float
    zero_centered: bool
    rounds_first: bool
    keeps_dtype: bool = False


def _rounds_first(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * x.to(dtype)


def _rounds_last(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * x).to(dtype)


def _rounds_last_wide(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight.to(torch.float32) * x).to(dtype)


def _zero_centered(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _by_liger(self, x):
    return LigerRMSNormFunction.apply(
        x, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place, self.row_mode
    )


class FusedNorm(FusedModule):
    """An RMSNorm in one kernel, in an FP8 context."""

    weight: Tensor
    _formula: Formula = Formula(0.0, False, False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., K]`` to the same shape."""
        if torch.compiler.is_compiling():  # Inductor fuses it
            return self._unfused(x)
        context = self._context()
        if not context.enabled:
            return self._unfused(x)
        weight = self._parameters["weight"]
        fits = _fits(x, weight)
        self._note(fits)
        if not fits:
            return self._unfused(x)
        eps, zero_centered, rounds_first, keeps_dtype = self._formula
        dtype = torch.promote_types(x.dtype, weight.dtype) if rounds_first and not keeps_dtype else x.dtype
        return RMSNormFunction.apply(x, weight, RMSNorm(eps, zero_centered, rounds_first, dtype))


def _fits(x: Any, weight: Any) -> bool:
    """Whether a kernel supports the norm of ``x``."""
    return (
        type(x) is Tensor
        and type(weight) is nn.Parameter
        and x.dtype in ops.HIGH_PRECISION
        and weight.dtype in ops.HIGH_PRECISION
        and x.device == weight.device
        and x.numel() > 0
        and not in_transform()
    )


def formula_of(norm: nn.Module) -> Formula | None:
    """The formula of ``norm``; None if it is not known."""
    forward = forward_of(norm)
    if computes(forward, _rounds_first):
        return Formula(norm.variance_epsilon, False, True)
    if computes(forward, _rounds_last, _rounds_last_wide):
        return Formula(norm.variance_epsilon, False, False)
    if computes(forward, _zero_centered) and computes(getattr(original_class(norm), "_norm", None), _norm):
        return Formula(norm.eps, True, False)
    if _is_by_liger(norm, forward) and norm.offset in (0.0, 1.0) and norm.casting_mode in ("llama", "gemma", "none"):
        return Formula(norm.variance_epsilon, norm.offset == 1.0, norm.casting_mode == "llama", keeps_dtype=True)
    if forward is nn.RMSNorm.forward and len(norm.normalized_shape) == 1:
        return Formula(torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps, False, False)
    return None


def _is_by_liger(norm, forward):
    """Whether Liger's kernel computes ``norm``: by its forward, or by that of its base if the former has another way
    for norms without a weight."""
    base = getattr(norm, "with_scale", False) and next(
        (each.forward for each in type(norm).__mro__ if each.__name__ == "LigerRMSNorm"), None
    )
    wraps = computes(base, _by_liger) and forward.__module__.startswith("liger_kernel.")
    return wraps or computes(forward, _by_liger)


def fuse_norm(norm: nn.Module) -> None:
    """Make ``norm`` run in one kernel, in place."""
    formula = formula_of(norm)
    fuse(norm, FusedNorm)
    norm._formula = formula


__all__ = ["FusedNorm", "formula_of", "fuse_norm"]
