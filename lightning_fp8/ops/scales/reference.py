"""The specification of ``update_scales`` in plain torch; its formulas are :mod:`lightning_fp8.scaling`'s."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.scales.schema import check_update


def update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str
) -> None:
    """See :func:`lightning_fp8.ops.update_scales`."""
    check_update(amax, amax_history, scale, fp8_max)
    new_scale, new_history = scaling.updated_scales(
        amax, amax_history, scale, fp8_max, margin, "max" if algorithm == "max" else "most_recent"
    )
    scale.copy_(new_scale)
    amax_history.copy_(new_history)
    amax.zero_()


implement("update_scales", "cpu", update_scales)
