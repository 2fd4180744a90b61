"""Casts and decoding on the CPU in one pass over memory, by loops that Numba compiles on their first call.

Only :mod:`lightning_fp8.ops.cpu` calls them. The compiled code is cached on disk.

Arrays are C-contiguous and hold the bits of tensors: codes are bytes, and a bfloat16 is the upper half of a float32.
Scales ``[rows / block_rows, columns / length]`` are float32. Integers are truncated to 32 bits after each operation,
because Numba computes in 64 bits otherwise, and the length of a block is a constant, so that LLVM can use full vectors.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from lightning_fp8.formats import E4M3, E5M2

u8, u16, u32, f32 = np.uint8, np.uint16, np.uint32, np.float32

_SIGNLESS, _EXPONENT, _BELOW_HALF, _SIGN, _REST = (u32(n) for n in (0x7FFFFFFF, 0x7F800000, 0x7FFF, 0x80, 0x7F))
_0, _1, _16, _23, _24 = (u32(n) for n in (0, 1, 16, 23, 24))
_MANTISSA, _HALF_OF_NORMAL, _LARGEST_CODE = u32(0x7FFFFF), u32(0x400000), u32(254)
_MASKS = {1: u8(0x7F), 2: u16(0x7FFF), 4: _SIGNLESS}
"""The mask of the magnitude in the bits of a value, by its number of bytes."""

_OPTIONS = {"nogil": True, "error_model": "numpy"}
_inlined = njit(inline="always", **_OPTIONS)


def _compiled(function: Any) -> Any:
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder for the cache is writable
        return njit(**_OPTIONS)(function)


def _shift_and_exponent(e4m3: bool) -> tuple[int, int]:
    """The position of a code's last bit in a float32, and the float32 exponent of the smallest normal code."""
    return (20, 121) if e4m3 else (21, 113)


# --- Magnitudes: without their sign, floats are ordered like integers, and NaN is the largest -------------------------


@cache
def amax_of_all(item_bytes: int) -> Any:
    """The loop ``(x [n])``, which returns the bits of the largest magnitude."""
    mask = _MASKS[item_bytes]
    zero, integer = mask ^ mask, type(mask)

    @_compiled
    def amax_of_all(x):
        largest = zero
        for i in range(x.shape[0]):
            largest = max(largest, integer(x[i] & mask))
        return largest

    return amax_of_all


@cache
def amax_of_rows(item_bytes: int) -> Any:
    """The loop ``(x [rows, columns], out [rows, 1])``, which finds the bits of the largest magnitude of each row."""
    mask = _MASKS[item_bytes]
    zero, integer = mask ^ mask, type(mask)

    @_compiled
    def amax_of_rows(x, out):
        for row in range(x.shape[0]):
            numbers = x[row]
            largest = zero
            for i in range(numbers.shape[0]):
                largest = max(largest, integer(numbers[i] & mask))
            out[row, 0] = largest

    return amax_of_rows


@_inlined
def _halve(source, target, count):
    """The larger element of each of ``count`` pairs of neighbors."""
    for i in range(count):
        target[i] = max(source[2 * i], source[2 * i + 1])


@cache
def amax_of_blocks(item_bytes: int, length: int) -> Any:
    """The loop ``(x, out [rows, blocks])`` for each ``length`` (32 or 128) consecutive elements of a row."""
    mask = _MASKS[item_bytes]
    zero = mask ^ mask

    @_compiled
    def amax_of_blocks(x, out):
        count = out.shape[1]
        padded = count * length
        a, b = np.zeros(padded, x.dtype), np.zeros(padded // 2, x.dtype)
        for row in range(x.shape[0]):
            for i in range(x.shape[1]):
                a[i] = x[row, i] & mask
            for i in range(x.shape[1], padded):
                a[i] = zero
            if length == 128:
                _halve(a, b, 64 * count)
                _halve(b, a, 32 * count)
            _halve(a, b, 16 * count)
            _halve(b, a, 8 * count)
            _halve(a, b, 4 * count)
            _halve(b, a, 2 * count)
            _halve(a, b, count)
            for i in range(count):
                out[row, i] = b[i]

    return amax_of_blocks


@cache
def amax_of_columns(item_bytes: int) -> Any:
    """The loop ``(x, block_rows, out [blocks, columns])`` for each ``block_rows`` consecutive elements of a column."""
    mask = _MASKS[item_bytes]
    zero, integer = mask ^ mask, type(mask)

    @_compiled
    def amax_of_columns(x, block_rows, out):
        for block in range(out.shape[0]):
            for i in range(x.shape[1]):
                out[block, i] = zero
            for row in range(block * block_rows, min((block + 1) * block_rows, x.shape[0])):
                for i in range(x.shape[1]):
                    out[block, i] = max(out[block, i], integer(x[row, i] & mask))

    return amax_of_columns


# --- E8M0 -------------------------------------------------------------------------------------------------------------


@_compiled
def e8m0_codes(amax, reciprocal, codes, scale):
    """The codes of finite ``amax [n] * reciprocal``, rounded up to powers of two, and ``2**(127 - code)``."""
    for i in range(amax.shape[0]):
        bits = f32(amax[i] * reciprocal).view(u32)
        code = u32(min(u32(u32(bits + _MANTISSA) >> _23), _LARGEST_CODE))
        code = code if bits > _HALF_OF_NORMAL else _0  # 2**-127 and below
        codes[i] = u8(code)
        inverse = u32(_LARGEST_CODE - code)
        scale[i] = u32(u32(inverse << _23) if inverse > _0 else _HALF_OF_NORMAL).view(f32)


@_compiled
def e8m0_values(codes, values):
    """``2**(code - 127)`` for codes ``[n]`` below 255."""
    for i in range(codes.shape[0]):
        code = u32(codes[i])
        values[i] = u32(u32(code << _23) if code > _0 else _HALF_OF_NORMAL).view(f32)


# --- Numbers to codes -------------------------------------------------------------------------------------------------


@_inlined
def _code(number, scale, up, shift, magic, least, largest, offset):
    """The code of ``number * scale``, rounded to nearest even and saturated. ``number`` must not be NaN.

    It adds a power of two to the magnitude, so that the last place of the sum is the last place of the code. The last
    bits of the sum are then the code's mantissa, including the leading 1, which is added to the exponent less 1.
    """
    bits = f32(u32(u32(number) << up).view(f32) * scale).view(u32)
    magnitude = u32(min(u32(bits & _SIGNLESS), largest))
    exponent = u32(max(u32(magnitude & _EXPONENT), least))
    rounded = f32(magnitude.view(f32) + u32(exponent + magic).view(f32)).view(u32)
    return u8(u32(u32(u32(rounded + u32(exponent >> shift)) - offset) & _REST) | u32(u32(bits >> _24) & _SIGN))


def _encoding(item_bytes: int, e4m3: bool) -> tuple[Any, ...]:
    shift, exponent = _shift_and_exponent(e4m3)
    return (
        u32(16 if item_bytes == 2 else 0), u32(shift), u32(shift << 23), u32(exponent << 23),
        f32((E4M3 if e4m3 else E5M2).max).view(u32), u32(exponent << 23 - shift),
    )  # fmt: skip


@cache
def encode_rows(item_bytes: int, e4m3: bool) -> Any:
    """The loop ``(x [rows, columns], scale [blocks, 1], block_rows, codes)``, with one scale for whole rows."""
    up, shift, magic, least, largest, offset = _encoding(item_bytes, e4m3)

    @_compiled
    def encode_rows(x, scale, block_rows, codes):
        for row in range(x.shape[0]):
            factor = scale[row // block_rows, 0]
            for i in range(x.shape[1]):
                codes[row, i] = _code(x[row, i], factor, up, shift, magic, least, largest, offset)

    return encode_rows


@cache
def encode_blocks(item_bytes: int, e4m3: bool, length: int) -> Any:
    """The loop ``(x, scale [blocks, blocks of length], block_rows, codes)``, with a scale for ``length`` columns."""
    up, shift, magic, least, largest, offset = _encoding(item_bytes, e4m3)

    @_compiled
    def encode_blocks(x, scale, block_rows, codes):
        whole = x.shape[1] // length
        for row in range(x.shape[0]):
            for block in range(whole):
                factor = scale[row // block_rows, block]
                for i in range(length):
                    at = block * length + i
                    codes[row, at] = _code(x[row, at], factor, up, shift, magic, least, largest, offset)
            for at in range(whole * length, x.shape[1]):
                factor = scale[row // block_rows, whole]
                codes[row, at] = _code(x[row, at], factor, up, shift, magic, least, largest, offset)

    return encode_blocks


@cache
def encode_columns(item_bytes: int, e4m3: bool) -> Any:
    """The loop ``(x, scale [blocks, columns], block_rows, codes)``, with one scale for each column of a block."""
    up, shift, magic, least, largest, offset = _encoding(item_bytes, e4m3)

    @_compiled
    def encode_columns(x, scale, block_rows, codes):
        for row in range(x.shape[0]):
            factors = scale[row // block_rows]
            for i in range(x.shape[1]):
                codes[row, i] = _code(x[row, i], factors[i], up, shift, magic, least, largest, offset)

    return encode_columns


# --- Codes to bfloat16 ------------------------------------------------------------------------------------------------


@_inlined
def _value(code, shift, kept, rebias):
    """The float32 value of a code, given as a signed byte. The code must be finite."""
    return f32(u32(u32(u32(np.int32(code)) << shift) & kept).view(f32) * rebias)


@_inlined
def _rounded(value):
    """The bits of ``value`` in bfloat16, rounded to nearest even. ``value`` must not be NaN."""
    bits = value.view(u32)
    return u16(u32(bits + u32(_BELOW_HALF + u32(u32(bits >> _16) & _1))) >> _16)


def _decoding(e4m3: bool) -> tuple[Any, ...]:
    shift, exponent = _shift_and_exponent(e4m3)
    return u32(shift), u32(0x80000000 | 0x7F << shift), f32(2.0 ** (exponent - 1))


@cache
def decode(e4m3: bool) -> Any:
    """The loop ``(codes [n], out [n])``, which writes the bits of bfloat16 values."""
    shift, kept, rebias = _decoding(e4m3)

    @_compiled
    def decode(codes, out):
        for i in range(codes.shape[0]):
            out[i] = u16(_value(codes[i], shift, kept, rebias).view(u32) >> _16)

    return decode


@cache
def decode_rows(e4m3: bool) -> Any:
    """The loop ``(codes, scale, block_rows, out)``, which writes values times scales; see :func:`encode_rows`."""
    shift, kept, rebias = _decoding(e4m3)

    @_compiled
    def decode_rows(codes, scale, block_rows, out):
        for row in range(codes.shape[0]):
            factor = scale[row // block_rows, 0]
            for i in range(codes.shape[1]):
                out[row, i] = _rounded(f32(_value(codes[row, i], shift, kept, rebias) * factor))

    return decode_rows


@cache
def decode_blocks(e4m3: bool, length: int) -> Any:
    """The loop ``(codes, scale, block_rows, out)``, which writes values times scales; see :func:`encode_blocks`."""
    shift, kept, rebias = _decoding(e4m3)

    @_compiled
    def decode_blocks(codes, scale, block_rows, out):
        whole = codes.shape[1] // length
        for row in range(codes.shape[0]):
            for block in range(whole):
                factor = scale[row // block_rows, block]
                for i in range(length):
                    at = block * length + i
                    out[row, at] = _rounded(f32(_value(codes[row, at], shift, kept, rebias) * factor))
            for at in range(whole * length, codes.shape[1]):
                factor = scale[row // block_rows, whole]
                out[row, at] = _rounded(f32(_value(codes[row, at], shift, kept, rebias) * factor))

    return decode_blocks


@cache
def decode_columns(e4m3: bool) -> Any:
    """The loop ``(codes, scale, block_rows, out)``, which writes values times scales; see :func:`encode_columns`."""
    shift, kept, rebias = _decoding(e4m3)

    @_compiled
    def decode_columns(codes, scale, block_rows, out):
        for row in range(codes.shape[0]):
            factors = scale[row // block_rows]
            for i in range(codes.shape[1]):
                out[row, i] = _rounded(f32(_value(codes[row, i], shift, kept, rebias) * factors[i]))

    return decode_columns
