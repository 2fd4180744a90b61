"""RMSNorm and the cast of its result in one pass, for layers that read the result as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fp8 import ops
from lightning_fp8.functions.linear import Slots, cast_args
from lightning_fp8.functions.product import refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.scaled import Role

_aten = torch.ops.aten
_READ_NO_VALUES = (_aten.new_empty_strided.default, _aten.new_empty.default, _aten.empty_like.default)


class NormOutput(torch.Tensor):
    """``x rstd weight`` of RMSNorm, which is computed where something reads it; FP8 layers read its copies instead.

    Every operation but those on shapes takes it for the tensor that it stands for.
    """

    _source: tuple[Tensor, Tensor, float]
    _computed: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor, eps: float) -> NormOutput:
        output: NormOutput = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        output._source = x, weight, eps
        output._computed = None
        return output

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NormOutput(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def computed(self) -> Tensor:
        """The norm's result, rounded as Hugging Face's norms do: before it is multiplied by the weight."""
        if self._computed is None:
            x, weight, eps = self._source
            wide = x.float()
            normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            self._computed = weight * normalized.to(x.dtype)
        return self._computed

    def data_ptr(self) -> int:
        """The address that kernels of others read."""
        return self.computed().data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is _aten.detach.default:
            (output,) = args
            detached = NormOutput(*output._source)
            detached._computed = output._computed
            return detached
        if function in _READ_NO_VALUES:
            return function(args[0]._source[0], *args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(NormOutput, NormOutput.computed, (args, kwargs or {}))
        return function(*args, **kwargs)


class NormCastFunction(torch.autograd.Function):
    """RMSNorm of ``x [..., K]``, whose FP8 copies ``cast`` gets.

    Keeps x, the weight and float32 statistics for its backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cast: InputCast,
        slots: Slots,
        observe: bool,
        columnwise: bool,
    ) -> Tensor:
        operands, statistics = ops.norm_quantize(
            x.view(-1, x.shape[-1]),
            weight,
            None,
            cast.recipe.cast(Role.INPUT),
            eps=eps,
            rms=True,
            **cast_args(Role.INPUT, cast.recipe, slots, observe=observe, rowwise=True, columnwise=columnwise),
        )
        cast.complete(operands)
        ctx.save_for_backward(x, weight, statistics)
        return NormOutput(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a norm that casts for FP8 layers", "fuse=False")
        x, weight, statistics = ctx.saved_tensors
        columns = x.shape[-1]
        dx, dweight, _ = ops.norm_backward(dy.reshape(-1, columns), x.view(-1, columns), weight, statistics, rms=True)
        return dx.view(x.shape), dweight, *[None] * 5
