"""The ops on CUDA tensors: plan once for tensors that lie alike, then allocate and start :mod:`cuda_kernels`.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.config import NAMES
from lightning_fp8.ops.given import Checked, lie_of, require_beside_a_cast, require_of_an_update
from lightning_fp8.ops.planning import current_device, planned, refuse_empty
from lightning_fp8.ops.plans import blocks_of, casting, values_of
from lightning_fp8.ops.schema import NAMESPACE, UNOBSERVED

quantize = casting(reference.quantize, lambda config, *lies: values_of(*lies))


def observe(x: Tensor, amax: Tensor) -> None:
    return _observe_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), x.data_ptr() % 16
    )(x, amax)  # fmt: skip


@planned(reference.observe)
def _observe_plan(
    device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int
) -> Callable[[Tensor, Tensor], None]:
    from cuda_kernels.casts.amax import amax_kernel
    from cuda_kernels.host import launch

    refuse_empty(shape)
    if len(shape) != 2:
        return lambda x, amax: observe(x.reshape(-1, shape[-1] if shape else 1), amax)
    if dtype == torch.float64:
        return lambda x, amax: observe(x.float(), amax)
    if dtype not in NAMES:
        raise TypeError(f"cannot observe {dtype}; cast to one of {', '.join(map(str, NAMES))} first")
    values = values_of(dtype, shape, strides, address)
    if values is None:
        return lambda x, amax: observe(x.contiguous(), amax)
    source, stride, size = values.wide or values.source, values.stride, (values.rows, values.columns)
    start = launch.Launch(amax_kernel(source, True), blocks_of(device, *size), size, device).start
    at, checked = launch.address_on(device), Checked(device)
    known = checked.known

    def op(x: Tensor, amax: Tensor) -> None:
        observed = at(amax)
        if observed not in known:
            require_beside_a_cast(device, None, lie_of(amax), None)
            checked.keep(observed)
        start(at(x), stride, 0, observed)

    return op


def update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    op = _update_plan(
        amax.device, amax.is_cuda and current_device(), amax_history.shape, margin, algorithm, recompute
    )  # fmt: skip
    return op(amax, amax_history, scale, fp8_max, margin, algorithm, recompute)


@planned(reference.update_scales)
def _update_plan(
    device: torch.device, amax_history: Sequence[int], margin: float, algorithm: str, recompute: bool
) -> Callable[..., None]:
    from cuda_kernels.casts import update_scales
    from cuda_kernels.host import launch

    refuse_empty(amax_history)
    length, n = amax_history if len(amax_history) == 2 else (0, 0)
    kernel = update_scales.update_scales_kernel(algorithm == "most_recent", recompute)
    start = launch.Launch(kernel, -(-n // update_scales.COLUMNS), (2.0**-margin, length, n), device).start
    at, checked = launch.address_on(device), Checked(device)
    known = checked.known

    def op(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, *rule: object) -> None:
        addresses = at(amax), at(amax_history), at(scale), at(fp8_max)
        if addresses not in known:
            require_of_an_update(amax, amax_history, scale, fp8_max)
            checked.keep(addresses)
        start(*addresses)

    return op


for _op in (quantize, observe, update_scales):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _op)
torch.library.impl(f"{NAMESPACE}::quantize{UNOBSERVED}", "cuda", quantize)
