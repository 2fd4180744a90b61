"""LayerNorm and RMSNorm in high precision. They compute in float32 (float64 of such an input)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.functions.dtypes import converted
from lightning_fp8.ops.norm import Norm


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of ``x [..., *shape]`` over its last dimensions, in ``dtype``, or in the dtype of x if it is None.

    ``weight`` and ``bias`` have the shape ``shape``. The result does not depend on the strides of ``x``.
    """
    dtype = dtype or x.dtype
    wide = (x if x.dtype == torch.float64 else x.float()).contiguous()  # else torch's rms_norm sums in another order
    gamma = None if weight is None else weight.to(wide.dtype)
    if gamma is not None and norm.zero_centered:
        gamma = gamma + 1.0
    if norm.rms:
        return converted(F.rms_norm(wide, shape, gamma, norm.eps), dtype)
    beta = None if bias is None else bias.to(wide.dtype)
    return converted(F.layer_norm(wide, shape, gamma, beta, norm.eps), dtype)
