"""What attention does to fragments: maxima, sums and exponentials of rows, masks, and rounding to an operand of wgmma.

:mod:`.fragments` says what each register holds; a thread has values of two rows, eight apart.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, f32, i32, u32x
from cuda_kernels.lowering.compiler import F32, I32, generated, pure
from cuda_kernels.lowering.fragments import Values, multiply, multiply_add, row_of

_MINUS_INFINITY = ir.Constant(F32, float("-inf"))


def reduced(builder: Any, instruction: str, acc: Values) -> Values:
    """The registers of each of a thread's two rows, taken together two by two."""
    results = []
    for row in range(2):
        values = [x for index, x in enumerate(acc) if row_of(index) == row]
        while len(values) > 1:
            pairs = [values[index : index + 2] for index in range(0, len(values), 2)]
            values = [pure(builder, instruction, F32, "=f,f,f", *pair) if len(pair) == 2 else pair[0] for pair in pairs]
        results += values
    return results


@cache
def rows_max(num_registers: int) -> Any:
    """``acc -> (x, y)``: the largest value of each row that this thread holds; NaN if there is one."""

    def emit(builder: Any, acc: Values) -> Values:
        return reduced(builder, "max.NaN.f32 $0, $1, $2;", acc)

    return generated(emit, UniTuple(f32, 2), fragment_type(num_registers))


@cache
def rows_sum(num_registers: int) -> Any:
    """``acc -> (x, y)``: the sum of each row's values that this thread holds."""

    def emit(builder: Any, acc: Values) -> Values:
        return reduced(builder, "add.rn.f32 $0, $1, $2;", acc)

    return generated(emit, UniTuple(f32, 2), fragment_type(num_registers))


@cache
def exp2_rows(num_registers: int) -> Any:
    """``(acc, c, s, t) -> 2 ** (acc c + s)``, ``t`` in place of ``s`` in the row eight below; below 2**-126 it is 0."""
    template = "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }"

    def emit(builder: Any, acc: Values, factor: Any, *offsets: Any) -> Values:
        return [
            pure(builder, template, F32, "=f,f,f,f", x, factor, offsets[row_of(index)]) for index, x in enumerate(acc)
        ]

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), f32, f32, f32)


@cache
def rescale_add_rows(num_registers: int) -> Any:
    """``(acc, part, s, t) -> acc s + part``, ``t`` in place of ``s`` in the row eight below."""

    def emit(builder: Any, acc: Values, part: Values, *scales: Any) -> Values:
        return [multiply_add(builder, x, scales[row_of(index)], y) for index, (x, y) in enumerate(zip(acc, part))]

    return generated(emit, *[fragment_type(num_registers)] * 3, f32, f32)


@cache
def scale_seen_rows(num_registers: int) -> Any:
    """``(acc, s, t, i, j) -> acc s`` where ``i`` is not 0, else 0; ``t`` and ``j`` are of the row eight below."""

    def emit(builder: Any, acc: Values, s: Any, t: Any, *flags: Any) -> Values:
        seen = [builder.icmp_signed("!=", flag, I32(0)) for flag in flags]
        results = []
        for index, x in enumerate(acc):
            scaled = multiply(builder, x, (s, t)[row_of(index)])
            results.append(builder.select(seen[row_of(index)], scaled, F32(0)))
        return results

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), f32, f32, i32, i32)


@cache
def mask_rows(num_registers: int) -> Any:
    """``(acc, first, last, first_below, last_below) -> acc``, -inf in columns that are not first to last.

    Columns count from the thread's first one; ``first_below`` and ``last_below`` are of the row eight below.
    """

    def emit(builder: Any, acc: Values, *limits: Any) -> Values:
        results = []
        for index, x in enumerate(acc):
            lowest, highest = limits[2 * row_of(index) :][:2]
            column = I32(8 * (index >> 2) + (index & 1))
            inside = builder.and_(builder.icmp_signed("<=", lowest, column), builder.icmp_signed(">=", highest, column))
            results.append(builder.select(inside, x, _MINUS_INFINITY))
        return results

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), i32, i32, i32, i32)


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

    def emit(builder: Any, acc: Values) -> Values:
        return [
            pure(builder, template, I32, "=r,f,f,f,f", *(acc[register + 2 * row + index] for index in (0, 1, 4, 5)))
            for register in range(0, num_registers, 8)
            for row in range(2)
        ]

    return generated(emit, u32x(num_registers // 4), fragment_type(num_registers))


@cache
def slice_words(num_registers: int, start: int, size: int) -> Any:
    """``words -> size`` of its ``num_registers`` words."""

    def emit(builder: Any, words: Values) -> Values:
        return words[start : start + size]

    return generated(emit, u32x(size), u32x(num_registers))
