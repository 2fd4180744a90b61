"""The specification of a GEMM (formats, scales, epilogue), and the configs that divide its work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cuda_kernels.device.sizes import DtypeName
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
        along_k: whether scales change along K, so that the products of a K iteration are summed before they are scaled.
        b_along_k_by_row: whether each row of B has its own scales along K.
        b_along_k_by_block: whether :data:`SCALE_N` rows of B share theirs.
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
        of_a, of_b = (_BLOCKS_ALONG_K.get(layout) for layout in self.layouts)
        self.along_k = of_b is not None
        self.b_along_k_by_row, self.b_along_k_by_block = of_b == (1, TILE_K), of_b == (SCALE_N, TILE_K)
        if (of_a is None) != (of_b is None):
            raise ValueError(f"scaling {value!r}: the scales of A and B must both change along K, or neither")
        if any(block is not None and block[1] != TILE_K for block in (of_a, of_b)):
            raise ValueError(
                f"scaling {value!r}: kernels scale the products of a K iteration at once, of blocks of {TILE_K}"
            )


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
        grouped: rows of A and out are in groups, by the table of :mod:`cuda_kernels.gemm.groups`; B is ``[E * N, K]``,
            of which each group has N rows, and its scales likewise. Only on Hopper, without bias, stored with TMA.
    """

    a_dtype: str
    b_dtype: str
    scaling: Scaling
    out_dtype: DtypeName
    bias_dtype: DtypeName | None = None
    accumulate: bool = False
    promote: bool = True
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.scaling.along_k:  # always promotes; set here so that both spellings share one kernel
            object.__setattr__(self, "promote", True)

    def __str__(self) -> str:
        parts = [self.a_dtype, self.b_dtype, self.scaling.value.replace(" ", "*"), self.out_dtype]
        parts += [f"bias={self.bias_dtype}"] * bool(self.bias_dtype)
        parts += ["accumulate"] * self.accumulate + ["promote"] * self.promote
        parts += ["grouped"] * self.grouped
        return " ".join(parts)


@dataclass(frozen=True)
class GemmConfig:
    """How Hopper's kernel divides the work.

    Attributes:
        mma_warpgroups: warpgroups of a block that multiply, 1 or 2.
        waves: blocks of 64 rows that each of them computes, one after the other; 1 or 2.
        tile_n: columns of a tile, a multiple of 32 and at least 64.
        stages: pipeline stages for operands in shared memory.
        epi_stages: buffers per warpgroup for epilogue tiles; with two, one is filled while the other is stored.
        smem_epilogue: store the result through shared memory with TMA, which requires rows of the result to be aligned
            to 16 bytes; otherwise directly from registers.
        even: N, the output's row stride and all addresses allow two consecutive elements of a row to be read or written
            at once.
    """

    mma_warpgroups: int
    waves: int
    tile_n: int
    stages: int
    epi_stages: int = 2
    smem_epilogue: bool = True
    even: bool = True

    @property
    def tile_m(self) -> int:
        return 64 * self.mma_warpgroups * self.waves

    @property
    def threads(self) -> int:
        """Threads of a block, including the producer's warpgroup."""
        return 128 * (self.mma_warpgroups + 1)

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}", f"mma_warpgroups={self.mma_warpgroups}", f"waves={self.waves}"]
        parts += [f"stages={self.stages}"] + ["smem_epilogue", f"epi_stages={self.epi_stages}"] * self.smem_epilogue
        return " ".join(parts + ["even"] * self.even)


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
        config.tile_m * scaling.along_k * 4,
        config.tile_n * scaling.b_along_k_by_row * 4,
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
    ):
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def epi_tile_columns(out_dtype: DtypeName) -> int:
    """Columns of an epilogue tile: 128 bytes of a row of the result."""
    return 32 if out_dtype == "float32" else 64


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
