"""Linear: ``torch.nn.Linear`` whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import (
    one_dtype,
    plain,
    require_positive,
    rows_by_name,
)
from lightning_fp8.modules.initialization import Initialization, InitMethod, refuse_meta
from lightning_fp8.modules.tensor_parallel import CutLayer, TensorParallel, cut_linear
from lightning_fp8.te.arguments import (
    ParallelArguments,
    PassesContextParallelGroup,
    checked_arguments,
    refuse_in_forward,
)
from lightning_fp8.weights.model_init import keep_weights_in_fp8


class Linear(PassesContextParallelGroup, CutLayer, nn.Linear):  # type: ignore[misc]
    """``y = x wᵀ + b``, ``x [..., in_features]`` to ``y [..., out_features]``, in FP8 inside ``fp8_autocast``.

    Outside ``fp8_autocast``, and with ``enabled=False``, the layer computes as ``torch.nn.Linear`` does. It has the
    ``state_dict`` of ``torch.nn.Linear``. The numbers of features and rows are not restricted.

    Args:
        in_features: the number of columns of x.
        out_features: the number of columns of y.
        bias: whether the layer has a bias.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad`` (float32, bfloat16 or float16)
            instead of ``weight.grad``. Every backward pass through the layer does so, even one that only needs the
            input's gradient. If ``weight.overwrite_main_grad`` is True, it overwrites ``main_grad`` instead. If the
            weight has the attribute ``grad_added_to_main_grad``, it is set to True and ``grad`` becomes zeros, as
            Megatron's hooks require.
        return_bias: return ``(y without bias, bias)``.
        init_method: initializes each weight, also in ``reset_parameters``. ``None`` is a normal distribution with a
            standard deviation of 0.023, as in Transformer Engine. The bias starts at zero. Layers that are converted
            from ``torch.nn.Linear`` keep its method.
        params_dtype: the dtype of the parameters. ``dtype`` is an alias.
        parameters_split: split the weight's rows into several parameters (``query_weight``, ``query_bias``, ...),
            which replace ``weight`` and ``bias``. Either names, or a dictionary of names and numbers of rows.
        delay_wgrad_compute: leave the weight's gradient to :meth:`backward_dw` instead of the backward pass.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`. With ``parallel_mode`` the arguments above
            are global sizes, and the attributes ``in_features`` and ``out_features`` and the parameters are local to
            this rank.

    Raises:
        ValueError, TypeError: If an argument or an input is invalid; the message names the valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
    """

    initialization = Initialization()  # of a layer whose class was swapped in place

    @checked_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        in_features, out_features = plain(in_features), plain(out_features)
        require_positive("in_features", in_features)
        require_positive("out_features", out_features)
        split_rows = None if parameters_split is None else rows_by_name(parameters_split, out_features)
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        factory: dict[str, Any] = {"device": device, "dtype": one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if split_rows is not None:
            self._split_parameters(split_rows)
        self._delay_wgrads(parallel.get("delay_wgrad_compute", False))
        self.initialization = Initialization.told(init_method, parallel)
        self.reset_parameters()
        cut_linear(self, parallel.get("parallel_mode"), TensorParallel.asked(parallel))
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

    def reset_parameters(self) -> None:
        """Initialize the parameters as the constructor does. Call it after ``to_empty`` of a module on meta.

        Raises:
            RuntimeError: If parameters are on meta, or if the module was loaded from a pickle that omits
                ``init_method``.
        """
        refuse_meta(self)
        if self.initialization.weight is None:
            nn.Linear.reset_parameters(self)
        else:
            with self._as_whole():
                self.initialization.fill(*self.weights_and_biases())
        self.forget_weight()

    def forward(  # type: ignore[override]
        self,
        input: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        inp: Tensor | None = None,
        weight: None = None,
        bias: None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (or torch.autocast's).

        Args:
            input: a bfloat16, float16 or float32 tensor. ``inp``, Transformer Engine's name, is an alias.
            is_first_microbatch: True casts the weight and caches the result; False uses the cached weight. See
                :meth:`lightning_fp8.modules.linear_layer.LinearLayer.forward`.
            fp8_output, fp8_grad, weight, bias: not supported; only their defaults are accepted.

        Raises:
            TypeError, ValueError: If the input does not fit the layer; the message names the valid values.
            NotImplementedError: If an argument that is not supported differs from its default.
        """
        if fp8_output is not False or fp8_grad is not False or weight is not None or bias is not None:
            refuse_in_forward(fp8_output=fp8_output, fp8_grad=fp8_grad, weight=weight, bias=bias)
        if inp is not None:
            if input is not None:
                raise TypeError("Linear takes one input; Transformer Engine calls it inp, torch input")
            input = inp
        if self.parallel_mode is not None:
            return self._forward_of_piece(input, is_first_microbatch)  # type: ignore[arg-type]
        return super().forward(input, is_first_microbatch)  # type: ignore[arg-type]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_of_piece(
        self, input: Tensor, is_first_microbatch: bool | None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        weight, bias = self._weight_and_bias()
        context = self._begin(input, weight, is_first_microbatch)
        y = self._product_of_piece(input, weight, bias, context, is_first_microbatch)
        return (y, self._returned_bias(bias, self.parallel_mode)) if self.return_bias else y

    def extra_repr(self) -> str:
        bias = getattr(self, self.bias_names[0]) is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, fp8={self.fp8}"
