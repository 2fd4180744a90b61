"""The dtype of what an autograd function returns."""

from __future__ import annotations

import torch
from torch import Tensor


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. Use it in the forward of an autograd function, in place of ``x.to(dtype)``.

    torch.compile before torch 2.12 adds each tensor that a forward computes to its outputs, as in
    ``torch._dynamo.variables.higher_order_ops``. Where ``x.to(dtype)`` has nothing to do, it is a second output that is
    ``x``, and autograd takes the gradient of the last one: that of ``x`` is silently zero.
    """
    return x if x.dtype is dtype else x.to(dtype)
