"""What a matrix product computes, whatever its size; and the tile of it that a block computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cuda_kernels.device.sizes import ceil_div

ACCUMULATORS = 192
"""The most registers of a thread for sums on Hopper: 224 without addresses and scales."""


class Scaling(Enum):
    """Which scales A and B have, K-major both."""

    TENSOR = "tensor"
    """One each."""
    ROW = "row"
    """One for each row."""
    BLOCK = "1x128 128x128"
    """A's for every 128 elements of a row, B's for every 128 of 128 rows."""
    BLOCKS = "1x128 1x128"

    @property
    def along_k(self) -> bool:
        """Whether scales change along K: then every 128 products are scaled before they are summed up."""
        return self in (Scaling.BLOCK, Scaling.BLOCKS)


@dataclass(frozen=True)
class Product:
    """``out [M, N] = A [M, K] Bᵀ [K, N] + bias [N]``, or ``out += A Bᵀ``.

    Attributes:
        a, b: FP8 formats, ``e4m3`` or ``e5m2``.
        scaling: of A and B.
        out: dtype of the result, ``bfloat16``, ``float16`` or ``float32``.
        bias: its dtype, if there is one.
        accumulate: adds to ``out``, which is float32.
        promote: sums no more than 128 products in a tensor core, whose accumulator keeps about 14 bits (DeepSeek-V3,
            arXiv:2412.19437); the rest in float32. Always where scales change along K.
        amax: raises a given number to the largest magnitude of ``out``.
    """

    a: str
    b: str
    scaling: Scaling
    out: str
    bias: str | None = None
    accumulate: bool = False
    promote: bool = True
    amax: bool = False

    def __post_init__(self) -> None:
        if self.scaling.along_k:  # there is no other kernel: products that say so and those that do not share it
            object.__setattr__(self, "promote", True)

    def __str__(self) -> str:
        parts = [self.a, self.b, self.scaling.value.replace(" ", "*"), self.out]
        parts += [f"bias={self.bias}"] * bool(self.bias)
        parts += ["accumulate"] * self.accumulate + ["promote"] * self.promote + ["amax"] * self.amax
        return " ".join(parts)


@dataclass(frozen=True)
class Tile:
    """How blocks of Hopper's kernel share the work.

    Attributes:
        groups: warpgroups of a block that multiply, 1 or 2.
        waves: how many times 64 rows each has; two are multiplied one after the other.
        alternate: two warpgroups take turns at whole tiles, one multiplying while the other's results leave
            ("ping-pong"); else they share a tile.
        columns: of the result, a multiple of 32 and at least 64.
        stages: places for operands in shared memory.
        cluster: blocks that share what they load, 1 or 2.
        shares_a: they have the same rows and share A; else the same columns and B.
        buffers: for 64 rows of 128 bytes of the result in each warpgroup; of two, one is filled while the other leaves.
        staged: results leave through shared memory in whole rows of 128 bytes, which needs rows of the result at
            multiples of 16 bytes; else straight from registers.
        even: columns come in pairs that lie at multiples of their size: of the result, of bias and of scales.
    """

    groups: int
    waves: int
    columns: int
    stages: int
    cluster: int = 1
    shares_a: bool = False
    buffers: int = 2
    staged: bool = True
    even: bool = True
    alternate: bool = False

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return 1 if self.alternate else self.groups

    @property
    def rows(self) -> int:
        return 64 * self.sharing * self.waves

    @property
    def threads(self) -> int:
        """A warpgroup more: the producer's."""
        return 128 * (self.groups + 1)

    def __str__(self) -> str:
        shared = f" cluster={self.cluster} {'A' if self.shares_a else 'B'}" if self.cluster > 1 else ""
        stored = f"staged {self.buffers}" if self.staged else "even" if self.even else "single"
        turns = " alternate" if self.alternate else ""
        return f"{self.rows}x{self.columns} {self.groups}x{self.waves} stages={self.stages}{shared} {stored}{turns}"


def smem_offsets(tile: Tile, scaling: Scaling) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the size of all.

    Operands are aligned to 1024 bytes, as the 128-byte swizzle needs.
    """
    offsets: dict[str, int] = {}
    end = 0
    buffers = 0 if not tile.staged else tile.groups * tile.buffers
    for name, size in (
        ("a", tile.stages * tile.rows * 128),
        ("b", tile.stages * tile.columns * 128),
        ("out", buffers * 8192),
        ("scale_a", tile.stages * tile.rows * 4 if scaling.along_k else 0),
        ("scale_b", tile.stages * tile.columns * 4 if scaling is Scaling.BLOCKS else 0),
        ("full", 8 * tile.stages),
        ("empty", 8 * tile.stages),
        ("order", 16 if tile.alternate else 0),
    ):
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def epi_tile_columns(out: str) -> int:
    """Columns of an epilogue tile: 128 bytes of a row of the result."""
    return 32 if out == "float32" else 64


def num_epi_tiles(tile: Tile, product: Product) -> int:
    """Epilogue tiles side by side in ``tile``."""
    return ceil_div(tile.columns, epi_tile_columns(product.out))


WARP_COLUMNS = 32
"""Columns of the result that a warp computes in the kernel with ``mma.sync``."""


@dataclass(frozen=True)
class MmaTile:
    """What a block computes; each of its warps computes half of the rows of 32 columns.

    Attributes:
        rows: of the result, a multiple of 32 and of ``columns / 4``.
        columns: of the result, a multiple of 32. With more than 128 of either, two accumulators do not fit.
        stages: places for operands in shared memory, at least 2.
        even: columns come in pairs that lie at multiples of their size: of the result, of bias and of scales.
    """

    rows: int
    columns: int
    stages: int
    even: bool = True

    @property
    def threads(self) -> int:
        return 32 * 2 * (self.columns // WARP_COLUMNS)

    @property
    def strips(self) -> int:
        """How many times 16 rows a warp has."""
        return self.rows // 32

    def stage_bytes(self, scaling: Scaling) -> int:
        """What a place holds: A, B, A's scales along K and B's, one after the other."""
        operands = (self.rows + self.columns) * 128
        return operands + 4 * self.rows * scaling.along_k + 4 * self.columns * (scaling is Scaling.BLOCKS)

    def shared_bytes(self, scaling: Scaling) -> int:
        return self.stages * self.stage_bytes(scaling)

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} stages={self.stages} {'even' if self.even else 'single'}"
