"""LayerNorm and RMSNorm with Transformer Engine's arguments. They compute in float32 (float64 of such an input).

Their output has the dtype of the input or of torch.autocast, as in Transformer Engine. Under autocast on a GPU
``torch.nn.LayerNorm`` returns float32, which the next linear layer casts to autocast's dtype. These norms round to that
dtype once, and their output takes half of the memory. A float64 input stays float64, since autocast does not cast it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype, plain
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.modules.initialization import refuse_meta
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.modules.tensor_parallel import GroupTaker
from lightning_fp8.parallel.regions import sum_gradients
from lightning_fp8.te.arguments import checked_arguments
from lightning_fp8.te.keys import EXTRA_STATE

_DTYPES = (*ops.HIGH_PRECISION, torch.float64)


def _normalized_shape(normalized_shape: int | Sequence[int] | None, hidden_size: int | None) -> list[int]:
    given = [shape for shape in (normalized_shape, hidden_size) if shape is not None]
    if not given:
        raise TypeError("pass normalized_shape (or hidden_size), the size of the dimensions to normalize")
    first, *others = map(_sizes, given)
    if first not in others and others:
        raise ValueError(f"{normalized_shape=} and {hidden_size=} are the same argument; pass one of them")
    return first


def _sizes(shape: Any) -> list[int]:
    sizes = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes)) else [shape]
    sizes = [plain(size) for size in sizes]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"normalized_shape={sizes} must be a positive integer, or a sequence of positive integers")
    return sizes


def _check_gamma(zero_centered_gamma: bool, elementwise_affine: bool) -> None:
    if zero_centered_gamma and not elementwise_affine:
        raise ValueError("zero_centered_gamma=True needs elementwise_affine=True: without it there is no gamma")


def _check_input(module: nn.Module, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(module).__name__} takes a tensor, not {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{type(module).__name__} got an input of {x.dtype}; it takes floating-point tensors")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"{type(module).__name__} normalizes {shape}, but the input has shape {tuple(x.shape)}")


class _GammaModule(GroupTaker):
    """A norm whose weight is gamma, or gamma - 1 with ``zero_centered_gamma``."""

    zero_centered_gamma: bool
    sequence_parallel: bool = False
    weight: Any  # None without elementwise_affine
    eps: Any  # a float; torch.nn.RMSNorm allows None
    normalized_shape: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *normalized_shape]`` to the same shape, in the input's dtype (or torch.autocast's)."""
        _check_input(self, input, tuple(self.normalized_shape))
        norm = Norm(self.eps, isinstance(self, nn.RMSNorm), self.zero_centered_gamma)
        weight, bias = self._summed(self.weight, None if norm.rms else self.bias)
        dtype = None if input.dtype == torch.float64 else autocast_dtype(input.device.type)
        return normalize(input, weight, bias, norm, self.normalized_shape, dtype or input.dtype)

    def _summed(self, *parameters: Any) -> list[Any]:
        """The parameters. With ``sequence_parallel`` their gradients are summed over the tensor-parallel group.

        Raises:
            RuntimeError: If ``sequence_parallel`` is True and no group is set.
        """
        group = self.tensor_parallel.group
        if group is None or not self.sequence_parallel:
            if self.sequence_parallel and torch.is_grad_enabled() and dist.is_initialized():
                raise RuntimeError(
                    f"{type(self).__name__} with sequence_parallel=True sums its parameters' gradients over the ranks: "
                    "call set_tensor_parallel_group(tp_group) first"
                )
            return [*parameters]
        return sum_gradients(*parameters, group=group)

    def reset_parameters(self) -> None:
        """Set gamma to 1 and beta to 0.

        Raises:
            RuntimeError: If parameters are on meta.
        """
        refuse_meta(self)
        super().reset_parameters()  # type: ignore[misc]
        if self.weight is not None and self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Drop the ``_extra_state`` of Transformer Engine 2.x, whose norms save one that is always empty."""
        state_dict.pop(f"{prefix}{EXTRA_STATE}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LayerNorm(_GammaModule, nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` over the last dimensions.

    Args:
        normalized_shape: the size of the last dimensions.
        eps: added to the variance.
        zero_centered_gamma: ``weight`` holds gamma - 1 and starts at 0.
        sequence_parallel: each rank normalizes a shard of the sequence. The gradients of the parameters are summed over
            the group of ``set_tensor_parallel_group``.
        params_dtype: the dtype of the parameters. ``dtype`` is an alias.
        hidden_size: Transformer Engine's older name of ``normalized_shape``.

    Raises:
        ValueError, TypeError: If a size, ``eps`` or an input is invalid.
    """

    @checked_arguments
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = _normalized_shape(normalized_shape, hidden_size)
        _check_gamma(zero_centered_gamma, elementwise_affine)
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(shape, eps, elementwise_affine, bias, device, one_dtype(params_dtype, dtype, _DTYPES))
        self.sequence_parallel = sequence_parallel


class RMSNorm(_GammaModule, nn.RMSNorm):
    """``x / sqrt(mean(x²) + eps) * gamma`` over the last dimensions.

    The arguments and errors are those of :class:`LayerNorm`.
    """

    @checked_arguments
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        hidden_size: int | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = _normalized_shape(normalized_shape, hidden_size)
        _check_gamma(zero_centered_gamma, elementwise_affine)
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(shape, eps, elementwise_affine, device, one_dtype(params_dtype, dtype, _DTYPES))
        self.sequence_parallel = sequence_parallel
