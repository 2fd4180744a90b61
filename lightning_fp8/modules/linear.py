"""Linear: ``torch.nn.Linear`` whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
from lightning_fp8.primary_weights import keep_weights_in_fp8
from lightning_fp8.te.arguments import (
    ParallelArguments,
    PassesContextParallelGroup,
    checked_arguments,
    refuse_in_forward,
)


class Linear(PassesContextParallelGroup, CutLayer, nn.Linear):  # type: ignore[misc]
    """``y = x wᵀ + b``, ``x [..., in_features]`` to ``y [..., out_features]``, in FP8 inside ``fp8_autocast``.

    Outside it, and in regions that are not enabled, it is ``torch.nn.Linear``. Its ``state_dict`` is
    ``torch.nn.Linear``'s. Features and rows may be any number.

    Args:
        in_features: columns of x.
        out_features: columns of y.
        bias: whether there is a bias.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad`` (float32, bfloat16 or float16)
            instead of ``weight.grad``, in each backward pass through the layer, also in one that asks for the input's
            gradient alone. Each overwrites it where ``weight.overwrite_main_grad`` is True. Where the weight has the
            attribute ``grad_added_to_main_grad`` it is set True, and ``grad`` gets zeros, as Megatron's hooks ask.
        return_bias: return ``(y without bias, bias)``.
        init_method: called on each weight, also by ``reset_parameters``; ``None`` is ``torch.nn.Linear``'s.
        params_dtype: dtype of the parameters; ``dtype`` is the same by torch's name.
        parameters_split: names, or name to rows, of parameters that hold the weight's rows in this order
            (``query_weight``, ``query_bias``, ...) instead of ``weight`` and ``bias``.
        delay_wgrad_compute: backward passes leave the weight's gradient to :meth:`backward_dw`.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`. With ``parallel_mode`` the features above are
            those of all ranks together, and ``in_features``, ``out_features`` and parameters this rank's.

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
        NotImplementedError: an argument that is not supported, and not at its default.
    """

    initialization = Initialization()

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
        dtype = one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if split_rows is not None:
            self._split_parameters(split_rows)
        self._delay_wgrads(parallel.get("delay_wgrad_compute", False))
        self.initialization = Initialization.told(init_method, None, parallel)
        self.initialization.fill(*self.weights_and_biases())
        cut_linear(self, parallel.get("parallel_mode"), TensorParallel.asked(parallel))
        self.ensure_slots()
        keep_weights_in_fp8(self, self.weight_names)

    def reset_parameters(self) -> None:
        """Fill the parameters as the constructor does: those of a module that was on meta, after ``to_empty``.

        Weights and biases are ``torch.nn.Linear``'s; ``init_method`` then fills the weights.

        Raises:
            RuntimeError: parameters are on meta, or ``init_method`` was left out of a pickle, of which this module was
                loaded.
        """
        refuse_meta(self)
        with self._as_whole():
            weights, biases = self.weights_and_biases()
            bound = 1 / math.sqrt(weights[0].shape[1])
            for weight, bias in zip(weights, biases):
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
                if bias is not None:
                    nn.init.uniform_(bias, -bound, bound)
            self.initialization.fill(weights, biases)
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
            input: bfloat16, float16 or float32; ``inp`` is the same by Transformer Engine's name.
            is_first_microbatch: True casts the weight and keeps the copy, False uses the kept copy; see
                :meth:`lightning_fp8.modules.linear_layer.LinearLayer.forward`.
            fp8_output, fp8_grad, weight, bias: refused unless at their defaults.

        Raises:
            TypeError, ValueError: an input that does not fit the layer; the message says what would.
            NotImplementedError: an argument that is not supported, and not at its default.
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
