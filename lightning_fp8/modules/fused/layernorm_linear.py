"""LayerNormLinear: a norm and the linear layer that reads it, as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype, rows_by_name
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.layernorm_linear import LayerNormLinearFunction
from lightning_fp8.functions.norm import Norm
from lightning_fp8.modules.fused.normed_layer import NormedLayer, detached, positive
from lightning_fp8.modules.initialization import InitMethod
from lightning_fp8.modules.tensor_parallel import TensorParallel, cut_linear
from lightning_fp8.te.arguments import ParallelArguments, checked_arguments, refuse_in_forward
from lightning_fp8.weights.model_init import keep_weights_in_fp8


class LayerNormLinear(NormedLayer):
    """``y = norm(x) wᵀ + b``, ``x [..., in_features]`` to ``y [..., out_features]``, in FP8 inside ``fp8_autocast``.

    In FP8 the norm's float32 values are cast directly to FP8. In high precision the module computes as
    :class:`LayerNorm` or :class:`RMSNorm` followed by ``torch.nn.Linear``. Its parameters have Transformer Engine's
    names: ``layer_norm_weight``, ``layer_norm_bias`` (for LayerNorm), ``weight`` and ``bias``.

    Args:
        in_features: the number of columns of x.
        out_features: the number of columns of y.
        eps: added to the variance.
        bias: whether the linear layer has a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1 and starts at 0.
        init_method: initializes each weight. ``None`` is a normal distribution with a standard deviation of 0.023. The
            bias is initialized to 0.
        params_dtype: the dtype of the parameters. ``dtype`` is an alias.
        parameters_split: see :class:`lightning_fp8.Linear`.
        return_bias: return the bias with y instead of adding it.
        return_layernorm_output: also return the norm's output ``[..., in_features]``, in y's dtype.
        fuse_wgrad_accumulation: see :class:`lightning_fp8.Linear`.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`; ``parallel_mode`` is ``"column"`` or None. See
            :class:`lightning_fp8.Linear`.

    Raises:
        ValueError, TypeError: If an argument or an input is invalid; the message names the valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
    """

    kind = "LayerNormLinear"

    @checked_arguments
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
        self.in_features = positive("in_features", in_features)
        self.out_features = positive("out_features", out_features)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        split_rows = None if parameters_split is None else rows_by_name(parameters_split, self.out_features)
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        norm = Norm(float(eps), normalization == "RMSNorm", zero_centered_gamma)
        self._register_norm(norm, self.in_features, parallel, **factory)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features, **factory)) if bias else None)
        if split_rows is not None:
            self._split_parameters(split_rows)
        self._initialize(parallel, init_method)
        tensor_parallel, mode = TensorParallel.asked(parallel), parallel.get("parallel_mode")
        if mode == "row" and tensor_parallel.size > 1:
            raise ValueError(
                "parallel_mode='row' of LayerNormLinear is not supported: its norm needs all input features; use "
                "LayerNorm (RMSNorm) and Linear(parallel_mode='row')"
            )
        cut_linear(self, mode, tensor_parallel)
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

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
            inp: a bfloat16, float16 or float32 tensor.
            is_first_microbatch: see :meth:`lightning_fp8.Linear.forward`.
            fp8_output, fp8_grad, weight, bias: not supported; only their defaults are accepted.

        Returns:
            y; with ``return_bias`` or ``return_layernorm_output`` a tuple of y, the bias and the norm's output.

        Raises:
            TypeError, ValueError: See :meth:`lightning_fp8.Linear.forward`.
            NotImplementedError: If an argument that is not supported differs from its default.
        """
        refuse_in_forward(fp8_output=fp8_output, fp8_grad=fp8_grad, weight=weight, bias=bias)
        if self.parallel_mode is not None:
            return self._forward_of_piece(inp, is_first_microbatch)
        own_weight, own_bias = self._weight_and_bias()
        context = self._begin(inp, own_weight, is_first_microbatch)
        added_bias = None if self.return_bias else own_bias
        normalized: Tensor | None
        if context.enabled and self.fp8:
            y, normalized = self._fused(inp, own_weight, added_bias, context, is_first_microbatch)
        else:
            normalized = self._normalized(inp)
            y = self._forward_outside_fp8(normalized, own_weight, added_bias, context, is_first_microbatch)
        return self._returned(y, own_bias, normalized)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_of_piece(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor | tuple[Tensor | None, ...]:
        weight, bias = self._weight_and_bias()
        context = self._begin(x, weight, is_first_microbatch)
        normalized = self._normalized(x)
        y = self._product_of_piece(normalized, weight, bias, context, is_first_microbatch)
        return self._returned(y, bias, normalized if self.return_layernorm_output else None)

    def _fused(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """y, and the norm's output with ``return_layernorm_output``."""
        tensors = x.reshape(-1, self.in_features), self.layer_norm_weight, self.layer_norm_bias, weight, bias
        (product,), dtype = self._products(x, (weight,), tensors, context, is_first_microbatch)
        if product.recipe.backward_override is not None:
            normalized = self._normalized(x)
            rows = normalized.reshape(-1, self.in_features)
            y = self._multiplied(rows, weight, bias, product, dtype)
            return y.view(*x.shape[:-1], self.out_features), normalized
        outputs = LayerNormLinearFunction.apply(
            *detached(*tensors), self.norm, product, dtype, self.return_layernorm_output
        )
        return self._shaped(outputs, x.shape)

    def extra_repr(self) -> str:
        bias = getattr(self, self.bias_names[0]) is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, norm={self.norm}"
