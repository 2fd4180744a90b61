"""What attention does to fragments: maxima, sums and exponentials of rows, masks, and rounding to an operand of wgmma.

:mod:`.fragments` says what each register holds; a thread has values of two rows, eight apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda.cgutils import pack_array, unpack_tuple

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, f32, i32, u32x
from cuda_kernels.lowering.compiler import inline, intrinsic_of, signature
from cuda_kernels.lowering.fragments import Values, _mapped

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_MINUS_INFINITY = ir.Constant(_F32, float("-inf"))


def _pure(builder: Any, template: str, result: Any, constraints: str, *operands: Any) -> Any:
    return inline(builder, template, result, constraints, operands, pure=True, convergent=False)


def _row_of(index: int) -> int:
    """Which of a thread's two rows register ``index`` belongs to."""
    return index >> 1 & 1


def _reduced(name: str, instruction: str, num_registers: int) -> Any:
    """``acc -> (x, y)``: each row's registers of this thread, taken together two by two."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        acc = unpack_tuple(builder, args[0])
        results = []
        for row in range(2):
            values = [x for index, x in enumerate(acc) if _row_of(index) == row]
            while len(values) > 1:
                pairs = [values[index : index + 2] for index in range(0, len(values), 2)]
                values = [
                    _pure(builder, instruction, _F32, "=f,f,f", *pair) if len(pair) == 2 else pair[0] for pair in pairs
                ]
            results += values
        return pack_array(builder, results)

    return intrinsic_of(
        name, 1, lambda typingctx, acc: (signature(UniTuple(f32, 2), fragment_type(num_registers)), lower)
    )


@cache
def rows_max(num_registers: int) -> Any:
    """``acc -> (x, y)``: the largest value of each row that this thread holds; NaN if there is one."""
    return _reduced("rows_max", "max.NaN.f32 $0, $1, $2;", num_registers)


@cache
def rows_sum(num_registers: int) -> Any:
    """``acc -> (x, y)``: the sum of each row's values that this thread holds."""
    return _reduced("rows_sum", "add.rn.f32 $0, $1, $2;", num_registers)


@cache
def exp2_rows(num_registers: int) -> Any:
    """``(acc, c, s, t) -> 2 ** (acc c + s)``, ``t`` in place of ``s`` in the row eight below; below 2**-126 it is 0."""
    template = "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }"

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        factor, *offsets = rest
        return [
            _pure(builder, template, _F32, "=f,f,f,f", x, factor, offsets[_row_of(index)])
            for index, x in enumerate(acc)
        ]

    return _mapped("exp2_rows", num_registers, (f32, f32, f32), emit)


@cache
def rescale_add_rows(num_registers: int) -> Any:
    """``(acc, part, s, t) -> acc s + part``, ``t`` in place of ``s`` in the row eight below."""

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        part, *scales = rest
        return [
            _pure(builder, "fma.rn.f32 $0, $1, $2, $3;", _F32, "=f,f,f,f", x, scales[_row_of(index)], y)
            for index, (x, y) in enumerate(zip(acc, part))
        ]

    return _mapped("rescale_add_rows", num_registers, (fragment_type(num_registers), f32, f32), emit)


@cache
def scale_seen_rows(num_registers: int) -> Any:
    """``(acc, s, t, i, j) -> acc s`` where ``i`` is not 0, else 0; ``t`` and ``j`` are of the row eight below."""

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        seen = [builder.icmp_signed("!=", flag, _I32(0)) for flag in rest[2:]]
        results = []
        for index, x in enumerate(acc):
            row = _row_of(index)
            scaled = _pure(builder, "mul.rn.f32 $0, $1, $2;", _F32, "=f,f,f", x, rest[row])
            results.append(builder.select(seen[row], scaled, _F32(0)))
        return results

    return _mapped("scale_seen_rows", num_registers, (f32, f32, i32, i32), emit)


@cache
def mask_rows(num_registers: int) -> Any:
    """``(acc, first, last, first_below, last_below) -> acc``, -inf in columns that are not first to last.

    Columns count from the thread's first one; ``first_below`` and ``last_below`` are of the row eight below.
    """

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        results = []
        for index, x in enumerate(acc):
            lowest, highest = rest[2 * _row_of(index) :][:2]
            column = _I32(8 * (index >> 2) + (index & 1))
            inside = builder.and_(builder.icmp_signed("<=", lowest, column), builder.icmp_signed(">=", highest, column))
            results.append(builder.select(inside, x, _MINUS_INFINITY))
        return results

    return _mapped("mask_rows", num_registers, (i32, i32, i32, i32), emit)


@cache
def pack_a_words(num_registers: int, fp8: str) -> Any:
    """``acc -> num_registers / 4`` words of codes, an operand A of wgmma without a shuffle.

    Of 16 columns of the accumulator a thread has 2q, 2q + 1, 2q + 8 and 2q + 9, where the operand wants 4q to 4q + 3.
    The product is the same if B's rows of K lie in the order :data:`cuda_kernels.attention.spec.ORDER_A`.
    """
    template = (
        f"{{ .reg .b16 lo, hi; cvt.rn.satfinite.{fp8}x2.f32 lo, $2, $1;"
        f" cvt.rn.satfinite.{fp8}x2.f32 hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
    )

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        acc = unpack_tuple(builder, args[0])
        words = [
            _pure(builder, template, _I32, "=r,f,f,f,f", *(acc[register + 2 * row + index] for index in (0, 1, 4, 5)))
            for register in range(0, num_registers, 8)
            for row in range(2)
        ]
        return pack_array(builder, words)

    return intrinsic_of(
        "pack_a_words",
        1,
        lambda typingctx, acc: (signature(u32x(num_registers // 4), fragment_type(num_registers)), lower),
    )


@cache
def slice_words(num_registers: int, start: int, size: int) -> Any:
    """``words -> size`` of its ``num_registers`` words."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        return pack_array(builder, unpack_tuple(builder, args[0])[start : start + size])

    return intrinsic_of("slice_words", 1, lambda typingctx, words: (signature(u32x(size), u32x(num_registers)), lower))
