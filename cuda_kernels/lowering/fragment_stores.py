"""Stores of matrix fragments to shared and to global memory; :mod:`.fragments` says what each register holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.cuda.cgutils import unpack_tuple

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import UniTuple, i32, i64, void
from cuda_kernels.device.ptx import CVT_RN, CVT_RN_X2, GUARDED
from cuda_kernels.device.sizes import DtypeName
from cuda_kernels.device.swizzle import ATOM_BYTES
from cuda_kernels.lowering.compiler import inline, intrinsic_of, signature

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

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

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        acc, addresses = (unpack_tuple(builder, value) for value in args)
        for j, address in enumerate(addresses):
            if rounded:
                pairs = [acc[index : index + 2] for index in range(8 * j, 8 * j + 8, 2)]
                packed = [
                    inline(builder, pack_halves, _I32, "=r,f,f", pair, pure=True, convergent=False) for pair in pairs
                ]
                inline(builder, _MATRICES, ir.VoidType(), "r,r,r,r,r", [address, *packed])
            else:
                inline(builder, _TWO_PAIRS, ir.VoidType(), "r,f,f,f,f", [address, *acc[4 * j : 4 * j + 4]])
        return context.get_dummy_value()

    kinds = fragment_type(num_registers), UniTuple(i32, num_registers // (8 if rounded else 4))
    return intrinsic_of("store_fragment_shared", 2, lambda typingctx, *args: (signature(void, *kinds), lower))


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
    size = 4 if dtype == "float32" else 2
    width = 2 if even else 1
    template = GUARDED % (f"${1 + width}", _ADDED[width] if accumulate else _STORED[dtype, width])
    constraints = ",".join(["l", *"f" * width, "r"])

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        packed, out, stride, row, rows, column, columns = args
        acc = unpack_tuple(builder, packed)
        for half in range(2):
            row_of_half = builder.add(row, _I32(8 * half))
            in_rows = builder.icmp_signed("<", row_of_half, rows)
            row_offset = builder.mul(builder.sext(row_of_half, _I64), stride)
            for first_register in range(0, num_registers, 4):
                for index in range(0, 2, width):
                    col = builder.add(column, _I32(2 * first_register + index))
                    in_bounds = builder.zext(builder.and_(in_rows, builder.icmp_signed("<", col, columns)), _I32)
                    offset = builder.mul(builder.add(row_offset, builder.sext(col, _I64)), _I64(size))
                    stored = acc[first_register + 2 * half + index :][:width]
                    address = builder.add(out, offset)
                    inline(builder, template, ir.VoidType(), constraints, [address, *stored, in_bounds])
        return context.get_dummy_value()

    kinds = fragment_type(num_registers), i64, i64, i32, i32, i32, i32
    return intrinsic_of("store_fragment_global", 7, lambda typingctx, *args: (signature(void, *kinds), lower))
