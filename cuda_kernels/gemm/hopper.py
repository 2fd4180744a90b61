"""The product on Hopper: copies by the tensor memory accelerator, multiplied by warpgroups, in persistent blocks.

One warp of a block, the producer, copies 128 bytes of each row of A and B at a time to a ring of places in shared
memory; the other warpgroups multiply them. Two barriers guard each place: ``full`` counts the bytes that arrived,
``empty`` the warpgroups that are done with it. Step ``t`` of a block has place ``t mod stages`` in the ring's round
``t div stages``, and the round's parity is that of the barriers. Where warpgroups alternate, barrier ``turn`` of each
says that the other has multiplied its tile: the parity of a place is only that of the round before, or of this.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from cuda_kernels.codec import device
from cuda_kernels.gemm.epilogue import leaver
from cuda_kernels.gemm.product import Product, Scaling, Tile, places
from cuda_kernels.gemm.raster import corner
from cuda_kernels.hopper import (
    K_MAJOR_128,
    address_of,
    barrier_arrive,
    barrier_arrive_at,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    broadcast,
    cluster_rank,
    cluster_sync,
    elect,
    fewer_registers,
    in_clusters_of,
    maps_by_value,
    more_registers,
    store_wait,
    tensor_load,
    tensor_load_to_all,
    tensor_map,
    warp_sync,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.launch import Kernel
from cuda_kernels.ptx import (
    dynamic_shared,
    from_bits,
    i32,
    i64,
    load_4_if,
    load_f32,
    quotient,
    shared_load_4,
)
from cuda_kernels.registers import (
    add,
    add_rows,
    add_rows_and_columns,
    zeros,
)

_K = 128
"""Bytes of a row in shared memory: the width of the swizzle, and the products of one scale."""
_PRODUCERS_REGISTERS, _REGISTERS = 56, 224


@cache
def gemm_kernel(product: Product, tile: Tile) -> Kernel:
    """``out [m, n]``, blocks taking every n-th tile; see :class:`Product` and :class:`Tile`.

    Parameters are tensor maps of A, B, out and both scales; the addresses of both scales, bias, the largest magnitude
    seen and out; the pitches of out's rows and of B's scales; m, n and k. What there is none of is 0, or A's map.
    """
    scaling, promote = product.scaling, product.promote or product.scaling.along_k
    groups, waves, columns, stages, cluster = tile.groups, tile.waves, tile.columns, tile.stages, tile.cluster
    alternate, taking_turns = tile.alternate, tile.groups // tile.sharing
    rows, count, last_stage, log = tile.rows, columns // 2, stages - 1, stages.bit_length() - 1
    at = places(tile, scaling)
    a_bytes, b_bytes = rows * _K, columns * _K
    arriving = a_bytes + b_bytes
    arriving += 4 * rows if scaling.along_k else 0
    arriving += 4 * columns if scaling is Scaling.BLOCKS else 0
    at_b, at_scale_a, at_scale_b, at_full, at_empty, at_turn = (
        at[name] for name in ("b", "scale_a", "scale_b", "full", "empty", "turn")
    )
    share_a, share_b = tile.shares_a and cluster > 1, not tile.shares_a and cluster > 1
    a_part, b_part = rows // (cluster if share_a else 1), columns // (cluster if share_b else 1)
    unit_rows, unit_columns = rows * (cluster if share_b else 1), columns * (cluster if share_a else 1)
    everyone, releases = (1 << cluster) - 1, tile.sharing * cluster * (4 if scaling.along_k else 1)
    zero, multiply = zeros(count), wgmma(columns, product.a, product.b)
    finish, finish_older = wgmma_wait(count, 0), wgmma_wait(count, 1)
    plus, plus_rows, plus_both = add(count), add_rows(count), add_rows_and_columns(count)
    leave, staged, along_k = leaver(product, tile), tile.staged, scaling.along_k
    by_row, by_block, by_blocks = scaling is Scaling.ROW, scaling is Scaling.BLOCK, scaling is Scaling.BLOCKS
    in_clusters = in_clusters_of(cluster)
    two_waves = waves == 2

    @device
    def release(empty, t, thread):
        """This warpgroup is done with the place of step ``t``, here and in the other blocks that write to it.

        One thread knows of all that the warpgroup's products are done, but not that other warps have read their scales.
        """
        place = empty + 8 * (t & last_stage)
        arriving_thread = thread
        if along_k:
            warp_sync()
            arriving_thread = thread & 31
        if cluster == 1:
            if arriving_thread == 0:
                barrier_arrive(place)
        elif arriving_thread < cluster:
            barrier_arrive_at(place, arriving_thread)

    @device
    def produce(smem, maps, unit, units, m_units, n_units, steps, rank):
        map_a, map_b, _, map_scale_a, map_scale_b = maps
        t = 0
        while unit < units:
            i, j = corner(unit, m_units, n_units)
            row, column = i * unit_rows, j * unit_columns
            if share_b:
                row += rank * rows
            if share_a:
                column += rank * columns
            for step in range(steps):
                place = t & last_stage
                full, a, b = smem + at_full + 8 * place, smem + place * a_bytes, smem + at_b + place * b_bytes
                barrier_wait(smem + at_empty + 8 * place, ((t >> log) & 1) ^ 1)
                barrier_expect(full, arriving)
                if share_a:
                    start = rank * a_part
                    tensor_load_to_all(a + start * _K, map_a, full, step * _K, row + start, everyone)
                else:
                    tensor_load(a, map_a, full, step * _K, row)
                if share_b:
                    start = rank * b_part
                    tensor_load_to_all(b + start * _K, map_b, full, step * _K, column + start, everyone)
                else:
                    tensor_load(b, map_b, full, step * _K, column)
                if along_k:
                    tensor_load(smem + at_scale_a + place * (4 * rows), map_scale_a, full, row, step)
                if by_blocks:
                    tensor_load(smem + at_scale_b + place * (4 * columns), map_scale_b, full, column, step)
                t += 1
            unit += quotient(cuda.gridDim.x, i32(cluster))

    @device
    def promoted(acc, part, smem, x, y, place, line, scale):
        """``acc`` plus the products of one step, and these; ``line``: this thread's first row in the tile."""
        part = multiply(part, x, y, 0)
        part = multiply(part, x + 2, y + 2, 1)
        part = multiply(part, x + 4, y + 4, 1)
        part = multiply(part, x + 6, y + 6, 1)
        wgmma_commit()
        part = finish(part)
        if not along_k:
            return plus(acc, part), part
        scales = smem + at_scale_a + (place * rows + line) * 4
        s, u = from_bits(shared_load_4(scales)), from_bits(shared_load_4(scales + 32))
        if by_block:
            return plus_rows(acc, part, s * scale, u * scale), part
        of_columns = smem + at_scale_b + place * (4 * columns) + 8 * (cuda.threadIdx.x & 3)
        return plus_both(acc, part, s, u, of_columns), part

    @device
    def consume(
        smem, maps, scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n,
        unit, units, m_units, n_units, steps, rank, group,
    ):  # fmt: skip
        thread = cuda.threadIdx.x & 127
        lane, warp, t, turn = thread & 31, broadcast(thread >> 5), 0, group
        mine = group * (64 * waves)  # the group's first row in the tile
        if alternate:
            mine, t, unit = 0, group * steps, unit + group * quotient(cuda.gridDim.x, i32(cluster))
        line = mine + warp * 16 + (lane >> 2)
        both = np.float32(1)
        if not along_k and not by_row:
            both = load_f32(scale_a) * load_f32(scale_b)
        factors = both, scale_a, scale_b, bias, seen
        while unit < units:
            i, j = corner(unit, m_units, n_units)
            row, column = i * unit_rows + mine, j * unit_columns
            if share_b:
                row += rank * rows
            if share_a:
                column += rank * columns
            acc, other, part = zero(), zero(), zero()
            of_block = scale_b + i64(column >> 7) * scale_b_pitch * 4
            if alternate:  # the first tile is the first group's at once
                barrier_wait(smem + at_turn + 8 * group, (turn & 1) ^ 1)
                turn += 1
            for step in range(steps):
                place = t & last_stage
                scale = np.float32(1)
                if by_block:
                    scale = from_bits(load_4_if(of_block + i64(step) * 4, column < n))
                barrier_wait(smem + at_full + 8 * place, (t >> log) & 1)
                x = K_MAJOR_128 | ((smem + place * a_bytes + mine * _K) >> 4)
                y = K_MAJOR_128 | ((smem + at_b + place * b_bytes) >> 4)
                wgmma_fence()
                if promote:
                    acc, part = promoted(acc, part, smem, x, y, place, line, scale)
                    if two_waves:
                        wgmma_fence()
                        other, part = promoted(other, part, smem, x + (64 * _K >> 4), y, place, line + 64, scale)
                    release(smem + at_empty, t, thread)
                else:
                    acc = multiply(acc, x, y, step)
                    acc = multiply(acc, x + 2, y + 2, 1)
                    acc = multiply(acc, x + 4, y + 4, 1)
                    acc = multiply(acc, x + 6, y + 6, 1)
                    wgmma_commit()
                    acc = finish_older(acc)
                    if step > 0:
                        release(smem + at_empty, t - 1, thread)
                t += 1
            if alternate and thread == 0:
                barrier_arrive(smem + at_turn + 8 * (group ^ 1))
            if not promote:
                acc = finish(acc)
                if steps > 0:
                    release(smem + at_empty, t - 1, thread)
            leave(acc, smem, maps[2], out, out_pitch, factors, group, thread, row, m, column, n)
            if two_waves:
                leave(other, smem, maps[2], out, out_pitch, factors, group, thread, row + 64, m, column, n)
            if alternate:
                t += steps
            unit += taking_turns * quotient(cuda.gridDim.x, i32(cluster))
        if staged and thread == 0:
            store_wait(0)

    def gemm(
        map_a, map_b, map_out, map_scale_a, map_scale_b,
        scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n, k,
    ):  # fmt: skip
        maps_by_value()
        if cluster > 1:
            in_clusters()
        of_scales = address_of(map_scale_a), address_of(map_scale_b)
        maps = address_of(map_a), address_of(map_b), address_of(map_out), of_scales[0], of_scales[1]
        smem = dynamic_shared()
        group, warp = broadcast(cuda.threadIdx.x >> 7), broadcast(cuda.threadIdx.x >> 5)
        rank = cluster_rank() if cluster > 1 else 0
        if cuda.threadIdx.x == 0:
            for stage in range(stages):
                barrier_init(smem + at_full + 8 * stage, 1)
                barrier_init(smem + at_empty + 8 * stage, releases)
            if alternate:
                barrier_init(smem + at_turn, 1)
                barrier_init(smem + at_turn + 8, 1)
            barrier_init_fence()
        if cluster > 1:
            cluster_sync()
        else:
            cuda.syncthreads()
        m_units, n_units = quotient(m + (unit_rows - 1), unit_rows), quotient(n + (unit_columns - 1), unit_columns)
        units, steps = m_units * n_units, quotient(k + (_K - 1), _K)
        unit = quotient(cuda.blockIdx.x, cluster)
        if group == groups:
            fewer_registers(_PRODUCERS_REGISTERS)
            if warp == 4 * groups and elect():
                produce(smem, maps, unit, units, m_units, n_units, steps, rank)
        else:
            more_registers(_REGISTERS)
            consume(
                smem, maps, scale_a, scale_b, bias, seen, out, out_pitch, scale_b_pitch, m, n,
                unit, units, m_units, n_units, steps, rank, group,
            )  # fmt: skip
        if cluster > 1:
            cluster_sync()  # another block may still write to this one's shared memory

    return Kernel(
        f"gemm({product}, {tile})",
        gemm,
        (*[tensor_map] * 5, *[i64] * 7, i32, i32, i32),
        tile.threads,
        shared_bytes=at["end"],
        cluster=cluster,
        architectures=("90a",),
    )
