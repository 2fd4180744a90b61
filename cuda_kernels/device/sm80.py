"""PTX of Ampere, which later GPUs have too: copies by cp.async."""

from __future__ import annotations

from cuda_kernels.device.language import asm, const, i32, i64, void

cp_async_16 = asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, i32, i64, i32)
"""``(shared, address, size)``: copy ``size`` bytes and fill up 16 with zeros; nothing is read where ``size`` is 0."""
cp_async_4 = asm("cp.async.ca.shared.global [$0], [$1], 4, $2;", void, i32, i64, i32)
cp_async_commit = asm("cp.async.commit_group;")
cp_async_wait = asm("cp.async.wait_group $0;", void, const)
"""Wait until all but so many groups of this thread's copies are complete."""
