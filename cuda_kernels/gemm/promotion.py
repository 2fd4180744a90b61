"""Promoted accumulation: a tensor core sums at most 128 products; these partial sums are scaled and added in float32.

Each row of A has scales along K; each row of B may have, too. They are loaded with the operands into a pipeline stage,
and read before the wgmmas are issued if registers allow it: the stage can then be released once the wgmmas are done. If
B has 128x128 blocks, a tile needs one or two of their scales per K iteration. These are not in a stage: each lane loads
those of a different iteration, so that a warp has them for 32 iterations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import add, add_rows, add_rows_and_columns, add_rows_of_two, column_pairs
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import from_bits, load_4_if, shared_load_4, shuffle
from cuda_kernels.gemm.spec import (
    ACCUMULATORS,
    LOG2_SCALE_N,
    SCALE_N,
    GemmConfig,
    GemmSpec,
    Scaling,
    smem_offsets,
    stage_bytes,
)


def reads_scales_early(spec: GemmSpec, config: GemmConfig) -> bool:
    """Whether registers suffice to read all scales before the wgmmas; a direct store from registers needs some more."""
    col_scale_inv_registers = config.tile_n // 4 if spec.scaling.b_along_k_by_row else 0
    most = ACCUMULATORS if config.smem_epilogue else ACCUMULATORS - 40
    return config.tile_n // 2 * (config.waves + 1) + col_scale_inv_registers <= most


@cache
def stage_scale_reader(spec: GemmSpec, config: GemmConfig) -> Any:
    """A device function ``(smem, stage_idx, row_in_tile) -> scale_invs`` of a stage, for :func:`make_promote_add`.

    ``row_in_tile``: the row of this thread's first register.
    """
    offsets = smem_offsets(config, spec.scaling)
    of_stage = stage_bytes(config, spec.scaling)
    # Floats of A, but bytes of B: in these units ptxas reads the scales before the products are done.
    scale_inv_a_floats, scale_inv_b_bytes = of_stage.scale_inv_a // 4, of_stage.scale_inv_b
    scale_inv_a_offset, scale_inv_b_offset = offsets["scale_inv_a"], offsets["scale_inv_b"]
    if not spec.scaling.along_k:
        return device(lambda smem, stage_idx, row_in_tile: i32(0))

    @device
    def row_scale_invs(smem, stage_idx, row_in_tile):
        scale_invs = smem + scale_inv_a_offset + (stage_idx * scale_inv_a_floats + row_in_tile) * 4
        return from_bits(shared_load_4(scale_invs)), from_bits(shared_load_4(scale_invs + 4 * 8))

    @device
    def col_scale_inv_smem(smem, stage_idx):
        return i32(smem + scale_inv_b_offset + stage_idx * scale_inv_b_bytes + 8 * (cuda.threadIdx.x & 3))

    if spec.scaling.b_along_k_by_block:
        return row_scale_invs
    early = reads_scales_early(spec, config)
    col_scale_invs = column_pairs(config.tile_n // 2) if early else device(lambda address: address)

    @device
    def scale_invs_of_both(smem, stage_idx, row_in_tile):
        return row_scale_invs(smem, stage_idx, row_in_tile), col_scale_invs(col_scale_inv_smem(smem, stage_idx))

    return scale_invs_of_both


@cache
def make_promote_add(spec: GemmSpec, config: GemmConfig) -> Any:
    """A device function ``(acc, partial, scale_invs, block_scale_invs, tile_col)``: ``acc + partial * scale_invs``.

    ``block_scale_invs``: this iteration's, from :func:`block_scale_readers`; ``tile_col``: the tile's first column.
    """
    num_registers = config.tile_n // 2
    add_partial = add(num_registers)
    add_row_scaled = add_rows(num_registers)
    add_row_scaled_by_two = add_rows_of_two(num_registers)
    if not spec.scaling.along_k:
        return device(lambda acc, partial, scale_invs, block_scale_invs, tile_col: add_partial(acc, partial))
    if spec.scaling.b_along_k_by_row:
        add_row_col_scaled = add_rows_and_columns(num_registers, reads_scales_early(spec, config))
        return device(
            lambda acc, partial, scale_invs, block_scale_invs, tile_col: add_row_col_scaled(
                acc, partial, scale_invs[0][0], scale_invs[0][1], scale_invs[1]
            )
        )
    if SCALE_N % config.tile_n == 0:
        return device(
            lambda acc, partial, scale_invs, block_scale_invs, tile_col: add_row_scaled(
                acc, partial, scale_invs[0] * block_scale_invs[0], scale_invs[1] * block_scale_invs[0]
            )
        )

    @device
    def promote_add(acc, partial, scale_invs, block_scale_invs, tile_col):
        s, t = scale_invs
        first, second = block_scale_invs
        cols_in_first = i32(SCALE_N - (tile_col & (SCALE_N - 1)))
        return add_row_scaled_by_two(acc, partial, s * first, t * first, s * second, t * second, cols_in_first)

    return promote_add


def block_scale_window(scaling: Scaling) -> int:
    """K iterations whose 128x128 scales are loaded at once, one per lane; without such scales, all iterations."""
    return 32 if scaling.b_along_k_by_block else 1 << 30


@cache
def block_scale_readers(tile_n: int) -> tuple[Any, Any]:
    """Device functions that read the 128x128 scales of a tile of ``tile_n`` columns.

    A tile is in one block of B, or straddles two: 128 is a multiple of its columns, or of its columns beyond 128.

    Returns:
        ``(scale_inv_b, stride, group, first_column, n, first_k_iter, k_iters) -> block_scale_invs``, which loads the
        scales of 32 iterations, one per lane, for the tile that starts at ``first_column`` of the group's B; and
        ``(block_scale_invs, k_iter) -> (first, second)``.
    """
    straddles = SCALE_N % tile_n > 0

    @device
    def load_block_scale_invs(scale_inv_b, stride, group, first_column, n, first_k_iter, k_iters):
        block = first_column >> LOG2_SCALE_N
        k_iter = i32(first_k_iter + (cuda.threadIdx.x & 31))
        before = group * ((n + (SCALE_N - 1)) >> LOG2_SCALE_N)  # blocks of the groups before
        address = scale_inv_b + (i64(before + block) * stride + k_iter) * 4
        first = load_4_if(address, k_iter < k_iters and first_column < n)
        second = first
        if straddles:
            second = load_4_if(address + stride * 4, k_iter < k_iters and (block + 1) * SCALE_N < n)
        return first, second

    @device
    def block_scale_invs_at(block_scale_invs, k_iter):
        first = from_bits(shuffle(block_scale_invs[0], k_iter & 31))
        second = first
        if straddles:
            second = from_bits(shuffle(block_scale_invs[1], k_iter & 31))
        return first, second

    return load_block_scale_invs, block_scale_invs_at
