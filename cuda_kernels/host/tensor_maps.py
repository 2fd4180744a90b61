"""Tensor maps: descriptors of a matrix and of the boxes of it that TMA copies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host.launch import Argument, Box, Map, is_cuda_device
from cuda_kernels.kernel import KernelError

_BYTES = 128
_ALIGNMENT = 64
_MAX_CACHED_MAPS = 1024

# CUtensorMapDataType by bytes per element: UINT8, UINT16, FLOAT32 (for sums).
_KINDS = {1: 0, 2: 1, 4: 7}
_INTERLEAVE_NONE = 0
_SWIZZLE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_OUTSIDE_IS_0 = 0


def map_on(device: torch.device, box: Box) -> Callable[[Tensor], Argument]:
    """From a tensor to a launch argument: the tensor map of a matrix with contiguous rows, copied in boxes ``box``.

    Maps are cached by address only, because torch's allocator reuses memory. All tensors passed to one function must
    have the same shape, strides and dtype; other operands need another function.
    """
    if not is_cuda_device(device):
        return lambda tensor: Map(tensor.t() if box.transposed else tensor, box)
    cached: dict[int, bytes] = {}

    def encoded(tensor: Tensor) -> bytes:
        address = tensor.data_ptr()
        found = cached.get(address)
        if found is None:
            if len(cached) == _MAX_CACHED_MAPS:
                cached.clear()
            found = cached[address] = _encoded(tensor.t() if box.transposed else tensor, box)
        return found

    return encoded


@cache
def _encode() -> Any:
    """The driver's ``cuTensorMapEncodeTiled``, called through ctypes, because NVIDIA's bindings do not align the map
    to 64 bytes."""
    function = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuTensorMapEncodeTiled
    uint32_pointer = ctypes.POINTER(ctypes.c_uint32)
    uint64_pointer = ctypes.POINTER(ctypes.c_uint64)
    number = ctypes.c_int
    function.argtypes = (
        ctypes.c_void_p, number, ctypes.c_uint32, ctypes.c_void_p,
        uint64_pointer, uint64_pointer, uint32_pointer, uint32_pointer, number, number, number, number,
    )  # fmt: skip
    return function


def _encoded(tensor: Tensor, box: Box) -> bytes:
    """A ``CUtensorMap`` as bytes; it does not keep the tensor alive.

    Raises:
        KernelError: If the driver refuses it.
    """
    rows, columns = tensor.shape
    itemsize = tensor.element_size()
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    address = ceil_div(ctypes.addressof(memory), _ALIGNMENT) * _ALIGNMENT
    result = _encode()(
        address, _KINDS[itemsize], 2, tensor.data_ptr(),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(tensor.stride(0) * itemsize),
        (ctypes.c_uint32 * 2)(box.columns, box.rows), (ctypes.c_uint32 * 2)(1, 1),
        _INTERLEAVE_NONE, _SWIZZLE_128B if box.swizzle else _SWIZZLE_NONE, _L2_PROMOTION_256B, _OUTSIDE_IS_0,
    )  # fmt: skip
    if result:
        raise KernelError(f"the CUDA driver returned {result} for a tensor map of {tuple(tensor.shape)} in {box}")
    return ctypes.string_at(address, _BYTES)
