"""The specification of every op in plain torch: what runs on the CPU, and on a card for which there is no kernel.

Two facts make it fast enough to train with. An FP8 code is a BF16 value, and so is a code times a power of two: the
product of such operands is exact in BF16 GEMMs with float32 accumulation. And 16-bit floats without their sign order
like integers, NaN on top, so an amax is an integer reduction.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.formats import E4M3, E8M0_DTYPE, Float8
from lightning_fp8.ops.config import DTYPES, parse_quantize_config, parse_scaled_mm_config
from lightning_fp8.ops.given import (
    compact,
    lie_of,
    require,
    require_beside_a_cast,
    require_beside_a_product,
    require_of_an_update,
)
from lightning_fp8.ops.schema import NAMESPACE, UNOBSERVED, scale_dtype, scale_shape
from lightning_fp8.scaled import Layout, block_shape


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
    require("amax", lie_of(amax), torch.float32, (), x.device)
    if not x.is_floating_point():
        raise TypeError(f"cannot observe {x.dtype}; cast to one of {', '.join(map(str, DTYPES.values()))} first")
    torch.maximum(amax, tensor_amax(x), out=amax)


def quantize(
    x: Tensor, config: str, scale: Tensor | None = None, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One given scale, or x's own where that is 0; else each tensor, row or block scaled from itself.

    See :func:`lightning_fp8.ops.quantize`.
    """
    require_beside_a_cast(x.device, lie_of(scale), lie_of(amax), compact("counts", counts))
    (float8, kind, power_2, epsilon, rowwise, columnwise, nonzero), x = parse_quantize_config(config), x.contiguous()
    if scale is not None:
        parse_quantize_config(config).refuse_scale()
        may_be_0 = not nonzero and (x.is_cuda or not scale.item())  # asking a card would wait for it
        if may_be_0 or amax is not None:
            own_amax = tensor_amax(x)
            if amax is not None:
                torch.maximum(amax, own_amax, out=amax)
            if may_be_0:
                scale = torch.where(scale == 0, scaling.current_scale(own_amax, float8.max), scale)
        return _quantize_tensor(x, scale, float8, rowwise, columnwise, counts)
    if kind is Layout.TENSOR:
        scale = scaling.current_scale(tensor_amax(x), float8.max, power_2, epsilon)
        return _quantize_tensor(x, scale, float8, rowwise, columnwise, counts)
    row = column = _nothing(x, float8, kind)
    if rowwise:
        row = _quantize_blocks(x, *block_shape(kind, *x.shape), kind, float8, power_2, epsilon, counts)
    if columnwise:
        block_rows, block_columns = block_shape(kind, *reversed(x.shape))
        counted = None if rowwise else counts
        data, scale_inv = _quantize_blocks(x, block_columns, block_rows, kind, float8, power_2, epsilon, counted)
        column = data.t(), scale_inv.t().contiguous()
    return (*row, *column)


def _nothing(x: Tensor, float8: Float8, layout: Layout) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=float8.dtype), x.new_empty(0, dtype=scale_dtype(layout))


def _count(counts: Tensor | None, values: Tensor, scale: Tensor, codes: Tensor, float8: Float8) -> None:
    """Add the numbers of ``values`` that the cast saturated and of those that it flushed to zero."""
    if counts is not None:
        counts[0] += ((values * scale).abs() > float8.max).sum()
        counts[1] += ((values != 0) & (codes.view(torch.uint8) & 0x7F == 0)).sum()


def _quantize_tensor(
    x: Tensor, scale: Tensor, float8: Float8, rowwise: bool, columnwise: bool, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, scale_inv = saturating_cast(x.to(torch.float32, copy=True), scale, float8), 1.0 / scale
    _count(counts, x.float(), scale, data, float8)
    nothing, no_scale = _nothing(x, float8, Layout.TENSOR)
    data_t = (data.clone() if rowwise else data).t() if columnwise else nothing  # each output has its own memory
    return data if rowwise else nothing, scale_inv, data_t, no_scale


def _quantize_blocks(
    x: Tensor,
    block_rows: int,
    block_columns: int,
    layout: Layout,
    float8: Float8,
    power_2: bool,
    epsilon: float,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` in blocks of ``[block_rows, block_columns]``; zeros fill a ragged edge and change no amax."""
    rows, columns = x.shape
    more_rows, more_columns = -rows % block_rows, -columns % block_columns
    padded = x
    if more_rows or more_columns:  # F.pad of torch 2.8 refuses a tensor without elements
        padded = x.new_zeros(rows + more_rows, columns + more_columns)
        padded[:rows, :columns] = x
    grid = padded.shape[0] // block_rows, padded.shape[1] // block_columns
    blocks = padded.view(grid[0], block_rows, grid[1], block_columns)
    amax = absolute_max(blocks, 1).amax(2) if block_rows > 1 else absolute_max(blocks.squeeze(1), 2)
    if layout is Layout.MX_1X32:
        codes = scaling.e8m0_from_amax(amax, float8.max)
        scale, scale_inv = _e8m0_scale(codes), codes.view(E8M0_DTYPE)
    else:
        scale = scaling.current_scale(amax, float8.max, power_2, epsilon)
        scale_inv = 1.0 / scale
    spread = scale[:, None, :, None]
    data = saturating_cast(blocks.to(torch.float32, copy=True), spread, float8)
    _count(counts, blocks.float(), spread, data, float8)
    return data.view(padded.shape)[:rows, :columns].contiguous(), scale_inv


def _e8m0_scale(codes: Tensor) -> Tensor:
    """``2**(127 - code)``; NaN for code 255, which uint8 turns into itself."""
    return scaling.e8m0_decode(254 - codes)  # torch.ldexp's powers may be of the default dtype


_SUBNORMAL = 5e-324


def decode(data: Tensor) -> Tensor:
    """FP8 codes as BF16 values, exactly: moves the bits, then multiplies by the difference of the exponents' biases."""
    if data.dtype == E4M3.dtype:
        shift, kept, special, rebias = 4, 0x87F0, 0x7F, 120
    else:
        shift, kept, special, rebias = 5, 0x8FE0, 0x7C, 112
    if data.is_cuda or _SUBNORMAL == 0.0:
        # Fast there, and asking for NaN would wait for the card; and where torch.set_flush_denormal(True) takes
        # subnormal numbers for 0, moved bits may be some.
        return data.to(torch.bfloat16)
    bits = data.view(torch.int8)
    if data.numel() and int((bits & 0x7F).amax()) >= special:
        return data.to(torch.bfloat16)  # NaN or inf: their codes are not numbers
    bits = bits.to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(kept - 0x10000)
    return bits.view(torch.bfloat16).mul_(2.0**rebias)


def scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Tensor | None = None
) -> Tensor:
    """See :func:`lightning_fp8.ops.scaled_mm`. ``fast`` changes nothing here: accumulation is float32."""
    layout_a, layout_b, out_dtype, _ = parse_scaled_mm_config(config)
    for name, data, scales, layout in (("a", a, scale_a, layout_a), ("b", b, scale_b, layout_b)):
        if data.numel():
            shape = scale_shape(layout, *data.shape)
            require(f"scale_inv of {name}", lie_of(scales), scale_dtype(layout), shape, a.device)
    require_beside_a_product((a.shape[0], b.shape[0]), a.device, lie_of(bias))
    if not (a.numel() and b.numel()):  # no row, no column, or nothing to add up
        out = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    left, right, scale = _operands(a, scale_a, layout_a, b, scale_b, layout_b)
    if out_dtype == torch.bfloat16 and left.dtype == torch.bfloat16 and scale is None:
        return torch.mm(left, right.t()) if bias is None else torch.addmm(bias.to(torch.bfloat16), left, right.t())
    out = _float32_product(left, right)
    if scale is not None:
        out *= scale
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


def scaled_mm_observed(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str, bias: Tensor | None, amax: Tensor
) -> Tensor:
    """See :func:`lightning_fp8.ops.scaled_mm`."""
    out = scaled_mm(a, scale_a, b, scale_b, config, bias)
    observe(out, amax)
    return out


def scaled_mm_accumulate(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str) -> None:
    """See :func:`lightning_fp8.ops.scaled_mm_accumulate`."""
    require_beside_a_product((a.shape[0], b.shape[0]), a.device, None, lie_of(out))
    out += scaled_mm(a, scale_a, b, scale_b, config)


def _operands(
    a: Tensor, scale_a: Tensor, layout_a: Layout, b: Tensor, scale_b: Tensor, layout_b: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of ``(left @ rightᵀ) * scale``: in BF16 where that is exact, else in float32."""
    microscaled = scale_a.dtype == scale_b.dtype == E8M0_DTYPE
    scale_a, scale_b = _scale_inv(scale_a), _scale_inv(scale_b)
    # Asking a card's scales would wait for it.
    if microscaled if a.is_cuda else _is_power_of_2(scale_a) and _is_power_of_2(scale_b):
        return _scaled(decode(a), scale_a, layout_a), _scaled(decode(b), scale_b, layout_b), None
    if layout_a is Layout.TENSOR and layout_b is Layout.TENSOR:
        return decode(a), decode(b), scale_a * scale_b
    if a.is_cuda and layout_a is Layout.ROW and layout_b is Layout.ROW:
        return decode(a), decode(b), scale_a * scale_b.t()
    return _scaled(decode(a).float(), scale_a, layout_a), _scaled(decode(b).float(), scale_b, layout_b), None


def _scale_inv(scale_inv: Tensor) -> Tensor:
    return scaling.e8m0_decode(scale_inv.view(torch.uint8)) if scale_inv.dtype == E8M0_DTYPE else scale_inv


def _is_power_of_2(scale: Tensor) -> bool:
    return not bool((scale.contiguous().view(torch.int32) & 0x7FFFFF).any())


def _scaled(values: Tensor, scale_inv: Tensor, layout: Layout) -> Tensor:
    """``values [R, K]`` times their block's scale, in values' dtype. Overwrites ``values``."""
    scale_inv = scale_inv.to(values.dtype)
    rows, columns = values.shape
    block_rows, block_columns = block_shape(layout, rows, columns)
    if layout in (Layout.TENSOR, Layout.ROW) or not values.numel():
        return values.mul_(scale_inv) if values.numel() else values
    if rows % block_rows or columns % block_columns:
        scale_inv = scale_inv.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
        return values.mul_(scale_inv)
    blocks = values.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
    blocks.mul_(scale_inv[:, None, :, None])
    return values


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):  # which would round float32 factors and the result
        if left.dtype == torch.float32:
            return torch.mm(left, right.t())
        if left.is_cuda:
            return torch.mm(left, right.t(), out_dtype=torch.float32)
        with bf16_products():
            return torch.mm(left.float(), right.float().t())


_products = threading.Lock()
_multiplying = 0
_precision_outside: Any = None


@contextmanager
def bf16_products() -> Iterator[None]:
    """Let float32 GEMMs multiply in BF16 and accumulate in float32: exact for operands that are BF16 values.

    The only way to a float32 result of a BF16 GEMM on the CPU; processors without BF16 ignore it. The setting is the
    process's: of threads that multiply at a time the first sets it, and the last puts back what was there.
    """
    global _multiplying, _precision_outside
    with _products:
        if not _multiplying:
            _precision_outside = _float32_precision()
            _set_float32_precision("medium" if _matmul is None else "bf16")
        _multiplying += 1
    try:
        yield
    finally:
        with _products:
            _multiplying -= 1
            if not _multiplying:
                _set_float32_precision(_precision_outside)


_matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch before 2.9 has one setting for all backends


def _float32_precision() -> str:
    return torch.get_float32_matmul_precision() if _matmul is None else _matmul.fp32_precision


def _set_float32_precision(precision: str) -> None:
    if _matmul is None:
        torch.set_float32_matmul_precision(precision)
    else:
        _matmul.fp32_precision = precision


def update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    """See :func:`lightning_fp8.ops.update_scales`."""
    require_of_an_update(amax, amax_history, scale, fp8_max)
    rolled = scaling.roll_history(amax_history, amax)
    if recompute:
        largest = scaling.reduce_history(rolled, "max" if algorithm == "max" else "most_recent")
        ran = (amax > 0) & torch.isfinite(amax)
        scale.copy_(torch.where(ran, scaling.delayed_scale(largest, scale, fp8_max, margin), scale))
    rolled[0] = 0  # the oldest amax counted for the last time
    amax_history.copy_(rolled)
    amax.zero_()


for _op in (observe, quantize, scaled_mm, scaled_mm_observed, scaled_mm_accumulate, update_scales):
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cpu", _op)
torch.library.impl(f"{NAMESPACE}::quantize{UNOBSERVED}", "cpu", quantize)
