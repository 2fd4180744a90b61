"""The specification of casts in plain torch: what runs on the CPU, and on a GPU for which there is no kernel.

An FP8 code is a BF16 value, and so is a code times a power of two. 16-bit floats without their sign order like
integers, NaN on top, so an amax is an integer reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.formats import E4M3, E8M0_DTYPE, Float8
from lightning_fp8.ops.core.checks import require
from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.quantize.options import QuantizeOptions, parse_quantize_options, refuse_scale
from lightning_fp8.ops.quantize.outputs import Outputs
from lightning_fp8.ops.quantize.schema import CastIO, cast_op, check_cast_io, implement_cast


def saturating_cast(values: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    """``round_to_nearest_even(clamp(values * scale, -max, max))``; NaN stays NaN. Overwrites float32 ``values``."""
    return values.mul_(scale).clamp_(-float8.max, float8.max).to(float8.dtype)


def absolute_max(x: Tensor, dim: int) -> Tensor:
    """``max |x|`` along ``dim`` as float32; NaN where there is one, 0 where there is nothing."""
    if x.numel() == 0:
        return x.new_zeros([size for index, size in enumerate(x.shape) if index != dim], dtype=torch.float32)
    if x.dtype in (torch.bfloat16, torch.float16):
        return (x.view(torch.int16) & 0x7FFF).amax(dim).view(x.dtype).float()
    return x.abs().amax(dim).float()


def tensor_amax(x: Tensor) -> Tensor:
    """``max |x|`` as float32 ``[]``; NaN if there is one, 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def observe(x: Tensor, amax: Tensor) -> None:
    """See :func:`lightning_fp8.ops.observe`.

    Raises:
        TypeError, ValueError: x is not floating point; ``amax`` has another dtype, shape or device.
    """
    require("amax", amax, torch.float32, (), x.device)
    if not x.is_floating_point():
        raise TypeError(f"cannot observe {x.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")
    torch.maximum(amax, tensor_amax(x), out=amax)


def cast(x: Tensor, options_text: str, io: CastIO) -> Outputs:
    """Scale ``x`` by one given scale, or by x's own where that is 0; else each tensor, row or block from itself.

    See :func:`lightning_fp8.ops.quantize`.
    """
    check_cast_io(x.device, io)
    scale, amax, overflow_counts = io
    options = parse_quantize_options(options_text)
    x = x.contiguous()
    if scale is not None:
        refuse_scale(options.layout)
        return _quantize_tensor(x, _given_scale(x, scale, amax, options), options, overflow_counts)
    if options.layout.has_one_scale:
        scale = scaling.current_scale(tensor_amax(x), options.float8.max, options.power_2, options.epsilon)
        return _quantize_tensor(x, scale, options, overflow_counts)
    rowwise_copy = columnwise_copy = _absent(x, options)
    if options.rowwise:
        rowwise_copy = _quantize_blocks(x, options.layout.block_shape(*x.shape), options, overflow_counts)
    if options.columnwise:
        block_rows, block_columns = options.layout.block_shape(x.shape[1], x.shape[0])
        uncounted = None if options.rowwise else overflow_counts
        data, scale_inv = _quantize_blocks(x, (block_columns, block_rows), options, uncounted)
        columnwise_copy = data.t(), scale_inv.t().contiguous()
    return (*rowwise_copy, *columnwise_copy)


quantize = cast_op(cast, num_inputs=1)


def _given_scale(x: Tensor, scale: Tensor, amax: Tensor | None, options: QuantizeOptions) -> Tensor:
    """The scale to cast with: the given one, or x's own if that is 0; raises ``amax``."""
    # Asking a GPU for the scale would wait for it.
    is_nonzero = options.scale_is_nonzero or (not x.is_cuda and bool(scale.item()))
    if is_nonzero and amax is None:
        return scale
    x_amax = tensor_amax(x)
    if amax is not None:
        torch.maximum(amax, x_amax, out=amax)
    return scale if is_nonzero else torch.where(scale == 0, scaling.current_scale(x_amax, options.float8.max), scale)


def _absent(x: Tensor, options: QuantizeOptions) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=options.float8.dtype), x.new_empty(0, dtype=options.layout.scale_dtype)


def _count(overflow_counts: Tensor | None, values: Tensor, scale: Tensor, codes: Tensor, float8: Float8) -> None:
    """Add the numbers of ``values`` that the cast saturated and of those that it flushed to zero."""
    if overflow_counts is not None:
        overflow_counts[0] += ((values * scale).abs() > float8.max).sum()
        overflow_counts[1] += ((values != 0) & (codes.view(torch.uint8) & 0x7F == 0)).sum()


def _quantize_tensor(x: Tensor, scale: Tensor, options: QuantizeOptions, overflow_counts: Tensor | None) -> Outputs:
    data = saturating_cast(x.to(torch.float32, copy=True), scale, options.float8)
    scale_inv = 1.0 / scale
    _count(overflow_counts, x.float(), scale, data, options.float8)
    absent, no_scale = _absent(x, options)
    data_t = absent
    if options.columnwise:
        data_t = (data.clone() if options.rowwise else data).t()  # each output has its own memory
    return data if options.rowwise else absent, scale_inv, data_t, no_scale


def _quantize_blocks(
    x: Tensor, block: tuple[int, int], options: QuantizeOptions, overflow_counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` in blocks; zeros fill a ragged edge and change no amax."""
    rows, columns = x.shape
    block_rows, block_columns = block
    more_rows, more_columns = -rows % block_rows, -columns % block_columns
    padded = x
    if more_rows or more_columns:  # F.pad of torch 2.8 refuses a tensor without elements
        padded = x.new_zeros(rows + more_rows, columns + more_columns)
        padded[:rows, :columns] = x
    grid = padded.shape[0] // block_rows, padded.shape[1] // block_columns
    blocks = padded.view(grid[0], block_rows, grid[1], block_columns)
    amax = absolute_max(blocks, 1).amax(2) if block_rows > 1 else absolute_max(blocks.squeeze(1), 2)
    if options.layout.scale_dtype == E8M0_DTYPE:
        codes = scaling.e8m0_from_amax(amax, options.float8.max)
        scale = scaling.e8m0_scale(codes)
        scale_inv = codes.view(E8M0_DTYPE)
    else:
        scale = scaling.current_scale(amax, options.float8.max, options.power_2, options.epsilon)
        scale_inv = 1.0 / scale
    block_scale = scale[:, None, :, None]
    data = saturating_cast(blocks.to(torch.float32, copy=True), block_scale, options.float8)
    _count(overflow_counts, blocks.float(), block_scale, data, options.float8)
    return data.view(padded.shape)[:rows, :columns].contiguous(), scale_inv


_SUBNORMAL = 5e-324


def decode(data: Tensor) -> Tensor:
    """Decode FP8 to BF16, exactly: shift the bits, then multiply by the difference of the exponents' biases."""
    if data.dtype == E4M3.dtype:
        shift, kept, special, rebias = 4, 0x87F0, 0x7F, 120
    else:
        shift, kept, special, rebias = 5, 0x8FE0, 0x7C, 112
    if data.is_cuda or _SUBNORMAL == 0.0:
        # Fast there, and asking for NaN would wait for the GPU; and where torch.set_flush_denormal(True) takes
        # subnormal numbers for 0, moved bits may be some.
        return data.to(torch.bfloat16)
    bits = data.view(torch.int8)
    if data.numel() and int((bits & 0x7F).amax()) >= special:
        return data.to(torch.bfloat16)  # NaN or inf: their codes are not numbers
    bits = bits.to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(kept - 0x10000)
    return bits.view(torch.bfloat16).mul_(2.0**rebias)


implement_cast("quantize", "cpu", quantize)
implement("observe", "cpu", observe)
