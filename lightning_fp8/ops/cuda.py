"""The ops on CUDA tensors: plan once for tensors that lie alike, then allocate and start :mod:`cuda_kernels`.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.fallback import falls_back, refuse_empty
from lightning_fp8.ops.how import parsed
from lightning_fp8.ops.operands import Outputs
from lightning_fp8.ops.plans import KEPT_PLANS, CastPlan, Task, plan_of, reading_of
from lightning_fp8.ops.schema import NAMESPACE

if TYPE_CHECKING:
    from cuda_kernels.launch import Argument, Launch


def quantize(
    x: Tensor, how: str, scale: Tensor | None = None, seen: Tensor | None = None, counts: Tensor | None = None
) -> Outputs:
    address = x.data_ptr() % 16
    given, observes, counted = scale is not None, seen is not None, counts is not None
    planned = _quantize_plan(x.device, x.dtype, x.shape, x.stride(), address, how, given, observes, counted)
    if planned is None:
        return quantize(x.contiguous(), how, scale, seen, counts)
    plan, pitch = planned
    return plan((plan.at(x), pitch), scale, seen, counts)


@lru_cache(KEPT_PLANS)
def _quantize_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> tuple[CastPlan, int] | None:
    """The plan, and the pitch of x; None as :func:`reading_of`."""
    reading = reading_of(device, dtype, shape, strides, address)
    if reading is None:
        return None
    source, _, pitch, rows, columns, _ = reading
    return plan_of(device, source, rows, columns, Task(parsed(how), given, observes, counts)), pitch


def observe(x: Tensor, seen: Tensor) -> None:
    planned = _observe_plan(x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
    if planned is None:
        return observe(x.contiguous(), seen)
    start, at, pitch = planned
    start(at(x), pitch, 0, at(seen))
    return None


@lru_cache(KEPT_PLANS)
def _observe_plan(
    device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int
) -> tuple[Launch, Callable[[Tensor], Argument], int] | None:
    from cuda_kernels import amax, launch

    reading = reading_of(device, dtype, shape, strides, address)
    if reading is None:
        return None
    source, _, pitch, rows, columns, blocks = reading
    start = launch.Launch(amax.amax_kernel(source, True), blocks, (rows, columns), device)
    return start, launch.address_on(device), pitch


def update_scales(
    seen: Tensor, window: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    start, at = _update_plan(seen.device, window.shape, margin, algorithm, recompute)
    start(at(seen), at(window), at(scale), at(fp8_max))


@lru_cache(KEPT_PLANS)
def _update_plan(
    device: torch.device, window: Sequence[int], margin: float, algorithm: str, recompute: bool
) -> tuple[Launch, Callable[[Tensor], Argument]]:
    from cuda_kernels import launch, scaling

    refuse_empty(window)
    length, n = window
    kernel = scaling.update_scales_kernel(algorithm == "most_recent", recompute)
    start = launch.Launch(kernel, -(-n // scaling.COLUMNS), (2.0**margin, length, n), device)
    return start, launch.address_on(device)


for _op, _how_at in ((quantize, 1), (observe, None), (update_scales, None)):
    _registered = falls_back(_op, getattr(reference, _op.__name__), _how_at)
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _registered)
