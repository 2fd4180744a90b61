"""The product on Hopper: copies by the tensor memory accelerator, multiplied by warpgroups, in persistent blocks.

One warp of a block, the producer, copies 128 bytes of each row of A and B at a time to a ring of places in shared
memory; the other warpgroups multiply them. Two barriers guard each place: ``full`` counts the bytes that arrived,
``empty`` the warpgroups that are done with it. Step ``t`` of a block has place ``t mod stages`` in the ring's round
``t div stages``, and the round's parity is that of the barriers. Where warpgroups alternate, barrier ``turn`` of each
says that the other's warps have multiplied its tile: the parity of a place is only that of the round before, or of
this. Where they share tiles, the second starts when all places are full that the first tile fills, some steps behind:
results of one leave while the other multiplies.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np

from cuda_kernels.device.fragments import zeros
from cuda_kernels.device.language import cuda, device, i32, i64, tensor_map, u32
from cuda_kernels.device.ptx import dynamic_shared, load_f32, quotient, remainder
from cuda_kernels.device.sm90 import (
    SMEM_DESC_K_MAJOR_SW128,
    address_of,
    cluster_rank,
    cluster_start,
    cluster_sync,
    elect_sync,
    fence_mbarrier_init,
    grid_constant_params,
    in_clusters_of,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_arrive_remote,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_or_trap,
    prefetch_tensormap,
    shfl_sync_0,
    syncwarp,
    tma_load,
    tma_load_multicast,
    tma_store_wait,
    warpgroup_reg_alloc,
    warpgroup_reg_dealloc,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.gemm.epilogue import leaver
from cuda_kernels.gemm.promotion import adder, reads_ahead, scales_of_blocks, scales_of_place, steps_at_once
from cuda_kernels.gemm.raster import corner
from cuda_kernels.gemm.spec import Product, Scaling, Tile, places
from cuda_kernels.kernel import Kernel

TRAP_VARIABLE = "LIGHTNING_FP8_TRAP"
"""Environment variable: with 1, a barrier that nobody completes is an error of the card, and no hang."""

_K = 128
"""Bytes of a row in shared memory: the width of the swizzle, and the products of one scale."""
_WARPS = 4
"""Of a warpgroup."""
_PRODUCERS_REGISTERS = 56
_REGISTERS = 224


@cache
def gemm_kernel(product: Product, tile: Tile) -> Kernel:
    """``out [m, n]``, blocks taking every n-th tile; see :class:`Product` and :class:`Tile`.

    Parameters are tensor maps of A, B, out and both scales; the addresses of both scales, bias, the largest magnitude
    seen and out; the pitches of out's rows and of B's scales; m, n and k. What there is none of is 0, or A's map.
    """
    scaling, promote = product.scaling, product.promote
    groups, waves, columns, stages, cluster = tile.groups, tile.waves, tile.columns, tile.stages, tile.cluster
    alternate = tile.alternate
    sharing = tile.sharing
    taking_turns = tile.groups // tile.sharing
    rows = tile.rows
    count = columns // 2
    last_stage = stages - 1
    at = places(tile, scaling)
    a_bytes = rows * _K
    b_bytes = columns * _K
    arriving = a_bytes + b_bytes
    arriving += 4 * rows if scaling.along_k else 0
    arriving += 4 * columns if scaling is Scaling.BLOCKS else 0
    at_b, at_scale_a, at_scale_b, at_full, at_empty, at_turn = (
        at[name] for name in ("b", "scale_a", "scale_b", "full", "empty", "turn")
    )
    share_a, share_b = tile.shares_a and cluster > 1, not tile.shares_a and cluster > 1
    a_part, b_part = rows // (cluster if share_a else 1), columns // (cluster if share_b else 1)
    unit_rows = rows * (cluster if share_b else 1)
    unit_columns = columns * (cluster if share_a else 1)
    everyone = (1 << cluster) - 1
    releases = sharing * cluster * (4 if scaling.along_k else 1)
    zero = zeros(count)
    multiply = wgmma(columns, product.a, product.b)
    finish, finish_older = wgmma_wait(count, 0), wgmma_wait(count, 1)
    leave = leaver(product, tile)
    staged = tile.staged
    along_k = scaling.along_k
    by_row = scaling is Scaling.ROW
    by_block = scaling is Scaling.BLOCK
    by_blocks = scaling is Scaling.BLOCKS
    read = scales_of_place(product, tile)
    plus = adder(product, tile)
    early = reads_ahead(product, tile)
    load_blocks, block_of = scales_of_blocks(columns)
    window = steps_at_once(scaling)
    in_clusters = in_clusters_of(cluster)
    two_waves = waves == 2
    traps = os.environ.get(TRAP_VARIABLE) == "1"
    wait = mbarrier_wait_or_trap if traps else mbarrier_wait

    @device
    def following(place, parity):
        """The next place in the ring, and its round's parity."""
        if place == last_stage:
            return i32(0), i32(parity ^ 1)
        return i32(place + 1), parity

    @device
    def after(place, parity, steps):
        """The place so many steps on."""
        there = i32(place + steps)
        return remainder(there, i32(stages)), i32((parity ^ quotient(there, i32(stages))) & 1)

    @device
    def corner_of(unit, m_units, n_units, rank):
        """The first row and column of this block's tile."""
        i, j = corner(unit, m_units, n_units)
        row, column = i * unit_rows, j * unit_columns
        if share_b:
            row += rank * rows
        if share_a:
            column += rank * columns
        return row, column

    @device
    def release(smem, place, thread):
        """This warpgroup is done with a place, here and in the other blocks that write to it.

        One thread knows of all that the warpgroup's products are done, but not that other warps have read their scales.
        """
        empty = smem + at_empty + 8 * place
        arriving_thread = thread
        if along_k:
            syncwarp()
            arriving_thread = thread & 31
        if cluster == 1:
            if arriving_thread == 0:
                mbarrier_arrive(empty)
        elif arriving_thread < cluster:
            mbarrier_arrive_remote(empty, arriving_thread)

    @device
    def step_of(acc, x, y, keep):
        """``acc`` plus the products of one step, which are on their way."""
        acc = multiply(acc, x, y, keep)
        acc = multiply(acc, x + 2, y + 2, 1)
        acc = multiply(acc, x + 4, y + 4, 1)
        acc = multiply(acc, x + 6, y + 6, 1)
        wgmma_commit()
        return acc

    @device
    def promoted(acc, other, part, smem, x, y, place, line, held, step, column, thread):
        """``acc``, and of a second wave ``other``, plus the products of one step, which are in ``part`` meanwhile."""
        scales = read(smem, place, line)
        scale = (np.float32(1), np.float32(1))
        wgmma_fence()
        part = finish(step_of(part, x, y, 0))
        if by_block:
            scale = block_of(held, step)
        if two_waves:
            scales_below = read(smem, place, line + 64)
            acc = plus(acc, part, scales, scale, column)
            wgmma_fence()
            part = finish(step_of(part, x + (64 * _K >> 4), y, 0))
        if early:
            release(smem, place, thread)
        if two_waves:
            other = plus(other, part, scales_below, scale, column)
        else:
            acc = plus(acc, part, scales, scale, column)
        if not early:
            release(smem, place, thread)
        return acc, other, part

    @device
    def produce(smem, maps, unit, units, m_units, n_units, steps, rank):
        map_a, map_b, _, map_scale_a, map_scale_b = maps
        place, parity = i32(0), i32(0)
        while unit < units:
            row, column = corner_of(unit, m_units, n_units, rank)
            for step in range(steps):
                full = smem + at_full + 8 * place
                a = smem + place * a_bytes
                b = smem + at_b + place * b_bytes
                wait(smem + at_empty + 8 * place, parity ^ 1)
                mbarrier_arrive_expect_tx(full, arriving)
                if share_a:
                    start = rank * a_part
                    tma_load_multicast(a + start * _K, map_a, full, step * _K, row + start, everyone)
                else:
                    tma_load(a, map_a, full, step * _K, row)
                if share_b:
                    start = rank * b_part
                    tma_load_multicast(b + start * _K, map_b, full, step * _K, column + start, everyone)
                else:
                    tma_load(b, map_b, full, step * _K, column)
                if along_k:
                    tma_load(smem + at_scale_a + place * (4 * rows), map_scale_a, full, row, step)
                if by_blocks:
                    tma_load(smem + at_scale_b + place * (4 * columns), map_scale_b, full, column, step)
                place, parity = following(place, parity)
            unit += quotient(cuda.gridDim.x, i32(cluster))

    @device
    def consume(
        smem, maps, scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n,
        unit, units, m_units, n_units, steps, rank, group,
    ):  # fmt: skip
        thread = cuda.threadIdx.x & 127
        lane = thread & 31
        warp = shfl_sync_0(thread >> 5)
        turn = group
        place, parity = i32(0), i32(0)
        mine = group * (64 * waves)  # the group's first row in the tile
        if alternate:
            place, parity = after(place, parity, group * steps)
            mine = 0
            unit = unit + group * quotient(cuda.gridDim.x, i32(cluster))
        elif group == 1 and unit < units:
            wait(smem + at_full + 8 * (min(steps, stages) - 1), 0)
        line = mine + warp * 16 + (lane >> 2)
        both = np.float32(1)
        if not along_k and not by_row:
            both = load_f32(scale_a) * load_f32(scale_b)
        factors = both, scale_a, scale_b, bias, seen
        held = (u32(0), u32(0))
        next_column = 0
        ahead = held
        if by_block:
            ahead = load_blocks(scale_b, scale_b_pitch, corner_of(unit, m_units, n_units, rank)[1], n, 0, steps)
        while unit < units:
            row, column = corner_of(unit, m_units, n_units, rank)
            row += mine
            unit += taking_turns * quotient(cuda.gridDim.x, i32(cluster))
            if by_block:
                next_column = corner_of(min(unit, units - 1), m_units, n_units, rank)[1]
            acc, other, part = zero(), zero(), zero()
            if alternate:  # the first tile is the first group's at once
                wait(smem + at_turn + 8 * group, (turn & 1) ^ 1)
                turn += 1
            older = place
            for first in range(i32(0), steps, i32(window)):
                if by_block:
                    held = ahead
                    last = first + window >= steps
                    ahead = load_blocks(
                        scale_b, scale_b_pitch, next_column if last else column, n, 0 if last else first + window, steps
                    )
                for step in range(first, min(i32(first + window), steps)):
                    wait(smem + at_full + 8 * place, parity)
                    x = SMEM_DESC_K_MAJOR_SW128 | (((smem + place * a_bytes + mine * _K) & 0x3FFFF) >> 4)
                    y = SMEM_DESC_K_MAJOR_SW128 | (((smem + at_b + place * b_bytes) & 0x3FFFF) >> 4)
                    if promote:
                        acc, other, part = promoted(
                            acc, other, part, smem, x, y, place, line, held, step, column, thread
                        )  # fmt: skip
                    else:
                        wgmma_fence()
                        acc = finish_older(step_of(acc, x, y, step))
                        if step > 0:
                            release(smem, older, thread)
                    older = place
                    place, parity = following(place, parity)
            if alternate and lane == 0:  # each warp: products join the threads of a warp, not those of a warpgroup
                mbarrier_arrive(smem + at_turn + 8 * (group ^ 1))
            if not promote:
                acc = finish(acc)
                release(smem, older, thread)
            leave(acc, smem, maps[2], out, out_pitch, factors, group, thread, row, m, column, n)
            if two_waves:
                leave(other, smem, maps[2], out, out_pitch, factors, group, thread, row + 64, m, column, n)
            if alternate:
                place, parity = after(place, parity, steps)
        if staged and thread == 0:
            tma_store_wait(0)

    def gemm(
        map_a, map_b, map_out, map_scale_a, map_scale_b,
        scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n, k,
    ):  # fmt: skip
        grid_constant_params()
        if cluster > 1:
            in_clusters()
        of_scales = address_of(map_scale_a), address_of(map_scale_b)
        maps = address_of(map_a), address_of(map_b), address_of(map_out), of_scales[0], of_scales[1]
        smem = dynamic_shared()
        group, warp = shfl_sync_0(cuda.threadIdx.x >> 7), shfl_sync_0(cuda.threadIdx.x >> 5)
        rank = cluster_rank() if cluster > 1 else 0
        if cuda.threadIdx.x == 0:
            prefetch_tensormap(maps[0])
            prefetch_tensormap(maps[1])
            if staged:
                prefetch_tensormap(maps[2])
            if along_k:
                prefetch_tensormap(maps[3])
            if by_blocks:
                prefetch_tensormap(maps[4])
            for stage in range(stages):
                mbarrier_init(smem + at_full + 8 * stage, 1)
                mbarrier_init(smem + at_empty + 8 * stage, releases)
            if alternate:
                mbarrier_init(smem + at_turn, _WARPS)
                mbarrier_init(smem + at_turn + 8, _WARPS)
            fence_mbarrier_init()
        if cluster > 1:
            cluster_start()
        else:
            cuda.syncthreads()
        m_units, n_units = quotient(m + (unit_rows - 1), unit_rows), quotient(n + (unit_columns - 1), unit_columns)
        units = m_units * n_units
        steps = quotient(k + (_K - 1), _K)
        unit = quotient(cuda.blockIdx.x, cluster)
        if group == groups:
            warpgroup_reg_dealloc(_PRODUCERS_REGISTERS)
            if warp == 4 * groups and elect_sync():
                produce(smem, maps, unit, units, m_units, n_units, steps, rank)
        else:
            warpgroup_reg_alloc(_REGISTERS)
            consume(
                smem, maps, scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n,
                unit, units, m_units, n_units, steps, rank, group,
            )  # fmt: skip
        if cluster > 1:
            cluster_sync()  # another block may still write to this one's shared memory

    return Kernel(
        f"gemm({product}, {tile}{' trap' * traps})",
        gemm,
        (*[tensor_map] * 5, *[i64] * 7, i32, i32, i32),
        tile.threads,
        shared_bytes=at["end"],
        cluster=cluster,
        architectures=("90a",),
    )
