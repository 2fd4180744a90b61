"""Matrix fragments: the registers in which a thread holds its part of a matrix, as tuples, and operations on them.

A warpgroup's accumulator ``[64, n]`` is ``n / 2`` float32 in each thread: registers ``4 j`` and ``4 j + 1`` are columns
``8 j + 2 q`` and the next of one row, ``4 j + 2`` and ``4 j + 3`` the same columns eight rows below, where ``q`` is the
lane modulo 4 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk32"; ``mma.m16n8k32`` has the same layout).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.cgutils import pack_array, unpack_tuple

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, f32, i32, i64, u32
from cuda_kernels.device.sizes import DtypeName
from cuda_kernels.lowering.compiler import inline, intrinsic_of, signature

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

Values = list[Any]


def _inline(builder: Any, template: str, result: Any, constraints: str, *operands: Any, effect: bool = False) -> Any:
    return inline(builder, template, result, constraints, operands, pure=not effect, convergent=effect)


def _multiply(builder: Any, x: Any, y: Any) -> Any:
    """The product, rounded: the compiler shall not fuse it with an addition."""
    return _inline(builder, "mul.rn.f32 $0, $1, $2;", _F32, "=f,f,f", x, y)


def _add(builder: Any, x: Any, y: Any) -> Any:
    return _inline(builder, "add.rn.f32 $0, $1, $2;", _F32, "=f,f,f", x, y)


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _inline(builder, "fma.rn.f32 $0, $1, $2, $3;", _F32, "=f,f,f,f", x, y, z)


def _mapped(
    name: str, num_registers: int, operands: Sequence[Any], emit: Callable[[Any, Values, list[Any]], Values]
) -> Any:
    """A function of ``num_registers`` registers and ``operands`` that gives as many registers."""
    fragment = fragment_type(num_registers)

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        unpacked = [
            unpack_tuple(builder, value) if isinstance(kind, types.BaseTuple) else value
            for kind, value in zip(sig.args, args)
        ]
        return pack_array(builder, emit(builder, unpacked[0], unpacked[1:]))

    return intrinsic_of(
        name, 1 + len(operands), lambda typingctx, *args: (signature(fragment, fragment, *operands), lower)
    )


@cache
def zeros(num_registers: int) -> Any:
    """``() -> num_registers`` zeros."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        return ir.Constant(context.get_value_type(sig.return_type), None)

    return intrinsic_of("zeros", 0, lambda typingctx: (signature(fragment_type(num_registers)), lower))


@cache
def slice_fragment(num_registers: int, start: int, size: int) -> Any:
    """``acc -> size`` of its registers."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        return pack_array(builder, unpack_tuple(builder, args[0])[start : start + size])

    return intrinsic_of(
        "slice_fragment",
        1,
        lambda typingctx, acc: (signature(fragment_type(size), fragment_type(num_registers)), lower),
    )


@cache
def scale_all(num_registers: int) -> Any:
    """``(acc, s) -> acc s``."""
    return _mapped(
        "scale_all", num_registers, (f32,), lambda builder, acc, rest: [_multiply(builder, x, rest[0]) for x in acc]
    )


@cache
def scale_rows(num_registers: int) -> Any:
    """``(acc, s, t) -> acc`` with its first row times ``s`` and the row eight below times ``t``."""
    return _mapped(
        "scale_rows",
        num_registers,
        (f32, f32),
        lambda builder, acc, rest: [_multiply(builder, x, rest[index >> 1 & 1]) for index, x in enumerate(acc)],
    )


@cache
def add(num_registers: int) -> Any:
    """``(acc, part) -> acc + part``."""
    return _mapped(
        "add",
        num_registers,
        (fragment_type(num_registers),),
        lambda builder, acc, rest: [_add(builder, x, y) for x, y in zip(acc, rest[0])],
    )


@cache
def add_rows(num_registers: int) -> Any:
    """``(acc, part, s, t) -> acc + part`` with part's rows scaled as :func:`scale_rows` does."""

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        part, *scales = rest
        return [_fused(builder, y, scales[index >> 1 & 1], x) for index, (x, y) in enumerate(zip(acc, part))]

    return _mapped("add_rows", num_registers, (fragment_type(num_registers), f32, f32), emit)


@cache
def add_rows_of_two(num_registers: int) -> Any:
    """``(acc, part, s, t, v, w, cols_in_first) -> acc + part``: part's rows scaled, by v and w in a second block.

    ``cols_in_first``: the column, a multiple of 32, from which on v and w are taken in place of s and t.
    """

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        part, *scales, cols_in_first = rest
        results = []
        for start in range(0, num_registers, 16):  # of 32 columns
            in_first = builder.icmp_signed("<", _I32(2 * start), cols_in_first)
            factors = [builder.select(in_first, scales[half], scales[half + 2]) for half in range(2)]
            for index in range(start, min(start + 16, num_registers)):
                results.append(_fused(builder, part[index], factors[index >> 1 & 1], acc[index]))
        return results

    return _mapped("add_rows_of_two", num_registers, (fragment_type(num_registers), f32, f32, f32, f32, i32), emit)


def _column_pair(builder: Any, shared: Any, j: int) -> Values:
    """Load the two float32 in shared memory that belong to the columns of registers ``4 j`` and ``4 j + 1``."""
    pair = ir.LiteralStructType([_F32, _F32])
    address = builder.add(shared, _I32(32 * j))
    loaded = _inline(builder, "ld.shared.v2.f32 {$0, $1}, [$2];", pair, "=f,=f,r", address, effect=True)
    return [builder.extract_value(loaded, index) for index in range(2)]


@cache
def column_pairs(num_registers: int) -> Any:
    """``shared -> num_registers / 2`` float32 scales, of a thread's columns; ``shared``: the address of the first."""

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        return pack_array(builder, [x for j in range(num_registers // 4) for x in _column_pair(builder, args[0], j)])

    return intrinsic_of(
        "column_pairs", 1, lambda typingctx, shared: (signature(fragment_type(num_registers // 2), i32), lower)
    )


@cache
def add_rows_and_columns(num_registers: int, loaded: bool = False) -> Any:
    """``(acc, part, s, t, col_scales) -> acc + part`` with part's rows scaled by ``s`` and ``t``, and its columns, too.

    ``col_scales``: the scales that :func:`column_pairs` loaded, if ``loaded``; else their address, and each pair is
    loaded when it is needed.
    """

    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        part, s, t, col_scales = rest
        results = []
        for j in range(num_registers // 4):
            pair = col_scales[2 * j : 2 * j + 2] if loaded else _column_pair(builder, col_scales, j)
            for index in range(4):
                factor = _multiply(builder, pair[index & 1], (s, t)[index >> 1])
                results.append(_fused(builder, part[4 * j + index], factor, acc[4 * j + index]))
        return results

    kind = fragment_type(num_registers // 2) if loaded else i32
    return _mapped("add_rows_and_columns", num_registers, (fragment_type(num_registers), f32, f32, kind), emit)


# --- Columns of a vector in memory: scales and biases -----------------------------------------------------------------

_HALVES = ".reg .b32 w; .reg .b16 h, i; mov.b32 w, 0; @p ld.global.b32 w, %s; mov.b32 {h, i}, w; "
_COLUMNS = {
    ("float32", 1): "mov.b32 $0, 0; @p ld.global.f32 $0, %s;",
    ("bfloat16", 1): ".reg .b16 h, z; mov.b16 h, 0; mov.b16 z, 0; @p ld.global.b16 h, %s; mov.b32 $0, {z, h};",
    ("float16", 1): ".reg .b16 h; mov.b16 h, 0; @p ld.global.b16 h, %s; cvt.f32.f16 $0, h;",
    ("float32", 2): "mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.f32 {$0, $1}, %s;",
    ("bfloat16", 2): _HALVES + ".reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, h}; mov.b32 $1, {z, i};",
    ("float16", 2): _HALVES + "cvt.f32.f16 $0, h; cvt.f32.f16 $1, i;",
}
"""Loads of one element of a vector, or of two neighbours, as float32. They are coherent so that they stay behind a
barrier: the assembler hoists other loads until no register is left."""


def _column_values(
    builder: Any, dtype: DtypeName, even: bool, address: Any, column: Any, columns: Any, j: int
) -> Values:
    """Load a vector's elements for the two columns of registers ``4 j`` and ``4 j + 1``; 0 beyond its end.

    ``address``: of the element of ``column``, the thread's first.
    """
    size = 4 if dtype == "float32" else 2
    count = 2 if even else 1
    loaded_values = []
    for index in range(8 * j, 8 * j + 2, count):
        # All elements are loaded from one address with offsets: an address for each would take as many registers.
        load = _COLUMNS[dtype, count] % f"[${count}+{size * index}]"
        in_bounds = f"add.s32 c, ${count + 1}, {index}; setp.lt.s32 p, c, ${count + 2};"
        template = f"{{ .reg .pred p; .reg .s32 c; {in_bounds} {load} }}"
        kind = ir.LiteralStructType([_F32] * count)
        constraints = ",".join(["=f"] * count + ["l", "r", "r"])
        loaded = _inline(builder, template, kind if even else _F32, constraints, address, column, columns, effect=True)
        loaded_values += [builder.extract_value(loaded, neighbour) for neighbour in range(2)] if even else [loaded]
    return loaded_values


def _with_columns(
    name: str, num_registers: int, dtype: DtypeName, even: bool, op: Callable[[Any, Any, Any], Any]
) -> Any:
    def emit(builder: Any, acc: Values, rest: list[Any]) -> Values:
        vector, column, columns = rest
        offset = builder.mul(builder.sext(column, _I64), _I64(4 if dtype == "float32" else 2))
        address = builder.add(vector, offset)
        results = []
        for j in range(num_registers // 4):
            loaded_values = _column_values(builder, dtype, even, address, column, columns, j)
            results += [op(builder, acc[4 * j + index], loaded_values[index & 1]) for index in range(4)]
        return results

    return _mapped(name, num_registers, (i64, i32, i32), emit)


@cache
def scale_columns(num_registers: int, even: bool) -> Any:
    """``(acc, vector, column, columns) -> acc`` with its columns times the float32 ``vector [columns]``.

    ``column``: the thread's first. ``even``: ``columns`` is, and the vector's address a multiple of two elements.
    """
    return _with_columns("scale_columns", num_registers, "float32", even, _multiply)


@cache
def add_columns(num_registers: int, dtype: DtypeName, even: bool) -> Any:
    """``(acc, vector, column, columns) -> acc`` plus ``vector [columns]`` of ``dtype`` in each row."""
    return _with_columns("add_columns", num_registers, dtype, even, _add)


@cache
def largest_of_rows(num_registers: int) -> Any:
    """``(acc, cols_left) -> (bits, bits)`` of the largest magnitudes in its first row and in the row eight below.

    ``cols_left``: columns from the thread's first one to the edge of the matrix.
    """

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        packed, cols_left = args
        largest = [_I32(0), _I32(0)]
        for index, value in enumerate(unpack_tuple(builder, packed)):
            bits = builder.and_(builder.bitcast(value, _I32), _I32(0x7FFFFFFF))
            in_bounds = builder.icmp_signed("<", _I32(8 * (index >> 2) + (index & 1)), cols_left)
            bits = builder.select(in_bounds, bits, _I32(0))
            half = index >> 1 & 1
            larger = builder.icmp_unsigned(">", bits, largest[half])
            largest[half] = builder.select(larger, bits, largest[half])
        return pack_array(builder, largest)

    results = UniTuple(u32, 2)
    return intrinsic_of(
        "largest_of_rows", 2, lambda typingctx, *args: (signature(results, fragment_type(num_registers), i32), lower)
    )
