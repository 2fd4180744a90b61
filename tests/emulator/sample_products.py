"""Products compiled for the tests of the emulator: one for Hopper, one for older and newer GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from tests.emulator.sample_instructions import (
    K_MAJOR,
    ROW,
    add_registers,
    address_of_map,
    asm,
    barrier_arrive,
    barrier_expect,
    barrier_fence,
    barrier_init,
    barrier_wait,
    broadcast,
    by_value,
    cluster_rank,
    cluster_sync,
    copy_async,
    copy_commit,
    copy_wait,
    elect,
    fewer_registers,
    load_matrices,
    mma,
    more_registers,
    multiply_tiles,
    named_barrier,
    pack_bf16,
    proxy_fence,
    quotient,
    registers,
    shared_address,
    store_commit,
    store_matrices,
    store_pair,
    store_wait,
    tensor_load,
    tensor_load_to_all,
    tensor_map,
    tensor_store,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait_older,
    zero_registers,
)
from tests.emulator.samples import compiled, f32, i32, i64, u32, void


@cache
def hopper_gemm(n_tile: int, cluster: int, split: bool = False) -> tuple[str, int, int]:
    """D = s A Bᵀ, of FP8 A [m, k] and B [n, k], in bfloat16. Gives PTX, threads of a block, bytes of shared memory.

    Persistent blocks of 128 x `n_tile` tiles. One warp copies tiles to a ring of four places in shared memory, two
    warpgroups multiply them, 64 rows each. `full` barriers count the bytes that arrived at a place, `empty` ones the
    warpgroups that are done with it. Blocks of a cluster share B: each loads a part of it for all. With `split`, the
    tensor cores sum 128 products at a time, and the partial sums are added in float32.
    """
    stages, a_bytes, b_bytes = 4, 128 * ROW, n_tile * ROW
    b_rows, everyone = n_tile // cluster, (1 << cluster) - 1
    b_part, words_count, count = b_rows * ROW, n_tile // 4, n_tile // 2
    out_bytes = 64 * 256
    out_start = stages * (a_bytes + b_bytes)
    full_start = out_start + 2 * out_bytes
    empty_start = full_start + 8 * stages
    halves = n_tile // 128

    zeros, multiply, add = zero_registers(count), multiply_tiles(n_tile), add_registers(count)
    finish = asm("wgmma.wait_group.sync.aligned 0;", registers(count), registers(count))
    packed = pack_bf16(count, types.Array(u32, 1, "C"))

    def gemm(map_a: Any, map_b: Any, map_d: Any, scale: Any, m: Any, n: Any, k: Any) -> None:
        by_value()
        a_map, b_map, d_map = address_of_map(map_a), address_of_map(map_b), address_of_map(map_d)
        smem = shared_address()
        full, empty = smem + full_start, smem + empty_start
        group, warp = broadcast(cuda.threadIdx.x >> 7), broadcast(cuda.threadIdx.x >> 5)
        rank = cluster_rank()
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                barrier_init(full + 8 * s, 1)
                barrier_init(empty + 8 * s, 2 * cluster)
            barrier_fence()
        cluster_sync()

        m_tiles, n_tiles = quotient(m + 128 * cluster - 1, 128 * cluster), quotient(n + n_tile - 1, n_tile)
        steps = quotient(k + ROW - 1, ROW)
        tile, step = quotient(cuda.blockIdx.x, cluster), 0
        if group == 2:
            fewer_registers()
            if warp == 8 and elect():
                while tile < m_tiles * n_tiles:
                    i = quotient(tile, n_tiles)
                    row, column = (i * cluster + rank) * 128, (tile - i * n_tiles) * n_tile
                    for kk in range(steps):
                        place, turn = step & 3, (step >> 2) & 1
                        ready = full + 8 * place
                        barrier_wait(empty + 8 * place, turn ^ 1)
                        barrier_expect(ready, a_bytes + b_bytes)
                        tensor_load(smem + place * a_bytes, a_map, ready, kk * ROW, row)
                        b = smem + stages * a_bytes + place * b_bytes + rank * b_part
                        tensor_load_to_all(b, b_map, ready, kk * ROW, column + rank * b_rows, everyone)
                        step += 1
                    tile += quotient(cuda.gridDim.x, cluster)
        else:
            more_registers()
            thread, lane = cuda.threadIdx.x & 127, cuda.threadIdx.x & 31
            out = smem + out_start + group * out_bytes
            line = (warp & 3) * 16 + (lane & 15)
            words = cuda.local.array(words_count, u32)
            while tile < m_tiles * n_tiles:
                acc = zeros()
                for kk in range(steps):
                    place, turn = step & 3, (step >> 2) & 1
                    barrier_wait(full + 8 * place, turn)
                    x = K_MAJOR | (((smem + place * a_bytes + group * (64 * ROW)) & 0x3FFFF) >> 4)
                    y = K_MAJOR | (((smem + stages * a_bytes + place * b_bytes) & 0x3FFFF) >> 4)
                    wgmma_fence()
                    if split:
                        part = multiply(zeros(), x, y, 0)
                        part = multiply(part, x + 2, y + 2, 1)
                        part = multiply(part, x + 4, y + 4, 1)
                        part = multiply(part, x + 6, y + 6, 1)
                        wgmma_commit()
                        acc = add(acc, finish(part))
                        if thread < cluster:
                            barrier_arrive(empty + 8 * place, thread)
                    else:
                        acc = multiply(acc, x, y, kk)
                        acc = multiply(acc, x + 2, y + 2, 1)
                        acc = multiply(acc, x + 4, y + 4, 1)
                        acc = multiply(acc, x + 6, y + 6, 1)
                        wgmma_commit()
                        wgmma_wait_older()
                        if kk > 0 and thread < cluster:
                            barrier_arrive(empty + 8 * ((step - 1) & 3), thread)
                    step += 1
                if not split:
                    acc = finish(acc)
                    if thread < cluster:
                        barrier_arrive(empty + 8 * ((step - 1) & 3), thread)

                packed(acc, scale[0], words)
                i = quotient(tile, n_tiles)
                row, column = (i * cluster + rank) * 128 + group * 64, (tile - i * n_tiles) * n_tile
                for half in range(halves):
                    if thread == 0:
                        store_wait()
                    named_barrier(1 + group, 128)
                    for c in range(8):
                        chunk = ((c & 3) * 2 + (lane >> 4)) ^ (line & 7)
                        w = half * 32 + c * 4
                        target = out + (c >> 2) * 8192 + line * 128 + chunk * 16
                        store_matrices(target, words[w], words[w + 1], words[w + 2], words[w + 3])
                    proxy_fence()
                    named_barrier(1 + group, 128)
                    if thread == 0:
                        tensor_store(d_map, out, column + half * 128, row)
                        tensor_store(d_map, out + 8192, column + half * 128 + 64, row)
                        store_commit()
                tile += quotient(cuda.gridDim.x, cluster)
            if thread == 0:
                store_wait()
        if cluster > 1:
            cluster_sync()

    arguments = void(tensor_map, tensor_map, tensor_map, types.CPointer(f32), i32, i32, i32)
    return compiled(gemm, arguments, 384, "sm_90a"), 384, empty_start + 8 * stages


@cache
def mma_gemm(target: str) -> tuple[str, int, int]:
    """D = A Bᵀ, of FP8 A [m, k] and B [n, k], in float32. Gives PTX, threads of a block, bytes of shared memory.

    A block of four warps has a 32 x 32 tile: each warp 16 x 16 of it, 64 of k at a time.
    """
    pitch, rows = 80, 32

    def gemm(a: Any, b: Any, d: Any, m: Any, n: Any, k: Any) -> None:
        smem = shared_address()
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row0, column0 = cuda.blockIdx.y * rows, cuda.blockIdx.x * rows
        r, q = thread >> 2, (thread & 3) * 16
        acc = cuda.local.array(8, f32)
        for j in range(8):
            acc[j] = f32(0)
        for k0 in range(0, k, 64):
            a_inside = 16 if row0 + r < m and k0 + q < k else 0
            b_inside = 16 if column0 + r < n and k0 + q < k else 0
            copy_async(smem + r * pitch + q, a + (row0 + r) * k + k0 + q, a_inside)
            copy_async(smem + (rows + r) * pitch + q, b + (column0 + r) * k + k0 + q, b_inside)
            copy_commit()
            copy_wait()
            cuda.syncthreads()
            line, half = lane & 15, (lane >> 4) * 16
            for kk in range(0, 64, 32):
                x = load_matrices(smem + ((warp & 1) * 16 + line) * pitch + kk + half)
                y = load_matrices(smem + (rows + (warp >> 1) * 16 + line) * pitch + kk + half)
                c = mma(acc[0], acc[1], acc[2], acc[3], x[0], x[1], x[2], x[3], y[0], y[2])
                acc[0], acc[1], acc[2], acc[3] = c[0], c[1], c[2], c[3]
                c = mma(acc[4], acc[5], acc[6], acc[7], x[0], x[1], x[2], x[3], y[1], y[3])
                acc[4], acc[5], acc[6], acc[7] = c[0], c[1], c[2], c[3]
            cuda.syncthreads()
        for j in range(2):
            for h in range(2):
                row = row0 + (warp & 1) * 16 + (lane >> 2) + 8 * h
                column = column0 + (warp >> 1) * 16 + 8 * j + (lane & 3) * 2
                if row < m and column < n:
                    store_pair(d + (row * n + column) * 4, acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1])

    return compiled(gemm, void(i64, i64, i64, i32, i32, i32), 128, target), 128, 2 * rows * pitch
