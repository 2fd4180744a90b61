"""BF16 on processors that have no instructions for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


def multiplies_bf16() -> bool:
    """Whether torch multiplies BF16 by the processor's own instructions."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def made_on() -> str:
    """A sentence's part on the device here and how it computed BF16, for a report."""
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}, torch {torch.__version__}"
    slow = ", which has no BF16: layers in BF16 multiply in float32 and round their results"
    return f"the CPU, torch {torch.__version__}{'' if multiplies_bf16() else slow}"


@contextmanager
def fast_bf16() -> Iterator[None]:
    """Compute linear layers and attention of BF16 tensors in float32 and round their results, where that is faster.

    torch takes longer for products of BF16 than for those of float32 on such a processor. Linear layers keep
    their numbers but for the order of additions; attention loses the rounding inside, so that this baseline is a
    little better than BF16's own. Changes nothing on a processor that multiplies BF16, and nothing that runs in FP8.
    """
    if multiplies_bf16():
        yield
        return
    with (
        patch.object(F, "linear", _in_float32(F.linear)),
        patch.object(F, "scaled_dot_product_attention", _in_float32(F.scaled_dot_product_attention)),
    ):
        yield


def _in_float32(function: Any) -> Any:
    def computed(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.bfloat16:
            return function(x, *args, **options)
        args = tuple(_widened(each) for each in args)
        options = {name: _widened(each) for name, each in options.items()}
        return function(x.float(), *args, **options).to(x.dtype)

    return computed


def _widened(each: Any) -> Any:
    return each.float() if isinstance(each, Tensor) and each.dtype == torch.bfloat16 else each
