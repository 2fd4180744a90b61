"""LayerNormLinear: a norm and the linear layer that reads it, as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype, refuse_in_forward, refuse_transforms, require_bools, rows_by_name
from lightning_fp8.arguments.initialization import Initialization, InitMethod, default_init_method
from lightning_fp8.arguments.parallel import ParallelArguments
from lightning_fp8.autocast import FP8Context
from lightning_fp8.functions.layernorm_linear import LayerNormLinearFunction
from lightning_fp8.modules.fused.arguments import (
    checked_norm,
    detached,
    register_norm,
    reset_norm,
)
from lightning_fp8.modules.fused.normed_layer import NormedLayer


class LayerNormLinear(NormedLayer):
    """``y = norm(x) wᵀ + b``, ``x [..., in_features]`` to ``y [..., out_features]``, in FP8 inside ``fp8_autocast``.

    In FP8 the norm's float32 values are cast at once; in high precision it is :class:`LayerNorm` or :class:`RMSNorm`
    followed by ``torch.nn.Linear``. Its parameters are ``layer_norm_weight``, ``layer_norm_bias`` (of LayerNorm),
    ``weight`` and ``bias``, as Transformer Engine's.

    Args:
        in_features: columns of x.
        out_features: columns of y.
        eps: added to the variance.
        bias: whether there is a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1 and starts at 0.
        init_method: called on each weight; ``None`` is normal with deviation 0.023. The bias starts at 0.
        params_dtype: dtype of the parameters; ``dtype`` is the same by torch's name.
        parameters_split: as in :class:`lightning_fp8.Linear`.
        return_bias: give the bias beside y, not added.
        return_layernorm_output: give the norm's output ``[..., in_features]``, in x's dtype, beside y.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad`` (float32) instead of ``weight.grad``.
        parallel: :class:`lightning_fp8.arguments.parallel.ParallelArguments`, at their defaults.

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
        NotImplementedError: a parallel argument that is not at its default.
    """

    kind = "LayerNormLinear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        fuse_wgrad_accumulation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        super().__init__()
        flags = {
            "return_bias": return_bias,
            "return_layernorm_output": return_layernorm_output,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        require_bools(bias=bias)
        sizes = {"in_features": in_features, "out_features": out_features}
        self._keep(sizes, flags, {"init_method": init_method}, parallel)
        split_rows = None if parameters_split is None else rows_by_name(parameters_split, self.out_features)
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        self.norm = checked_norm(normalization, eps, zero_centered_gamma)
        register_norm(self, self.norm, self.in_features, **factory)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features, **factory)) if bias else None)
        if split_rows is not None:
            self._split_parameters(split_rows)
        self.initialization = Initialization.told(init_method or default_init_method, nn.init.zeros_, parallel)
        self.reset_parameters()
        self.ensure_slots()

    def reset_parameters(self) -> None:
        """Fill the parameters as the constructor does: those of a module that was on meta, after ``to_empty``.

        Raises:
            RuntimeError: ``init_method`` was left out of a pickle, of which this module was loaded.
        """
        reset_norm(self, self.norm)
        self.initialization.fill(*self.weights_and_biases())
        self.forget_weight()

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        weight: None = None,
        bias: None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (or torch.autocast's).

        Args:
            inp: bfloat16, float16 or float32.
            is_first_microbatch: as in :meth:`lightning_fp8.Linear.forward`.
            fp8_output, fp8_grad, weight, bias: refused where they ask for anything.

        Returns:
            y; with ``return_bias`` and ``return_layernorm_output`` a tuple of y, the bias and the norm's output.

        Raises:
            TypeError, ValueError: as :meth:`lightning_fp8.Linear.forward`.
            NotImplementedError: an argument that asks for what is not here.
        """
        refuse_in_forward(fp8_output=fp8_output, fp8_grad=fp8_grad, weight=weight, bias=bias)
        own_weight, own_bias, context = self._begin(inp, is_first_microbatch)
        added_bias = None if self.return_bias else own_bias
        normalized: Tensor | None
        if context.enabled and self.fp8:
            y, normalized = self._fused(inp, own_weight, added_bias, context, is_first_microbatch)
        else:
            normalized = self._normalized(inp)
            y = self._multiply(normalized, own_weight, added_bias, context, is_first_microbatch)
        return self._returned(y, own_bias, normalized)

    def _fused(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """y and, if it is asked for, the norm's output."""
        tensors = x.reshape(-1, self.in_features), self.layer_norm_weight, self.layer_norm_bias, weight, bias
        refuse_transforms(self.kind, *tensors)
        slots, dtype, observe = self._enter_fp8(context, x, weight)
        product = self._product(weight, self.weight_names, slots[0], observe, is_first_microbatch, context)
        outputs = LayerNormLinearFunction.apply(
            *detached(*tensors), self.norm, product, dtype, self.return_layernorm_output
        )
        return self._shaped(outputs, x.shape)

    def extra_repr(self) -> str:
        bias = getattr(self, self.bias_names[0]) is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, norm={self.norm}"
