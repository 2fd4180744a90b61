"""Casts and decoding of large tensors on the CPU by :mod:`lightning_fp8.ops.loops`, if Numba is installed.

Results have the same bits as the specification's. A function returns None if no loop supports its arguments; the caller
then runs the specification. This is the case for small tensors, for tensors with inf or NaN, and if subnormal numbers
are flushed to 0. Rows are divided among ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.formats import E4M3, Float8

LEAST = 2**15
"""The number of elements below which the specification is about as fast."""
OF_A_THREAD = 2**17
"""The minimum number of elements for each thread; more threads would not be faster."""
_SUBNORMAL = 5e-324
_LENGTHS = (32, 128)
_INFINITY = {2: 0x7F80, 4: 0x7F800000}
_NUMBERS: dict[torch.dtype, type] = {torch.bfloat16: np.uint16, torch.float32: np.uint32}

Block = tuple[int, int]
"""The numbers of rows and columns that share a scale."""


@cache
def _loops() -> Any:
    """The module ``loops``; None without Numba."""
    try:
        from lightning_fp8.ops import loops
    except ImportError:
        return None
    return loops


def _applies(x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # Dynamo would trace NumPy
        return False
    return x.is_cpu and x.numel() >= LEAST and x.dim() == 2 and _SUBNORMAL != 0.0 and _loops() is not None


def amax_of(x: Tensor) -> Tensor | None:
    """The largest magnitude of contiguous ``x [R, K]`` as float32 ``[]``; None also if it is not finite."""
    if not _applies(x) or x.dtype not in _NUMBERS:
        return None
    numbers = _bits(x)
    amax = _finite(np.array([_largest(x, numbers)], numbers.dtype))
    return None if amax is None else amax[0]


def _largest(x: Tensor, numbers: Any) -> int:
    """The bits of the largest magnitude."""
    of_all, found = _loops().amax_of_all(numbers.itemsize), []
    _over_rows(x, 1, lambda start, stop: found.append(of_all(numbers[start:stop].reshape(-1))))
    return max(found)  # type: ignore[no-any-return]


def amax_of_blocks(x: Tensor, block: Block) -> Tensor | None:
    """The largest magnitude of each block of contiguous ``x [R, K]`` as float32; None also if one is not finite."""
    if not _applies(x) or x.dtype not in _NUMBERS:
        return None
    numbers, (rows, columns), (block_rows, length) = _bits(x), x.shape, block
    loops, item_bytes = _loops(), numbers.itemsize
    if block_rows == 1 and (length == columns or length in _LENGTHS):
        amax = np.empty((rows, ceil_div(columns, length)), numbers.dtype)
        if length == columns:
            of_rows = loops.amax_of_rows(item_bytes)
            _over_rows(x, 1, lambda start, stop: of_rows(numbers[start:stop], amax[start:stop]))
        else:
            of_blocks = loops.amax_of_blocks(item_bytes, length)
            _over_rows(x, 1, lambda start, stop: of_blocks(numbers[start:stop], amax[start:stop]))
        return _finite(amax)
    of_columns = loops.amax_of_columns(item_bytes)
    amax = np.empty((ceil_div(rows, block_rows), columns), numbers.dtype)

    def of_some(start: int, stop: int) -> None:
        of_columns(numbers[start:stop], block_rows, amax[start // block_rows : ceil_div(stop, block_rows)])

    _over_rows(x, block_rows, of_some)
    if length == 1:
        return _finite(amax)
    padded = np.pad(amax, ((0, 0), (0, -columns % length)))
    return _finite(padded.reshape(len(amax), -1, length).max(2))


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """The E8M0 codes of finite amaxes, equal to :func:`lightning_fp8.scaling.e8m0_from_amax`, and their scales.

    Call it only if :func:`amax_of_blocks` did not return None.
    """
    codes, scale = torch.empty(amax.shape, dtype=torch.uint8), torch.empty(amax.shape, dtype=torch.float32)
    reciprocal = np.float32(1.0 / fp8_max)
    flat = (_array(each, kind).reshape(-1) for each, kind in ((codes, np.uint8), (scale, np.float32)))
    _loops().e8m0_codes(_array(amax, np.float32).reshape(-1), reciprocal, *flat)
    return codes, scale


def e8m0_decode(codes: Tensor) -> Tensor | None:
    """``2**(code - 127)`` as float32; None also if a code is NaN."""
    is_small = not codes.is_cpu or codes.numel() < LEAST // 32
    if torch.compiler.is_compiling() or is_small or _SUBNORMAL == 0.0 or _loops() is None or int(codes.amax()) == 255:
        return None
    codes = codes.contiguous()
    values = torch.empty(codes.shape, dtype=torch.float32)
    _loops().e8m0_values(_array(codes, np.uint8).reshape(-1), _array(values, np.float32).reshape(-1))
    return values


def encode(x: Tensor, scale: Tensor, block: Block, float8: Float8) -> Tensor | None:
    """The codes of contiguous ``x [R, K]`` times the ``scale`` of each block, as bytes. x must not contain NaN.

    Args:
        scale: float32, ``[ceil(R / block rows), ceil(K / block columns)]``, positive and finite.
    """
    if not _applies(x) or x.dtype not in _NUMBERS:
        return None
    numbers = _bits(x)
    out = torch.empty(x.shape, dtype=torch.uint8)
    of = (numbers.itemsize, float8 == E4M3)
    if not _by_blocks("encode", of, x, numbers, scale, block, _array(out, np.uint8)):
        return None
    return out


def decode(data: Tensor) -> Tensor | None:
    """The values of codes in bfloat16; None also if one is not finite, or if data is not contiguous in either order."""
    return _in_order(data, _decode)


def decode_scaled(data: Tensor, scale_inv: Tensor, block: Block) -> Tensor | None:
    """The values of codes times the scales of their blocks in bfloat16, rounded once; None as for :func:`decode`.

    Args:
        scale_inv: float32, ``[ceil(R / block rows), ceil(K / block columns)]``, exact in bfloat16.
    """
    if not data.is_contiguous():
        scale_inv, block = scale_inv.t(), (block[1], block[0])
    return _in_order(data, lambda codes: _decode_scaled(codes, scale_inv, block))


def _in_order(data: Tensor, decoded: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Apply ``decoded`` to codes in their memory order; the result has the same order."""
    if not _applies(data) or not (data.is_contiguous() or data.t().is_contiguous()):
        return None
    stored = data if data.is_contiguous() else data.t()
    if _largest(stored, _array(stored, np.uint8)) >= (0x7F if data.dtype == E4M3.dtype else 0x7C):
        return None
    values = decoded(stored)
    return values if stored is data or values is None else values.t()


def _decode(data: Tensor) -> Tensor:
    codes, out = _array(data, np.int8), torch.empty(data.shape, dtype=torch.int16)
    values = _array(out, np.uint16)
    run = _loops().decode(data.dtype == E4M3.dtype)
    _over_rows(data, 1, lambda start, stop: run(codes[start:stop].reshape(-1), values[start:stop].reshape(-1)))
    return out.view(torch.bfloat16)


def _decode_scaled(data: Tensor, scale_inv: Tensor, block: Block) -> Tensor | None:
    out = torch.empty(data.shape, dtype=torch.int16)
    of = (data.dtype == E4M3.dtype,)
    found = _by_blocks("decode", of, data, _array(data, np.int8), scale_inv, block, _array(out, np.uint16))
    return out.view(torch.bfloat16) if found else None


def _by_blocks(name: str, of: tuple[Any, ...], x: Tensor, numbers: Any, scale: Tensor, block: Block, out: Any) -> bool:
    """Run the loop for these blocks. Return False if no loop supports them."""
    loops, (block_rows, length), columns = _loops(), block, x.shape[1]
    if length >= columns:
        run = getattr(loops, f"{name}_rows")(*of)
    elif length == 1:
        run = getattr(loops, f"{name}_columns")(*of)
    elif length in _LENGTHS:
        run = getattr(loops, f"{name}_blocks")(*of, length)
    else:
        return False
    scale = scale.contiguous()
    factors = _array(scale, np.float32)

    def of_rows(start: int, stop: int) -> None:
        of_these = factors[start // block_rows : ceil_div(stop, block_rows)]
        run(numbers[start:stop], of_these, block_rows, out[start:stop])

    _over_rows(x, block_rows, of_rows)
    return True


def _bits(x: Tensor) -> Any:
    """The bits of a tensor's values as an array of unsigned integers."""
    return _array(x, _NUMBERS[x.dtype])


def _array(x: Tensor, dtype: type) -> Any:
    """An array of the elements of contiguous ``x``, viewed as ``dtype``. It is valid as long as ``x``.

    ``Tensor.numpy`` would make the storage non-resizable, and FSDP resizes the storage of gathered parameters.
    """
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    return np.frombuffer(memory, dtype).reshape(x.shape)


def _finite(amax: Any) -> Tensor | None:
    """Magnitudes as float32, given their bits; None if one is infinite or NaN."""
    if amax.max() >= _INFINITY[amax.itemsize]:
        return None
    bits = amax.astype(np.uint32) << 16 if amax.itemsize == 2 else amax
    return torch.from_numpy(bits.view(np.float32))


# --- Threads ----------------------------------------------------------------------------------------------------------


def _over_rows(x: Tensor, multiple: int, run: Callable[[int, int], object]) -> None:
    """Call ``run(start, stop)`` in threads for ranges of rows that begin at multiples of ``multiple``."""
    rows = x.shape[0]
    num_shares = min(torch.get_num_threads(), x.numel() // OF_A_THREAD, ceil_div(rows, multiple))
    if num_shares <= 1:
        run(0, rows)
        return
    step = ceil_div(ceil_div(rows, multiple), num_shares) * multiple
    others = [_pool().submit(run, start, min(start + step, rows)) for start in range(step, rows, step)]
    run(0, step)
    for each in others:
        each.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lightning_fp8")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads do not exist in a forked child
