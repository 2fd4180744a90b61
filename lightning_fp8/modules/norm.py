"""LayerNorm and RMSNorm with Transformer Engine's arguments. They compute in float32 and keep their input's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _normalized_shape(normalized_shape: int | Sequence[int] | None, hidden_size: int | None) -> list[int]:
    shape = hidden_size if normalized_shape is None else normalized_shape
    if shape is None:
        raise TypeError("pass normalized_shape (or hidden_size), the size of the dimensions to normalize")
    shape = [shape] if isinstance(shape, int) else list(shape)
    if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
        raise ValueError(f"normalized_shape={shape} must hold positive integers")
    return shape


def _check_eps(eps: float) -> float:
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps={eps} must be a finite number of at least 0")
    return eps


def _check_input(module: nn.Module, x: Tensor, shape: tuple[int, ...]) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{type(module).__name__} got an input of {x.dtype}; it takes floating-point tensors")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"{type(module).__name__} normalizes {shape}, but the input has shape {tuple(x.shape)}")


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` over the last dimensions.

    Args:
        normalized_shape: the size of the last dimensions.
        eps: added to the variance.
        zero_centered_gamma: ``weight`` holds gamma - 1 and starts at 0.
        params_dtype: dtype of the parameters; ``dtype`` is the same by torch's name.
        hidden_size: Transformer Engine's older name of ``normalized_shape``.

    Raises:
        ValueError, TypeError: a size, ``eps`` or an input that does not fit.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        shape = _normalized_shape(normalized_shape, hidden_size)
        super().__init__(shape, _check_eps(eps), elementwise_affine, bias, device, params_dtype or dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.elementwise_affine and self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape and dtype."""
        _check_input(self, input, tuple(self.normalized_shape))
        gamma, beta = _gamma(self), self.bias.float() if self.bias is not None else None
        return F.layer_norm(input.float(), self.normalized_shape, gamma, beta, self.eps).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x²) + eps) * gamma`` over the last dimensions.

    Args and errors as for :class:`LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        shape = _normalized_shape(normalized_shape, hidden_size)
        super().__init__(shape, _check_eps(eps), elementwise_affine, device, params_dtype or dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.elementwise_affine and self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape and dtype."""
        _check_input(self, x, tuple(self.normalized_shape))
        return F.rms_norm(x.float(), self.normalized_shape, _gamma(self), self.eps).to(x.dtype)


def _gamma(module: LayerNorm | RMSNorm) -> Tensor | None:
    if module.weight is None:
        return None
    return module.weight.float() + 1.0 if module.zero_centered_gamma else module.weight.float()
