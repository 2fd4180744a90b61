"""The epilogue of both GEMMs: scales and bias of the accumulator, rounded and stored."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import (
    add_columns,
    scale_all,
    scale_columns,
    scale_rows,
    slice_fragment,
    store_fragment_global,
)
from cuda_kernels.device.language import device, i32, i64
from cuda_kernels.device.ptx import from_bits, load_4_if, shared_load_16, store_16
from cuda_kernels.device.sm90 import (
    fence_proxy_async_shared,
    named_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from cuda_kernels.device.swizzle import ROW_BYTES, make_swizzled_store, swizzle_128b
from cuda_kernels.gemm.spec import EPI_TILE_BYTES, GemmConfig, GemmSpec, Scaling, epi_tile_columns, smem_offsets
from cuda_kernels.kernel import KernelError


@cache
def make_epilogue(spec: GemmSpec, num_registers: int, even: bool) -> Any:
    """A device function ``(acc, epi_args, frag_row, m, frag_col, n) -> acc``: scales and bias.

    ``epi_args``: the product of both tensor scales; the addresses of A's scales, B's scales and bias.
    ``frag_row``, ``frag_col``: position of the thread's first register in the result.
    """
    if spec.scaling is Scaling.TENSOR:
        scale_by_one = scale_all(num_registers)
        scale = device(lambda acc, epi_args, frag_row, m, frag_col, n: scale_by_one(acc, epi_args[0]))
    elif spec.scaling is Scaling.ROW:
        scale = _make_row_scaler(num_registers, even, spec.grouped)
    elif spec.scaling.along_k:
        scale = device(lambda acc, epi_args, frag_row, m, frag_col, n: acc)
    else:
        raise KernelError(f"{spec.scaling} has scales that neither a K iteration nor the epilogue applies")
    if not spec.bias_dtype:
        return scale
    add = add_columns(num_registers, spec.bias_dtype, even)

    @device
    def scale_and_add(acc, epi_args, frag_row, m, frag_col, n):
        return add(scale(acc, epi_args, frag_row, m, frag_col, n), epi_args[3], frag_col, n)

    return scale_and_add


def _make_row_scaler(num_registers: int, even: bool, grouped: bool) -> Any:
    scale_by_rows = scale_rows(num_registers)
    scale_by_columns = scale_columns(num_registers, even)

    @device
    def scale_rows_and_columns(acc, epi_args, frag_row, m, frag_col, n):
        _, scale_inv_a, scale_inv_b, _ = epi_args
        if grouped and scale_inv_a == 0:  # rows of no group
            m, n = i32(0), i32(0)
        above = from_bits(load_4_if(scale_inv_a + i64(frag_row) * 4, frag_row < m))
        below = from_bits(load_4_if(scale_inv_a + i64(frag_row + 8) * 4, frag_row + 8 < m))
        return scale_by_columns(scale_by_rows(acc, above, below), scale_inv_b, frag_col, n)

    return scale_rows_and_columns


@cache
def make_epilogue_store(spec: GemmSpec, config: GemmConfig) -> Any:
    """A device function that applies the epilogue to 64 rows of a warpgroup and stores them.

    It is ``(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n)``.
    ``wg_thread``: the thread's index in its warpgroup. ``tile_col``: the tile's first column.
    """
    if config.smem_epilogue:
        return _make_smem_store(0, spec, config)
    num_registers = config.tile_n // 2
    finish = make_epilogue(spec, num_registers, config.even)
    store = store_fragment_global(num_registers, spec.out_dtype, config.even, spec.accumulate)

    @device
    def epilogue_store(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n):
        lane = wg_thread & 31
        frag_row = first_row + (wg_thread >> 5) * 16 + (lane >> 2)
        frag_col = tile_col + 2 * (lane & 3)
        store(finish(acc, epi_args, frag_row, m, frag_col, n), out, out_stride, frag_row, m, frag_col, n)

    return epilogue_store


def _make_smem_store(epi_tile: int, spec: GemmSpec, config: GemmConfig) -> Any:
    """:func:`make_epilogue_store` through shared memory, one epilogue tile of 128-byte rows after another."""
    columns = epi_tile_columns(spec.out_dtype)
    epi_tiles, start, num_registers = config.tile_n // columns, epi_tile * columns, columns // 2
    buffers = config.epi_stages
    is_last = epi_tile == epi_tiles - 1
    buffer_idx = epi_tile % buffers
    # The first epilogue tile may use the same buffer as the previous tile's last one, and then waits for all stores.
    drain_first = epi_tiles % buffers > 0
    pending_stores = 0 if drain_first and epi_tile == 0 else buffers - 1
    waits = not drain_first or epi_tile == 0 or epi_tile >= buffers
    slice_epi_tile = slice_fragment(config.tile_n // 2, start // 2, num_registers)
    finish = make_epilogue(spec, num_registers, config.even)
    copy_r2s = make_swizzled_store(num_registers, spec.out_dtype)
    out_offset = smem_offsets(config, spec.scaling)["out"]
    copy = tma_reduce_add if spec.accumulate else tma_store
    grouped, log2_chunk = spec.grouped, 2 if spec.out_dtype == "float32" else 3  # elements of 16 bytes

    @device
    def store_rows(buffer, out, out_stride, wg_thread, first_row, m, first_col, n):
        """Store the rows before ``m`` of an epilogue tile; a box would cover rows of the next group."""
        for chunk_idx in range(wg_thread, EPI_TILE_BYTES >> 4, 128):
            row, chunk = chunk_idx >> 3, chunk_idx & 7
            col = first_col + (chunk << log2_chunk)
            if first_row + row < m and col < n:
                words = shared_load_16(i32(buffer + swizzle_128b(row, chunk)))
                address = out + ((i64(first_row + row) * out_stride + i64(col)) << (4 - log2_chunk))
                store_16(address, words[0], words[1], words[2], words[3])

    @device
    def epilogue_store(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n):
        lane, warp = wg_thread & 31, wg_thread >> 5
        buffer = smem + out_offset + (wg_idx * buffers + buffer_idx) * EPI_TILE_BYTES
        if waits:
            if wg_thread == 0:
                tma_store_wait(pending_stores)
            named_barrier(1 + wg_idx, 128)
        # Scales and bias are loaded per epilogue tile, because those of all tiles would not fit into registers.
        finished = finish(
            slice_epi_tile(acc), epi_args,
            first_row + warp * 16 + (lane >> 2), m, tile_col + (start + 2 * (lane & 3)), n,
        )  # fmt: skip
        copy_r2s(finished, buffer + warp * (16 * ROW_BYTES), lane)
        fence_proxy_async_shared()
        named_barrier(1 + wg_idx, 128)
        if grouped and first_row + 64 > m:
            store_rows(buffer, out, out_stride, wg_thread, first_row, m, tile_col + start, n)
        elif wg_thread == 0:
            copy(map_out, buffer, tile_col + start, first_row)
        if wg_thread == 0:
            tma_store_commit()

    if is_last:
        return epilogue_store
    store_rest = _make_smem_store(epi_tile + 1, spec, config)

    @device
    def store_epi_tiles(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n):
        epilogue_store(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n)
        store_rest(acc, smem, map_out, out, out_stride, epi_args, wg_idx, wg_thread, first_row, m, tile_col, n)

    return store_epi_tiles
