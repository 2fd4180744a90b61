"""Tensor maps in the encoding of the emulator's runtime (runtime/tensor_map.h)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import torch

BYTES = 128
_MAGIC = 0x70616D726F736E74
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_LAYOUT = struct.Struct("<2Q4Q5I5H5B")


class TensorMap:
    """Describes a tensor and the boxes that are copied from or to it: the emulator's ``CUtensorMap``.

    `box`, `dims` and `strides` (in elements) are outermost first, like ``tensor.shape``. Elements outside the tensor
    read as zero and are not written. The limits are those of ``cuTensorMapEncodeTiled`` without interleaving: rank 1
    to 5; elements of 1, 2 or 4 bytes; addresses and strides that are multiples of 16 bytes; boxes of at most 256
    elements in each dimension, whose rows are multiples of 16 bytes and no longer than the swizzle.

    Raises:
        ValueError: if a limit is exceeded, or if `dims` and `strides` exceed the tensor's storage.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        box: Sequence[int],
        swizzle: Literal[0, 32, 64, 128] = 0,
        dims: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        self.tensor = tensor
        self.box = tuple(box)
        self.swizzle = swizzle
        self.dims = tuple(tensor.shape if dims is None else dims)
        self.strides = tuple(tensor.stride() if strides is None else strides)
        self._check()

    def _check(self) -> None:
        size, rank = self.tensor.element_size(), len(self.dims)
        row = self.box[-1] * size if self.box else 0
        byte_strides = [s * size for s in self.strides[:-1]]
        last = sum((n - 1) * s for n, s in zip(self.dims, self.strides))
        storage = self.tensor.untyped_storage()
        end = self.tensor.data_ptr() + (last + 1) * size
        for broken, message in (
            (not 1 <= rank <= 5, f"rank {rank}: 1 to 5 are possible"),
            (len(self.box) != rank or len(self.strides) != rank, f"box {self.box} and dims {self.dims} differ in rank"),
            (size not in (1, 2, 4), f"elements of {size} bytes: 1, 2 and 4 are possible"),
            (self.swizzle not in _SWIZZLES, f"swizzle {self.swizzle}: 0, 32, 64 and 128 are possible"),
            (min(self.dims, default=0) < 1, f"dims {self.dims} are not positive"),
            (self.strides[-1:] != (1,), f"strides {self.strides}: the innermost one has to be 1"),
            (self.tensor.data_ptr() % 16, f"address {self.tensor.data_ptr():#x} is not a multiple of 16"),
            (any(s % 16 for s in byte_strides), f"strides of {byte_strides} bytes are not multiples of 16"),
            (not all(1 <= b <= 256 for b in self.box), f"box {self.box}: 1 to 256 elements are possible"),
            (row % 16, f"rows of the box have {row} bytes, not a multiple of 16"),
            (self.swizzle and row > self.swizzle, f"rows of {row} bytes do not fit a swizzle of {self.swizzle}"),
            (
                end > storage.data_ptr() + storage.nbytes(),
                f"dims {self.dims} and strides {self.strides} exceed the storage",
            ),
        ):
            if broken:
                raise ValueError(message)

    def encode(self, *, writable: bool) -> bytes:
        """The 128 bytes that the runtime reads."""
        size, rank = self.tensor.element_size(), len(self.dims)
        strides = [s * size for s in reversed(self.strides[:-1])]
        return _LAYOUT.pack(
            _MAGIC,
            self.tensor.data_ptr(),
            *_padded(strides, 4, 0),
            *_padded(list(reversed(self.dims)), 5, 1),
            *_padded(list(reversed(self.box)), 5, 1),
            size,
            rank,
            _SWIZZLES[self.swizzle],
            self.tensor.dtype == torch.float32,
            writable,
        ).ljust(BYTES, b"\0")


def _padded(values: list[int], length: int, fill: int) -> list[int]:
    return values + [fill] * (length - len(values))
