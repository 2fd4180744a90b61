"""The dtype of a tensor that an autograd function returns."""

from __future__ import annotations

import torch
from torch import Tensor


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. Use it in the forward of an autograd function, in place of ``x.to(dtype)``.

    Before torch 2.12, torch.compile adds each tensor that a forward computes to its outputs (see
    ``torch._dynamo.variables.higher_order_ops``). If ``x`` already has the dtype, ``x.to(dtype)`` returns ``x``, which
    is then a second output. autograd uses the gradient of the last output, and the gradient of ``x`` is silently zero.
    """
    return x if x.dtype is dtype else x.to(dtype)
