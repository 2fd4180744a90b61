"""The schema of ``update_scales``; on fake and meta tensors it does nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.core.checks import require, require_contiguous
from lightning_fp8.ops.core.registration import define, fake, refuse_vmap

define(
    "update_scales",
    "(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, float margin, str algorithm) -> ()",
)
refuse_vmap("update_scales")


@fake("update_scales")
def _update_scales(*args: object) -> None:
    return None


def check_update(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor) -> None:
    """Check what an update takes: float32 ``[n]``, and a history ``[len, n]`` of at least one step, on one device.

    Raises:
        TypeError, ValueError: as :func:`require`; a tensor is not contiguous.
    """
    num_slots = amax.numel()
    length = amax_history.shape[0] if amax_history.dim() else 1
    for name, tensor, shape in (
        ("amax", amax, (num_slots,)),
        ("amax_history", amax_history, (max(length, 1), num_slots)),
        ("scale", scale, (num_slots,)),
        ("fp8_max", fp8_max, (num_slots,)),
    ):
        require_contiguous(name, tensor)
        require(name, tensor, torch.float32, shape, amax.device)
