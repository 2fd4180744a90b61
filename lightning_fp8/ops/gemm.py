"""GEMMs of FP8 operands: the ops, and their specification in plain torch.

The specification runs on the CPU, and on GPUs without kernels. Kernels are in ``gemm_cuda.py``.

Operands are K-major: ``a [M, K]`` and ``b [N, K]``. The ops call the ``scale_inv`` of the operands ``scale_a`` and
``scale_b``, as ``torch._scaled_mm`` does. The result is ``[M, N]``.

The specification is fast enough for training because the value of an FP8 code is a BF16 number, and so is its product
with a power of two: BF16 GEMMs with float32 accumulation multiply such operands exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E8M0_DTYPE
from lightning_fp8.numerics.scaled import Layout, ScaledTensor
from lightning_fp8.ops.bf16_products import bf16_products, multiplies_bf16
from lightning_fp8.ops.cast import decode
from lightning_fp8.ops.checks import HIGH_PRECISION, require
from lightning_fp8.ops.op import op, spec

Shape = Sequence[int]


@spec("str layout_a, str layout_b, ScalarType out_dtype, bool fast_accum")
class Gemm(NamedTuple):
    """A GEMM's options.

    Attributes:
        layout_a, layout_b: the layouts of the operands' scales.
        out_dtype: the dtype of the result.
        fast_accum: whether the tensor core may use its accumulator of lower precision.
    """

    layout_a: Layout
    layout_b: Layout
    out_dtype: torch.dtype
    fast_accum: bool = False

    @property
    def flat(self) -> tuple[str, str, torch.dtype, bool]:
        """The fields as the arguments of an op."""
        return self.layout_a.code, self.layout_b.code, self.out_dtype, self.fast_accum

    @classmethod
    def from_flat(cls, layout_a: str, layout_b: str, out_dtype: torch.dtype, fast_accum: bool) -> Gemm:
        """The inverse of :attr:`flat`.

        Raises:
            ValueError: If a layout is unknown.
        """
        return cls(Layout(layout_a), Layout(layout_b), out_dtype, fast_accum)


# --- The public functions ---------------------------------------------------------------------------------------------


def scaled_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """``a @ bᵀ + bias`` of two K-major FP8 operands, accumulated in float32 and rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        bias: ``[N]``, added before rounding.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: allow the tensor core's accumulator of lower precision. It has no effect on the CPU.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError, ValueError: If the operands have different K, or ``bias`` has the wrong dtype, shape or device.
    """
    gemm = Gemm(a.layout, b.layout, out_dtype, fast_accum)
    return scaled_mm_op.call(a.data, a.scale_inv, b.data, b.scale_inv, gemm, bias)  # type: ignore[no-any-return]


def scaled_mm_accumulate(out: Tensor, a: ScaledTensor, b: ScaledTensor) -> None:
    """``out += a @ bᵀ`` with ``out [M, N]`` in float32 (a weight's ``main_grad``).

    Raises:
        TypeError, ValueError: If the operands have different K, or ``out`` has the wrong dtype, shape or device.
    """
    scaled_mm_accumulate_op.call(out, a.data, a.scale_inv, b.data, b.scale_inv, Gemm(a.layout, b.layout, torch.float32))


# --- The ops ----------------------------------------------------------------------------------------------------------


def _check(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    gemm: Gemm,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Check that K is equal, scales match their layouts, and ``bias`` and ``out`` match the result."""
    if gemm.out_dtype not in HIGH_PRECISION:
        raise TypeError(f"out_dtype={gemm.out_dtype} must be one of {', '.join(map(str, HIGH_PRECISION))}")
    m, k = a.shape
    n, k_of_b = b.shape
    if k != k_of_b:
        raise ValueError(
            f"contractions differ: a is {tuple(a.shape)}, b is {tuple(b.shape)}; pass a [M, K] and b [N, K]"
        )
    device = a.device
    for name, data, scale_inv, layout in (
        ("scale_inv of a", a, scale_a, gemm.layout_a),
        ("scale_inv of b", b, scale_b, gemm.layout_b),
    ):
        is_one = layout.has_one_scale and not scale_inv.dim() and scale_inv.dtype is torch.float32
        if not (is_one and scale_inv.device == device) and data.numel():
            require(name, scale_inv, layout.scale_dtype, layout.scale_shape(*data.shape), device)
    if bias is not None:
        require("bias", bias, HIGH_PRECISION, (n,), device)
    if out is not None:
        require("out", out, HIGH_PRECISION, (m, n), device)


def _check_accumulate(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm) -> None:
    _check(a, scale_a, b, scale_b, gemm, out=out)


@op("scaled_mm", check=_check)
def scaled_mm_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None = None
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=gemm.out_dtype)


@op("scaled_mm_accumulate", check=_check_accumulate, writes=("out",))
def scaled_mm_accumulate_op(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm) -> None:
    return None


@register_flop_formula(scaled_mm_op.overload.overloadpacket)
def _scaled_mm_flops(a: Shape, _: Shape, b: Shape, *others: object, **kwargs: object) -> int:
    return 2 * a[0] * a[1] * b[0]


@register_flop_formula(scaled_mm_accumulate_op.overload.overloadpacket)
def _scaled_mm_accumulate_flops(out: Shape, a: Shape, *others: object, **kwargs: object) -> int:
    return 2 * out[0] * out[1] * a[1]


def implement_gemm(device_type: str, multiply: Any, plan: Any = None) -> None:
    """Implement both ops by ``(a, scale_a, b, scale_b, gemm, bias, out=None) -> result``.

    Args:
        plan: the plan cache of the implementation, if it has one.
    """

    def accumulate(out: Tensor, *operands: Any) -> None:
        multiply(*operands, None, out)

    scaled_mm_op.implement(device_type, multiply, plan)
    scaled_mm_accumulate_op.implement(device_type, accumulate)


# --- The specification ------------------------------------------------------------------------------------------------


def reference_gemm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    gemm: Gemm,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply, and add to ``out`` unless it is None.

    Operands are exact, or rounded to float32 if their scales require it. ``fast_accum`` has no effect.
    """
    result = _multiply(a, scale_a, b, scale_b, gemm, bias)
    return result if out is None else out.add_(result)


def _multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None) -> Tensor:
    """``a @ bᵀ + bias`` in ``gemm.out_dtype``."""
    out_dtype = gemm.out_dtype
    if not (a.numel() and b.numel()):  # M, N or K is 0
        out = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    if out_dtype == torch.bfloat16 and not a.is_cuda and multiplies_bf16():
        factor = _common_factor(scale_a, scale_b, gemm)
        if factor is not None and (bias is None or bias.dtype == torch.bfloat16):
            added = a.new_empty((), dtype=torch.bfloat16) if bias is None else bias
            with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
                return torch.addmm(added, decode(a), decode(b).t(), beta=int(bias is not None), alpha=factor)
    left, right, scale_inv_ab = _factors(a, scale_a, b, scale_b, gemm)
    in_bf16 = out_dtype == left.dtype == torch.bfloat16 and scale_inv_ab is None
    if in_bf16 and (left.is_cuda or multiplies_bf16()):
        return torch.mm(left, right.t()) if bias is None else torch.addmm(bias.to(torch.bfloat16), left, right.t())
    out = _float32_mm(left, right)
    if scale_inv_ab is not None:
        out *= scale_inv_ab
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


def _factors(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of ``(left @ rightᵀ) * scale_inv_ab``, in BF16 if that is exact, else in float32."""
    layout_a, layout_b = gemm.layout_a, gemm.layout_b
    is_cuda = a.is_cuda
    microscaled = scale_a.dtype == scale_b.dtype == E8M0_DTYPE
    # Reading scales would wait for a GPU.
    (scale_a, is_exact_a), (scale_b, is_exact_b) = _in_float32(scale_a, is_cuda), _in_float32(scale_b, is_cuda)
    if microscaled if is_cuda else is_exact_a and is_exact_b:
        return _scaled(decode(a), scale_a, layout_a), _scaled(decode(b), scale_b, layout_b), None
    if layout_a.has_one_scale and layout_b.has_one_scale:
        return decode(a), decode(b), scale_a * scale_b
    if is_cuda and layout_a.has_one_scale_per_row and layout_b.has_one_scale_per_row:
        return decode(a), decode(b), scale_a * scale_b.t()
    left = _scaled(decode(a).float(), scale_a, layout_a)
    return left, _scaled(decode(b).float(), scale_b, layout_b), None


_SMALLEST_FACTOR = 2.0**-64
"""Nonzero products of two codes are at least 2**-32. Scaled by this factor they are still normal numbers, as BF16 GEMMs
require."""


def _common_factor(scale_a: Tensor, scale_b: Tensor, gemm: Gemm) -> float | None:
    """The common scale of all products; None if there are several scales, or if it is too small.

    A BF16 GEMM on the CPU multiplies its sums by ``alpha`` in float32, and then rounds them once.
    """
    if not (gemm.layout_a.has_one_scale and gemm.layout_b.has_one_scale):
        return None
    factor = float((scale_a * scale_b).item())
    return factor if factor >= _SMALLEST_FACTOR else None


def _in_float32(scale_inv: Tensor, is_cuda: bool) -> tuple[Tensor, bool]:
    """Scales as float32, and whether they are all normal powers of two, which is not checked on a GPU."""
    if scale_inv.dtype == E8M0_DTYPE:
        scale_inv = scaling.e8m0_decode(scale_inv.view(torch.uint8))
    return scale_inv, not is_cuda and _is_power_of_2(scale_inv)


def _is_power_of_2(scale_inv: Tensor) -> bool:
    """Whether all mantissas are 0."""
    if scale_inv.numel() == 1:
        return not int(scale_inv.view(torch.int32).item()) & 0x7FFFFF
    return not bool((scale_inv.contiguous().view(torch.int32) & 0x7FFFFF).any())


def _scaled(values: Tensor, scale_inv: Tensor, layout: Layout) -> Tensor:
    """``values [R, K]`` times the ``scale_inv`` of their block, in place, in the dtype of ``values``."""
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

    ``torch.set_float32_matmul_precision`` applies to operands in float32.
    """
    if torch.is_autocast_enabled(left.device.type):  # autocast would round float32 factors and the result
        with torch.autocast(left.device.type, enabled=False):
            return _float32_mm(left, right)
    if left.dtype == torch.float32:
        return torch.mm(left, right.t())
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    with bf16_products():
        return torch.mm(left.float(), right.float().t())


implement_gemm("cpu", reference_gemm)
