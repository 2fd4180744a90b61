"""Linear: ``torch.nn.Linear`` whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.arguments import one_dtype, plain, require_bool
from lightning_fp8.modules.linear_layer import LinearLayer


class Linear(LinearLayer, nn.Linear):  # type: ignore[misc]
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

    Raises:
        ValueError, TypeError: arguments or an input that do not fit; the message says what would.
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
    ) -> None:
        in_features, out_features = plain(in_features), plain(out_features)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        flags = {"bias": bias, "return_bias": return_bias, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        for name, flag in flags.items():
            require_bool(name, flag)
        if init_method is not None and not callable(init_method):
            raise TypeError(f"init_method={init_method!r} must be a function that fills a tensor in place, or None")
        rows = None if parameters_split is None else _rows_by_name(parameters_split, out_features)
        dtype = one_dtype(params_dtype, dtype, ops.HIGH_PRECISION)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)
        if rows is not None:
            self._split_parameters(rows)
        self.ensure_slots()

    def _split_parameters(self, rows: Mapping[str, int]) -> None:
        weights = self.weight.detach().split(list(rows.values()))
        sizes = list(rows.values())
        biases = self.bias.detach().split(sizes) if self.bias is not None else [None] * len(sizes)
        del self.weight, self.bias
        for name, weight, bias in zip(rows, weights, biases):
            self.register_parameter(f"{name}_weight", nn.Parameter(weight.clone()))
            self.register_parameter(f"{name}_bias", nn.Parameter(bias.clone()) if bias is not None else None)
        self.weight_names = tuple(f"{name}_weight" for name in rows)
        self.bias_names = tuple(f"{name}_bias" for name in rows)

    def extra_repr(self) -> str:
        bias = getattr(self, self.bias_names[0]) is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


def _rows_by_name(parameters_split: Sequence[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """Rows of each part of ``parameters_split``, in order.

    Names lose the underscores at their ends, which ``_weight`` brings.

    Raises:
        TypeError: neither a sequence of names nor a mapping of names to rows.
        ValueError: parts that are empty, have one name, or do not add up to ``out_features``.
    """
    split: Any = parameters_split
    if isinstance(split, str) or not isinstance(split, (Sequence, Mapping)) or not all(map(_is_name, split)):
        raise TypeError(
            f"parameters_split={split!r} must be a sequence of names or a mapping of name to rows; names have no dots"
        )
    if not split:
        raise ValueError("parameters_split is empty; name at least one part, or pass None")
    names = [name.rstrip("_") for name in split]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameters_split names {twice} more than once; give each part a name of its own")
    if isinstance(split, Mapping):
        sizes = list(split.values())
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"parameters_split={dict(split)} must give each part a positive number of rows")
        if sum(sizes) != out_features:
            raise ValueError(f"parameters_split={dict(split)} must sum to out_features={out_features}")
        return dict(zip(names, sizes))
    if out_features % len(names):
        raise ValueError(f"out_features={out_features} does not divide into {len(names)} equal parts")
    return dict.fromkeys(names, out_features // len(names))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.strip("_") != "" and "." not in name
