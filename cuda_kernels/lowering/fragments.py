"""Matrix fragments: the registers in which a thread holds its part of a matrix, as tuples, and operations on them.

A warpgroup's accumulator ``[64, n]`` is ``n / 2`` float32 in each thread: registers ``4 j`` and ``4 j + 1`` are columns
``8 j + 2 q`` and the next of one row, ``4 j + 2`` and ``4 j + 3`` the same columns eight rows below, where ``q`` is the
lane modulo 4 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk32"; ``mma.m16n8k32`` has the same layout).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, f32, i32, i64, u32x, void
from cuda_kernels.device.ptx import CVT_RN, CVT_RN_X2, GUARDED
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.swizzle import ATOM_BYTES
from cuda_kernels.lowering.compiler import F32, I32, I64, generated, inline, pure

Values = list[Any]


def multiply(builder: Any, x: Any, y: Any) -> Any:
    """The product, rounded: the compiler shall not fuse it with an addition."""
    return pure(builder, "mul.rn.f32 $0, $1, $2;", F32, "=f,f,f", x, y)


def add_rounded(builder: Any, x: Any, y: Any) -> Any:
    """The sum, rounded."""
    return pure(builder, "add.rn.f32 $0, $1, $2;", F32, "=f,f,f", x, y)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x y + z``, rounded once."""
    return pure(builder, "fma.rn.f32 $0, $1, $2, $3;", F32, "=f,f,f,f", x, y, z)


def row_of(index: int) -> int:
    """Which of a thread's two rows register ``index`` belongs to."""
    return index >> 1 & 1


@cache
def zeros(num_registers: int) -> Any:
    """``() -> num_registers`` zeros."""

    def emit(builder: Any) -> Values:
        return [F32(0)] * num_registers

    return generated(emit, fragment_type(num_registers))


@cache
def slice_fragment(num_registers: int, start: int, size: int) -> Any:
    """``acc -> size`` of its registers."""

    def emit(builder: Any, acc: Values) -> Values:
        return acc[start : start + size]

    return generated(emit, fragment_type(size), fragment_type(num_registers))


@cache
def scale_all(num_registers: int) -> Any:
    """``(acc, s) -> acc s``."""

    def emit(builder: Any, acc: Values, scale: Any) -> Values:
        return [multiply(builder, x, scale) for x in acc]

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), f32)


@cache
def scale_rows(num_registers: int) -> Any:
    """``(acc, s, t) -> acc`` with its first row times ``s`` and the row eight below times ``t``."""

    def emit(builder: Any, acc: Values, *scales: Any) -> Values:
        return [multiply(builder, x, scales[row_of(index)]) for index, x in enumerate(acc)]

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), f32, f32)


@cache
def add(num_registers: int) -> Any:
    """``(acc, part) -> acc + part``."""

    def emit(builder: Any, acc: Values, part: Values) -> Values:
        return [add_rounded(builder, x, y) for x, y in zip(acc, part)]

    return generated(emit, *[fragment_type(num_registers)] * 3)


@cache
def add_rows(num_registers: int) -> Any:
    """``(acc, part, s, t) -> acc + part`` with part's rows scaled as :func:`scale_rows` does."""

    def emit(builder: Any, acc: Values, part: Values, *scales: Any) -> Values:
        return [multiply_add(builder, y, scales[row_of(index)], x) for index, (x, y) in enumerate(zip(acc, part))]

    return generated(emit, *[fragment_type(num_registers)] * 3, f32, f32)


@cache
def add_rows_of_two(num_registers: int) -> Any:
    """``(acc, part, s, t, v, w, cols_in_first) -> acc + part``: part's rows scaled, by v and w in a second block.

    ``cols_in_first``: the column, a multiple of 32, from which on v and w are taken in place of s and t.
    """

    def emit(builder: Any, acc: Values, part: Values, s: Any, t: Any, v: Any, w: Any, cols_in_first: Any) -> Values:
        results = []
        for start in range(0, num_registers, 16):  # of 32 columns
            in_first = builder.icmp_signed("<", I32(2 * start), cols_in_first)
            factors = builder.select(in_first, s, v), builder.select(in_first, t, w)
            for index in range(start, min(start + 16, num_registers)):
                results.append(multiply_add(builder, part[index], factors[row_of(index)], acc[index]))
        return results

    return generated(emit, *[fragment_type(num_registers)] * 3, f32, f32, f32, f32, i32)


def _column_pair(builder: Any, shared: Any, j: int) -> Values:
    """Load the two float32 in shared memory that belong to the columns of registers ``4 j`` and ``4 j + 1``."""
    pair = ir.LiteralStructType([F32, F32])
    address = builder.add(shared, I32(32 * j))
    loaded = inline(builder, "ld.shared.v2.f32 {$0, $1}, [$2];", pair, "=f,=f,r", [address])
    return [builder.extract_value(loaded, index) for index in range(2)]


@cache
def column_pairs(num_registers: int) -> Any:
    """``shared -> num_registers / 2`` float32 scales, of a thread's columns; ``shared``: the address of the first."""

    def emit(builder: Any, shared: Any) -> Values:
        return [x for j in range(num_registers // 4) for x in _column_pair(builder, shared, j)]

    return generated(emit, fragment_type(num_registers // 2), i32)


@cache
def add_rows_and_columns(num_registers: int, loaded: bool = False) -> Any:
    """``(acc, part, s, t, col_scales) -> acc + part`` with part's rows scaled by ``s`` and ``t``, and its columns, too.

    ``col_scales``: the scales that :func:`column_pairs` loaded, if ``loaded``; else their address, and each pair is
    loaded when it is needed.
    """

    def emit(builder: Any, acc: Values, part: Values, s: Any, t: Any, col_scales: Any) -> Values:
        results = []
        for j in range(num_registers // 4):
            pair = col_scales[2 * j : 2 * j + 2] if loaded else _column_pair(builder, col_scales, j)
            for index in range(4):
                factor = multiply(builder, pair[index & 1], (s, t)[index >> 1])
                results.append(multiply_add(builder, part[4 * j + index], factor, acc[4 * j + index]))
        return results

    kind = fragment_type(num_registers // 2) if loaded else i32
    return generated(emit, *[fragment_type(num_registers)] * 3, f32, f32, kind)


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
    count = 2 if even else 1
    loaded_values = []
    for index in range(8 * j, 8 * j + 2, count):
        # All elements are loaded from one address with offsets: an address for each would take as many registers.
        load = _COLUMNS[dtype, count] % f"[${count}+{ITEM_BYTES[dtype] * index}]"
        in_bounds = f"add.s32 c, ${count + 1}, {index}; setp.lt.s32 p, c, ${count + 2};"
        template = f"{{ .reg .pred p; .reg .s32 c; {in_bounds} {load} }}"
        kind = ir.LiteralStructType([F32] * count)
        constraints = ",".join(["=f"] * count + ["l", "r", "r"])
        loaded = inline(builder, template, kind if even else F32, constraints, [address, column, columns])
        loaded_values += [builder.extract_value(loaded, neighbour) for neighbour in range(2)] if even else [loaded]
    return loaded_values


def _with_columns(op: Callable[..., Any], num_registers: int, dtype: DtypeName, even: bool) -> Any:
    def emit(builder: Any, acc: Values, vector: Any, column: Any, columns: Any) -> Values:
        offset = builder.mul(builder.sext(column, I64), I64(ITEM_BYTES[dtype]))
        address = builder.add(vector, offset)
        results = []
        for j in range(num_registers // 4):
            loaded_values = _column_values(builder, dtype, even, address, column, columns, j)
            results += [op(builder, acc[4 * j + index], loaded_values[index & 1]) for index in range(4)]
        return results

    return generated(emit, fragment_type(num_registers), fragment_type(num_registers), i64, i32, i32)


@cache
def scale_columns(num_registers: int, even: bool) -> Any:
    """``(acc, vector, column, columns) -> acc`` with its columns times the float32 ``vector [columns]``.

    ``column``: the thread's first. ``even``: ``columns`` is, and the vector's address a multiple of two elements.
    """
    return _with_columns(multiply, num_registers, "float32", even)


@cache
def add_columns(num_registers: int, dtype: DtypeName, even: bool) -> Any:
    """``(acc, vector, column, columns) -> acc`` plus ``vector [columns]`` of ``dtype`` in each row."""
    return _with_columns(add_rounded, num_registers, dtype, even)


# --- Stores to shared and to global memory ----------------------------------------------------------------------------

_MATRICES = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
_TWO_PAIRS = f"st.shared.v2.f32 [$0], {{$1, $2}}; st.shared.v2.f32 [$0+{ATOM_BYTES}], {{$3, $4}};"


@cache
def store_fragment_shared(num_registers: int, dtype: DtypeName) -> Any:
    """``(acc, addresses)``: store a warp's 16 rows to shared memory, 32 bytes of each to one address after the other.

    For 16-bit values an address is that of the row that a lane has in ``stmatrix``; for float32 that of the lane's own
    two elements, from which the row eight below is :data:`~cuda_kernels.device.swizzle.ATOM_BYTES` on.
    """
    rounded = dtype != "float32"
    pack_halves = f"{CVT_RN_X2[dtype]} $0, $2, $1;" if rounded else ""

    def emit(builder: Any, acc: Values, addresses: Values) -> None:
        for j, address in enumerate(addresses):
            if rounded:
                pairs = [acc[index : index + 2] for index in range(8 * j, 8 * j + 8, 2)]
                packed = [pure(builder, pack_halves, I32, "=r,f,f", *pair) for pair in pairs]
                inline(builder, _MATRICES, ir.VoidType(), "r,r,r,r,r", [address, *packed])
            else:
                inline(builder, _TWO_PAIRS, ir.VoidType(), "r,f,f,f,f", [address, *acc[4 * j : 4 * j + 4]])

    return generated(emit, void, fragment_type(num_registers), UniTuple(i32, num_registers // (8 if rounded else 4)))


_STORED = {
    ("float32", 1): "@p st.global.f32 [$0], $1;",
    ("float32", 2): "@p st.global.v2.f32 [$0], {$1, $2};",
    **{(dtype, 1): f".reg .b16 h; {cvt} h, $1; @p st.global.b16 [$0], h;" for dtype, cvt in CVT_RN.items()},
    **{(dtype, 2): f".reg .b32 w; {cvt} w, $2, $1; @p st.global.b32 [$0], w;" for dtype, cvt in CVT_RN_X2.items()},
}
"""One element, or two neighbours."""
_ADDED = {
    1: ".reg .f32 v; @p ld.global.f32 v, [$0]; add.rn.f32 v, v, $1; @p st.global.f32 [$0], v;",
    2: ".reg .f32 v, w; @p ld.global.v2.f32 {v, w}, [$0]; add.rn.f32 v, v, $1; add.rn.f32 w, w, $2;"
    " @p st.global.v2.f32 [$0], {v, w};",
}


@cache
def store_fragment_global(num_registers: int, dtype: DtypeName, even: bool, accumulate: bool) -> Any:
    """``(acc, out, stride, row, rows, column, columns)``: store what is inside ``out [rows, columns]`` of ``dtype``.

    ``row``, ``column``: of register 0. ``stride``: of out's rows, in elements. ``even``: columns and stride are even,
    so that two elements are stored at once. ``accumulate``: adds to ``out``; float32 only.
    """
    width = 2 if even else 1
    template = GUARDED % (f"${1 + width}", _ADDED[width] if accumulate else _STORED[dtype, width])
    constraints = ",".join(["l", *"f" * width, "r"])

    def emit(builder: Any, acc: Values, out: Any, stride: Any, row: Any, rows: Any, column: Any, columns: Any) -> None:
        for half in range(2):
            row_of_half = builder.add(row, I32(8 * half))
            in_rows = builder.icmp_signed("<", row_of_half, rows)
            row_offset = builder.mul(builder.sext(row_of_half, I64), stride)
            for first_register in range(0, num_registers, 4):
                for index in range(0, 2, width):
                    col = builder.add(column, I32(2 * first_register + index))
                    in_bounds = builder.zext(builder.and_(in_rows, builder.icmp_signed("<", col, columns)), I32)
                    offset = builder.mul(builder.add(row_offset, builder.sext(col, I64)), I64(ITEM_BYTES[dtype]))
                    stored = acc[first_register + 2 * half + index :][:width]
                    address = builder.add(out, offset)
                    inline(builder, template, ir.VoidType(), constraints, [address, *stored, in_bounds])

    return generated(emit, void, fragment_type(num_registers), i64, i64, i32, i32, i32, i32)


# --- Operands and products of a warp ----------------------------------------------------------------------------------


@cache
def ldmatrix_x4(count: int, stride: int) -> Any:
    """``shared -> 4 count`` registers: four matrices of 8 rows of 16 bytes, and the next four ``stride`` bytes further.

    Of each four, lanes 0 to 7 give the addresses of the first one's rows, lanes 8 to 15 the second's ...
    """
    four = ir.LiteralStructType([I32] * 4)
    template = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

    def emit(builder: Any, shared: Any) -> Values:
        addresses = [builder.add(shared, I32(stride * index)) for index in range(count)]
        loaded = [inline(builder, template, four, "=r,=r,=r,=r,r", [address]) for address in addresses]
        return [builder.extract_value(matrices, index) for matrices in loaded for index in range(4)]

    return generated(emit, u32x(4 * count), i32)


@cache
def mma(strips: int, parts: int, atype: str, btype: str) -> Any:
    """``(acc, a, b) -> acc + A [16 strips, 32] Bᵀ [32, 8 parts]`` of FP8 formats ``atype`` and ``btype``, of a warp.

    ``acc``: ``4 parts`` registers for each strip. ``a``: four registers for each strip, its rows 0 to 7 and 8 to 15 of
    bytes 0 to 15, then of 16 to 31. ``b``: two registers for each part.
    """
    num_registers = 4 * strips * parts
    four = ir.LiteralStructType([F32] * 4)
    template = (
        f"mma.sync.aligned.m16n8k32.row.col.f32.{atype}.{btype}.f32"
        " {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    constraints = ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 6)

    def emit(builder: Any, acc: Values, a: Values, b: Values) -> Values:
        results = []
        for strip in range(strips):
            for part in range(parts):
                first_register = 4 * (strip * parts + part)
                operands = (
                    acc[first_register : first_register + 4] + a[4 * strip : 4 * strip + 4] + b[2 * part : 2 * part + 2]
                )
                summed = inline(builder, template, four, constraints, operands, pure=True)
                results += [builder.extract_value(summed, index) for index in range(4)]
        return results

    return generated(
        emit, fragment_type(num_registers), fragment_type(num_registers), u32x(4 * strips), u32x(2 * parts)
    )
