"""Linear: ``torch.nn.Linear`` whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_fp8 import ops
from lightning_fp8.arguments import (
    one_dtype,
    plain,
    refuse_in_forward,
    require_bools,
    require_init_method,
    require_positive,
    rows_by_name,
)
from lightning_fp8.arguments.parallel import ParallelArguments, SetsNoGroups, initialization_rng, refuse_parallel
from lightning_fp8.modules.linear_layer import LinearLayer


class Linear(SetsNoGroups, LinearLayer, nn.Linear):  # type: ignore[misc]
    """``y = x wᵀ + b``, ``x [..., in_features]`` to ``y [..., out_features]``, in FP8 inside ``fp8_autocast``.

    Outside it, and in regions that are not enabled, it is ``torch.nn.Linear``. Its ``state_dict`` is
    ``torch.nn.Linear``'s. Features and rows may be any number.

    Args:
        in_features: columns of x.
        out_features: columns of y.
        bias: whether there is a bias.
        init_method: called on each weight; ``None`` is ``torch.nn.Linear``'s.
        params_dtype: dtype of the parameters; ``dtype`` is the same by torch's name.
        parameters_split: names, or name to rows, of parameters that hold the weight's rows in this order
            (``query_weight``, ``query_bias``, ...) instead of ``weight`` and ``bias``.
        return_bias: return ``(y without bias, bias)``.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad`` (float32) instead of ``weight.grad``.
        parallel: :class:`lightning_fp8.arguments.parallel.ParallelArguments`, at their defaults.

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
        NotImplementedError: a parallel argument that is not at its default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        in_features, out_features = plain(in_features), plain(out_features)
        require_positive("in_features", in_features)
        require_positive("out_features", out_features)
        require_bools(bias=bias, return_bias=return_bias, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        require_init_method("init_method", init_method)
        refuse_parallel("Linear", parallel)
        split_rows = None if parameters_split is None else rows_by_name(parameters_split, out_features)
        dtype = one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if init_method is not None:
            with torch.no_grad(), initialization_rng(parallel):
                init_method(self.weight)
        if split_rows is not None:
            self._split_parameters(split_rows)
        self.ensure_slots()

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
            fp8_output, fp8_grad, weight, bias: refused where they ask for anything.

        Raises:
            TypeError, ValueError: an input that does not fit the layer; the message says what would.
            NotImplementedError: an argument that asks for what is not here.
        """
        refuse_in_forward(fp8_output=fp8_output, fp8_grad=fp8_grad, weight=weight, bias=bias)
        if inp is not None and input is not None:
            raise TypeError("Linear takes one input; Transformer Engine calls it inp, torch input")
        return super().forward(inp if input is None else input, is_first_microbatch)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        bias = getattr(self, self.bias_names[0]) is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
