"""The specification of GEMMs in plain torch: what runs on the CPU, and on a GPU for which there is no kernel.

One fact makes it fast enough to train with: an FP8 code is a BF16 value, and so is a code times a power of two. The
product of such operands is exact in BF16 GEMMs with float32 accumulation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.formats import E8M0_DTYPE
from lightning_fp8.ops.core.bf16_products import bf16_products, multiplies_bf16
from lightning_fp8.ops.core.checks import require
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.gemm.options import ScaledMMOptions, parse_scaled_mm_options
from lightning_fp8.ops.gemm.schema import Operand, check_epilogue, gemm_ops
from lightning_fp8.ops.quantize.reference import decode
from lightning_fp8.scaled import Layout


def gemm(
    a: Operand, b: Operand, options_text: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
) -> Tensor:
    """Multiply, see :func:`lightning_fp8.ops.scaled_mm`; raise ``amax``; add to ``out``.

    ``fast`` changes nothing here: accumulation is float32.
    """
    check_epilogue((a[0].shape[0], b[0].shape[0]), a[0].device, None, out, amax)
    return finish_unfused(multiply(a, b, parse_scaled_mm_options(options_text), bias), amax, out)


def finish_unfused(result: Tensor, amax: Tensor | None, out: Tensor | None) -> Tensor:
    """The rest of an epilogue that no kernel has computed: observe the result, and add it to ``out``."""
    if amax is not None:
        torch.ops.lightning_fp8.observe.default(result, amax)
    return result if out is None else out.add_(result)


def multiply(a: Operand, b: Operand, options: ScaledMMOptions, bias: Tensor | None) -> Tensor:
    """``a @ bᵀ + bias`` in ``options.out_dtype``; operands are exact, or rounded to float32 where scales ask for it."""
    data_a, data_b = a[0], b[0]
    for name, (data, scale_inv), layout in (("a", a, options.layout_a), ("b", b, options.layout_b)):
        if data.numel():
            shape = layout.scale_shape(*data.shape)
            require(f"scale_inv of {name}", scale_inv, layout.scale_dtype, shape, data_a.device)
    check_epilogue((data_a.shape[0], data_b.shape[0]), data_a.device, bias)
    out_dtype = options.out_dtype
    if not (data_a.numel() and data_b.numel()):  # no row, no column, or nothing to add up
        out = data_a.new_zeros(data_a.shape[0], data_b.shape[0], dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    left, right, scale_inv_ab = _factors(a, options.layout_a, b, options.layout_b)
    in_bf16 = out_dtype == left.dtype == torch.bfloat16 and scale_inv_ab is None
    if in_bf16 and (left.is_cuda or multiplies_bf16()):
        return torch.mm(left, right.t()) if bias is None else torch.addmm(bias.to(torch.bfloat16), left, right.t())
    out = _float32_mm(left, right)
    if scale_inv_ab is not None:
        out *= scale_inv_ab
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


scaled_mm, scaled_mm_observed, scaled_mm_accumulate = gemm_ops(gemm)


def _factors(a: Operand, layout_a: Layout, b: Operand, layout_b: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of ``(left @ rightᵀ) * scale_inv_ab``: in BF16 where that is exact, else in float32."""
    microscaled = a[1].dtype == b[1].dtype == E8M0_DTYPE
    codes_a, scale_inv_a = a[0], _as_float32(a[1])
    codes_b, scale_inv_b = b[0], _as_float32(b[1])
    is_cuda = codes_a.is_cuda
    # Asking a GPU for the scales would wait for it.
    if microscaled if is_cuda else _is_power_of_2(scale_inv_a) and _is_power_of_2(scale_inv_b):
        return _scaled(decode(codes_a), scale_inv_a, layout_a), _scaled(decode(codes_b), scale_inv_b, layout_b), None
    if layout_a.has_one_scale and layout_b.has_one_scale:
        return decode(codes_a), decode(codes_b), scale_inv_a * scale_inv_b
    if is_cuda and layout_a.has_one_scale_per_row and layout_b.has_one_scale_per_row:
        return decode(codes_a), decode(codes_b), scale_inv_a * scale_inv_b.t()
    left = _scaled(decode(codes_a).float(), scale_inv_a, layout_a)
    return left, _scaled(decode(codes_b).float(), scale_inv_b, layout_b), None


def _as_float32(scale_inv: Tensor) -> Tensor:
    return scaling.e8m0_decode(scale_inv.view(torch.uint8)) if scale_inv.dtype == E8M0_DTYPE else scale_inv


def _is_power_of_2(scale_inv: Tensor) -> bool:
    return not bool((scale_inv.contiguous().view(torch.int32) & 0x7FFFFF).any())


def _scaled(values: Tensor, scale_inv: Tensor, layout: Layout) -> Tensor:
    """``values [R, K]`` times their block's ``scale_inv``, in values' dtype. Overwrites ``values``."""
    scale_inv = scale_inv.to(values.dtype)
    rows, columns = values.shape
    if not values.numel():
        return values
    if not layout.scales_along_k:
        return values.mul_(scale_inv)
    block_rows, block_columns = layout.block_shape(rows, columns)
    if rows % block_rows or columns % block_columns:
        scale_inv = scale_inv.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
        return values.mul_(scale_inv)
    blocks = values.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
    blocks.mul_(scale_inv[:, None, :, None])
    return values


def _float32_mm(left: Tensor, right: Tensor) -> Tensor:
    """``left @ rightᵀ`` of two operands in BF16 or float32, in float32.

    Operands in float32 are multiplied as ``torch.set_float32_matmul_precision`` says.
    """
    with torch.autocast(left.device.type, enabled=False):  # which would round float32 factors and the result
        if left.dtype == torch.float32:
            return torch.mm(left, right.t())
        if left.is_cuda:
            return torch.mm(left, right.t(), out_dtype=torch.float32)
        with bf16_products():
            return torch.mm(left.float(), right.float().t())


implement("scaled_mm", "cpu", scaled_mm)
implement("scaled_mm_observed", "cpu", scaled_mm_observed)
implement("scaled_mm_accumulate", "cpu", scaled_mm_accumulate)
