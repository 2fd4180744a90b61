"""The configs in which our kernels compute a GEMM, and an estimate of their time. Pure functions of numbers.

:mod:`cuda_kernels.host.gemm_selection` chooses among them and the libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import product

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.gemm.spec import (
    ACCUMULATORS,
    MMA_ARCHITECTURES,
    TILE_K,
    WGMMA_ARCHITECTURES,
    GemmConfig,
    GemmSpec,
    MmaConfig,
    smem_offsets,
)
from cuda_kernels.kernel import SHARED_BYTES


class Library(Enum):
    """An alternative to our kernels for a GEMM."""

    CUBLASLT = "cublaslt"
    """``torch._scaled_mm``."""
    REFERENCE = "bf16"
    """Plain torch: in BF16 if that is exact, as for codes and codes times powers of two, otherwise in float32.
    Files of measurements contain its value."""


KernelConfig = GemmConfig | MmaConfig
"""One of our kernels (for Hopper or other GPUs) and its tiling."""
GemmChoice = KernelConfig | Library
"""The kernel or library that computes a GEMM."""


@dataclass(frozen=True)
class GemmProblem:
    """A GEMM with its sizes, on a GPU.

    Attributes:
        m, n, k: ``[m, k]`` times ``[n, k]`` transposed; at least 1.
        spec: the formats, the scales and the dtype of the result.
        architecture: ``"90a"``, ``"89"``, ...
        multiprocessors: number of multiprocessors of the GPU.
        out_aligned: whether TMA can store the result in place; operands are always aligned.
        even: whether two consecutive elements of the result can be written at once, and those of the bias read.
        library_blocks: whether ``torch._scaled_mm`` supports scales along K on this GPU.
        groups: the number of groups of a spec that is grouped, whose sizes only the GPU knows; else 0.
    """

    m: int
    n: int
    k: int
    spec: GemmSpec
    architecture: str
    multiprocessors: int
    out_aligned: bool
    even: bool
    library_blocks: bool = False
    groups: int = 0


def legal_configs(problem: GemmProblem) -> list[KernelConfig]:
    """The configs in which our kernels compute the problem; empty on architectures without a GEMM kernel.

    sm_90a uses wgmma, sm_89 and sm_120 use ``mma.sync``. Buffers must fit into a block's shared memory, 227 KiB or
    99 KiB, and on Hopper the accumulators into 192 registers per thread.
    """
    if problem.architecture in WGMMA_ARCHITECTURES:
        return [config for shape in _SHAPES if (config := _hopper_config(*shape, problem))]
    return list(_mma_configs(problem)) if problem.architecture in MMA_ARCHITECTURES and not problem.groups else []


def legal_choices(problem: GemmProblem) -> list[GemmChoice]:
    """:func:`legal_configs`, and the libraries that support the problem; the last one always does."""
    libraries = [Library.CUBLASLT] if cublaslt_takes(problem) else []
    return [*legal_configs(problem), *libraries, Library.REFERENCE]


def cublaslt_takes(problem: GemmProblem) -> bool:
    """Whether ``torch._scaled_mm`` supports the problem on this GPU, if it has FP8.

    Sizes, dtypes and biases do not matter, because the caller pads, rounds or scales unsupported ones
    (``lightning_fp8/ops/torch_scaled_mm.py``, with sources). Two operands in E5M2 are not supported. Scales along K are
    supported for E4M3 only, on GPUs with ``problem.library_blocks``.
    """
    formats = problem.spec.a_dtype, problem.spec.b_dtype
    if problem.spec.scaling.along_k:
        return problem.library_blocks and formats == ("e4m3", "e4m3")
    return formats != ("e5m2", "e5m2")


# --- Hopper -----------------------------------------------------------------------------------------------------------

_SHAPES = ((2, 1, 256), (2, 2, 128), (2, 1, 192), (1, 1, 128))
"""``mma_warpgroups, waves, tile_n`` of Hopper's candidates: 128x256, 256x128, 128x192 and 64x128.

In benchmarks/results/2026-11-26-h200-products.json, the best of these four takes 0.3 % longer than the best of 21, in
the geometric mean over 20 GEMMs, and at most 4.1 %. The others shared operands in clusters of two blocks, let two
warpgroups take turns at whole tiles, or had other sizes.
"""


def _hopper_config(mma_warpgroups: int, waves: int, tile_n: int, problem: GemmProblem) -> GemmConfig | None:
    """The config with as many stages and epilogue stages as fit; None if it is not legal."""
    for epi_stages, stages in product((2, 1), range(8, 3, -1)):
        config = GemmConfig(mma_warpgroups, waves, tile_n, stages, epi_stages, problem.out_aligned, problem.even)
        if is_legal(config, problem.spec):
            return config
    return None


def is_legal(config: GemmConfig, spec: GemmSpec) -> bool:
    """Whether the kernel supports ``spec`` with these tiles, without spilling registers."""
    sums = config.tile_n // 2 * (config.waves + spec.promote)
    return (
        smem_offsets(config, spec.scaling)["end"] <= SHARED_BYTES["90a"]
        and sums <= ACCUMULATORS
        # The other 64 rows of a warpgroup have their own accumulators only if partial sums are added to them.
        and (config.waves == 1 or (spec.promote and config.smem_epilogue))
        and (config.smem_epilogue or (config.tile_n <= 128 and not spec.grouped))
    )


# --- mma.sync ---------------------------------------------------------------------------------------------------------


def _mma_configs(problem: GemmProblem) -> Iterator[MmaConfig]:
    for tile_m, tile_n in ((128, 128), (64, 64)):
        for stages in (4, 3):
            config = MmaConfig(tile_m, tile_n, stages, problem.even)
            if config.shared_bytes(problem.spec.scaling) <= SHARED_BYTES[problem.architecture]:
                yield config
                break


# --- The choice -------------------------------------------------------------------------------------------------------


@lru_cache(4096)
def fastest_by_estimate(problem: GemmProblem) -> GemmChoice:
    """The config with the least estimated time; a library only if no kernel of ours is legal.

    The estimate counts clocks. From NVIDIA's data sheets, a multiprocessor of Hopper multiplies 4,096 FP8 numbers and
    moves 128 bytes to or from shared memory per clock. Loading 64 bytes per clock fits the tiles timed in
    benchmarks/results/2026-11-26-h200-products.json: the chosen tile takes 0.2 % longer than the fastest, in the
    geometric mean. The costs of promotion and of a tile's end are assumptions.
    """
    configs = legal_configs(problem)
    if not configs:
        return legal_choices(problem)[0]
    return min(configs, key=lambda config: estimate_cycles(config, problem))


def estimate_cycles(config: KernelConfig, problem: GemmProblem) -> float:
    """Estimated clocks of a GEMM; see :func:`fastest_by_estimate`."""
    rows, columns = config.tile_m, config.tile_n
    rounds = ceil_div(num_tiles(problem, config), problem.multiprocessors)
    k_iter = max(rows * columns * TILE_K / 4096, (rows + columns) * TILE_K / 64)
    if isinstance(config, GemmConfig):
        k_iter = max(k_iter, shared_memory_cycles(config, problem.spec), _promotion_cycles(config, problem.spec))
    epilogue = 1500 + rows * columns / 16
    return rounds * (ceil_div(problem.k, TILE_K) * k_iter + epilogue)


def num_tiles(problem: GemmProblem, config: KernelConfig) -> int:
    """Number of tiles of the result; of groups the expected one, as the last tile of each is half full on average."""
    m = problem.m + problem.groups * config.tile_m // 2
    return ceil_div(m, config.tile_m) * ceil_div(problem.n, config.tile_n)


def num_blocks(problem: GemmProblem, config: KernelConfig) -> int:
    """Blocks of the grid: one per tile; on Hopper at most one per multiprocessor, since each loops over tiles."""
    tiles = num_tiles(problem, config)
    return min(tiles, problem.multiprocessors) if isinstance(config, GemmConfig) else tiles


def shared_memory_cycles(config: GemmConfig, spec: GemmSpec) -> float:
    """Clocks of shared memory per step, at 128 bytes per clock.

    Copies write 128 bytes per row and column; products of 64 rows read these rows and all columns; each warp reads the
    scales of its columns, eight at a time, if there are any.
    """
    rows, columns = config.tile_m, config.tile_n
    scales = rows // 16 * columns / 8 * spec.scaling.b_along_k_by_row
    return rows + columns + rows // 64 * (64 + columns) + scales


def _promotion_cycles(config: GemmConfig, spec: GemmSpec) -> float:
    """Clocks of a warpgroup's part of a step: its products, then its additions, during which it does not multiply."""
    if not spec.promote:
        return 0.0
    operations = 2 if spec.scaling.b_along_k_by_row else 1
    return config.waves * (64 * config.tile_n * TILE_K / 4096 + config.tile_n / 2 * operations + 100)
