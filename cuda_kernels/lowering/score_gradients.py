"""Attention's backward pass on fragments: gradients of scores, statistics of columns, and sums that leave registers.

:mod:`.fragments` says what each register holds. Where queries are rows, their statistics are registers; where they are
columns, these lie in shared memory and are read two by two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, f32, i32, i64, void
from cuda_kernels.lowering.attention_fragments import reduced
from cuda_kernels.lowering.compiler import F32, I64, generated, inline, pure
from cuda_kernels.lowering.fragments import Values, add_rounded, multiply, row_of

_POWER = "{ .reg .f32 x; neg.f32 x, $3; fma.rn.f32 x, $1, $2, x; ex2.approx.ftz.f32 $0, x; }"
_GRADIENT = "{ .reg .f32 x; neg.f32 x, $3; fma.rn.f32 x, $1, $2, x; mul.rn.f32 $0, x, $4; }"


def _column_pair(builder: Any, shared: Any, j: int) -> Values:
    """Load the two float32 in shared memory that belong to the columns of registers ``4 j`` and ``4 j + 1``."""
    pair = ir.LiteralStructType([F32, F32])
    template = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * j}];"
    loaded = inline(builder, template, pair, "=f,=f,r", [shared], convergent=False)
    return [builder.extract_value(loaded, index) for index in range(2)]


@cache
def exp2_columns(num_registers: int) -> Any:
    """``(acc, c, shared) -> 2 ** (acc c - m)``; ``shared``: the address of ``m`` of the thread's first column."""

    def emit(builder: Any, acc: Values, factor: Any, shared: Any) -> Values:
        results = []
        for j in range(num_registers // 4):
            pair = _column_pair(builder, shared, j)
            for index in range(4 * j, 4 * j + 4):
                results.append(pure(builder, _POWER, F32, "=f,f,f,f", acc[index], factor, pair[index & 1]))
        return results

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), f32, i32)


@cache
def score_gradients_rows(num_registers: int) -> Any:
    """``(dp, p, c, d, e) -> p (dp c - d)``, ``e`` in place of ``d`` in the row eight below."""

    def emit(builder: Any, acc: Values, p: Values, factor: Any, *offsets: Any) -> Values:
        return [
            pure(builder, _GRADIENT, F32, "=f,f,f,f,f", x, factor, offsets[row_of(index)], y)
            for index, (x, y) in enumerate(zip(acc, p))
        ]

    return generated(emit, *[fragment_type(num_registers)] * 3, f32, f32, f32)


@cache
def score_gradients_columns(num_registers: int) -> Any:
    """``(dp, p, c, shared) -> p (dp c - d)``; ``shared``: the address of ``d`` of the thread's first column."""

    def emit(builder: Any, acc: Values, p: Values, factor: Any, shared: Any) -> Values:
        results = []
        for j in range(num_registers // 4):
            pair = _column_pair(builder, shared, j)
            for index in range(4 * j, 4 * j + 4):
                operands = acc[index], factor, pair[index & 1], p[index]
                results.append(pure(builder, _GRADIENT, F32, "=f,f,f,f,f", *operands))
        return results

    return generated(emit, *[fragment_type(num_registers)] * 3, f32, i32)


@cache
def rows_amax(num_registers: int) -> Any:
    """``acc -> (x, y)``: the largest magnitude of each row that this thread holds; NaN if there is one."""
    template = "{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; max.NaN.f32 $0, x, y; }"

    def emit(builder: Any, acc: Values) -> Values:
        return reduced(builder, template, acc)

    return generated(emit, UniTuple(f32, 2), fragment_type(num_registers))


@cache
def add_rows_to_global(num_registers: int, threads: int, first: bool = False) -> Any:
    """``(acc, s, t, address)``: add ``acc``, rows scaled as ``scale_rows`` does, to float32 numbers in global memory.

    Register ``i`` is added at ``address + 4 threads i``: those of ``threads`` threads lie side by side. Nothing is
    loaded, and where a thread adds to numbers of its own the sums have one order. ``first``: store instead of adding.
    """
    operation = "st.global.f32" if first else "red.global.add.f32"

    def emit(builder: Any, acc: Values, s: Any, t: Any, address: Any) -> None:
        for index, x in enumerate(acc):
            scaled = multiply(builder, x, (s, t)[row_of(index)])
            place = builder.add(address, I64(4 * threads * index))
            inline(builder, f"{operation} [$0], $1;", ir.VoidType(), "l,f", [place, scaled], convergent=False)

    return generated(emit, void, fragment_type(num_registers), f32, f32, i64)


@cache
def add_from_global(num_registers: int, threads: int) -> Any:
    """``(acc, address) -> acc`` plus what :func:`add_rows_to_global` left at ``address``."""

    def emit(builder: Any, acc: Values, address: Any) -> Values:
        results = []
        for index, x in enumerate(acc):
            place = builder.add(address, I64(4 * threads * index))
            kept = inline(builder, "ld.relaxed.gpu.global.f32 $0, [$1];", F32, "=f,l", [place], convergent=False)
            results.append(add_rounded(builder, x, kept))
        return results

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), i64)
