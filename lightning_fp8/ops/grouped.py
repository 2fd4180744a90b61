"""Casts and GEMMs of experts: tokens that are sorted by expert, times the weight of each expert.

Group ``g`` has the rows ``offs[g - 1] <= row < offs[g]`` of the tokens. ``offs`` is int32 ``[E]`` on their device, as
``torch.nn.functional.grouped_mm`` takes it. Rows from ``offs[-1]`` on are in no group.

A group computes what the ops without groups compute of its rows: blocks along the tokens begin where a group begins.
The specification is a loop over these ops. It also runs on GPUs where no kernel exists, and reads ``offs`` on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from typing_extensions import Unpack

from lightning_fp8.capture import is_capturing
from lightning_fp8.numerics.scaled import Cast, ScaledTensor
from lightning_fp8.ops.cast import (
    CastArgs,
    Outputs,
    Quantized,
    asked_by,
    check_cast,
    fake_outputs,
    operands_of,
    quantize_op,
    transposed_operand,
)
from lightning_fp8.ops.checks import require
from lightning_fp8.ops.gemm import Gemm, Shape, scaled_mm_op
from lightning_fp8.ops.op import op, spec
from lightning_fp8.ops.transpose import transpose_op

# --- The public functions ---------------------------------------------------------------------------------------------


def quantize_experts(w: Tensor, cast: Cast, **cast_args: Unpack[CastArgs]) -> Quantized:
    """:func:`lightning_fp8.ops.quantize` of each of ``w [E, N, K]``. In layout ``tensor`` all have one scale.

    Returns:
        The operands of w ``[E, N, K]`` and of its transpose ``[E, K, N]``, whose scales are ``[E, ...]``.
    """
    usage, requested, observed = asked_by(w, cast, cast_args)
    return operands_of(quantize_experts_op.call(w, usage, *observed), usage, *requested)


def grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offs: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """The rows of each group of ``a [T, K]`` times the transpose of its matrix of ``b [E, N, K]``.

    Returns:
        ``[T, N]``, with zeros in rows of no group.
    """
    gemm = Gemm(a.layout, b.layout, out_dtype, fast_accum)
    return grouped_mm_op.call(a.data, a.scale_inv, b.data, b.scale_inv, offs, gemm)  # type: ignore[no-any-return]


def grouped_wgrad(
    dy: ScaledTensor | Tensor, x: ScaledTensor | Tensor, offs: Tensor, casts: Casts, *, out_dtype: torch.dtype
) -> Tensor:
    """``dyᵀ x`` of the rows of each group.

    Args:
        dy: ``[T, N]``, its operand in layout ``tensor``, or its values, which are cast along the rows of each group.
        x: ``[T, K]``, likewise.

    Returns:
        ``[E, N, K]``, with zeros for groups without rows.
    """
    of_dy = (dy.data, dy.scale_inv) if isinstance(dy, ScaledTensor) else (dy, None)
    of_x = (x.data, x.scale_inv) if isinstance(x, ScaledTensor) else (x, None)
    return grouped_wgrad_op.call(*of_dy, *of_x, offs, casts, out_dtype)  # type: ignore[no-any-return]


def grouped_wgrad_in_high_precision(dy: Tensor, x: Tensor, offs: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """:func:`grouped_wgrad` of ``dy [T, N]`` and ``x [T, K]`` without casts; in BF16 no GPU is asked for ``offs``."""
    return grouped_wgrad_in_high_precision_op.call(dy, x, offs, out_dtype)  # type: ignore[no-any-return]


def ends_of(offs: Tensor) -> list[int]:
    """``offs`` on the host. A GPU is asked once for each tensor, and again after it was changed in place.

    Raises:
        RuntimeError: In the capture of a CUDA graph.
    """
    version = None if offs.is_inference() else offs._version  # inference tensors have no version counter
    known: tuple[int | None, list[int]] = getattr(offs, "_ends", (version, []))
    if known[0] != version or not known[1]:
        if is_capturing():
            raise RuntimeError(
                "a CUDA graph captures a loop over experts, which reads on the host where their tokens end: "
                "skip=('*.experts',) keeps them in high precision"
            )
        known = version, offs.tolist()
        if offs.is_cuda:
            offs._ends = known  # type: ignore[attr-defined]
    return known[1]


def groups_of(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """``group, start, end`` of each group that has rows."""
    start = 0
    for group, end in enumerate(ends_of(offs)):
        if start < end:
            yield group, start, end
        start = end


# --- The ops ----------------------------------------------------------------------------------------------------------


@spec(", ".join(f"{field}_{name}" for name in ("dy", "x") for field in Cast.schema.split(", ")))
class Casts(NamedTuple):
    """The casts of the two operands of wgrad."""

    dy: Cast
    x: Cast

    @property
    def flat(self) -> tuple[Any, ...]:
        """The fields of both casts."""
        return *self.dy.flat, *self.x.flat

    @classmethod
    def from_flat(cls, *flat: Any) -> Casts:
        """The inverse of :attr:`flat`."""
        half = len(flat) // 2
        return cls(Cast.from_flat(*flat[:half]), Cast.from_flat(*flat[half:]))


def _check_experts(w: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> None:
    if w.dim() != 3:
        raise TypeError(f"experts have a weight [E, N, K], not shape {tuple(w.shape)}")
    check_cast(w.flatten(0, 1), cast, scale, amax)


@op("quantize_experts", check=_check_experts)
def quantize_experts_op(w: Tensor, cast: Cast, *observed: Tensor | None) -> Outputs:
    return fake_outputs(w, cast, w.shape[1], w.shape[2], w.shape[0])


def _check_grouped(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> None:
    if b.dim() != 3 or a.dim() != 2 or a.shape[1] != b.shape[2]:
        raise ValueError(f"a is {tuple(a.shape)}, b is {tuple(b.shape)}; pass a [T, K] and b [E, N, K]")
    require("offs", offs, torch.int32, (b.shape[0],), a.device)


@op("grouped_mm", check=_check_grouped)
def grouped_mm_op(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=gemm.out_dtype)


def _check_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> None:
    if dy.dim() != 2 or x.dim() != 2 or len(dy) != len(x):
        raise ValueError(f"dy is {tuple(dy.shape)}, x is {tuple(x.shape)}; pass dy [T, N] and x [T, K]")
    require("offs", offs, torch.int32, (offs.numel(),), dy.device)


@op("grouped_wgrad", check=lambda dy, _, x, __, offs, *others: _check_wgrad(dy, x, offs))
def grouped_wgrad_op(
    dy: Tensor,
    scale_dy: Tensor | None,
    x: Tensor,
    scale_x: Tensor | None,
    offs: Tensor,
    casts: Casts,
    out_dtype: torch.dtype,
) -> Tensor:
    return dy.new_empty(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)


@op("grouped_wgrad_in_high_precision", check=lambda dy, x, offs, _: _check_wgrad(dy, x, offs))
def grouped_wgrad_in_high_precision_op(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return dy.new_empty(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)


@register_flop_formula(grouped_mm_op.overload.overloadpacket)
def _grouped_mm_flops(a: Shape, _: Shape, b: Shape, *others: object, **kwargs: object) -> int:
    """All rows count, also those of no group: how many these are is known only on the device."""
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(
    [each.overload.overloadpacket for each in (grouped_wgrad_op, grouped_wgrad_in_high_precision_op)]
)
def _wgrad_flops(dy: Shape, *others: object, out_shape: Shape, **kwargs: object) -> int:
    return 2 * dy[0] * out_shape[1] * out_shape[2]


# --- The specification ------------------------------------------------------------------------------------------------


def reference_experts(w: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Outputs:
    """Cast each expert; those of layout ``tensor`` together."""
    out: Outputs = quantize_experts_op._signature(w, cast)
    if cast.layout.has_one_scale:
        results = quantize_op.call(w.flatten(0, 1), cast.usage(True, False, cast.scale_is_nonzero), scale, amax)
        out.scale_inv.copy_(results[1])
        codes = results[0].view(w.shape)
        if cast.rowwise:
            out.data.copy_(codes)
        if cast.columnwise:
            out.data_t.copy_(codes.mT)
        return out
    for expert, each in enumerate(w):
        for whole, part in zip(out, quantize_op.call(each, cast, None, None)):
            if whole.numel():
                whole[expert] = part
    return out


def reference_grouped_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
    """Multiply each group."""
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=gemm.out_dtype)
    for group, start, end in groups_of(offs):
        of_a = scale_a[start:end] if scale_a.dim() else scale_a
        of_b = scale_b[group] if scale_b.dim() else scale_b
        out[start:end] = scaled_mm_op.call(a[start:end], of_a, b[group], of_b, gemm, None)
    return out


def reference_grouped_wgrad(
    dy: Tensor,
    scale_dy: Tensor | None,
    x: Tensor,
    scale_x: Tensor | None,
    offs: Tensor,
    casts: Casts,
    out_dtype: torch.dtype,
) -> Tensor:
    """Cast the rows of each group along them, and multiply."""
    groups = [*groups_of(offs)]
    new = dy.new_empty if len(groups) == len(offs) else dy.new_zeros
    out = new(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)
    gemm = Gemm(casts.dy.layout, casts.x.layout, out_dtype)
    for group, start, end in groups:
        of_dy = _transposed(dy[start:end], scale_dy, casts.dy)
        of_x = _transposed(x[start:end], scale_x, casts.x)
        out[group] = scaled_mm_op.call(*of_dy, *of_x, gemm, None)
    return out


def _transposed(rows: Tensor, scale_inv: Tensor | None, cast: Cast) -> tuple[Tensor, Tensor]:
    """The codes and scales of ``rowsᵀ``."""
    if scale_inv is not None:
        return transpose_op.call(rows), scale_inv
    made = cast.usage(False, True)
    return transposed_operand(quantize_op.call(rows, made, None, None), made)


def reference_grouped_wgrad_in_high_precision(dy: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply each group, or all of them by torch."""
    if dy.is_cuda and dy.dtype is x.dtype is torch.bfloat16 and not (dy.shape[1] % 8 or x.shape[1] % 8):
        return torch._grouped_mm(dy.t(), x, offs=offs).to(out_dtype)
    out = dy.new_zeros(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype)
    for group, start, end in groups_of(offs):
        out[group] = dy[start:end].t() @ x[start:end]
    return out


quantize_experts_op.implement("cpu", reference_experts)
grouped_mm_op.implement("cpu", reference_grouped_mm)
for _device in ("cpu", "cuda"):
    grouped_wgrad_op.implement(_device, reference_grouped_wgrad)
    grouped_wgrad_in_high_precision_op.implement(_device, reference_grouped_wgrad_in_high_precision)
