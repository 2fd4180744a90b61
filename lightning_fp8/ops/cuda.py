"""The ops on CUDA tensors: checks, allocates, and starts the kernels of :mod:`cuda_kernels`.

Where kernels cannot run (no numba-cuda, a driver or a card too old) one warning says why, and the reference serves.
Nothing here waits for the device.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops import reference
from lightning_fp8.ops.operands import NAMES, Operands, Outputs
from lightning_fp8.ops.schema import NAMESPACE, empty_operand
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.launch import Kernel
    from cuda_kernels.tile import Source

_without_kernels: set[torch.device] = set()


class Reading(NamedTuple):
    """How kernels read a tensor, and all that lie alike.

    Attributes:
        source: what gives them its values.
        words: what they take beside its address: pitch, rows, columns.
        tiles: blocks of a kernel that takes a tile each.
        blocks: blocks of a kernel that takes many.
    """

    source: Source
    words: tuple[int, int, int]
    tiles: int
    blocks: int


class Plan(NamedTuple):
    """What casts of tensors that lie alike have in common: the kernels, in the order of their launches, and results."""

    reading: Reading
    kernels: tuple[Kernel, ...]
    operands: Operands


Place = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...], int]


def place_of(x: Tensor) -> Place:
    """Where and how ``x`` lies; equal for tensors that the same kernels read."""
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16


@lru_cache(maxsize=4096)
def reading_of(place: Place) -> Reading | None:
    """How to read a tensor ``[R, K]`` there; None if it has to be made contiguous first."""
    from cuda_kernels import launch, tile

    device, dtype, (rows, columns), strides, address = place
    if strides[1] != 1 and columns != 1:
        return None
    quads = columns % 4 == 0 and strides[0] % 4 == 0 and address % (4 * dtype.itemsize) == 0
    tiles = tile.tiles(rows, columns)
    blocks = min(tiles, 4 * launch.multiprocessors(device))
    return Reading(tile.tensor_source(NAMES[dtype], quads), (strides[0], rows, columns), tiles, blocks)


@lru_cache(maxsize=4096)
def _plan(
    place: Place, dtype: torch.dtype, layout: str, rowwise: bool, columnwise: bool, observe: bool, count: bool
) -> Plan | None:
    from cuda_kernels.amax import amax_kernel, row_amax_kernel
    from cuda_kernels.quantize import quantize_rows_kernel, quantize_tensor_kernel
    from cuda_kernels.quantize_blocks import quantize_blocks_kernel

    reading, kind, fp8 = reading_of(place), Layout(layout), float8_of(dtype).name.lower()
    if reading is None:
        return None
    source, (_, rows, columns) = reading.source, reading.words
    operands = Operands(place[0], kind, dtype, rows, columns, rowwise, columnwise)
    if kind is Layout.TENSOR:
        cast = quantize_tensor_kernel(source, fp8, rowwise, columnwise, observe, count)
        return Plan(reading, (amax_kernel(source, False), cast), operands)
    if kind is Layout.ROW:
        cast = quantize_rows_kernel(source, fp8, rowwise, columnwise, count)
        return Plan(reading, (row_amax_kernel(source, rowwise, columnwise), cast), operands)
    cast = quantize_blocks_kernel(source, fp8, layout, rowwise, columnwise, count)
    return Plan(reading, (cast,), operands)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    layout: str,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
) -> Outputs:
    if layout == "tensor":
        return _quantize_tensor(x, None, None, counts, dtype, power_2, epsilon, rowwise, columnwise)
    plan = _plan(place_of(x), dtype, layout, rowwise, columnwise, False, counts is not None)
    if plan is None:
        return quantize(x.contiguous(), dtype, layout, power_2, epsilon, rowwise, columnwise, counts)
    (_, words, tiles, _), kernels, operands = plan
    outputs = operands.allocate()
    tail = int(power_2), epsilon, 0 if counts is None else counts, *operands.described(outputs)
    if layout == "row":
        _, rows, columns = words
        amaxes = x.new_zeros(rows + columns, dtype=torch.float32)
        both = amaxes[:rows], amaxes[rows:]
        kernels[0].launch(tiles, (x, *words, *both))
        kernels[1].launch(tiles, (x, *words, *both, *tail))
    else:
        kernels[0].launch(tiles, (x, *words, *tail))
    return outputs


def quantize_with_scale(
    x: Tensor,
    scale: Tensor,
    seen: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
    may_be_0: bool = True,
) -> Outputs:
    return _quantize_tensor(x, scale, seen, counts, dtype, False, 0.0, rowwise, columnwise, may_be_0)


def _quantize_tensor(
    x: Tensor,
    scale: Tensor | None,
    seen: Tensor | None,
    counts: Tensor | None,
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    needs_amax: bool = True,
) -> Outputs:
    plan = _plan(place_of(x), dtype, "tensor", rowwise, columnwise, seen is not None, counts is not None)
    if plan is None:
        x = x.contiguous()
        return _quantize_tensor(x, scale, seen, counts, dtype, power_2, epsilon, rowwise, columnwise, needs_amax)
    (_, words, tiles, blocks), (amax, cast), operands = plan
    outputs = operands.allocate()
    given: Tensor | int = 0 if scale is None else scale
    own: Tensor | int = 0
    if needs_amax:
        own = scratch(x, blocks)
        # Where a scale is given this returns at once, unless the scale is 0.
        amax.launch(blocks, (x, *words, given, own))
    observed = 0 if seen is None else seen, 0 if counts is None else counts
    described = operands.described(outputs)
    cast.launch(tiles, (x, *words, given, own, blocks, int(power_2), epsilon, *observed, *described))
    return outputs


def observe(x: Tensor, seen: Tensor) -> None:
    from cuda_kernels.amax import amax_kernel

    reading = reading_of(place_of(x))
    if reading is None:
        return observe(x.contiguous(), seen)
    amax_kernel(reading.source, True).launch(reading.blocks, (x, *reading.words, 0, seen))
    return None


def update_scales(
    seen: Tensor, window: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    from cuda_kernels import scaling as kernels

    length, n = window.shape
    kernel = kernels.update_scales_kernel(algorithm == "most_recent", recompute)
    kernel.launch(-(-n // kernels.COLUMNS), (seen, window, scale, fp8_max, 2.0**margin, length, n))


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[torch.device, int], Tensor] = {}


_scratch = _Scratch()


def scratch(x: Tensor, count: int) -> Tensor:
    """At least ``count`` float32 on the device of ``x``, for launches on the current stream until the next call.

    Kept for each thread and stream, whose launches follow each other. A CUDA graph that is being captured gets its own.
    """
    stream = 0
    if x.is_cuda:
        if torch._C._cuda_isCurrentStreamCapturing():
            return x.new_empty(count, dtype=torch.float32)
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    kept = _scratch.kept
    key = x.device, stream
    if key not in kept or kept[key].numel() < count:
        kept[key] = torch.empty(max(count, 1024), dtype=torch.float32, device=x.device)
    return kept[key]


def falls_back(
    kernels_op: Callable[..., Any], reference_op: Callable[..., Any] | None = None, layout_at: int | None = None
) -> Callable[..., Any]:
    """``kernels_op``, or ``reference_op`` where the device runs no kernels or there is nothing to do.

    Args:
        reference_op: by default the reference of the same name.
        layout_at: which argument names the operands' layout; ``tensor`` if none does.
    """
    reference_op = reference_op or getattr(reference, kernels_op.__name__)
    layout_at = 2 if kernels_op is quantize else layout_at

    @wraps(kernels_op)
    def op(x: Tensor, *args: Any) -> Any:
        if x.is_cuda and torch._C._cuda_getDevice() != x.get_device():
            with torch.cuda.device(x.device):
                return op(x, *args)
        if x.numel() and (not _without_kernels or x.device not in _without_kernels):
            try:
                return kernels_op(x, *args)
            except (ImportError, RuntimeError) as error:
                if not _is_kernel_error(error):
                    raise
                _without_kernels.add(x.device)
                warnings.warn(
                    f"FP8 kernels do not run on {x.device}: {error}. Casts run as plain torch operations, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        results = reference_op(x, *args)
        if results is None:
            return None
        layout = Layout.TENSOR if layout_at is None else Layout(args[layout_at - 1])
        return (*_promised(results[:4], layout), *results[4:])

    return op


def _is_kernel_error(error: Exception) -> bool:
    if isinstance(error, ImportError):
        return True
    from cuda_kernels.launch import KernelError

    return isinstance(error, KernelError)


def _promised(results: tuple[Tensor, ...], layout: Layout) -> tuple[Tensor, ...]:
    """The reference's operands in the strides that these ops promise."""
    promised: list[Tensor] = []
    for data, scale_inv in (results[:2], results[2:]):
        if data.dim() == 2:
            like = empty_operand(data.device, layout, data.dtype, *data.shape)
            for tensor, copy in zip((data, scale_inv), like):
                copy.view(torch.int8 if copy.element_size() == 1 else copy.dtype).copy_(
                    tensor.view(torch.int8 if copy.element_size() == 1 else copy.dtype)
                )
            promised += like
        else:
            promised += [data, scale_inv]
    return tuple(promised)


for _op in (quantize, quantize_with_scale, observe, update_scales):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", falls_back(_op))
