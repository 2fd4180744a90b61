"""A warp's ldmatrix and mma.sync; kernels name them through :mod:`cuda_kernels.device.fragments`."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import i32, u32x
from cuda_kernels.lowering.compiler import F32, I32, generated, inline
from cuda_kernels.lowering.fragments import Values


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
