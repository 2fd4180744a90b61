"""PTX of Hopper: mbarriers, the tensor memory accelerator (TMA), and wgmma."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from cuda_kernels.device.fragments import fragment_type
from cuda_kernels.device.language import asm, const, i32, i64, lowered, u32x, void

# --- Barriers ---------------------------------------------------------------------------------------------------------

mbarrier_init = asm("mbarrier.init.shared::cta.b64 [$0], $1;", void, i32, i32)
mbarrier_arrive = asm("mbarrier.arrive.shared::cta.b64 _, [$0];", void, i32)
mbarrier_arrive_expect_tx = asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", void, i32, i32)
TRAP_VARIABLE = "LIGHTNING_FP8_TRAP"
"""Environment variable, read when kernels are first imported: with 1, waiting too long for a barrier traps."""

_WAIT = "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again; }"
# 10,000 waits of up to a millisecond; the hardware may end each earlier.
_WAIT_OR_TRAP = (
    "{ .reg .pred p; .reg .u32 n; mov.u32 n, 0;"
    " again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 1000000; @p bra done;"
    " add.u32 n, n, 1; setp.gt.u32 p, n, 10000; @p trap; bra again; done: }"
)
mbarrier_wait = asm(_WAIT_OR_TRAP if os.environ.get(TRAP_VARIABLE) == "1" else _WAIT, void, i32, i32)
"""Wait for the phase of this parity. Kernels that trap have another cache key, since it includes this text."""
fence_mbarrier_init = asm("fence.mbarrier_init.release.cluster;")
named_barrier = asm("bar.sync $0, $1;", void, i32, i32)
named_barrier_arrive = asm("bar.arrive $0, $1;", void, i32, i32)
"""Arrive at a named barrier without waiting for the others."""

# --- Warps ------------------------------------------------------------------------------------------------------------

elect_sync = asm("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }", i32)
shfl_sync_0 = asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", i32, i32)
"""Lane 0's value, by which the compiler knows that a branch is uniform in the warp."""
syncwarp = asm("bar.warp.sync 0xffffffff;")
warpgroup_reg_alloc = asm("setmaxnreg.inc.sync.aligned.u32 $0;", void, const)
warpgroup_reg_dealloc = asm("setmaxnreg.dec.sync.aligned.u32 $0;", void, const)

# --- Tensor maps and copies -------------------------------------------------------------------------------------------

grid_constant_params = lowered("entry", "grid_constant_params")()
"""To be called in a kernel with tensor maps: they become ``__grid_constant__`` parameters, which TMA reads in place."""
address_of = lowered("entry", "address_of")()
"""``map -> int64``: its address, the operand of TMA instructions."""

prefetch_tensormap = asm("prefetch.tensormap [$0];", void, i64)
tma_load = asm(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];",
    void, i32, i64, i32, i32, i32,
)  # fmt: skip
"""``(shared, map, barrier, column, row)``."""
tma_store = asm("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$2, $3}], [$1];", void, i64, i32, i32, i32)
"""``(map, shared, column, row)``."""
tma_reduce_add = asm(
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$0, {$2, $3}], [$1];",
    void, i64, i32, i32, i32,
)  # fmt: skip
"""The same, added to the matrix."""
tma_store_commit = asm("cp.async.bulk.commit_group;")
tma_store_wait = asm("cp.async.bulk.wait_group.read $0;", void, const)
"""Wait until at most this many groups of this thread's stores still read shared memory."""
fence_proxy_async_shared = asm("fence.proxy.async.shared::cta;")
"""Make this thread's writes to shared memory visible to a TMA store."""

# --- Products ---------------------------------------------------------------------------------------------------------


@cache
def wgmma(n: int, atype: str, btype: str) -> Any:
    """``(acc, x, y, keep) -> acc``: ``A [64, 32] Bᵀ [32, n]`` of FP8 ``atype`` and ``btype``, plus acc if ``keep``.

    ``x``, ``y``: matrix descriptors, :func:`cuda_kernels.device.swizzle.smem_descriptor`.
    """
    num_registers = n // 2
    acc = ", ".join(f"${index}" for index in range(num_registers))
    return asm(
        f"{{ .reg .pred p; setp.ne.b32 p, ${n + 2}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{atype}.{btype} {{{acc}}}, ${n}, ${n + 1}, p, 1, 1; }}",
        fragment_type(num_registers), fragment_type(num_registers), i64, i64, i32,
    )  # fmt: skip


@cache
def wgmma_rs(n: int, atype: str, btype: str) -> Any:
    """``(acc, x, y, keep) -> acc``: :func:`wgmma` with A in four registers ``x`` of each thread.

    Each register has four consecutive columns. The first two registers are row ``lane / 4`` of a warp's 16 rows and the
    row eight below, from column ``4 (lane mod 4)``; the others are the same rows 16 columns later (PTX ISA, "Register
    fragments for wgmma.mma_async.m64nNk32").
    """
    num_registers = n // 2
    acc = ", ".join(f"${index}" for index in range(num_registers))
    x = ", ".join(f"${n + index}" for index in range(4))
    return asm(
        f"{{ .reg .pred p; setp.ne.b32 p, ${n + 5}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{atype}.{btype} {{{acc}}}, {{{x}}}, ${n + 4}, p, 1, 1; }}",
        fragment_type(num_registers), fragment_type(num_registers), u32x(4), i64, i32,
    )  # fmt: skip


wgmma_fence = asm("wgmma.fence.sync.aligned;")
wgmma_commit = asm("wgmma.commit_group.sync.aligned;")


@cache
def wgmma_wait(num_registers: int, pending: int) -> Any:
    """``acc -> acc``, after waiting until at most ``pending`` groups of wgmmas are incomplete."""
    return asm(f"wgmma.wait_group.sync.aligned {pending};", fragment_type(num_registers), fragment_type(num_registers))
