"""Conv1D: GPT-2's linear layer of Hugging Face, whose weight lies transposed, ``[in_features, out_features]``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.retype import retype, unsharded_class


class TransposedLinear(LinearLayer):
    """``y = x w + b`` with ``w [in_features, out_features]``, in FP8 as :class:`Linear` is; its GEMMs read ``wᵀ``."""

    def _parameter(self, names: tuple[str, ...]) -> Any:
        parameter = super()._parameter(names)
        return parameter.t() if names == self.weight_names else parameter

    def _high_precision(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = input.reshape(-1, input.shape[-1])
        y = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        return y.view(*input.shape[:-1], -1)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' own Conv1D, told without importing it."""
    cls = unsharded_class(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def retype_conv1d(module: nn.Module) -> None:
    """Turn transformers' Conv1D into its FP8 subclass, in place."""
    weight: Any = module.weight
    retype(module, _subclass(unsharded_class(module)))
    module.in_features, module.out_features = weight.shape  # type: ignore[assignment]


@lru_cache
def _subclass(conv1d: type) -> type:
    return type("Conv1D", (TransposedLinear, conv1d), {"__module__": __name__})


def __getattr__(name: str) -> Any:  # where a pickled model looks for its class
    if name == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        return _subclass(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
