"""``quantize`` and ``observe`` on CUDA tensors: planned once for tensors of one key, then allocated and started.

Nothing here waits for the device: kernels ask whether a given scale is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.casts.quantize_blocks import takes_octets
from cuda_kernels.device.tile import TileLoader, tensor_loader
from cuda_kernels.host import launch
from lightning_fp8.ops.core.checks import CheckedAddresses
from lightning_fp8.ops.core.dispatch import Op, check_not_empty, current_device, planned
from lightning_fp8.ops.core.options import DTYPE_NAMES, HIGH_PRECISION
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.core.tensor_keys import PlainKey, TensorKey, tensor_key
from lightning_fp8.ops.quantize import reference
from lightning_fp8.ops.quantize.launches import cast_launches, cast_variant, num_blocks, overflow_counts_key
from lightning_fp8.ops.quantize.outputs import Outputs, with_kernel_strides
from lightning_fp8.ops.quantize.schema import check_cast_io, implement_cast

Loaders = tuple[TileLoader, "TileLoader | None", int]
"""The tile loader of some values, that of the same in vectors of 16 bytes if they come in such, and their columns."""


def planned_cast(reference_op: Op, loaders: Callable[[str, TensorKey], Loaders]) -> Callable[..., Outputs]:
    """The op ``(x, options_text, scale, amax, overflow_counts)`` that casts what tile loaders compute from x by rows.

    A tensor whose rows have gaps between their elements is made contiguous first.

    Args:
        reference_op: ``(x, options_text, io)``, computes the same without kernels.
        loaders: ``(options_text, x_key)`` to the tile loaders that compute the values.
    """

    @planned(fallback=with_kernel_strides(reference_op))
    def plan(device: torch.device, x_plain_key: PlainKey, options_text: str, *given: Any) -> Op:
        x_key = TensorKey(*x_plain_key, device)
        variant = cast_variant(device, options_text, *given)
        options = variant.options
        check_not_empty(x_key.shape)
        if not x_key.has_contiguous_rows:
            return lambda x, options_text, io: op(x.contiguous(), options_text, *io)
        loader, wide, columns = loaders(options_text, x_key)
        # The widest vectors do not pay where columns share a scale, too.
        narrow = options.columnwise or not takes_octets(options.layout.block)
        amax_loader = wide or loader if options.layout.has_one_scale else loader
        store_loader = loader if narrow else wide or loader
        launches = cast_launches(options.layout)(device, amax_loader, x_key.rows, columns, variant, store_loader).cast
        pointer = launch.address_on(device)
        stride = x_key.stride
        return lambda x, options_text, io: launches((pointer(x), stride), io)

    def op(
        x: Tensor, options_text: str, scale: Tensor | None = None, amax: Tensor | None = None,
        overflow_counts: Tensor | None = None,
    ) -> Outputs:  # fmt: skip
        return plan(
            x.device, x.is_cuda and current_device(), tensor_key(x), options_text, scale is not None, amax is not None,
            None if overflow_counts is None else overflow_counts_key(overflow_counts),
        )(x, options_text, (scale, amax, overflow_counts))  # fmt: skip

    return op


def tensor_loaders(options_text: str, x_key: TensorKey) -> Loaders:
    """The loaders of a tensor's own values."""
    vector = next(n for n in (8, 4, 1) if n == 1 or x_key.is_vectorizable(n))
    wide = tensor_loader(DTYPE_NAMES[x_key.dtype], 8) if vector == 8 and x_key.dtype.itemsize == 2 else None
    return tensor_loader(DTYPE_NAMES[x_key.dtype], min(vector, 4)), wide, x_key.columns


quantize = planned_cast(reference.cast, tensor_loaders)


def observe(x: Tensor, amax: Tensor) -> None:
    """See :func:`lightning_fp8.ops.observe`."""
    _observe_plan(x.device, x.is_cuda and current_device(), tensor_key(x))(x, amax)


@planned(fallback=reference.observe)
def _observe_plan(device: torch.device, x_plain_key: PlainKey) -> Callable[[Tensor, Tensor], None]:
    x_key = TensorKey(*x_plain_key, device)
    shape = x_key.shape
    check_not_empty(shape)
    if len(shape) != 2:
        return lambda x, amax: observe(x.reshape(-1, shape[-1] if shape else 1), amax)
    if x_key.dtype == torch.float64:
        return lambda x, amax: observe(x.float(), amax)
    if x_key.dtype not in DTYPE_NAMES:
        raise TypeError(f"cannot observe {x_key.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")
    if not x_key.has_contiguous_rows:
        return lambda x, amax: observe(x.contiguous(), amax)
    loader, wide, _ = tensor_loaders("", x_key)
    rows, columns = shape
    kernel, blocks = amax_kernel(wide or loader, True), num_blocks(device, rows, columns)
    run = launch.bind(kernel, blocks, device, ("loader_args", "scale_ptr", "amax_ptr"), rows=rows, columns=columns)
    pointer = launch.address_on(device)
    stride = x_key.stride
    checked = CheckedAddresses(device)

    def op(x: Tensor, amax: Tensor) -> None:
        amax_ptr = pointer(amax)
        if amax_ptr not in checked:
            check_cast_io(device, (None, amax, None))
            checked.keep(amax_ptr)
        run(pointer(x), stride, 0, amax_ptr)

    return op


implement_cast("quantize", "cuda", quantize)
implement("observe", "cuda", observe)
