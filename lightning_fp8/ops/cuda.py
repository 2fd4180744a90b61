"""The ops on CUDA tensors: checks, allocates, and starts the kernels of :mod:`cuda_kernels`.

Where kernels cannot run (no numba-cuda, a driver or a card too old) one warning says why, and the reference serves.
Nothing here waits for the device.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops import reference
from lightning_fp8.ops.operands import NAMES, Operands, Outputs, comes_in_vectors
from lightning_fp8.ops.schema import NAMESPACE, empty_operand
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.launch import Argument, Launch
    from cuda_kernels.tile import Source

_without_kernels: set[torch.device] = set()


class Reading(NamedTuple):
    """How kernels read a tensor, and all that lie alike.

    Attributes:
        source: what gives them its values.
        quads: whether four elements load at once.
        words: what they take beside its address: pitch, rows, columns.
        tiles: blocks of a kernel that takes a tile each.
        blocks: blocks of a kernel that takes many.
    """

    source: Source
    quads: bool
    words: tuple[int, int, int]
    tiles: int
    blocks: int


class Plan(NamedTuple):
    """What casts of values that lie alike have in common.

    Attributes:
        layout: of the scales.
        operands: the results.
        amax: what finds the amaxes that the cast needs; None where it finds them itself.
        cast: the cast.
        rows, columns: of the values.
    """

    layout: str
    operands: Operands
    amax: Launch | None
    cast: Launch
    rows: int
    columns: int


class How(NamedTuple):
    """How to cast; see :func:`lightning_fp8.ops.quantize`."""

    dtype: torch.dtype
    layout: str
    power_2: bool
    epsilon: float
    rowwise: bool
    columnwise: bool
    observe_amax: bool
    count_losses: bool


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
    quads = comes_in_vectors(columns, strides[0], address, dtype.itemsize, 4)
    tiles = tile.tiles(rows, columns)
    blocks = min(tiles, 4 * launch.multiprocessors(device))
    return Reading(tile.tensor_source(NAMES[dtype], quads), quads, (strides[0], rows, columns), tiles, blocks)


@lru_cache(maxsize=4096)
def plan_of(
    device: torch.device, source: Source, rows: int, columns: int, how: How, storing: Source | None = None
) -> Plan:
    """How to cast the values of ``source``, ``[rows, columns]``; ``storing``: the same for the kernel that casts."""
    from cuda_kernels import amax, launch, quantize, quantize_blocks, tile

    fp8, kind, tiles = float8_of(how.dtype).name.lower(), Layout(how.layout), tile.tiles(rows, columns)
    operands = Operands(device, kind, how.dtype, rows, columns, how.rowwise, how.columnwise)
    values, usage = storing or source, (how.rowwise, how.columnwise)
    scaling = int(how.power_2), how.epsilon
    finds = None
    if kind is Layout.TENSOR:
        blocks = min(tiles, 4 * launch.multiprocessors(device))
        finds = launch.Launch(amax.amax_kernel(source, False), blocks, (rows, columns))
        kernel = quantize.quantize_tensor_kernel(values, fp8, *usage, how.observe_amax, how.count_losses)
        numbers = rows, columns, blocks, *scaling, *operands.pitches
    elif kind is Layout.ROW:
        finds = launch.Launch(amax.row_amax_kernel(source, *usage), tiles, (rows, columns))
        kernel = quantize.quantize_rows_kernel(values, fp8, *usage, how.count_losses)
        numbers = rows, columns, *scaling, *operands.pitches
    else:
        kernel = quantize_blocks.quantize_blocks_kernel(values, fp8, how.layout, *usage, how.count_losses)
        numbers = rows, columns, *scaling, *operands.pitches
    return Plan(how.layout, operands, finds, launch.Launch(kernel, tiles, numbers), rows, columns)


def cast(
    plan: Plan,
    x: Tensor,
    words: Sequence[Argument],
    scale: Tensor | None,
    seen: Tensor | None,
    counts: Tensor | None,
    needs_amax: bool = True,
    storing: Sequence[Argument] | None = None,
) -> Outputs:
    """Cast as planned; ``words``: what the source takes; ``storing``: what that of the kernel that casts takes."""
    layout, operands, amax, start, rows, columns = plan
    outputs, counted = operands.allocate(), 0 if counts is None else counts
    storing = storing or words
    if amax is None:
        start(*storing, counted, *outputs)
    elif layout == "row":
        amaxes = torch.zeros(rows + columns, dtype=torch.float32, device=x.device)
        both = amaxes, amaxes.data_ptr() + 4 * rows
        amax(*words, *both)
        start(*storing, *both, counted, *outputs)
    else:
        given: Tensor | int = 0 if scale is None else scale
        own: Tensor | int = 0
        if needs_amax:
            own = scratch(x, amax.blocks)
            amax(*words, given, own)  # where a scale is given it returns at once, unless the scale is 0
        start(*storing, given, own, 0 if seen is None else seen, counted, *outputs)
    return outputs


@lru_cache(maxsize=4096)
def _plan(place: Place, how: How) -> tuple[Plan, int] | None:
    """How to cast a tensor there, and the pitch of its rows; None if it has to be made contiguous first."""
    reading = reading_of(place)
    if reading is None:
        return None
    pitch, rows, columns = reading.words
    return plan_of(place[0], reading.source, rows, columns, how), pitch


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
    how = How(dtype, layout, power_2, epsilon, rowwise, columnwise, False, counts is not None)
    plan = _plan(place_of(x), how)
    if plan is None:
        return quantize(x.contiguous(), dtype, layout, power_2, epsilon, rowwise, columnwise, counts)
    return cast(plan[0], x, (x, plan[1]), None, None, counts)


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
    how = How(dtype, "tensor", False, 0.0, rowwise, columnwise, seen is not None, counts is not None)
    plan = _plan(place_of(x), how)
    if plan is None:
        return quantize_with_scale(x.contiguous(), scale, seen, dtype, rowwise, columnwise, counts, may_be_0)
    return cast(plan[0], x, (x, plan[1]), scale, seen, counts, may_be_0)


def observe(x: Tensor, seen: Tensor) -> None:
    from cuda_kernels.amax import amax_kernel

    reading = reading_of(place_of(x))
    if reading is None:
        return observe(x.contiguous(), seen)
    pitch, rows, columns = reading.words
    amax_kernel(reading.source, True).launch(reading.blocks, (x, pitch, 0, seen, rows, columns))
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
