"""The specification of a GEMM (formats, scales, epilogue), and the configs that divide its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from cuda_kernels.device.sizes import DtypeName, ceil_div
from cuda_kernels.device.swizzle import ROW_BYTES

WGMMA_ARCHITECTURES = ("90a",)
"""Architectures of the wgmma kernel, with :class:`GemmConfig`."""
MMA_ARCHITECTURES = ("89", "120")
"""Architectures of the ``mma.sync`` kernel, with :class:`MmaConfig`. Other architectures have no GEMM kernel."""

ACCUMULATORS = 192
"""Maximum registers per thread for accumulators on Hopper: 224, less those for addresses and scales."""


TILE_K = ROW_BYTES
"""Elements of K per K iteration: those of a swizzled row."""
SCALE_N = 128
"""Rows of B that share a scale of 128x128 blocks."""
LOG2_TILE_K, LOG2_SCALE_N = TILE_K.bit_length() - 1, SCALE_N.bit_length() - 1

_BLOCKS_ALONG_K = {"1x128": (1, 128), "128x128": (SCALE_N, 128)}
"""Rows and elements of K that share a scale, for layouts with scales along K."""

EPI_TILE_BYTES = 64 * ROW_BYTES
"""An epilogue tile: a warpgroup's 64 rows of 128 bytes."""


class Scaling(Enum):
    """The scales of A and B, both K-major: the layout of A's and of B's, or of both.

    Attributes:
        layouts: the names of A's layout and of B's.
        along_k: whether scales change along K, so that products with one scale are summed before they are scaled.
        scale_k: elements of K with one scale in a K iteration.
    """

    TENSOR = "tensor"
    """One per operand."""
    ROW = "row"
    """One per row."""
    BLOCK_1X128_128X128 = "1x128 128x128"
    """One per 128 elements of a row of A; one per 128 rows of B by 128 elements."""
    BLOCK_1X128_1X128 = "1x128 1x128"
    """One per 128 elements of a row, for A and B."""

    def __init__(self, value: str) -> None:
        a, _, b = value.partition(" ")
        self.layouts = a, b or a
        self.along_k = self.layouts[1] in _BLOCKS_ALONG_K
        self._b_rows, self.scale_k = _BLOCKS_ALONG_K.get(self.layouts[1], (0, TILE_K))
        blocks = [_BLOCKS_ALONG_K.get(layout) for layout in self.layouts]
        if (blocks[0] is None) != (blocks[1] is None):
            raise ValueError(f"scaling {value!r}: the scales of A and B must both change along K, or neither")
        if any(block is not None and block[1] != TILE_K for block in blocks):
            raise ValueError(
                f"scaling {value!r}: kernels scale the products of a K iteration at once, of blocks of {TILE_K}"
            )

    @property
    def b_along_k_by_row(self) -> bool:
        """Whether each row of B has its own scales along K."""
        return self._b_rows == 1

    @property
    def b_along_k_by_block(self) -> bool:
        """Whether :data:`SCALE_N` rows of B share their scales along K."""
        return self._b_rows == SCALE_N

    @property
    def sums_per_k_iter(self) -> int:
        """Number of partial sums of a K iteration that have their own scales."""
        return TILE_K // self.scale_k

    @property
    def a_scales_per_stage(self) -> int:
        """Scales of a row of A in a pipeline stage; see :func:`stage_bytes` for their bytes."""
        return self.sums_per_k_iter if self.along_k else 0

    @property
    def b_scales_per_stage(self) -> int:
        """The same for B; 0 if many rows share scales."""
        return self.sums_per_k_iter if self.b_along_k_by_row else 0


@dataclass(frozen=True)
class GemmSpec:
    """``out [M, N] = A [M, K] Bᵀ [K, N] + bias [N]``, or ``out += A Bᵀ``.

    Attributes:
        a_dtype, b_dtype: FP8 formats, ``e4m3`` or ``e5m2``.
        scaling: the scales of A and B.
        out_dtype: dtype of the result, ``bfloat16``, ``float16`` or ``float32``.
        bias_dtype: dtype of the bias, or None without a bias.
        accumulate: add to ``out``, which is float32.
        promote: add partial sums of at most 128 products in float32, because a tensor core's accumulator keeps about 14
            bits (DeepSeek-V3, arXiv:2412.19437). Always true with scales along K.
        has_amax: update a given amax with the largest magnitude of ``out``.
    """

    a_dtype: str
    b_dtype: str
    scaling: Scaling
    out_dtype: DtypeName
    bias_dtype: DtypeName | None = None
    accumulate: bool = False
    promote: bool = True
    has_amax: bool = False

    def __post_init__(self) -> None:
        if self.scaling.along_k:  # always promotes; set here so that both spellings share one kernel
            object.__setattr__(self, "promote", True)

    def __str__(self) -> str:
        parts = [self.a_dtype, self.b_dtype, self.scaling.value.replace(" ", "*"), self.out_dtype]
        parts += [f"bias={self.bias_dtype}"] * bool(self.bias_dtype)
        parts += ["accumulate"] * self.accumulate + ["promote"] * self.promote + ["amax"] * self.has_amax
        return " ".join(parts)


@dataclass(frozen=True)
class GemmConfig:
    """How Hopper's kernel divides the work.

    Attributes:
        mma_warpgroups: warpgroups of a block that multiply, 1 or 2.
        waves: blocks of 64 rows that each of them computes, one after the other; 1 or 2.
        tile_n: columns of a tile, a multiple of 32 and at least 64.
        stages: pipeline stages for operands in shared memory.
        cluster: blocks of a cluster, 1 or 2.
        multicast_a: whether the blocks of a cluster share rows, and load A once; otherwise they share columns and B.
        epi_stages: buffers per warpgroup for epilogue tiles; with two, one is filled while the other is stored.
        smem_epilogue: store the result through shared memory with TMA, which requires rows of the result to be aligned
            to 16 bytes; otherwise directly from registers.
        even: N, the output's row stride and all addresses allow two consecutive elements of a row to be read or written
            at once.
        pingpong: two warpgroups process alternating tiles, so that one multiplies while the other stores its results;
            otherwise they share a tile.
    """

    mma_warpgroups: int
    waves: int
    tile_n: int
    stages: int
    cluster: int = 1
    multicast_a: bool = False
    epi_stages: int = 2
    smem_epilogue: bool = True
    even: bool = True
    pingpong: bool = False

    @property
    def warpgroups_per_tile(self) -> int:
        """Number of warpgroups that share a tile."""
        return 1 if self.pingpong else self.mma_warpgroups

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups_per_tile * self.waves

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of all tiles of a cluster together."""
        tile_m, tile_n, cluster = self.tile_m, self.tile_n, self.cluster
        return (tile_m, tile_n * cluster) if self.multicast_a else (tile_m * cluster, tile_n)

    @property
    def a_rows_loaded(self) -> int:
        """Rows of A that one block loads for its tile; its share if the blocks of a cluster share them."""
        return self.tile_m // (self.cluster if self.multicast_a else 1)

    @property
    def b_rows_loaded(self) -> int:
        """The same for B, whose rows are the tile's columns."""
        return self.tile_n // (1 if self.multicast_a else self.cluster)

    @property
    def threads(self) -> int:
        """Threads of a block, including the producer's warpgroup."""
        return 128 * (self.mma_warpgroups + 1)

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}", f"mma_warpgroups={self.mma_warpgroups}", f"waves={self.waves}"]
        parts += [f"stages={self.stages}", f"cluster={self.cluster}"] + ["multicast_a"] * self.multicast_a
        parts += ["smem_epilogue", f"epi_stages={self.epi_stages}"] * self.smem_epilogue
        parts += ["even"] * self.even + ["pingpong"] * self.pingpong
        return " ".join(parts)


class StageBytes(NamedTuple):
    """Bytes of the buffers of a pipeline stage, for both kernels; the ``mma.sync`` kernel stores them in this order.

    Attributes:
        a, b: the operands, :data:`TILE_K` bytes per row.
        scale_inv_a, scale_inv_b: their scales along K, in float32; 0 if none are copied.
    """

    a: int
    b: int
    scale_inv_a: int
    scale_inv_b: int


def stage_bytes(config: GemmConfig | MmaConfig, scaling: Scaling) -> StageBytes:
    """The contents of a stage for the tiles of ``config``."""
    return StageBytes(
        config.tile_m * TILE_K,
        config.tile_n * TILE_K,
        config.tile_m * scaling.a_scales_per_stage * 4,
        config.tile_n * scaling.b_scales_per_stage * 4,
    )


def smem_offsets(config: GemmConfig, scaling: Scaling) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the total size.

    Operands and epilogue tiles come first, because they must be aligned to atoms of the swizzle.
    """
    offsets: dict[str, int] = {}
    end = 0
    of_stage = stage_bytes(config, scaling)
    buffers = 0 if not config.smem_epilogue else config.mma_warpgroups * config.epi_stages
    for name, size in (
        ("a", config.stages * of_stage.a),
        ("b", config.stages * of_stage.b),
        ("out", buffers * EPI_TILE_BYTES),
        ("scale_inv_a", config.stages * of_stage.scale_inv_a),
        ("scale_inv_b", config.stages * of_stage.scale_inv_b),
        ("full", 8 * config.stages),
        ("empty", 8 * config.stages),
        ("order", 16 if config.pingpong else 0),
    ):
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def epi_tile_columns(out_dtype: DtypeName) -> int:
    """Columns of an epilogue tile: 128 bytes of a row of the result."""
    return 32 if out_dtype == "float32" else 64


def num_epi_tiles(config: GemmConfig, spec: GemmSpec) -> int:
    """Number of epilogue tiles across a tile of ``config``."""
    return ceil_div(config.tile_n, epi_tile_columns(spec.out_dtype))


WARP_COLUMNS = 32
"""Columns of the result per warp in the ``mma.sync`` kernel."""


@dataclass(frozen=True)
class MmaConfig:
    """How the ``mma.sync`` kernel divides the work; each warp of a block computes half the rows of 32 columns.

    Attributes:
        tile_m: rows of a tile, a multiple of 32 and of ``tile_n / 4``.
        tile_n: columns of a tile, a multiple of 32. If either exceeds 128, two accumulators do not fit.
        stages: pipeline stages for operands in shared memory, at least 2.
        even: N, the output's row stride and all addresses allow two consecutive elements of a row to be read or written
            at once.
    """

    tile_m: int
    tile_n: int
    stages: int
    even: bool = True
    cluster: ClassVar[int] = 1

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.tile_m, self.tile_n

    @property
    def threads(self) -> int:
        return 32 * 2 * (self.tile_n // WARP_COLUMNS)

    @property
    def strips(self) -> int:
        """Number of 16-row strips per warp."""
        return self.tile_m // 32

    def shared_bytes(self, scaling: Scaling) -> int:
        """Bytes of shared memory of a block, for all stages."""
        return self.stages * sum(stage_bytes(self, scaling))

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n} stages={self.stages}{' even' * self.even}"
