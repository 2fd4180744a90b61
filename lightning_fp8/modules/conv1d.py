"""Conv1D: the linear layer of Hugging Face's GPT-2, whose weight is ``[in_features, out_features]``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.modules.linear_layer import LinearLayer, is_foreign


class TransposedLinear(LinearLayer):
    """``y = x w + b`` with ``w [in_features, out_features]``. Its GEMMs read ``wᵀ``, in FP8 as in :class:`Linear`."""

    def _weight_and_bias(self) -> tuple[Tensor, Any]:
        weight, bias = super()._weight_and_bias()
        return weight if is_foreign(weight) else weight.t(), bias

    def _high_precision(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = input.reshape(-1, input.shape[-1])
        w = weight if is_foreign(weight) else weight.t()
        y = x @ w if bias is None else torch.addmm(bias, x, w)
        return y.view(*input.shape[:-1], -1)


@lru_cache
def fp8_conv1d(conv1d: type) -> type:
    """The FP8 subclass of the class of ``conv1d``, which is transformers' Conv1D."""
    return type("Conv1D", (TransposedLinear, conv1d), {"__module__": __name__})


def __getattr__(name: str) -> Any:  # unpickling looks up the class here
    if name == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        return fp8_conv1d(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
