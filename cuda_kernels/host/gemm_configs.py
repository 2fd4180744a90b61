"""Which kernel for which product: legal plans of a problem, and the choice among them. Pure functions of numbers.

A choice is one that was measured on a card (see :mod:`cuda_kernels.host.gemm_selection`), or the least of an estimate
that knows tensor cores, the memory behind them, and how many tiles fill the card.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import product as product_of

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.gemm.spec import ACCUMULATORS, MmaTile, Product, Scaling, Tile, num_epi_tiles, smem_offsets

SHARED_BYTES = {"90a": 232_448, "89": 101_376, "120": 101_376}
"""The most that a block may have, by architecture: those that kernels are for."""


class Library(Enum):
    """What else multiplies."""

    CUBLASLT = "cublaslt"
    """``torch._scaled_mm``."""
    BF16 = "bf16"
    """Codes, or codes times scales that are powers of two, are BF16 values: their products are exact."""


Plan = Tile | MmaTile | Library


@dataclass(frozen=True)
class Problem:
    """One product of a size on a card.

    Attributes:
        m, n, k: ``[m, k]`` times ``[n, k]`` transposed; at least 1.
        architecture: ``"90a"``, ``"89"``, ...
        multiprocessors: of the card.
        aligned: rows of the result begin at multiples of 16 bytes.
        even: its columns come in pairs, and so do those of bias and scales.
    """

    m: int
    n: int
    k: int
    product: Product
    architecture: str
    multiprocessors: int
    aligned: bool
    even: bool


def plans(problem: Problem) -> list[Plan]:
    """All that compute the problem; the last always does."""
    found: list[Plan] = []
    if problem.architecture == "90a":
        found += _hopper_tiles(problem)
    elif problem.architecture in SHARED_BYTES:
        found += _mma_tiles(problem)
    if cublaslt_takes(problem):
        found.append(Library.CUBLASLT)
    return [*found, Library.BF16]


def cublaslt_takes(problem: Problem) -> bool:
    """Whether ``torch._scaled_mm`` computes the problem on every card that knows FP8.

    It wants n and k in multiples of 16, and scales of rows only for E4M3 and results in bfloat16.
    """
    product = problem.product
    if problem.n % 16 or problem.k % 16 or product.a == product.b == "e5m2":
        return False
    if product.bias is not None and (product.bias != product.out or product.out == "float32"):
        return False
    if product.scaling is Scaling.ROW:
        return product.a == product.b == "e4m3" and product.out == "bfloat16"
    return product.scaling is Scaling.TENSOR


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
"""Warpgroups, times 64 rows of each, columns, and whether the warpgroups alternate."""


def _hopper_tiles(problem: Problem) -> Iterator[Tile]:
    for groups, waves, columns, alternate in _SHAPES:
        tile = Tile(
            groups, waves, columns, stages=4, staged=problem.aligned, even=problem.even, alternate=alternate
        )  # fmt: skip
        shared = replace(tile, cluster=2, shares_a=tile.rows > columns)
        for clustered in (tile, shared)[: problem.multiprocessors]:
            fitted = _fitted(clustered, problem.product)
            if fitted:
                yield fitted


def _fitted(tile: Tile, product: Product) -> Tile | None:
    """``tile`` with as many stages and buffers as fit; None if it is not legal."""
    for buffers, stages in product_of((2, 1), range(8, 3, -1)):
        fitted = replace(tile, stages=stages, buffers=min(buffers, num_epi_tiles(tile, product)))
        if is_legal(fitted, product):
            return fitted
    return None


def is_legal(tile: Tile, product: Product) -> bool:
    """Whether the kernel computes ``product`` in such tiles, without spilling registers, and there is a use for it.

    Warpgroups that take turns do so at all steps of a tile. Where sums are promoted they would wait for each step's
    products and then add 64 numbers a thread, with nobody to multiply meanwhile: about 420 clocks for 256 clocks' worth
    of products (:func:`_clocks`), which hiding the tile's end repays only for k below some 800.
    """
    sums = tile.columns // 2 * (tile.waves + product.promote)
    return (
        smem_offsets(tile, product.scaling)["end"] <= SHARED_BYTES["90a"]
        and sums <= ACCUMULATORS
        # The other 64 rows of a warpgroup have accumulators of their own only where parts are added to them.
        and (tile.waves == 1 or (product.promote and tile.staged))
        and not (tile.alternate and product.promote)
        and (tile.staged or tile.columns <= 128)
    )


# --- mma.sync ---------------------------------------------------------------------------------------------------------


def _mma_tiles(problem: Problem) -> Iterator[MmaTile]:
    for rows, columns in ((128, 128), (64, 64)):
        for stages in (4, 3):
            tile = MmaTile(rows, columns, stages, problem.even)
            if tile.shared_bytes(problem.product.scaling) <= SHARED_BYTES[problem.architecture]:
                yield tile
                break


# --- The choice -------------------------------------------------------------------------------------------------------


@lru_cache(4096)
def estimated(problem: Problem) -> Plan:
    """The plan of least estimated time; a library only where there is no other.

    Counts clocks. That a multiprocessor of Hopper multiplies 4,096 FP8 numbers in one, and moves 128 bytes to or from
    shared memory, follows from NVIDIA's data sheets; that it loads 28 bytes, and what promotion and a tile's end cost,
    is assumed and not measured.
    """
    tiles = [plan for plan in plans(problem) if not isinstance(plan, Library)]
    if not tiles:
        return plans(problem)[0]
    return min(tiles, key=lambda tile: _clocks(tile, problem))


def _clocks(tile: Tile | MmaTile, problem: Problem) -> float:
    rows, columns = tile.rows, tile.columns
    cluster = 1
    loaded = float(rows + columns)
    if isinstance(tile, Tile):
        cluster = tile.cluster
        if cluster > 1:
            loaded -= (rows if tile.shares_a else columns) / 2
    num_m_tiles = ceil_div(problem.m, rows)
    num_n_tiles = ceil_div(problem.n, columns)
    if isinstance(tile, Tile) and tile.shares_a:
        num_n_tiles = ceil_div(num_n_tiles, cluster) * cluster
    else:
        num_m_tiles = ceil_div(num_m_tiles, cluster) * cluster
    rounds = ceil_div(num_m_tiles * num_n_tiles, problem.multiprocessors // cluster * cluster)
    step = max(rows * columns * 128 / 4096, loaded * 128 / 28)
    if isinstance(tile, Tile):
        step = max(step, shared_clocks(tile, problem.product), _promoted_clocks(tile, problem.product))
    end = 1500 + rows * columns / 16
    ends = 1 if isinstance(tile, Tile) and tile.alternate else rounds
    return rounds * ceil_div(problem.k, 128) * step + ends * end


def shared_clocks(tile: Tile, product: Product) -> float:
    """How long shared memory takes for a step, at 128 bytes in a clock.

    The copies write 128 bytes for each row and column; products of 64 rows read these and all columns; each warp reads
    the scales of its columns, eight at a time, where they have some.
    """
    rows, columns = tile.rows, tile.columns
    scales = rows // 16 * columns / 8 if product.scaling is Scaling.BLOCKS else 0
    return rows + columns + rows // 64 * (64 + columns) + scales


def _promoted_clocks(tile: Tile, product: Product) -> float:
    """How long a warpgroup takes for its part of a step: its products, and what is added while it does not multiply."""
    if not product.promote:
        return 0.0
    each = 2 if product.scaling is Scaling.BLOCKS else 1
    added = tile.waves * (tile.columns / 2 * each + 100)
    return 64 * tile.waves * tile.columns * 128 / 4096 + added
