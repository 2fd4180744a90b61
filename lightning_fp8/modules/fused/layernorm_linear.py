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
from lightning_fp8.modules.fused.normed_layer import NormedLayer, detached, register_norm, reset_norm
from lightning_fp8.modules.initialization import Initialization, InitMethod, default_init_method, refuse_meta
from lightning_fp8.modules.tensor_parallel import TensorParallel, cut_linear
from lightning_fp8.primary_weights import keep_weights_in_fp8
from lightning_fp8.te.arguments import ParallelArguments, checked_arguments, refuse_in_forward


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
        return_layernorm_output: give the norm's output ``[..., in_features]``, in y's dtype, beside y.
        fuse_wgrad_accumulation: as in :class:`lightning_fp8.Linear`.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`; ``parallel_mode`` is ``"column"`` or None. See
            :class:`lightning_fp8.Linear`.

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
        NotImplementedError: an argument that is not supported, and not at its default.
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
        flags = {
            "return_bias": return_bias,
            "return_layernorm_output": return_layernorm_output,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "return_layernorm_output_gathered": parallel.get("return_layernorm_output_gathered", False),
        }
        self._keep(flags, in_features=in_features, out_features=out_features)
        split_rows = None if parameters_split is None else rows_by_name(parameters_split, self.out_features)
        factory: Any = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        self.norm = Norm(float(eps), normalization == "RMSNorm", zero_centered_gamma)
        register_norm(self, self.norm, self.in_features, **factory)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features, **factory)) if bias else None)
        if split_rows is not None:
            self._split_parameters(split_rows)
        self._delay_wgrads(parallel.get("delay_wgrad_compute", False))
        self.initialization = Initialization.told(init_method or default_init_method, nn.init.zeros_, parallel)
        self.reset_parameters()
        tensor_parallel, mode = TensorParallel.asked(parallel), parallel.get("parallel_mode")
        if mode == "row" and tensor_parallel.size > 1:
            raise ValueError(
                "parallel_mode='row' of LayerNormLinear is not supported: its norm needs all input features; use "
                "LayerNorm (RMSNorm) and Linear(parallel_mode='row')"
            )
        cut_linear(self, mode, tensor_parallel)
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

    def reset_parameters(self) -> None:
        """Fill the parameters as the constructor does: those of a module that was on meta, after ``to_empty``.

        Raises:
            RuntimeError: parameters are on meta, or ``init_method`` was left out of a pickle, of which this module was
                loaded.
        """
        refuse_meta(self)
        reset_norm(self, self.norm)
        with self._as_whole():
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
            NotImplementedError: an argument that is not supported, and not at its default.
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
        return self._returned(y, bias, self._given_norm(normalized) if self.return_layernorm_output else None)

    def _fused(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """y and, if it is asked for, the norm's output."""
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
