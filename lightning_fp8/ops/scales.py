"""The scale update of delayed scaling for all tensors of a model: the op, its specification and its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.update_scales import SLOTS, update_scales_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch
from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.scaling import AmaxAlgorithm
from lightning_fp8.ops.checks import require, require_contiguous
from lightning_fp8.ops.op import op
from lightning_fp8.ops.plans import check_not_empty, current_device, planned


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    margin: float,
    algorithm: AmaxAlgorithm,
) -> None:
    """Update all tensors in place: append ``amax`` to ``amax_history``, compute ``scale``, and set ``amax`` to 0.

    Args:
        amax: float32 ``[n]``.
        amax_history: float32 ``[len, n]``, oldest first. Its first row is 0 between updates, as in Transformer Engine.
        scale: float32 ``[n]``.
        fp8_max: float32 ``[n]``, the largest value of each tensor's format.
        margin: the headroom in bits.
        algorithm: ``"max"`` uses the maximum of the history, ``"most_recent"`` its last row.

    Raises:
        TypeError, ValueError: If a tensor has the wrong dtype, shape or device, or if the algorithm or margin is
            invalid.
    """
    update_scales_op.call(amax, amax_history, scale, fp8_max, float(margin), algorithm)


def _check(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str) -> None:
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm={algorithm!r} is unknown; use 'max' or 'most_recent'")
    if not -126 <= margin <= 126:
        raise ValueError(f"margin={margin} must be from -126 to 126, the exponents of float32")
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


@op("update_scales", check=_check, writes=("amax", "amax_history", "scale"))
def update_scales_op(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str
) -> None:
    return None


def reference_update(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: Any
) -> None:
    """The specification in plain torch, by the formulas of :mod:`lightning_fp8.numerics.scaling`."""
    new_scale, new_history = scaling.updated_scales(amax, amax_history, scale, fp8_max, margin, algorithm)
    scale.copy_(new_scale)
    amax_history.copy_(new_history)
    amax.zero_()


def update_on_cuda(amax: Tensor, amax_history: Tensor, *others: Any) -> None:
    """The update in one launch."""
    run = _plan(amax.device, amax.is_cuda and current_device(), amax_history.shape, *others[2:])
    run(amax, amax_history, *others)


@planned(fallback=reference_update, name="update_scales")
def _plan(device: torch.device, shape: Sequence[int], margin: float, algorithm: str) -> Callable[..., None]:
    """Plan the update for an ``amax_history`` of ``shape``."""
    check_not_empty(shape)
    length, n = shape
    kernel = update_scales_kernel(algorithm == "most_recent")
    addresses = "amaxes", "amax_history", "scale", "fp8_max"
    run = launch.bind(kernel, ceil_div(n, SLOTS), device, addresses, power=2.0**-margin, length=length, n=n)
    pointer = launch.address_on(device)

    def update(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, *_: object) -> None:
        run(pointer(amax), pointer(amax_history), pointer(scale), pointer(fp8_max))

    return update


update_scales_op.implement("cpu", reference_update)
update_scales_op.implement("cuda", update_on_cuda)
