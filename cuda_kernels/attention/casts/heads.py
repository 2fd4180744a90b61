"""Read tensors of heads, for casts and means: a thread reads four channels of 16 rows, a block 128 rows of a head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from cuda_kernels.attention.spec import ROWS, HeadSize
from cuda_kernels.device.codec import quad_loader, quad_registers
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import load_16_if, quotient
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName

GROUP = 16
"""Rows per thread."""


@dataclass(frozen=True)
class HeadsSpec(HeadSize):
    """A strided tensor of heads; the channels of a head are contiguous.

    Attributes:
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        vector: 4 if the address and all strides are multiples of four elements, else 1.
    """

    dtype: DtypeName
    vector: int

    @classmethod
    def of(cls, head_dim: int, dtype: DtypeName, strides: tuple[int, ...], aligned: bool) -> HeadsSpec:
        """``aligned``: whether the address is a multiple of four elements."""
        return cls(head_dim, dtype, 4 if aligned and not any(stride % 4 for stride in strides) else 1)

    @property
    def quads(self) -> int:
        """Number of threads that share a row."""
        return self.head_dim // 4

    @property
    def threads(self) -> int:
        """Threads of a block of 128 rows."""
        return self.quads * (ROWS // GROUP)

    def __str__(self) -> str:
        return f"d={self.head_dim}, {self.dtype}, vector={self.vector}"


@cache
def make_heads_loader(spec: HeadsSpec) -> Any:
    """A device function ``(x, stride, rows_left, registers)`` that loads a thread's four channels of 16 rows.

    ``x``: the address of the first element. ``stride``: bytes between rows. Rows from ``rows_left`` on are 0.
    """
    registers_of_quad = quad_registers(spec.dtype)
    load_quad = quad_loader(spec.dtype, spec.vector == 4)

    @device
    def load(x, stride, rows_left, registers):
        address = x
        for step in range(GROUP):
            loaded = load_quad(address, 0, 4, step < rows_left)
            for register in range(registers_of_quad):
                registers[step * registers_of_quad + register] = loaded[register]
            address += stride

    return load


@cache
def make_heads_reader(spec: HeadsSpec) -> Any:
    """A device function ``(block, x, table, heads, stride_b, stride_l, stride_h, registers)`` that loads 128 rows.

    ``block``: which ones, of all heads. It returns the head, the sequence, the first packed row, how many of the
    thread's 16 rows exist, its group of rows and its quad of channels. Strides are in elements, between sequences, rows
    and heads.
    """
    item = ITEM_BYTES[spec.dtype]
    quads = spec.quads
    load = make_heads_loader(spec)

    @device
    def read(block, x, table, heads, stride_b, stride_l, stride_h, registers):
        thread = i32(cuda.threadIdx.x)
        rows = quotient(block, heads)
        head = i32(block - rows * heads)
        entry = load_16_if(table + i64(rows) * 16, True)
        sequence, source_row, valid, packed_row = i32(entry[0]), i32(entry[1]), i32(entry[2]), i32(entry[3])
        group = quotient(thread, quads)
        quad = i32(thread - group * quads)
        rows_left = i32(valid - group * GROUP)
        place = i64(sequence) * stride_b + i64(source_row + group * GROUP) * stride_l + i64(head) * stride_h
        load(x + (place + 4 * quad) * item, stride_l * item, rows_left, registers)
        return head, sequence, packed_row, rows_left, group, quad

    return read
