"""The GEMM on Hopper: a producer warp copies with TMA, warpgroups multiply with wgmma, in persistent blocks.

Each pipeline stage holds 128 bytes of each row of A's and B's tile in shared memory. It has two mbarriers: ``full``
counts the bytes written by TMA, ``empty`` the arrivals of consumers that have read it. K iteration ``i`` of a block
uses stage ``i mod stages`` and waits for the phase bit ``(i div stages) & 1``. Two warpgroups share a tile, and the
second one starts when all stages of the first tile are full. It stays some iterations behind, so that one stores
results while the other multiplies.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.device.fragments import zeros
from cuda_kernels.device.language import cuda, device, i32, i64, tensor_map, u32
from cuda_kernels.device.ptx import dynamic_shared, load_4, load_f32, quotient
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    address_of,
    elect_sync,
    fence_mbarrier_init,
    grid_constant_params,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensormap,
    shfl_sync_0,
    syncwarp,
    tma_load,
    tma_store_wait,
    warpgroup_reg_alloc,
    warpgroup_reg_dealloc,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import advance_descriptor, smem_descriptor
from cuda_kernels.gemm.epilogue import make_epilogue_store
from cuda_kernels.gemm.groups import load_row_tile
from cuda_kernels.gemm.promotion import (
    block_scale_readers,
    block_scale_window,
    make_promote_add,
    reads_scales_early,
    stage_scale_reader,
)
from cuda_kernels.gemm.raster import tile_coord
from cuda_kernels.gemm.spec import TILE_K, WGMMA_ARCHITECTURES, GemmConfig, GemmSpec, Scaling, smem_offsets, stage_bytes
from cuda_kernels.kernel import Kernel, typed

_WARPGROUP_WARPS = 4
_PRODUCERS_REGISTERS = 56
_REGISTERS = 224


@cache
def gemm_kernel(spec: GemmSpec, config: GemmConfig) -> Kernel:
    """``out [m, n]`` by persistent blocks, each processing every n-th tile; see :class:`GemmSpec`, :class:`GemmConfig`.

    Parameters are the tensor maps of A, B, out and both scales; the addresses of both scales, bias, out and the table
    of groups; the strides of out's rows and of B's scales in elements; m, n and k. An absent address is 0, an absent
    map is A's.
    """
    scaling, promote = spec.scaling, spec.promote
    mma_warpgroups, waves, tile_m, tile_n = config.mma_warpgroups, config.waves, config.tile_m, config.tile_n
    stages = config.stages
    num_registers = tile_n // 2
    offsets = smem_offsets(config, scaling)
    a_bytes, b_bytes, scale_inv_a_bytes, scale_inv_b_bytes = of_stage = stage_bytes(config, scaling)
    tx_bytes = sum(of_stage)
    b_offset, scale_inv_a_offset, scale_inv_b_offset, full_offset, empty_offset = (
        offsets[name] for name in ("b", "scale_inv_a", "scale_inv_b", "full", "empty")
    )
    empty_arrivals = mma_warpgroups * (_WARPGROUP_WARPS if scaling.along_k else 1)
    zero_acc = zeros(num_registers)
    wgmma_k32 = wgmma(tile_n, spec.a_dtype, spec.b_dtype)
    wgmma_wait_0, wgmma_wait_1 = wgmma_wait(num_registers, 0), wgmma_wait(num_registers, 1)
    epilogue_store = make_epilogue_store(spec, config)
    smem_epilogue = config.smem_epilogue
    along_k = scaling.along_k
    by_row, grouped = scaling is Scaling.ROW, spec.grouped
    b_along_k_by_block = scaling.b_along_k_by_block
    b_along_k_by_row = scaling.b_along_k_by_row
    read_scale_invs = stage_scale_reader(spec, config)
    promote_add = make_promote_add(spec, config)
    releases_early = reads_scales_early(spec, config)
    load_block_scale_invs, block_scale_invs_at = block_scale_readers(tile_n)
    scale_window = block_scale_window(scaling)
    next_stage = stage_counters(stages)
    two_waves = waves == 2

    @device
    def locate(tile_idx, sizes):
        """A tile's first row and column, the end of its rows, its group, its first K iteration and their number.

        Rows of no group have one iteration, behind K, where operands and scales are 0.
        """
        m_tiles, n_tiles, m, k_iters, row_tiles = sizes
        i, j = tile_coord(tile_idx, m_tiles, n_tiles)
        if grouped:
            row, end, group, first_k_iter = load_row_tile(row_tiles, i)
            return row, j * tile_n, end, group, first_k_iter, i32(1) if first_k_iter > 0 else i32(k_iters)
        return i32(i * tile_m), j * tile_n, i32(m), i32(0), i32(0), i32(k_iters)

    @device
    def consumer_release(smem, stage_idx, wg_thread):
        """Arrive at the stage's ``empty`` barrier.

        One thread arrives for its warpgroup, because wgmma completes for all of it. If scales are read, by plain loads,
        one thread of each warp arrives.
        """
        arriving_lane = wg_thread
        if along_k:
            syncwarp()
            arriving_lane = wg_thread & 31
        if arriving_lane == 0:
            mbarrier_arrive(smem + empty_offset + 8 * stage_idx)

    @device
    def issue_k_iter(acc, desc_a, desc_b, accumulate):
        """Issue the wgmmas of one K iteration; after waiting, the result is ``acc`` plus its products."""
        acc = wgmma_k32(acc, desc_a, desc_b, accumulate)
        acc = wgmma_k32(acc, advance_descriptor(desc_a, 32), advance_descriptor(desc_b, 32), 1)
        acc = wgmma_k32(acc, advance_descriptor(desc_a, 64), advance_descriptor(desc_b, 64), 1)
        acc = wgmma_k32(acc, advance_descriptor(desc_a, 96), advance_descriptor(desc_b, 96), 1)
        wgmma_commit()
        return acc

    @device
    def promoted_k_iter(
        acc, acc_below, partial, smem, desc_a, desc_b, stage_idx,
        row_in_tile, block_scale_invs, k_iter, tile_col, wg_thread,
    ):  # fmt: skip
        """Add one K iteration's scaled products to ``acc`` and, for the 64 rows below, to ``acc_below``.

        The tensor cores accumulate them in ``partial``.
        """
        scale_invs = read_scale_invs(smem, stage_idx, row_in_tile)
        block_scale_inv = (np.float32(1), np.float32(1))
        wgmma_fence()
        partial = wgmma_wait_0(issue_k_iter(partial, desc_a, desc_b, 0))
        if b_along_k_by_block:
            block_scale_inv = block_scale_invs_at(block_scale_invs, k_iter)
        if two_waves:
            scale_invs_below = read_scale_invs(smem, stage_idx, row_in_tile + 64)
            acc = promote_add(acc, partial, scale_invs, block_scale_inv, tile_col)
            wgmma_fence()
            partial = wgmma_wait_0(issue_k_iter(partial, advance_descriptor(desc_a, 64 * TILE_K), desc_b, 0))
        if releases_early:
            consumer_release(smem, stage_idx, wg_thread)
        if two_waves:
            acc_below = promote_add(acc_below, partial, scale_invs_below, block_scale_inv, tile_col)
        else:
            acc = promote_add(acc, partial, scale_invs, block_scale_inv, tile_col)
        if not releases_early:
            consumer_release(smem, stage_idx, wg_thread)
        return acc, acc_below, partial

    @device
    def produce(smem, maps, work_tile, work_tiles, sizes, n):
        map_a, map_b, _, map_scale_inv_a, map_scale_inv_b = maps
        stage_idx, phase = i32(0), i32(0)
        while work_tile < work_tiles:
            tile_row, tile_col, _, group, first_k_iter, num_k_iters = locate(work_tile, sizes)
            for k_iter in range(num_k_iters):
                k = (first_k_iter + k_iter) * TILE_K
                full = smem + full_offset + 8 * stage_idx
                a = smem + stage_idx * a_bytes
                b = smem + b_offset + stage_idx * b_bytes
                mbarrier_wait(smem + empty_offset + 8 * stage_idx, phase ^ 1)
                mbarrier_arrive_expect_tx(full, tx_bytes)
                tma_load(a, map_a, full, k, tile_row)
                tma_load(b, map_b, full, k, group * n + tile_col)
                if along_k:
                    tma_load(
                        smem + scale_inv_a_offset + stage_idx * scale_inv_a_bytes, map_scale_inv_a, full,
                        tile_row, first_k_iter + k_iter,
                    )  # fmt: skip
                if b_along_k_by_row:
                    tma_load(
                        smem + scale_inv_b_offset + stage_idx * scale_inv_b_bytes, map_scale_inv_b, full,
                        tile_col, k_iter,
                    )  # fmt: skip
                stage_idx, phase = next_stage(stage_idx, phase)
            work_tile += cuda.gridDim.x

    @device
    def consume(
        smem, maps, scale_inv_a, scale_inv_b, bias, out, out_stride, scale_inv_b_stride, n,
        work_tile, work_tiles, sizes, k_iters, wg_idx,
    ):  # fmt: skip
        wg_thread = cuda.threadIdx.x & 127
        lane = wg_thread & 31
        warp = shfl_sync_0(wg_thread >> 5)
        stage_idx, phase = i32(0), i32(0)
        wg_row = wg_idx * (64 * waves)  # the warpgroup's first row in the tile
        if wg_idx == 1 and work_tile < work_tiles:
            mbarrier_wait(smem + full_offset + 8 * (min(locate(work_tile, sizes)[5], stages) - 1), 0)
        row_in_tile = wg_row + warp * 16 + (lane >> 2)
        scale_inv_ab = np.float32(1)
        if not along_k and not by_row:
            scale_inv_ab = load_f32(scale_inv_a) * load_f32(scale_inv_b)
        epi_args = scale_inv_ab, scale_inv_a, scale_inv_b, bias
        block_scale_invs = (u32(0), u32(0))
        next_tile_col, next_group, next_k_iter = 0, i32(0), i32(0)
        next_block_scale_invs = block_scale_invs
        if b_along_k_by_block:
            _, tile_col, _, group, first_k_iter, _ = locate(min(work_tile, work_tiles - 1), sizes)
            next_block_scale_invs = load_block_scale_invs(
                scale_inv_b, scale_inv_b_stride, group, tile_col, n, first_k_iter, k_iters
            )
        while work_tile < work_tiles:
            tile_row, tile_col, m, group, first_k_iter, num_k_iters = locate(work_tile, sizes)
            first_row = tile_row + wg_row
            work_tile += cuda.gridDim.x
            if b_along_k_by_block:
                _, next_tile_col, _, next_group, next_k_iter, _ = locate(min(work_tile, work_tiles - 1), sizes)
            if by_row:
                is_behind = first_k_iter > 0
                of_group = i64(0) if is_behind else scale_inv_b + i64(group) * i64(n) * 4
                epi_args = scale_inv_ab, i64(0) if is_behind else scale_inv_a, of_group, bias
            acc, acc_below, partial = zero_acc(), zero_acc(), zero_acc()
            previous_stage = stage_idx
            for window_start in range(i32(0), num_k_iters, i32(scale_window)):
                if b_along_k_by_block:
                    block_scale_invs = next_block_scale_invs
                    last = window_start + scale_window >= num_k_iters
                    next_block_scale_invs = load_block_scale_invs(
                        scale_inv_b, scale_inv_b_stride, next_group if last else group,
                        next_tile_col if last else tile_col, n,
                        next_k_iter if last else window_start + scale_window, k_iters,
                    )  # fmt: skip
                for k_iter in range(window_start, min(i32(window_start + scale_window), num_k_iters)):
                    mbarrier_wait(smem + full_offset + 8 * stage_idx, phase)
                    desc_a = smem_descriptor(smem + stage_idx * a_bytes + wg_row * TILE_K)
                    desc_b = smem_descriptor(smem + b_offset + stage_idx * b_bytes)
                    if promote:
                        acc, acc_below, partial = promoted_k_iter(
                            acc, acc_below, partial, smem, desc_a, desc_b, stage_idx,
                            row_in_tile, block_scale_invs, k_iter, tile_col, wg_thread,
                        )  # fmt: skip
                    else:
                        wgmma_fence()
                        acc = wgmma_wait_1(issue_k_iter(acc, desc_a, desc_b, k_iter))
                        if k_iter > 0:
                            consumer_release(smem, previous_stage, wg_thread)
                    previous_stage = stage_idx
                    stage_idx, phase = next_stage(stage_idx, phase)
            if not promote:
                acc = wgmma_wait_0(acc)
                consumer_release(smem, previous_stage, wg_thread)
            epilogue_store(acc, smem, maps[2], out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n)
            if two_waves:
                epilogue_store(
                    acc_below, smem, maps[2], out, out_stride, epi_args, wg_idx, wg_thread,
                    first_row + 64, m, tile_col, n,
                )  # fmt: skip
        if smem_epilogue and wg_thread == 0:
            tma_store_wait(0)

    def gemm(
        map_a, map_b, map_out, map_scale_inv_a, map_scale_inv_b,
        scale_inv_a, scale_inv_b, bias, out, row_tiles, out_stride, scale_inv_b_stride, m, n, k,
    ):  # fmt: skip
        grid_constant_params()
        scale_inv_maps = address_of(map_scale_inv_a), address_of(map_scale_inv_b)
        maps = address_of(map_a), address_of(map_b), address_of(map_out), scale_inv_maps[0], scale_inv_maps[1]
        smem = dynamic_shared()
        wg_idx, warp = shfl_sync_0(cuda.threadIdx.x >> 7), shfl_sync_0(cuda.threadIdx.x >> 5)
        if cuda.threadIdx.x == 0:
            prefetch_tensormap(maps[0])
            prefetch_tensormap(maps[1])
            if smem_epilogue:
                prefetch_tensormap(maps[2])
            if along_k:
                prefetch_tensormap(maps[3])
            if b_along_k_by_row:
                prefetch_tensormap(maps[4])
            for stage in range(stages):
                mbarrier_init(smem + full_offset + 8 * stage, 1)
                mbarrier_init(smem + empty_offset + 8 * stage, empty_arrivals)
            fence_mbarrier_init()
        cuda.syncthreads()
        m_tiles, n_tiles = quotient(m + (tile_m - 1), tile_m), quotient(n + (tile_n - 1), tile_n)
        if grouped:
            m_tiles = i32(load_4(row_tiles))
        work_tiles = m_tiles * n_tiles
        k_iters = quotient(k + (TILE_K - 1), TILE_K)
        sizes = m_tiles, n_tiles, m, k_iters, row_tiles
        work_tile = cuda.blockIdx.x
        if wg_idx == mma_warpgroups:
            warpgroup_reg_dealloc(_PRODUCERS_REGISTERS)
            if warp == _WARPGROUP_WARPS * mma_warpgroups and elect_sync():
                produce(smem, maps, work_tile, work_tiles, sizes, n)
        else:
            warpgroup_reg_alloc(_REGISTERS)
            consume(
                smem, maps, scale_inv_a, scale_inv_b, bias, out, out_stride, scale_inv_b_stride, n,
                work_tile, work_tiles, sizes, k_iters, wg_idx,
            )  # fmt: skip

    return Kernel(
        f"gemm({spec}, {config})",
        gemm,
        {
            **typed(tensor_map, "map_a map_b map_out map_scale_inv_a map_scale_inv_b"),
            **typed(i64, "scale_inv_a scale_inv_b bias out row_tiles out_stride scale_inv_b_stride"),
            **typed(i32, "m n k"),
        },
        config.threads,
        shared_bytes=offsets["end"],
        architectures=WGMMA_ARCHITECTURES,
    )
