"""PTX instructions as functions that a Numba-CUDA kernel may call, documented by their names in the PTX ISA.

``asm(template, result, *operands)`` makes one: ``$0 $1 ...`` in the template name first the results, then the operands.
An operand is a Numba type (a register), a tuple of them, or :data:`const` (an immediate, known when the kernel is
compiled). A tuple that has the result's type is read and written in the same registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.cgutils import pack_array, unpack_tuple
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

i32, i64, u32, f32, void = types.int32, types.int64, types.uint32, types.float32, types.void

const: Any = object()
_REGISTER = {"i16": "h", "i32": "r", "i64": "l", "float": "f"}


def words(count: int) -> Any:
    """The type of ``count`` 32-bit registers."""
    return types.UniTuple(u32, count)


def intrinsic_of(name: str, arity: int, typing: Any) -> Any:
    """An intrinsic of ``arity`` operands; Numba reads their number from the signature."""
    operands = [Parameter(f"x{index}", Parameter.POSITIONAL_OR_KEYWORD) for index in range(arity)]
    typing.__signature__ = Signature([Parameter("context", Parameter.POSITIONAL_OR_KEYWORD), *operands])
    typing.__name__ = name
    return intrinsic(typing)


def asm(template: str, result: Any = void, *operands: Any, pure: bool = False) -> Any:
    """A function for one PTX template.

    Args:
        template: PTX with ``$0 $1 ...`` for results and operands.
        result: the type of the result, a ``UniTuple`` for several, ``void`` for none.
        operands: a Numba type for each operand, a ``UniTuple`` for several registers, or :data:`const`.
        pure: whether it may be moved, merged or dropped: it reads and writes registers only.
    """
    results = [] if result is void else list(result) if isinstance(result, types.BaseTuple) else [result]

    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        constraints = ["=" + _REGISTER[str(context.get_value_type(kind))] for kind in results]
        inputs: list[Any] = []
        for operand, kind, value in zip(operands, sig.args, values):
            if operand is const:
                constraints.append("n")
                inputs.append(ir.IntType(32)(kind.literal_value))
                continue
            parts = unpack_tuple(builder, value) if isinstance(operand, types.BaseTuple) else [value]
            tied = isinstance(operand, types.BaseTuple) and operand == result
            constraints += [str(index) if tied else _REGISTER[str(part.type)] for index, part in enumerate(parts)]
            inputs += parts
        registers = [context.get_value_type(kind) for kind in results]
        returned = (
            ir.VoidType() if not registers else registers[0] if len(registers) == 1 else ir.LiteralStructType(registers)
        )
        code = ir.InlineAsm(
            ir.FunctionType(returned, [value.type for value in inputs]),
            template,
            ",".join(constraints if pure else [*constraints, "~{memory}"]),
            side_effect=not pure,
        )
        value = builder.call(code, inputs)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return pack_array(builder, [builder.extract_value(value, index) for index in range(len(results))])

    def typing(context: Any, *args: Any) -> Any:
        known = (isinstance(arg, types.IntegerLiteral) for operand, arg in zip(operands, args) if operand is const)
        if all(known):
            return signature(result, *(arg if op is const else op for op, arg in zip(operands, args))), lower
        return None

    return intrinsic_of(template.strip("{ ").split()[0], len(operands), typing)


# --- Global memory: loads bypass L1, every byte is read once; a false predicate gives zeros ---------------------------

load_2 = asm("ld.global.nc.b16 $0, [$1];", types.uint16, i64)
load_4 = asm("ld.global.nc.b32 $0, [$1];", u32, i64)
load_f32 = asm("ld.global.f32 $0, [$1];", f32, i64)
"""Coherent: also sees what this kernel wrote."""

# Zeros first: of two complementary predicates the assembler does not see that they define the whole register, and keeps
# it throughout a loop.
_GUARD = "{ .reg .pred p; setp.ne.s32 p, %s, 0; %s @p ld.global.nc.L1::no_allocate.%s; }"
load_2_if = asm(
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0; @p ld.global.nc.b16 h, [$1];"
    " cvt.u32.u16 $0, h; }",
    u32, i64, i32,
)  # fmt: skip
load_4_if = asm(_GUARD % ("$2", "mov.b32 $0, 0;", "b32 $0, [$1]"), u32, i64, i32)
load_8_if = asm(_GUARD % ("$3", "mov.b32 $0, 0; mov.b32 $1, 0;", "v2.b32 {$0, $1}, [$2]"), words(2), i64, i32)
load_16_if = asm(
    _GUARD
    % (
        "$5",
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "v4.b32 {$0, $1, $2, $3}, [$4]",
    ),
    words(4), i64, i32,
)  # fmt: skip

store_1 = asm("st.global.b8 [$0], $1;", void, i64, u32)
store_2 = asm("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", void, i64, u32)
store_4 = asm("st.global.b32 [$0], $1;", void, i64, u32)
store_f32 = asm("st.global.f32 [$0], $1;", void, i64, f32)
store_8 = asm("st.global.v2.b32 [$0], {$1, $2};", void, i64, u32, u32)
store_16 = asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", void, i64, u32, u32, u32, u32)

atomic_max = asm("red.global.max.u32 [$0], $1;", void, i64, u32)
atomic_add = asm("red.global.add.u64 [$0], $1;", void, i64, i64)
load_relaxed = asm("ld.relaxed.gpu.global.b32 $0, [$1];", u32, i64)

# --- Shared memory ----------------------------------------------------------------------------------------------------


def _shared(context: Any) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        memory = builder.module.globals.get("dynamic_shared")
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", addrspace=3)
            memory.linkage, memory.align = "external", 1024
        return builder.ptrtoint(memory, ir.IntType(32))

    return signature(i32), lower


dynamic_shared = intrinsic_of("dynamic_shared", 0, _shared)

shared_load_4 = asm("ld.shared.b32 $0, [$1];", u32, i32)
shared_load_16 = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", words(4), i32)
shared_store_4 = asm("st.shared.b32 [$0], $1;", void, i32, u32)
shared_store_8 = asm("st.shared.v2.b32 [$0], {$1, $2};", void, i32, u32, u32)
shared_store_16 = asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", void, i32, u32, u32, u32, u32)

# --- Warps ------------------------------------------------------------------------------------------------------------

warp_max = asm("redux.sync.max.u32 $0, $1, 0xffffffff;", u32, u32)
warp_sum = asm("redux.sync.add.u32 $0, $1, 0xffffffff;", u32, u32)
shuffle = asm("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", u32, u32, i32)
shuffle_xor = asm("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", u32, u32, const)

# --- Registers --------------------------------------------------------------------------------------------------------

bits = asm("mov.b32 $0, $1;", u32, f32, pure=True)
from_bits = asm("mov.b32 $0, $1;", f32, u32, pure=True)
unsigned_max = asm("max.u32 $0, $1, $2;", u32, u32, u32, pure=True)
"""Numba's own ``max`` compares unsigned numbers as 64-bit ones."""
quotient = asm("div.s32 $0, $1, $2;", i32, i32, i32, pure=True)
"""Numba's own ``//`` turns into a 64-bit division with a call."""
remainder = asm("rem.s32 $0, $1, $2;", i32, i32, i32, pure=True)
divide = asm("div.rn.f32 $0, $1, $2;", f32, f32, f32, pure=True)
permute_bytes = asm("prmt.b32 $0, $1, $2, $3;", u32, u32, u32, const, pure=True)

low_half = {
    "bfloat16": asm("shl.b32 $0, $1, 16;", f32, u32, pure=True),
    "float16": asm("{ .reg .b16 h, x; mov.b32 {h, x}, $1; cvt.f32.f16 $0, h; }", f32, u32, pure=True),
}
"""The value of a register's low 16 bits, by the name of their dtype."""
high_half = {
    "bfloat16": asm("and.b32 $0, $1, 0xffff0000;", f32, u32, pure=True),
    "float16": asm("{ .reg .b16 h, x; mov.b32 {x, h}, $1; cvt.f32.f16 $0, h; }", f32, u32, pure=True),
}

float8x4 = {
    name: asm(
        f"{{ .reg .b16 lo, hi; cvt.rn.satfinite.{name}x2.f32 lo, $2, $1; cvt.rn.satfinite.{name}x2.f32 hi, $4, $3;"
        " mov.b32 $0, {lo, hi}; }",
        u32, f32, f32, f32, f32, pure=True,
    )
    for name in ("e4m3", "e5m2")
}  # fmt: skip
"""Four float32, rounded to nearest even, saturated, NaN kept; the first in the lowest byte. By the format's name."""
