"""PTX instructions as functions for kernels; the PTX ISA documents them by name."""

from __future__ import annotations

from typing import Any

from cuda_kernels.device.language import UniTuple, asm, const, f32, i32, i64, lowered, u32, u32x, void
from cuda_kernels.device.swizzle import ATOM_BYTES

GUARDED = "{ .reg .pred p; setp.ne.s32 p, %s, 0; %s }"
"""Instructions that use the predicate ``p``, which is true if an operand is not 0."""

# --- Global memory: streaming loads bypass L1, since every byte is read once; a false predicate gives zeros -----------

load_4 = asm("ld.global.nc.b32 $0, [$1];", u32, i64)
load_f32 = asm("ld.global.f32 $0, [$1];", f32, i64)
"""Coherent with earlier writes of the same kernel."""

# The register is zeroed before the predicated load. With two complementary predicates, ptxas would extend its live
# range over a whole loop.
_STREAMED, _CACHED = ".L1::no_allocate", ""


def _load_if(cache: str, num_registers: int) -> Any:
    """Load ``num_registers`` consecutive 32-bit words if the last operand is not 0; otherwise they are 0."""
    words = ", ".join(f"${index}" for index in range(num_registers))
    vector, words = (f"v{num_registers}.", f"{{{words}}}") if num_registers > 1 else ("", words)
    zeros = " ".join(f"mov.b32 ${index}, 0;" for index in range(num_registers))
    address, flag = f"${num_registers}", f"${num_registers + 1}"
    load = f"ld.global.nc{cache}.{vector}b32 {words}, [{address}];"
    return asm(GUARDED % (flag, f"{zeros} @p {load}"), u32x(num_registers) if num_registers > 1 else u32, i64, i32)


load_1_if = asm(
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0; @p ld.global.nc.b8 h, [$1];"
    " cvt.u32.u16 $0, h; }",
    u32, i64, i32,
)  # fmt: skip
load_2_if = asm(
    "{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b16 h, 0; @p ld.global.nc.b16 h, [$1];"
    " cvt.u32.u16 $0, h; }",
    u32, i64, i32,
)  # fmt: skip
load_4_if, load_8_if, load_16_if = (_load_if(_STREAMED, num_registers) for num_registers in (1, 2, 4))
cached_4_if, cached_8_if, cached_16_if = (_load_if(_CACHED, num_registers) for num_registers in (1, 2, 4))
"""Loads through L1, for data that is read again: by other rows, or by neighbouring loads of the same 32-byte sector."""

store_1 = asm("st.global.b8 [$0], $1;", void, i64, u32)
store_2 = asm("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", void, i64, u32)
store_4 = asm("st.global.b32 [$0], $1;", void, i64, u32)
store_f32 = asm("st.global.f32 [$0], $1;", void, i64, f32)
store_8 = asm("st.global.v2.b32 [$0], {$1, $2};", void, i64, u32, u32)
store_16 = asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", void, i64, u32, u32, u32, u32)

atomic_max = asm("red.global.max.u32 [$0], $1;", void, i64, u32)
load_relaxed = asm("ld.relaxed.gpu.global.b32 $0, [$1];", u32, i64)

# --- Asynchronous copies from global to shared memory (Ampere and later) ----------------------------------------------

cp_async_16 = asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, i32, i64, i32)
"""``(shared, address, size)``: copy ``size`` bytes and pad to 16 with zeros; nothing is read if ``size`` is 0."""
cp_async_4 = asm("cp.async.ca.shared.global [$0], [$1], 4, $2;", void, i32, i64, i32)
cp_async_commit = asm("cp.async.commit_group;")
cp_async_wait = asm("cp.async.wait_group $0;", void, const)
"""Wait until at most this many groups of this thread's copies are pending."""

# --- Shared memory ----------------------------------------------------------------------------------------------------

dynamic_shared = lowered("entry", "dynamic_shared")(ATOM_BYTES)
"""``() -> int32``: address of the block's dynamic shared memory, aligned for swizzled tiles."""
shared_load_4 = asm("ld.shared.b32 $0, [$1];", u32, i32)
shared_load_16 = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", u32x(4), i32)
shared_store_4 = asm("st.shared.b32 [$0], $1;", void, i32, u32)
shared_store_16 = asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", void, i32, u32, u32, u32, u32)

# --- Warps ------------------------------------------------------------------------------------------------------------

warp_max = asm("redux.sync.max.u32 $0, $1, 0xffffffff;", u32, u32)
warp_any = asm(
    "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.s32 $0, 1, 0, q; }", i32, i32
)
shuffle = asm("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", u32, u32, i32)
shuffle_xor = asm("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", u32, u32, const)

# --- Registers --------------------------------------------------------------------------------------------------------

bits = asm("mov.b32 $0, $1;", u32, f32, pure=True)
from_bits = asm("mov.b32 $0, $1;", f32, u32, pure=True)
unsigned_max = asm("max.u32 $0, $1, $2;", u32, u32, u32, pure=True)
"""Numba's ``max`` compares unsigned numbers as 64-bit numbers."""
larger_magnitudes = {
    "bfloat16": asm("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", u32, u32, u32, pure=True),
    "float16": asm("max.NaN.xorsign.abs.f16x2 $0, $1, $2;", u32, u32, u32, pure=True),
    "float32": asm("max.NaN.xorsign.abs.f32 $0, $1, $2;", f32, f32, f32, pure=True),
}
"""The value of larger magnitude, per half if there are two; NaN is the largest, the sign is arbitrary. By dtype."""
quotient = asm("div.s32 $0, $1, $2;", i32, i32, i32, pure=True)
"""Numba's ``//`` compiles to a call of 64-bit division."""
remainder = asm("rem.s32 $0, $1, $2;", i32, i32, i32, pure=True)
divide = asm("div.rn.f32 $0, $1, $2;", f32, f32, f32, pure=True)
square_root = asm("sqrt.rn.f32 $0, $1;", f32, f32, pure=True)
exp2_approx = asm("ex2.approx.ftz.f32 $0, $1;", f32, f32, pure=True)
reciprocal_approx = asm("rcp.approx.ftz.f32 $0, $1;", f32, f32, pure=True)
"""Computed by the special-function unit: within 2 and 1 float32 ulps; values below 2**-126 are 0."""
log2_approx = asm("lg2.approx.f32 $0, $1;", f32, f32, pure=True)
float_max = asm("max.NaN.f32 $0, $1, $2;", f32, f32, f32, pure=True)
float_min = asm("min.NaN.f32 $0, $1, $2;", f32, f32, f32, pure=True)
"""NaN if either operand is NaN."""
permute_bytes = asm("prmt.b32 $0, $1, $2, $3;", u32, u32, u32, const, pure=True)

low_half = {
    "bfloat16": asm("shl.b32 $0, $1, 16;", f32, u32, pure=True),
    "float16": asm("{ .reg .b16 h, x; mov.b32 {h, x}, $1; cvt.f32.f16 $0, h; }", f32, u32, pure=True),
}
"""The value of a register's low 16 bits, by dtype."""
high_half = {
    "bfloat16": asm("and.b32 $0, $1, 0xffff0000;", f32, u32, pure=True),
    "float16": asm("{ .reg .b16 h, x; mov.b32 {x, h}, $1; cvt.f32.f16 $0, h; }", f32, u32, pure=True),
}

e4m3_pair = asm(
    "{ .reg .b16 c, h, i; .reg .b32 w; cvt.u16.u32 c, $2; cvt.rn.f16x2.e4m3x2 w, c; mov.b32 {h, i}, w;"
    " cvt.f32.f16 $0, h; cvt.f32.f16 $1, i; }",
    UniTuple(f32, 2), u32, pure=True,
)  # fmt: skip
"""The values of the two codes in a register's low 16 bits, the low byte first."""

CVT_RN = {"bfloat16": "cvt.rn.bf16.f32", "float16": "cvt.rn.f16.f32"}
"""The instruction that rounds float32 to nearest even, by dtype."""
CVT_RN_X2 = {"bfloat16": "cvt.rn.bf16x2.f32", "float16": "cvt.rn.f16x2.f32"}
"""The same for two float32; the first is stored in the high half."""
pack_halves = {dtype: asm(f"{cvt} $0, $2, $1;", u32, f32, f32, pure=True) for dtype, cvt in CVT_RN_X2.items()}
"""Two float32, rounded to nearest even, with the first in the low half. By dtype."""

float8x4 = {
    name: asm(
        f"{{ .reg .b16 lo, hi; cvt.rn.satfinite.{name}x2.f32 lo, $2, $1; cvt.rn.satfinite.{name}x2.f32 hi, $4, $3;"
        " mov.b32 $0, {lo, hi}; }",
        u32, f32, f32, f32, f32, pure=True,
    )
    for name in ("e4m3", "e5m2")
}  # fmt: skip
"""Cast four float32, rounding to nearest even and saturating, NaN kept; the first is the lowest byte. By format."""
