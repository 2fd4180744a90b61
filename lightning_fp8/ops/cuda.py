"""The ops on CUDA tensors: checks, allocates, and starts the kernels of :mod:`cuda_kernels`.

Where kernels cannot run (no numba-cuda, a driver or a card too old) one warning says why, and the reference serves.
Nothing here waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops import reference
from lightning_fp8.ops.schema import NAMESPACE, empty_operand, scale_dtype
from lightning_fp8.scaled import Layout

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_without_kernels: set[torch.device] = set()


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    layout: str,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from cuda_kernels import quantize as kernels
    from cuda_kernels import tile

    kind, fp8 = Layout(layout), float8_of(dtype).name.lower()
    if kind is Layout.TENSOR:
        return _quantize_tensor(x, None, None, counts, fp8, dtype, power_2, epsilon, rowwise, columnwise)
    source, words = _source(x)
    rows, columns = x.shape
    outputs = _outputs(x, kind, dtype, rowwise, columnwise)
    head = (*words, rows, columns)
    tail = (int(power_2), epsilon, 0 if counts is None else counts, *_described(kind, outputs))
    if kind is Layout.ROW:
        amaxes = x.new_zeros(rows + columns, dtype=torch.float32)
        both = (amaxes[:rows], amaxes[rows:])
        tiles = tile.tiles(rows, columns)
        kernels.row_amax_kernel(source, rowwise, columnwise).launch(tiles, (*head, *both))
        kernel = kernels.quantize_rows_kernel(source, fp8, rowwise, columnwise, counts is not None)
        kernel.launch(tiles, (*head, *both, *tail))
    else:
        kernel = kernels.quantize_blocks_kernel(source, fp8, layout, rowwise, columnwise, counts is not None)
        kernel.launch(tile.tiles(rows, columns), (*head, *tail))
    return outputs


def quantize_with_scale(
    x: Tensor,
    scale: Tensor,
    seen: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fp8 = float8_of(dtype).name.lower()
    return _quantize_tensor(x, scale, seen, counts, fp8, dtype, False, 0.0, rowwise, columnwise)


def _quantize_tensor(
    x: Tensor,
    scale: Tensor | None,
    seen: Tensor | None,
    counts: Tensor | None,
    fp8: str,
    dtype: torch.dtype,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from cuda_kernels import launch, tile
    from cuda_kernels import quantize as kernels

    source, words = _source(x)
    rows, columns = x.shape
    outputs = _outputs(x, Layout.TENSOR, dtype, rowwise, columnwise)
    tiles = tile.tiles(rows, columns)
    blocks = min(tiles, 4 * launch.multiprocessors(x.device))
    given = 0 if scale is None else scale
    own = x.new_empty(blocks, dtype=torch.float32)
    # Where a scale is given this returns at once, unless the scale is 0.
    kernels.amax_kernel(source, False).launch(blocks, (*words, rows, columns, given, own))
    kernel = kernels.quantize_tensor_kernel(source, fp8, rowwise, columnwise, seen is not None, counts is not None)
    kernel.launch(
        tiles,
        (
            *(*words, rows, columns, given, own, blocks, int(power_2), epsilon),
            0 if seen is None else seen,
            0 if counts is None else counts,
            *_described(Layout.TENSOR, outputs),
        ),
    )
    return outputs


def observe(x: Tensor, seen: Tensor) -> None:
    from cuda_kernels import launch, tile
    from cuda_kernels import quantize as kernels

    source, words = _source(x)
    rows, columns = x.shape
    blocks = min(tile.tiles(rows, columns), 4 * launch.multiprocessors(x.device))
    kernels.amax_kernel(source, True).launch(blocks, (*words, rows, columns, 0, seen))


def update_scales(
    seen: Tensor, window: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    from cuda_kernels import scaling as kernels

    length, n = window.shape
    kernel = kernels.update_scales_kernel(algorithm == "most_recent", recompute)
    kernel.launch(-(-n // kernels.COLUMNS), (seen, window, scale, fp8_max, 2.0**margin, length, n))


def _source(x: Tensor) -> tuple[Any, tuple[Tensor, int]]:
    """How kernels read ``x [R, K]``, and what they take for it: the tensor and the pitch of its rows."""
    from cuda_kernels.tile import tensor_source

    columns = x.shape[1]
    if x.stride(1) != 1 and columns > 1:
        x = x.contiguous()
    pitch = x.stride(0)
    aligned = columns % 4 == 0 and pitch % 4 == 0 and x.data_ptr() % (4 * x.element_size()) == 0
    return tensor_source(_NAMES[x.dtype], aligned), (x, pitch)


def _outputs(
    x: Tensor, layout: Layout, dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    row = empty_operand(x.device, layout, dtype, rows, columns) if rowwise else _nothing(x.device, layout, dtype)
    column = empty_operand(x.device, layout, dtype, columns, rows) if columnwise else _nothing(x.device, layout, dtype)
    return (*row, *column)


@cache
def _nothing(device: torch.device, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=scale_dtype(layout), device=device)


def _described(layout: Layout, outputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
    """The kernels' last parameters: of each copy, its codes and scales with their pitches."""
    data, scale_inv, data_t, scale_inv_t = outputs
    by_columns = layout in (Layout.BLOCK_1X128, Layout.MX_1X32)
    described: list[Any] = []
    for codes, scales in ((data, scale_inv), (data_t, scale_inv_t)):
        scale_pitch = scales.stride(1 if by_columns else 0) if scales.dim() == 2 else 0
        described += [codes, codes.stride(0), scales, scale_pitch]
    return tuple(described)


def falls_back(kernels_op: Callable[..., Any]) -> Callable[..., Any]:
    """``kernels_op``, or the reference of the same name where the device runs no kernels or there is nothing to do."""
    reference_op = getattr(reference, kernels_op.__name__)

    @wraps(kernels_op)
    def op(x: Tensor, *args: Any) -> Any:
        if x.numel() and x.device not in _without_kernels:
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
        return _promised(results, Layout(args[1]) if kernels_op is quantize else Layout.TENSOR)

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
