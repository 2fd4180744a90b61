"""Device functions that convert tensors' bits to float32, and amaxes to scales; inlined into kernels.

An amax is passed as the bits of its float32. Without the sign bit, floats order like integers, with NaN above all
others. So an integer maximum keeps NaN, and does not depend on the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import (
    atomic_max,
    bits,
    cached_4_if,
    divide,
    from_bits,
    high_half,
    larger_magnitudes,
    load_2_if,
    load_8_if,
    load_16_if,
    load_relaxed,
    low_half,
    pack_halves,
    store_2,
    store_f32,
    unsigned_max,
)
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName

FP8_MAX = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
"""Largest finite value of each format, since kernels do not import torch; also in ``numerics/formats.py``."""

_ZERO = np.float32(0)
_ONE = np.float32(1)
_INFINITY = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max
_SIGNLESS = np.uint32(0x7FFFFFFF)
INFINITY_BITS = np.uint32(0x7F800000)
"""The bits of infinity, and the mask of the exponent. Non-finite values have this magnitude or a larger one."""
_MANTISSA = np.uint32(0x7FFFFF)


@device
def update_amax(amax_out, amax_bits):
    """``*amax_out = max(*amax_out, amax_bits)``. Reads first, because most blocks do not exceed the current maximum."""
    if amax_bits > load_relaxed(amax_out):
        atomic_max(amax_out, amax_bits)


@device
def magnitude(value):
    """The bits of ``|value|``."""
    return bits(value) & _SIGNLESS


@device
def largest_of(a, b, c, d):
    """The largest of four magnitudes. They are passed and returned as bits, which have the same order."""
    return unsigned_max(unsigned_max(a, b), unsigned_max(c, d))


@device
def amax_to_scale(amax, fp8_max, power_2, epsilon):
    """``fp8_max / max(amax, epsilon)`` in float32; 1 if amax is 0, inf or NaN.

    ``power_2`` rounds it down to a power of two. Same as ``current_scale`` of ``lightning_fp8.numerics.scaling``.
    """
    amax = epsilon if epsilon > amax else amax
    scale = divide(fp8_max, amax)
    scale = scale if scale < _LARGEST else _LARGEST
    scale = scale if _ZERO < amax < _INFINITY else _ONE
    return from_bits(bits(scale) & INFINITY_BITS) if power_2 else scale


@device
def e8m0_code(amax, reciprocal_max):
    """The E8M0 code of ``amax * reciprocal_max``, rounded up; 254 for inf, 255 for NaN.

    Same as ``e8m0_from_amax`` of ``lightning_fp8.numerics.scaling``, which gives the source.
    """
    scaled = bits(amax * reciprocal_max)
    exponent, mantissa = scaled >> np.uint32(23), scaled & _MANTISSA
    # Code 0 represents subnormals up to 2**-127.
    above = mantissa > np.uint32(0) if exponent > np.uint32(0) else mantissa > np.uint32(0x400000)
    code = exponent + (np.uint32(1) if above else np.uint32(0))
    code = code if code < np.uint32(254) else np.uint32(254)
    return code if amax == amax else np.uint32(255)


@device
def e8m0_scale(code):
    """``2**(127 - code)``, the scale to multiply by before the cast; NaN for 255."""
    scale = (np.uint32(254) - code) << np.uint32(23) if code < np.uint32(254) else np.uint32(0x00400000)
    return from_bits(scale if code < np.uint32(255) else _SIGNLESS)


def quad_loader(dtype: DtypeName, aligned: bool) -> Any:
    """A device function ``(address, column, columns, in_bounds) -> registers`` that loads four elements of a row.

    Elements beyond ``columns`` are zeros; if ``in_bounds`` is false, all four are. ``aligned``: the address and the
    row's length are multiples of four elements, so that all four elements are either inside or outside.
    """
    if aligned:
        return vector_loader_in_bounds(dtype, 4)

    item = ITEM_BYTES[dtype]
    load_one = load_2_if if item == 2 else cached_4_if

    @device
    def load_each(address, column, columns, in_bounds):
        return (
            load_one(address, in_bounds and column < columns),
            load_one(address + item, in_bounds and column + 1 < columns),
            load_one(address + 2 * item, in_bounds and column + 2 < columns),
            load_one(address + 3 * item, in_bounds and column + 3 < columns),
        )

    @device
    def load_halves(address, column, columns, in_bounds):
        a, b, c, d = load_each(address, column, columns, in_bounds)
        return a | b << np.uint32(16), c | d << np.uint32(16)

    return load_halves if item == 2 else load_each


def vector_loader_in_bounds(dtype: DtypeName, elements: int) -> Any:
    """An aligned :func:`quad_loader` of ``elements`` elements, which take 8 or 16 bytes."""
    load_if = load_vector_if(dtype, elements)

    @device
    def load(address, column, columns, in_bounds):
        return load_if(address, in_bounds and column < columns)

    return load


def load_vector_if(dtype: DtypeName, elements: int) -> Any:
    """A device function ``(address, flag) -> registers`` that loads consecutive elements, which take 8 or 16 bytes.

    The address is a multiple of that.
    """
    return load_8_if if elements * ITEM_BYTES[dtype] == 8 else load_16_if


def quad_registers(dtype: DtypeName) -> int:
    """Number of registers for four elements."""
    return ITEM_BYTES[dtype]


def quad_decoder(dtype: DtypeName) -> Any:
    """A device function ``(registers, start) -> four float32`` that decodes a quad in an array of registers."""
    if dtype == "float32":

        @device
        def decode(registers, start):
            return (
                from_bits(registers[start]),
                from_bits(registers[start + 1]),
                from_bits(registers[start + 2]),
                from_bits(registers[start + 3]),
            )
    else:
        low, high = low_half[dtype], high_half[dtype]

        @device
        def decode(registers, start):
            first_pair, second_pair = registers[start], registers[start + 1]
            return low(first_pair), high(first_pair), low(second_pair), high(second_pair)

    return decode


def element_storer(dtype: DtypeName) -> Any:
    """A device function ``(address, value)`` that rounds and stores one element."""
    if dtype == "float32":
        return store_f32
    pack = pack_halves[dtype]
    return device(lambda address, value: store_2(address, pack(value, value)))


@dataclass(frozen=True)
class Maxima:
    """Device functions that track the largest magnitudes of quads, of four columns each.

    Two 16-bit elements share a register and an instruction. Signs are ignored when a maximum is read.

    Attributes:
        num_registers: registers for the maxima of four columns.
        clear: device function ``maxima`` that resets them.
        take: device function ``(registers, quad_index, quad, maxima)`` that sets them to those of one quad;
            ``quad``: its decoded values.
        fold: the same, but keeps the larger of each.
        largest_of_columns: device function ``maxima -> bits of four float32``.
        largest: device function ``maxima -> bits`` of the largest.
    """

    num_registers: int
    clear: Any
    take: Any
    fold: Any
    largest_of_columns: Any
    largest: Any


def _clearer(num_registers: int) -> Any:
    @device
    def clear(maxima):
        for index in range(num_registers):
            maxima[index] = np.uint32(0)

    return clear


def packed_maxima(dtype: DtypeName) -> Maxima:
    """Maxima of 16-bit elements, in packed registers as they were loaded."""
    larger = larger_magnitudes[dtype]
    low = low_half[dtype]
    high = high_half[dtype]

    @device
    def take(registers, quad_index, quad, maxima):
        maxima[0], maxima[1] = registers[2 * quad_index], registers[2 * quad_index + 1]

    @device
    def fold(registers, quad_index, quad, maxima):
        maxima[0], maxima[1] = (
            larger(maxima[0], registers[2 * quad_index]),
            larger(maxima[1], registers[2 * quad_index + 1]),
        )

    @device
    def largest_of_columns(maxima):
        first_pair, second_pair = maxima[0], maxima[1]
        return (
            magnitude(low(first_pair)),
            magnitude(high(first_pair)),
            magnitude(low(second_pair)),
            magnitude(high(second_pair)),
        )

    @device
    def largest(maxima):
        pair = larger(maxima[0], maxima[1])
        return unsigned_max(magnitude(low(pair)), magnitude(high(pair)))

    return Maxima(2, _clearer(2), take, fold, largest_of_columns, largest)


def decoded_maxima() -> Maxima:
    """Maxima of decoded quads."""
    larger = larger_magnitudes["float32"]

    @device
    def take(registers, quad_index, quad, maxima):
        for index in range(4):
            maxima[index] = bits(quad[index])

    @device
    def fold(registers, quad_index, quad, maxima):
        for index in range(4):
            maxima[index] = bits(larger(from_bits(maxima[index]), quad[index]))

    @device
    def largest_of_columns(maxima):
        return (
            maxima[0] & _SIGNLESS,
            maxima[1] & _SIGNLESS,
            maxima[2] & _SIGNLESS,
            maxima[3] & _SIGNLESS,
        )

    @device
    def largest(maxima):
        a, b = (
            larger(from_bits(maxima[0]), from_bits(maxima[1])),
            larger(from_bits(maxima[2]), from_bits(maxima[3])),
        )
        return magnitude(larger(a, b))

    return Maxima(4, _clearer(4), take, fold, largest_of_columns, largest)
