"""The GEMM on GPUs without wgmma: operands are copied by cp.async and multiplied by mma.sync, with one tile per block.

All threads of a block copy 128 bytes of each row of A and B, and their scales along K, into the next stage of a ring in
shared memory, swizzled (:func:`~cuda_kernels.device.swizzle.swizzle_128b`). While one stage is multiplied, all others
are in flight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.fragments import (
    add,
    add_rows,
    add_rows_and_columns,
    ldmatrix_x4,
    mma,
    slice_fragment,
    store_fragment_global,
    zeros,
)
from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import (
    cp_async_4,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    dynamic_shared,
    from_bits,
    load_f32,
    quotient,
    shared_load_4,
)
from cuda_kernels.device.swizzle import along_row, ldmatrix_a, ldmatrix_b, swizzle_128b
from cuda_kernels.gemm.epilogue import make_epilogue
from cuda_kernels.gemm.promotion import block_scale_readers, block_scale_window
from cuda_kernels.gemm.raster import tile_coord
from cuda_kernels.gemm.spec import (
    LOG2_TILE_K,
    MMA_ARCHITECTURES,
    TILE_K,
    WARP_COLUMNS,
    GemmSpec,
    MmaConfig,
    Scaling,
    stage_bytes,
)
from cuda_kernels.kernel import Kernel, typed


@cache
def mma_gemm_kernel(spec: GemmSpec, config: MmaConfig) -> Kernel:
    """``out [m, n]``, one block per tile; see :class:`GemmSpec` and :class:`MmaConfig`.

    Parameters are the address and stride of A, of B, of A's scales and of B's; the address of bias; the
    address and stride of out; m, n and k. Strides are in elements; addresses and strides of A and B are multiples
    of 16. Scales of 1x128 blocks are contiguous along rows of the operand, those of 128x128 along a row of blocks. An
    absent address is 0.
    """
    scaling, promote = spec.scaling, spec.promote
    tile_m, tile_n, threads, strips, stages = config.tile_m, config.tile_n, config.threads, config.strips, config.stages
    along_k = scaling.along_k
    by_row = scaling is Scaling.ROW
    b_along_k_by_block = scaling.b_along_k_by_block
    b_along_k_by_row = scaling.b_along_k_by_row
    of_stage = stage_bytes(config, scaling)
    bytes_per_stage = sum(of_stage)
    prefetch = stages - 1
    pending = stages - 2
    b_offset = of_stage.a
    scale_inv_a_offset = b_offset + of_stage.b
    scale_inv_b_offset = scale_inv_a_offset + of_stage.scale_inv_a
    parts = WARP_COLUMNS // 8
    num_acc_regs = strips * WARP_COLUMNS // 2
    zero_acc = zeros(num_acc_regs)
    promote_add = add(num_acc_regs)
    mma_k32 = mma(strips, parts, spec.a_dtype, spec.b_dtype)
    load_a, load_b = ldmatrix_x4(strips, 16 * TILE_K), ldmatrix_x4(parts // 2, 16 * TILE_K)
    promote_add_scaled = _make_promote_add(spec, strips)
    epilogue_store = _make_epilogue_store(spec, strips, config.even)
    load_block_scale_invs, block_scale_invs_at = block_scale_readers(WARP_COLUMNS)
    scale_window = block_scale_window(scaling)
    rows_at_once = threads // 8  # a multiple of 8, so that a thread copies the same chunk of each row

    @device
    def next_stage(stage_addr, smem):
        """The address of the next stage in the ring."""
        return stage_addr + bytes_per_stage if stage_addr < smem + prefetch * bytes_per_stage else smem

    @device
    def copy_operand(shared, address, stride, num_rows, first_row, limit, k):
        """Copy 128 bytes of ``num_rows`` rows from ``first_row`` on; zeros from row ``limit`` and byte ``k`` on."""
        row_in_tile, chunk = cuda.threadIdx.x >> 3, cuda.threadIdx.x & 7
        shared += swizzle_128b(row_in_tile, chunk)
        address += i64(first_row + row_in_tile) * stride + 16 * chunk
        bytes_left = min(max(k - 16 * chunk, 0), 16)
        for row_offset in range(0, num_rows, rows_at_once):
            size = bytes_left if first_row + row_in_tile + row_offset < limit else 0
            cp_async_16(shared + row_offset * TILE_K, address + row_offset * stride, size)

    @device
    def copy_scale_invs(shared, address, num_rows, first_row, limit):
        for row_offset in range(0, num_rows, threads):
            row_in_tile = cuda.threadIdx.x + row_offset
            if row_in_tile < num_rows:
                cp_async_4(
                    shared + 4 * row_in_tile,
                    address + 4 * i64(first_row + row_in_tile),
                    4 if first_row + row_in_tile < limit else 0,
                )

    @device
    def copy(stage_addr, k_iter, a_args, b_args, tile_row, tile_col, m, n, k):
        a, a_stride, scale_inv_a, scale_inv_a_stride = a_args
        b, b_stride, scale_inv_b, scale_inv_b_stride = b_args
        start = k_iter * TILE_K
        copy_operand(stage_addr, a + start, a_stride, tile_m, tile_row, m, k - start)
        copy_operand(stage_addr + b_offset, b + start, b_stride, tile_n, tile_col, n, k - start)
        if along_k:
            copy_scale_invs(
                stage_addr + scale_inv_a_offset, scale_inv_a + 4 * i64(k_iter) * scale_inv_a_stride, tile_m, tile_row, m
            )
        if b_along_k_by_row:
            copy_scale_invs(
                stage_addr + scale_inv_b_offset, scale_inv_b + 4 * i64(k_iter) * scale_inv_b_stride, tile_n, tile_col, n
            )

    def mma_gemm(
        a, a_stride, b, b_stride, scale_inv_a, scale_inv_a_stride, scale_inv_b, scale_inv_b_stride,
        bias, out, out_stride, m, n, k,
    ):  # fmt: skip
        smem = dynamic_shared()
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        i, j = tile_coord(cuda.blockIdx.x, quotient(m + (tile_m - 1), tile_m), quotient(n + (tile_n - 1), tile_n))
        tile_row, tile_col = i * tile_m, j * tile_n
        a_args = (a, a_stride, scale_inv_a, scale_inv_a_stride)
        b_args = (b, b_stride, scale_inv_b, scale_inv_b_stride)
        k_iters = (k + (TILE_K - 1)) >> LOG2_TILE_K
        for k_iter in range(prefetch):
            if k_iter < k_iters:
                copy(smem + k_iter * bytes_per_stage, k_iter, a_args, b_args, tile_row, tile_col, m, n, k)
            cp_async_commit()

        warp_row, warp_col = (warp & 1) * (16 * strips), (warp >> 1) * WARP_COLUMNS  # the warp's offset in the tile
        a_fragment_offset = warp_row * TILE_K + ldmatrix_a(lane)
        b_fragment_offset = b_offset + warp_col * TILE_K + ldmatrix_b(lane)
        row_in_tile = warp_row + (lane >> 2)  # of this thread's first register
        col_in_tile = warp_col + 2 * (lane & 3)
        acc, stage_addr, free_stage_addr = zero_acc(), smem, smem + prefetch * bytes_per_stage
        for window_start in range(i32(0), k_iters, i32(scale_window)):
            block_scale_invs = (u32(0), u32(0))
            if b_along_k_by_block:
                block_scale_invs = load_block_scale_invs(
                    scale_inv_b, scale_inv_b_stride, i32(0), tile_col + warp_col, n, window_start, k_iters
                )
            for k_iter in range(window_start, min(i32(window_start + scale_window), k_iters)):
                cp_async_wait(pending)
                cuda.syncthreads()
                a_addr = stage_addr + a_fragment_offset
                b_addr = stage_addr + b_fragment_offset
                block_scale_inv = np.float32(1)
                partial = mma_k32(zero_acc() if promote else acc, load_a(a_addr), load_b(b_addr))
                # The copy is issued here, while the tensor cores are busy.
                if k_iter + prefetch < k_iters:
                    copy(free_stage_addr, k_iter + prefetch, a_args, b_args, tile_row, tile_col, m, n, k)
                cp_async_commit()
                partial = mma_k32(partial, load_a(along_row(a_addr, 32)), load_b(along_row(b_addr, 32)))
                partial = mma_k32(partial, load_a(along_row(a_addr, 64)), load_b(along_row(b_addr, 64)))
                partial = mma_k32(partial, load_a(along_row(a_addr, 96)), load_b(along_row(b_addr, 96)))
                if b_along_k_by_block:
                    block_scale_inv = block_scale_invs_at(block_scale_invs, k_iter)[0]
                if along_k:
                    acc = promote_add_scaled(
                        acc, partial, stage_addr + scale_inv_a_offset + 4 * row_in_tile,
                        stage_addr + scale_inv_b_offset + 4 * col_in_tile, block_scale_inv,
                    )  # fmt: skip
                else:
                    acc = promote_add(acc, partial) if promote else partial
                stage_addr, free_stage_addr = next_stage(stage_addr, smem), stage_addr

        scale_inv_ab = np.float32(1)
        if not along_k and not by_row:
            scale_inv_ab = load_f32(scale_inv_a) * load_f32(scale_inv_b)
        epi_args = scale_inv_ab, scale_inv_a, scale_inv_b, bias
        epilogue_store(acc, out, out_stride, epi_args, tile_row + row_in_tile, m, tile_col + col_in_tile, n)

    return Kernel(
        f"mma_gemm({spec}, {config})",
        mma_gemm,
        {
            **typed(i64, "a a_stride b b_stride scale_inv_a scale_inv_a_stride scale_inv_b scale_inv_b_stride"),
            **typed(i64, "bias out out_stride"),
            **typed(i32, "m n k"),
        },
        threads,
        shared_bytes=config.shared_bytes(scaling),
        architectures=MMA_ARCHITECTURES,
    )


def _make_promote_add(spec: GemmSpec, strips: int, strip: int = 0) -> Any:
    """A device function ``(acc, partial, row_scale_inv_smem, col_scale_inv_smem, block_scale_inv) -> acc``.

    It processes the 16-row strips from ``strip`` on. ``row_scale_inv_smem``, ``col_scale_inv_smem``: addresses of the
    scales of this thread's first row and column. ``block_scale_inv``: with blocks of 128x128, the scale of all columns.
    """
    num_registers = WARP_COLUMNS // 2
    slice_strip = slice_fragment(strips * num_registers, strip * num_registers, num_registers)
    b_along_k_by_block = spec.scaling.b_along_k_by_block
    plus_rows = add_rows(num_registers)
    plus_both = add_rows_and_columns(num_registers)

    @device
    def promote_add(acc, partial, row_scale_inv_smem, col_scale_inv_smem, block_scale_inv):
        address = row_scale_inv_smem + 4 * 16 * strip
        s, t = from_bits(shared_load_4(address)), from_bits(shared_load_4(address + 4 * 8))  # rows eight apart
        if b_along_k_by_block:
            return plus_rows(slice_strip(acc), slice_strip(partial), s * block_scale_inv, t * block_scale_inv)
        return plus_both(slice_strip(acc), slice_strip(partial), s, t, col_scale_inv_smem)

    if strip == strips - 1:
        return promote_add
    next_strips = _make_promote_add(spec, strips, strip + 1)

    @device
    def add_strips(acc, partial, row_scale_inv_smem, col_scale_inv_smem, block_scale_inv):
        return promote_add(acc, partial, row_scale_inv_smem, col_scale_inv_smem, block_scale_inv) + next_strips(
            acc, partial, row_scale_inv_smem, col_scale_inv_smem, block_scale_inv
        )

    return add_strips


def _make_epilogue_store(spec: GemmSpec, strips: int, even: bool, strip: int = 0) -> Any:
    """A device function ``(acc, out, out_stride, epi_args, frag_row, m, frag_col, n)``: epilogue and store.

    It processes the 16-row strips from ``strip`` on. ``frag_row``, ``frag_col``: position of this thread's first
    register.
    """
    num_registers = WARP_COLUMNS // 2
    slice_strip = slice_fragment(strips * num_registers, strip * num_registers, num_registers)
    finish = make_epilogue(spec, num_registers, even)
    store = store_fragment_global(num_registers, spec.out_dtype, even, spec.accumulate)

    @device
    def epilogue_store(acc, out, out_stride, epi_args, frag_row, m, frag_col, n):
        strip_row = frag_row + 16 * strip
        store(finish(slice_strip(acc), epi_args, strip_row, m, frag_col, n), out, out_stride, strip_row, m, frag_col, n)

    if strip == strips - 1:
        return epilogue_store
    next_strips = _make_epilogue_store(spec, strips, even, strip + 1)

    @device
    def store_strips(acc, out, out_stride, epi_args, frag_row, m, frag_col, n):
        epilogue_store(acc, out, out_stride, epi_args, frag_row, m, frag_col, n)
        next_strips(acc, out, out_stride, epi_args, frag_row, m, frag_col, n)

    return store_strips
