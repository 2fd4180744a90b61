"""Microbenchmark kernels that repeat one operation, for rates of Hopper's multiprocessors that are not documented."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cuda_kernels.attention.products import make_product, make_register_product
from cuda_kernels.device.fragments import rows_sum, zeros
from cuda_kernels.device.language import cuda, i32, i64, tensor_map, u32
from cuda_kernels.device.ptx import dynamic_shared, shared_store_16, store_f32
from cuda_kernels.device.sm90 import (
    address_of,
    fence_proxy_async_shared,
    grid_constant_params,
    shfl_sync_0,
    tma_reduce_add,
    tma_store,
    tma_store_commit,
    tma_store_wait,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import smem_descriptor
from cuda_kernels.kernel import Kernel

THREADS = 256
CHAIN = 512
"""K of the products that a warpgroup issues before it waits."""
COPY_ROWS, COPY_COLUMNS = 128, 64
"""float32 values that a block copies at once: 32 KB."""
_ONES = 0x38383838
"""Four E4M3 codes of 1."""


@cache
def product_rate_kernel(n: int, from_registers: bool) -> Kernel:
    """Two warpgroups repeatedly multiply ``[64, 512]`` by ``[512, n]`` ones; A in registers or shared memory.

    Parameters: the address of float32 ``[blocks, 256]``, each thread's sum of its upper row; the number of repetitions.
    """
    count = n // 2
    zero, wait, sum_of = zeros(count), wgmma_wait(count, 0), rows_sum(count)
    multiply = make_register_product(n, 4) if from_registers else make_product(n, 4)
    shared_bytes = (128 + n) * 128

    def product_rate(out: Any, repetitions: Any) -> None:
        smem = dynamic_shared()
        thread = i32(cuda.threadIdx.x)
        for index in range(thread, shared_bytes // 16, THREADS):
            shared_store_16(smem + 16 * index, u32(_ONES), u32(_ONES), u32(_ONES), u32(_ONES))
        fence_proxy_async_shared()
        cuda.syncthreads()
        y = smem_descriptor(smem + 128 * 128)
        if from_registers:
            w = u32(_ONES)
            x = (w, w, w, w, w, w, w, w, w, w, w, w, w, w, w, w)
        else:
            x = smem_descriptor(smem + shfl_sync_0(cuda.threadIdx.x >> 7) * 8192)
        acc = zero()
        for _ in range(repetitions):
            wgmma_fence()
            acc = multiply(multiply(multiply(multiply(acc, x, y, 1), x, y, 1), x, y, 1), x, y, 1)
            acc = wait(acc)
        total, _ = sum_of(acc)
        store_f32(out + (i64(cuda.blockIdx.x) * THREADS + thread) * 4, total)

    place = "registers" if from_registers else "shared"
    return _repeated(f"product_rate({n=}, A in {place})", product_rate, i64, shared_bytes)


@cache
def copy_rate_kernel(add: bool) -> Kernel:
    """A block's tensor memory accelerator repeatedly writes, or adds, 32 KB of zeros to the same place.

    Parameters: the tensor map of float32 ``[blocks * 128, 64]`` in boxes of 128 by 64, not swizzled; the number of
    repetitions.
    """
    copy = tma_reduce_add if add else tma_store
    shared_bytes = COPY_ROWS * COPY_COLUMNS * 4

    def copy_rate(out: Any, repetitions: Any) -> None:
        grid_constant_params()
        smem = dynamic_shared()
        for index in range(i32(cuda.threadIdx.x), shared_bytes // 16, THREADS):
            shared_store_16(smem + 16 * index, u32(0), u32(0), u32(0), u32(0))
        fence_proxy_async_shared()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for _ in range(repetitions):
                copy(address_of(out), smem, 0, i32(cuda.blockIdx.x * COPY_ROWS))
                tma_store_commit()
                tma_store_wait(3)
            tma_store_wait(0)

    return _repeated(f"copy_rate({add=})", copy_rate, tensor_map, shared_bytes)


def _repeated(name: str, function: Callable[[Any, Any], None], out: Any, shared_bytes: int) -> Kernel:
    """A kernel for Hopper with the parameters ``(out, repetitions)``; ``out`` is the first one's type."""
    parameters = {"out": out, "repetitions": i32}
    return Kernel(name, function, parameters, THREADS, shared_bytes, architectures=("90a",))
