"""The configs in which our kernels compute a GEMM, and an estimate of their time. Pure functions of numbers.

:mod:`cuda_kernels.host.gemm_selection` chooses among them and the libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    num_epi_tiles,
    smem_offsets,
)
from cuda_kernels.kernel import SHARED_BYTES


class Library(Enum):
    """A library that computes a GEMM where no kernel of ours does."""

    CUBLASLT = "cublaslt"
    """``torch._scaled_mm``."""
    REFERENCE = "bf16"
    """Plain torch: in BF16 where that is exact, as of codes and of codes times powers of two, and else in float32.
    Its value is what files of measurements call it."""


KernelConfig = GemmConfig | MmaConfig
"""One of our kernels, on Hopper and elsewhere, and how it divides the work."""
GemmChoice = KernelConfig | Library
"""The kernel or library that computes a GEMM."""


@dataclass(frozen=True)
class GemmProblem:
    """A GEMM of a size on a GPU.

    Attributes:
        m, n, k: ``[m, k]`` times ``[n, k]`` transposed; at least 1.
        spec: what is computed: formats, scales, the dtype of the result.
        architecture: ``"90a"``, ``"89"``, ...
        multiprocessors: of the GPU.
        out_aligned: TMA can store the result where it lies; operands always are aligned.
        even: two neighbouring elements of the result can be written at once, and of what has its columns, read.
        library_blocks: ``torch._scaled_mm`` multiplies operands whose scales change along K on this GPU.
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


def legal_configs(problem: GemmProblem) -> list[KernelConfig]:
    """The configs in which our kernels compute the problem; none on architectures without such a kernel.

    On sm_90a they are those of wgmma, on sm_89 and sm_120 of ``mma.sync``: tiles and stages whose buffers fit into the
    shared memory of a block, 227 KiB and 99 KiB, and on Hopper whose sums fit into 192 registers of a thread.
    """
    if problem.architecture in WGMMA_ARCHITECTURES:
        return list(_hopper_configs(problem))
    return list(_mma_configs(problem)) if problem.architecture in MMA_ARCHITECTURES else []


def legal_choices(problem: GemmProblem) -> list[GemmChoice]:
    """:func:`legal_configs`, and the libraries that compute the problem; the last one always does."""
    libraries = [Library.CUBLASLT] if cublaslt_takes(problem) else []
    return [*legal_configs(problem), *libraries, Library.REFERENCE]


def cublaslt_takes(problem: GemmProblem) -> bool:
    """Whether ``torch._scaled_mm`` computes the problem on this GPU, if it has FP8.

    Of any size and dtype, with any bias: whoever calls it pads, rounds or scales what does not fit
    (``lightning_fp8/ops/torch_scaled_mm.py``, which names the sources). It takes no two operands in E5M2; where scales
    change along K, E4M3 alone, on GPUs with ``problem.library_blocks``.
    """
    formats = problem.spec.a_dtype, problem.spec.b_dtype
    if problem.spec.scaling.along_k:
        return problem.library_blocks and formats == ("e4m3", "e4m3")
    return formats != ("e5m2", "e5m2")


# --- Hopper -----------------------------------------------------------------------------------------------------------

_SHAPES = (
    (2, 1, 256, False),
    (2, 2, 128, False),
    (2, 1, 192, False),
    (2, 1, 160, False),
    (2, 1, 256, True),
    (2, 1, 128, False),
    (2, 1, 128, True),
    (1, 1, 256, False),
    (1, 1, 128, False),
    (2, 1, 64, False),
    (1, 1, 64, False),
)
"""``mma_warpgroups, waves, tile_n, pingpong`` of Hopper's candidates."""


def _hopper_configs(problem: GemmProblem) -> Iterator[GemmConfig]:
    for mma_warpgroups, waves, tile_n, pingpong in _SHAPES:
        config = GemmConfig(
            mma_warpgroups, waves, tile_n, stages=4, smem_epilogue=problem.out_aligned, even=problem.even,
            pingpong=pingpong,
        )  # fmt: skip
        candidates = [config]
        if problem.multiprocessors > 1:  # each block of a cluster fills one
            candidates.append(replace(config, cluster=2, multicast_a=config.tile_m > tile_n))
        yield from filter(None, (_fitted(candidate, problem.spec) for candidate in candidates))


def _fitted(config: GemmConfig, spec: GemmSpec) -> GemmConfig | None:
    """``config`` with as many stages and epilogue stages as fit; None if it is not legal."""
    for epi_stages, stages in product((2, 1), range(8, 3, -1)):
        fitted = replace(config, stages=stages, epi_stages=min(epi_stages, num_epi_tiles(config, spec)))
        if is_legal(fitted, spec):
            return fitted
    return None


def is_legal(config: GemmConfig, spec: GemmSpec) -> bool:
    """Whether the kernel computes ``spec`` in such tiles, without spilling registers, and there is a use for it.

    Warpgroups that take turns do so at all steps of a tile. Where sums are promoted they would wait for each step's
    products and then add 64 numbers a thread, with nobody to multiply meanwhile: about 420 clocks for 256 clocks' worth
    of products (:func:`estimate_cycles`), which hiding the tile's end repays only for k below some 800.
    """
    sums = config.tile_n // 2 * (config.waves + spec.promote)
    return (
        smem_offsets(config, spec.scaling)["end"] <= SHARED_BYTES["90a"]
        and sums <= ACCUMULATORS
        # The other 64 rows of a warpgroup have accumulators of their own only where parts are added to them.
        and (config.waves == 1 or (spec.promote and config.smem_epilogue))
        and not (config.pingpong and spec.promote)
        and (config.smem_epilogue or config.tile_n <= 128)
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
    """The config of least estimated time; cuBLASLt or the reference only where no kernel of ours is legal.

    Counts clocks. That a multiprocessor of Hopper multiplies 4,096 FP8 numbers in one, and moves 128 bytes to or from
    shared memory, follows from NVIDIA's data sheets; that it loads 28 bytes, and what promotion and a tile's end cost,
    is assumed and not measured.
    """
    configs = legal_configs(problem)
    if not configs:
        return legal_choices(problem)[0]
    return min(configs, key=lambda config: estimate_cycles(config, problem))


def estimate_cycles(config: KernelConfig, problem: GemmProblem) -> float:
    """The clocks that a GEMM takes; see :func:`fastest_by_estimate`."""
    rows, columns = config.tile_m, config.tile_n
    loaded_rows = float(rows + columns)
    if isinstance(config, GemmConfig):
        loaded_rows = float(config.a_rows_loaded + config.b_rows_loaded)
    rounds = ceil_div(num_tiles(problem.m, problem.n, config), resident_blocks(config, problem.multiprocessors))
    k_iter = max(rows * columns * TILE_K / 4096, loaded_rows * TILE_K / 28)
    if isinstance(config, GemmConfig):
        k_iter = max(k_iter, shared_memory_cycles(config, problem.spec), _promotion_cycles(config, problem.spec))
    epilogue = 1500 + rows * columns / 16
    epilogues = 1 if isinstance(config, GemmConfig) and config.pingpong else rounds
    return rounds * ceil_div(problem.k, TILE_K) * k_iter + epilogues * epilogue


def num_tiles(m: int, n: int, config: KernelConfig) -> int:
    """Tiles of ``out [m, n]``, counting those beyond its edge that complete a cluster's."""
    rows, columns = config.cluster_tile
    return ceil_div(m, rows) * ceil_div(n, columns) * config.cluster


def resident_blocks(config: KernelConfig, multiprocessors: int) -> int:
    """Blocks that run at a time: one for each multiprocessor, in whole clusters."""
    return multiprocessors // config.cluster * config.cluster


def num_blocks(problem: GemmProblem, config: KernelConfig) -> int:
    """Blocks of the grid: one for each tile; on Hopper no more than are resident, since each takes tile after tile."""
    tiles = num_tiles(problem.m, problem.n, config)
    return min(tiles, resident_blocks(config, problem.multiprocessors)) if isinstance(config, GemmConfig) else tiles


def shared_memory_cycles(config: GemmConfig, spec: GemmSpec) -> float:
    """Clocks that shared memory takes for a step, at 128 bytes in each.

    The copies write 128 bytes for each row and column; products of 64 rows read these and all columns; each warp reads
    the scales of its columns, eight at a time, where they have some.
    """
    rows, columns = config.tile_m, config.tile_n
    scales = rows // 16 * columns / 8 * spec.scaling.b_scales_per_stage
    return rows + columns + rows // 64 * (64 + columns) + scales


def _promotion_cycles(config: GemmConfig, spec: GemmSpec) -> float:
    """Clocks of a warpgroup for its part of a step: its products, and additions, during which it does not multiply."""
    if not spec.promote:
        return 0.0
    operations = 2 if spec.scaling.b_along_k_by_row else 1
    added = spec.scaling.sums_per_k_iter * config.waves * (config.tile_n / 2 * operations + 100)
    return 64 * config.waves * config.tile_n * TILE_K / 4096 + added
