"""The specification of ``update_scales`` in plain torch; its formulas are :mod:`lightning_fp8.scaling`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.scales.schema import check_update


def update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    """See :func:`lightning_fp8.ops.update_scales`."""
    check_update(amax, amax_history, scale, fp8_max)
    rolled = scaling.roll_history(amax_history, amax)
    if recompute:
        largest = scaling.reduce_history(rolled, "max" if algorithm == "max" else "most_recent")
        ran = (amax > 0) & torch.isfinite(amax)
        scale.copy_(torch.where(ran, scaling.delayed_scale(largest, scale, fp8_max, margin), scale))
    rolled[0] = 0  # the oldest amax counted for the last time
    amax_history.copy_(rolled)
    amax.zero_()


implement("update_scales", "cpu", update_scales)
