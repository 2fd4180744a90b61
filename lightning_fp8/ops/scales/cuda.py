"""``update_scales`` on CUDA tensors, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cuda_kernels.casts.update_scales import SLOTS, update_scales_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch
from lightning_fp8.ops.core.checks import CheckedAddresses
from lightning_fp8.ops.core.dispatch import check_not_empty, current_device, planned
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.scales import reference
from lightning_fp8.ops.scales.schema import check_update


def update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str
) -> None:
    """See :func:`lightning_fp8.ops.update_scales`."""
    op = _plan(amax.device, amax.is_cuda and current_device(), amax_history.shape, margin, algorithm)
    return op(amax, amax_history, scale, fp8_max, margin, algorithm)


@planned(fallback=reference.update_scales)
def _plan(device: torch.device, amax_history: Sequence[int], margin: float, algorithm: str) -> Callable[..., None]:
    """``amax_history``: its shape."""
    check_not_empty(amax_history)
    length, n = amax_history if len(amax_history) == 2 else (0, 0)
    kernel = update_scales_kernel(algorithm == "most_recent")
    addresses = "amaxes", "amax_history", "scale", "fp8_max"
    run = launch.bind(kernel, ceil_div(n, SLOTS), device, addresses, power=2.0**-margin, length=length, n=n)
    pointer = launch.address_on(device)
    checked = CheckedAddresses(device)

    def op(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, *options: object) -> None:
        pointers = pointer(amax), pointer(amax_history), pointer(scale), pointer(fp8_max)
        if pointers not in checked:
            check_update(amax, amax_history, scale, fp8_max)
            checked.keep(pointers)
        run(*pointers)

    return op


implement("update_scales", "cuda", update_scales)
