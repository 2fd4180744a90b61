"""Casts to FP8: the ops ``quantize``, ``quantize_columns`` and ``observe``, and their specification in plain torch.

The specification runs on the CPU, and on GPUs without kernels. Kernels are in ``cast_cuda.py``.

Operands are K-major. ``quantize`` takes ``x [R, K]`` and returns the operand of x (``rowwise``) and the operand of xᵀ
(``columnwise``, ``[K, R]``, scaled along R), as requested by its :class:`.Cast`. An operand that
is not requested is empty. Layout ``tensor`` has one scale for both operands, and ``scale_inv_t`` is empty.

The value of an FP8 code is a BF16 number, and so is its product with a power of two. Without the sign bit, the bits of
16-bit floats have the order of integers, and NaN is the largest. An amax is therefore an integer reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E4M3, E8M0_DTYPE, Float8, float8_of
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.checks import HIGH_PRECISION, require, require_contiguous, require_scalar
from lightning_fp8.ops.compiled import compiled_on_cards
from lightning_fp8.ops.memory import Allocation, code_allocation, copy_bits, empty_tensor, operand_allocations
from lightning_fp8.ops.op import op


class Quantized(NamedTuple):
    """The GEMM operands of one tensor ``x [R, K]``: x itself, and xᵀ ``[K, R]``. One that is not requested is None."""

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None


class CastArgs(TypedDict, total=False):
    """The keyword arguments of all functions that cast; see :func:`quantize`."""

    scale: Tensor | None
    amax: Tensor | None
    scale_is_nonzero: bool
    rowwise: bool
    columnwise: bool


class Outputs(NamedTuple):
    """The results of a cast. Those that are not requested are empty."""

    data: Tensor
    scale_inv: Tensor
    data_t: Tensor
    scale_inv_t: Tensor


# --- The public functions ---------------------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    scale_is_nonzero: bool = False,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Quantized:
    """Cast ``x`` to FP8: ``round_to_nearest_even(clamp(x * scale, -max, max))``.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32, with any strides.
        cast: the format and layout.
        scale: float32 ``[]``, only for layout ``tensor``. ``None`` or a value of 0 computes the scale from x's amax.
        scale_is_nonzero: promises that ``scale`` is not 0, which saves the computation of an amax.
        amax: float32 ``[]``, updated in place to ``max(amax, max |x|)``; only with ``scale``.
        rowwise: whether to return the operand of x.
        columnwise: whether to return the operand of xᵀ, scaled along R.

    Raises:
        TypeError: If x is not a 2-D bfloat16, float16 or float32 tensor, or another tensor has the wrong dtype.
        ValueError: If ``scale`` is passed with another layout than ``tensor``, ``amax`` is passed without ``scale``, or
            a tensor has the wrong shape.
    """
    usage = asked(x, cast, rowwise, columnwise, scale_is_nonzero)
    return operands_of(quantize_op.call(x, usage, scale, amax), usage, rowwise, columnwise)


def quantize_columns(x: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    """Cast ``x`` to FP8 with a given scale for each column: ``round_to_nearest_even(clamp(x * scale, -max, max))``.

    If the shards of a tensor are cast with the same scales, their codes are shards of the tensor's codes. Transposed by
    :func:`lightning_fp8.ops.transpose`, they are the codes of xᵀ in layout ``row``.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32, with any strides.
        scale: float32 ``[K]``, contiguous.
        float8: the format of the codes.

    Returns:
        The codes ``[R, K]``. On a GPU each row is aligned to 16 bytes.

    Raises:
        TypeError: If x is not a 2-D bfloat16, float16 or float32 tensor, or ``scale`` is not float32.
        ValueError: If ``scale`` has the wrong shape, is on another device, or is not contiguous.
    """
    return quantize_columns_op.call(x, scale, float8.dtype)  # type: ignore[no-any-return]


def observe(x: Tensor, amax: Tensor) -> None:
    """Update ``amax`` (float32 ``[]``) to ``max(amax, max |x|)`` without a cast. x is floating point, of any shape.

    Raises:
        TypeError, ValueError: If x is not floating point, or if ``amax`` has the wrong dtype, shape or device.
    """
    observe_op.call(x, amax)


def asked(x: Tensor | None, cast: Cast, rowwise: bool, columnwise: bool, scale_is_nonzero: bool) -> Cast:
    """The cast to pass to an op. If the operand of xᵀ is a view of the operand of x, it only casts x."""
    if columnwise and gives_a_view(x, cast):
        return cast.usage(True, False, scale_is_nonzero)
    return cast.usage(rowwise, columnwise, scale_is_nonzero)


def asked_by(x: Tensor, cast: Cast, args: CastArgs) -> tuple[Cast, tuple[bool, bool], tuple[Tensor | None, ...]]:
    """:func:`asked` of keyword arguments. Also which operands they request, and the last arguments of the op."""
    requested = args.get("rowwise", True), args.get("columnwise", False)
    usage = asked(x, cast, *requested, args.get("scale_is_nonzero", False))
    return usage, requested, (args.get("scale"), args.get("amax"))


def gives_a_view(x: Tensor | None, cast: Cast) -> bool:
    """Whether the operand of xᵀ is a view. Both must share scales, and GEMMs on a GPU do not read transposed codes."""
    return cast.layout.transposes and x is not None and not x.is_cuda


def operands_of(results: Sequence[Tensor], made: Cast, rowwise: bool, columnwise: bool) -> Quantized:
    """The operands, given the results of the cast ``made`` (see :func:`asked`)."""
    layout = made.layout
    operand = ScaledTensor(results[0], results[1], layout) if rowwise else None
    transposed = ScaledTensor(*transposed_operand(results, made), layout) if columnwise else None
    return Quantized(operand, transposed)


def transposed_operand(results: Sequence[Tensor], made: Cast) -> tuple[Tensor, Tensor]:
    """The codes and scales of xᵀ, given the results of the cast ``made``; views if it only cast x."""
    has_one_scale = made.layout.has_one_scale
    if made.columnwise:
        return results[2], results[1] if has_one_scale else results[3]
    return results[0].mT, results[1] if has_one_scale else results[1].mT


def joined(first: Outputs, second: Outputs) -> tuple[Tensor, ...]:
    """The results of two casts as those of one op, which must not share memory."""
    apart = (x if x.dim() != 1 or x.numel() else empty_tensor(x.device, x.dtype, 1) for x in second)
    return *first, *apart


# --- The ops ----------------------------------------------------------------------------------------------------------


def _check_input(x: Tensor) -> None:
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize {x.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")
    if x.dim() != 2:
        raise TypeError(f"a cast takes a 2-D tensor, not shape {tuple(x.shape)}; flatten the leading dimensions")


def check_cast(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> None:
    """Check the common arguments of ops that cast.

    Raises:
        TypeError, ValueError: See :func:`quantize`.
    """
    _check_input(x)
    if scale is not None:
        if not cast.layout.has_one_scale:
            raise ValueError(
                f"layout {cast.layout.code!r} computes the scale of each block from its values; scale must be None"
            )
        if scale.dtype is not torch.float32 or scale.dim() or scale.device != x.device:
            require("scale", scale, torch.float32, (), x.device)
    elif amax is not None:
        raise ValueError("amax needs scale; pass scale, too (a value of 0 computes it from x)")
    if amax is not None and (amax.dtype is not torch.float32 or amax.dim() or amax.device != x.device):
        require("amax", amax, torch.float32, (), x.device)


def fake_outputs(x: Tensor, cast: Cast, rows: int, columns: int, experts: int | None = None) -> Outputs:
    """The results of a cast of ``[rows, columns]`` on the device of ``x``, uninitialized."""
    allocations = kernel_allocations if x.device.type == "cuda" else reference_allocations
    return Outputs(*(allocation.empty(x.device) for allocation in allocations(cast, rows, columns, experts)))


@op("quantize", check=check_cast)
def quantize_op(x: Tensor, cast: Cast, *observed: Tensor | None) -> Outputs:
    return fake_outputs(x, cast, x.shape[0], x.shape[1])


def _check_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    _check_input(x)
    if scale.dtype is not torch.float32 or scale.shape != x.shape[1:] or scale.device != x.device:
        require("scale", scale, torch.float32, x.shape[1:], x.device)
    require_contiguous("scale", scale)
    float8_of(dtype)


@op("quantize_columns", check=_check_columns)
def quantize_columns_op(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return code_allocation(x.device, dtype, x.shape[0], x.shape[1]).empty(x.device)


def _check_observe(x: Tensor, amax: Tensor) -> None:
    require_scalar("amax", amax, x.device)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise TypeError(f"cannot observe {x.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")


@op("observe", check=_check_observe, writes=("amax",))
def observe_op(x: Tensor, amax: Tensor) -> None:
    return None


def kernel_allocations(cast: Cast, rows: int, columns: int, experts: int | None = None) -> tuple[Allocation, ...]:
    """The memory layout of a cast's results that kernels write; of experts, one behind the other, if there are any."""
    layout, dtype = cast.layout, cast.float8.dtype
    of_x, of_transposed = (operand_allocations(layout, dtype, *shape) for shape in ((rows, columns), (columns, rows)))
    return _allocations(cast, of_x, of_transposed, experts)


def reference_allocations(cast: Cast, rows: int, columns: int, experts: int | None = None) -> tuple[Allocation, ...]:
    """The memory layout of a cast's results in the specification. Codes of xᵀ are a view of those of x."""
    layout, dtype = cast.layout, cast.float8.dtype

    def scales(r: int, k: int) -> Allocation:
        return Allocation.contiguous(layout.scale_shape(r, k), layout.scale_dtype)

    codes = Allocation.contiguous((rows, columns), dtype)
    return _allocations(cast, (codes, scales(rows, columns)), (codes.t(), scales(columns, rows)), experts)


def _allocations(
    cast: Cast, of_x: tuple[Allocation, ...], of_transposed: tuple[Allocation, ...], experts: int | None
) -> tuple[Allocation, ...]:
    absent = Allocation.absent(cast.float8.dtype), Allocation.absent(cast.layout.scale_dtype)
    rowwise = [each.stacked(experts) for each in of_x] if cast.rowwise else absent
    columnwise = [each.stacked(experts) for each in of_transposed] if cast.columnwise else absent
    if cast.layout.has_one_scale:  # both operands need it, and it is computed even if neither is requested
        return rowwise[0], Allocation((), (), cast.layout.scale_dtype), columnwise[0], absent[1]
    return *rowwise, *columnwise


# --- The specification ------------------------------------------------------------------------------------------------


_Bytes = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""The results of compiled code: codes and E8M0 scales are bytes, and results that are not requested are None."""


def reference_quantize(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Outputs:
    """Cast ``x`` with the given scale, or, if it is None or 0, with scales computed from each tensor, row or block."""
    results = _quantize_to_bytes(x, cast, scale, amax)
    dtypes = (cast.float8.dtype, cast.layout.scale_dtype) * 2
    return Outputs(
        *(empty_tensor(x.device, dtype) if each is None else each.view(dtype) for each, dtype in zip(results, dtypes))
    )


@compiled_on_cards
def _quantize_to_bytes(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> _Bytes:
    x = x.contiguous()
    if scale is not None:
        return _quantize_tensor(x, _given_scale(x, cast, scale, amax), cast)
    layout = cast.layout
    if layout.has_one_scale:
        scale = scaling.current_scale(tensor_amax(x), cast.float8.max, cast.power_2_scale, cast.amax_epsilon)
        return _quantize_tensor(x, scale, cast)
    data = scale_inv = data_t = scale_inv_t = None
    block_rows, block_columns = _block(layout)
    if cast.rowwise:
        data, scale_inv = _quantize_blocks(x, (block_rows, block_columns), cast)
    if cast.columnwise:
        columns, scale_inv_t = _quantize_blocks(x, (block_columns, block_rows), cast)
        data_t, scale_inv_t = _transposed(columns), scale_inv_t.t().contiguous()
    return data, scale_inv, data_t, scale_inv_t


@torch.compiler.assume_constant_result
def _block(layout: Layout) -> tuple[int | None, int | None]:
    """``layout.block`` as constants. Code that is compiled for dynamic shapes would treat them as dynamic sizes."""
    return layout.block


def reference_quantize_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale each column of ``x`` by its own scale."""
    out = code_allocation(x.device, dtype, x.shape[0], x.shape[1]).empty(x.device)
    copy_bits(_quantize_columns_to_bytes(x, scale, dtype), out)
    return out


@compiled_on_cards
def _quantize_columns_to_bytes(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return _saturating_bytes(values, scale, float8_of(dtype))


def reference_observe(x: Tensor, amax: Tensor) -> None:
    """Update ``amax`` to ``max(amax, max |x|)``."""
    torch.maximum(amax, tensor_amax(x), out=amax)


def saturating_cast(values: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    """``round_to_nearest_even(clamp(values * scale, -max, max))``; NaN stays NaN. Overwrites float32 ``values``."""
    return _saturated(values, scale, float8).to(float8.dtype)


def _saturated(values: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    return values.mul_(scale).clamp_(-float8.max, float8.max)


def _saturating_bytes(values: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    """:func:`saturating_cast` as bytes. Compiled code for GPUs below 8.9 has no FP8 type, or one that rounds twice."""
    saturated = _saturated(values, scale, float8)
    return encode(saturated, float8) if torch.compiler.is_compiling() else saturated.to(float8.dtype).view(torch.uint8)


def absolute_max(x: Tensor, dim: int) -> Tensor:
    """``max |x|`` along ``dim`` as float32; NaN if any value is NaN, 0 for an empty dimension."""
    if x.numel() == 0:
        return x.new_zeros([size for index, size in enumerate(x.shape) if index != dim], dtype=torch.float32)
    if x.dtype in (torch.bfloat16, torch.float16):
        return (x.view(torch.int16) & 0x7FFF).amax(dim).view(x.dtype).float()
    return x.abs().amax(dim).float()


def tensor_amax(x: Tensor) -> Tensor:
    """``max |x|`` as float32 ``[]``; NaN if any value is NaN, 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def _given_scale(x: Tensor, cast: Cast, scale: Tensor, amax: Tensor | None) -> Tensor:
    """Update ``amax``, and return the scale of the cast: the given scale, or the scale of x's amax if it is 0."""
    # Reading the scale would wait for the GPU, and compiled code cannot branch on it.
    can_ask = not (x.is_cuda or torch.compiler.is_compiling())
    is_nonzero = cast.scale_is_nonzero or (can_ask and bool(scale.item()))
    if is_nonzero and amax is None:
        return scale
    x_amax = tensor_amax(x)
    if amax is not None:
        torch.maximum(amax, x_amax, out=amax)
    return scale if is_nonzero else torch.where(scale == 0, scaling.current_scale(x_amax, cast.float8.max), scale)


def _quantize_tensor(x: Tensor, scale: Tensor, cast: Cast) -> _Bytes:
    data = _saturating_bytes(x.to(torch.float32, copy=True), scale, cast.float8)
    data_t = None
    if cast.columnwise:
        data_t = _transposed(data.clone() if cast.rowwise else data)  # the outputs of an op must not share memory
    return data if cast.rowwise else None, scaling.inverse(scale), data_t, None


def _transposed(codes: Tensor) -> Tensor:
    """A view of the transpose, or a contiguous copy in compiled code, which writes each result once in any case."""
    return codes.t().contiguous() if torch.compiler.is_compiling() else codes.t()


def blocks_of(x: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """The blocks ``[R / r, r, K / k, k]`` of ``x [R, K]``, padded with zeros, which do not change an amax."""
    rows, columns = x.shape
    block_rows, block_columns = block[0] or max(rows, 1), block[1] or max(columns, 1)
    more_rows, more_columns = -rows % block_rows, -columns % block_columns
    padded = x
    if more_rows or more_columns:  # F.pad of torch 2.8 does not support empty tensors
        padded = x.new_zeros(rows + more_rows, columns + more_columns)
        padded[:rows, :columns] = x
    return padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns)


def _quantize_blocks(x: Tensor, block: tuple[int | None, int | None], cast: Cast) -> tuple[Tensor, Tensor]:
    blocks = blocks_of(x, block)
    amax = absolute_max(blocks, 1).amax(2) if blocks.shape[1] > 1 else absolute_max(blocks.squeeze(1), 2)
    scale, scale_inv = block_scales(amax, cast)
    data = _saturating_bytes(blocks.to(torch.float32, copy=True), scale[:, None, :, None], cast.float8)
    return data.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]].contiguous(), scale_inv


def block_scales(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """The scales of blocks in float32, and their inverses, which are codes for E8M0."""
    if cast.layout.scale_dtype == E8M0_DTYPE:
        codes = scaling.e8m0_from_amax(amax, cast.float8.max)
        return scaling.e8m0_scale(codes), codes
    scale = scaling.current_scale(amax, cast.float8.max, cast.power_2_scale, cast.amax_epsilon)
    return scale, scaling.inverse(scale)


def encode(values: Tensor, float8: Float8) -> Tensor:
    """The codes of float32 ``values`` as bytes, rounded to nearest even, by integer arithmetic on their bits.

    Magnitudes must not exceed the format's largest. The code of NaN is 0x7F with its sign.
    """
    mantissa, bias = (3, 7) if float8 is E4M3 else (2, 15)
    shift = 23 - mantissa
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    half = (1 << shift - 1) - 1 + (magnitude >> shift & 1)
    normal = (magnitude + half >> shift) - (127 - bias << mantissa)
    last_place = 2.0 ** (1 - bias - mantissa + 23)  # has the smallest code in its last place: adding it rounds to codes
    subnormal = (values.abs() + last_place).view(torch.int32) & 0xFF
    code = torch.where(magnitude < (128 - bias) << 23, subnormal, normal)
    code = torch.where(magnitude > 0x7F800000, 0x7F, code)
    return (bits >> 24 & 0x80 | code).to(torch.uint8)


_SUBNORMAL = 5e-324
_FEW = 2**13
"""The number of elements below which torch's own conversion is faster than several passes over the bits."""


def decode(data: Tensor) -> Tensor:
    """Decode FP8 to BF16, exactly: shift the bits, then multiply by the difference of the exponents' biases."""
    if data.dtype == E4M3.dtype:
        shift, kept, special, rebias = 4, 0x87F0, 0x7F, 120
    else:
        shift, kept, special, rebias = 5, 0x8FE0, 0x7C, 112
    if data.is_cuda or data.numel() <= _FEW or _SUBNORMAL == 0.0:
        # GPUs convert fast, and checking for NaN would wait for them. With torch.set_flush_denormal(True), shifted bits
        # that are subnormal numbers would be read as 0.
        return data.to(torch.bfloat16)
    bits = data.view(torch.int8)
    if int((bits & 0x7F).amax()) >= special:
        return data.to(torch.bfloat16)  # some codes are NaN or inf
    bits = bits.to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(kept - 0x10000)
    return bits.view(torch.bfloat16).mul_(2.0**rebias)


quantize_op.implement("cpu", reference_quantize)
quantize_columns_op.implement("cpu", reference_quantize_columns)
observe_op.implement("cpu", reference_observe)
