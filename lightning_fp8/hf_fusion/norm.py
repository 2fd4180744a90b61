"""RMSNorms of other libraries, such as Hugging Face's, in one kernel forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.functions.rms_norm import RMSNorm, RMSNormFunction
from lightning_fp8.hf_fusion.fused import FusedModule, computes, fuse, in_transform, original_class

# ruff: noqa: ANN001, ANN202, D103  (templates, of which only the code is read)
# mypy: ignore-errors


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


class FusedNorm(FusedModule):
    """An RMSNorm in one kernel, in an FP8 context."""

    weight: Tensor
    _formula: tuple[float, bool, bool] = 0.0, False, False

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., K]`` to the same shape."""
        if torch.compiler.is_compiling():  # Inductor fuses it
            return super().forward(x)
        context = self._context()
        if not context.enabled:
            return super().forward(x)
        weight = self._parameters["weight"]
        fits = _fits(x, weight)
        self._note(fits)
        if not fits:
            return super().forward(x)
        eps, zero_centered, rounds_first = self._formula
        dtype = torch.promote_types(x.dtype, weight.dtype) if rounds_first else x.dtype
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


def formula_of(norm: nn.Module) -> tuple[float, bool, bool] | None:
    """``eps``, whether the weight stores gamma - 1, and whether x rstd is rounded first; None if it is not known."""
    cls = original_class(norm)
    forward = cls.forward
    if computes(forward, _rounds_first):
        return norm.variance_epsilon, False, True
    if computes(forward, _rounds_last, _rounds_last_wide):
        return norm.variance_epsilon, False, False
    if computes(forward, _zero_centered) and computes(getattr(cls, "_norm", None), _norm):
        return norm.eps, True, False
    if forward is nn.RMSNorm.forward and len(norm.normalized_shape) == 1:
        return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps, False, False
    return None


def fuse_norm(norm: nn.Module) -> None:
    """Make ``norm`` run in one kernel, in place."""
    formula = formula_of(norm)
    fuse(norm, FusedNorm)
    norm._formula = formula


__all__ = ["FusedNorm", "formula_of", "fuse_norm"]
