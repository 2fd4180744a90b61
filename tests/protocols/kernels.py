"""Pipelined kernels, each launched on so many tiles. Numbers are zero: no program depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from cuda_kernels.attention.backward.statistics import STATISTICS
from cuda_kernels.attention.host.backward import BackwardLaunch, BackwardTables, Operands
from cuda_kernels.attention.host.forward import AttentionProblem, ForwardLaunch, PackedCodes, Visible
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.gemm.spec import GemmConfig, GemmSpec, Scaling
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host.launch import Argument
from cuda_kernels.host.tensor_maps import Box, Map
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.cases.attention_kernel_cases import rows_of
from tests.cuda_kernels.emulated import executing
from tests.protocols.protocol import Protocol
from tests.protocols.record import recorded

CPU = torch.device("cpu")
MOST_TILES = 5


class Pipelined(NamedTuple):
    """A kernel, and its protocol for numbers of tiles.

    Attributes:
        sizes: for which there is one.
    """

    name: str
    protocol: Callable[[int], Protocol]
    sizes: Sequence[int]


# --- Attention --------------------------------------------------------------------------------------------------------


def _codes(rows: int, head_dim: int) -> PackedCodes:
    data = torch.zeros(1, rows, head_dim, dtype=torch.uint8)
    return PackedCodes(data, data.mT.contiguous(), torch.ones(1, rows // ROWS))


def _attention(which: str, head_dim: int, tiles: int) -> Protocol:
    """Of a block with 128 rows of its own that visits so many tiles of 128 others."""
    own, others = ((rows_of(torch.tensor([length]), ROWS * max(tiles, 1))) for length in (ROWS, ROWS * tiles))
    queries, keys = (others, own) if which in ("dk", "dv", "dkv") else (own, others)
    problem = AttentionProblem(
        AttentionSpec(head_dim, "float32"), (1, 1), queries.space, keys.space, Visible(), head_dim**-0.5
    )
    q, k = (_codes(each.space.total, head_dim) for each in (queries, keys))
    gradients = [torch.zeros(each.space.total, 1, head_dim) for each in (queries, keys, keys)]
    strides = (0, head_dim, head_dim)
    launched: list[tuple[Kernel, Sequence[Argument | float]]] = []
    with executing(lambda kernel, blocks, args: launched.append((kernel, args))):
        if which == "forward":
            launch = ForwardLaunch(problem, strides, CPU)
            m, l = (torch.zeros(1, queries.space.total) for _ in range(2))  # noqa: E741
            launch.run(problem.tiles_of_queries(queries, keys), q, k, k, gradients[0], m, l)
        else:
            backward = BackwardLaunch(problem, strides, strides, CPU)
            tables: BackwardTables = backward.tables(queries, keys)
            statistics = torch.zeros(1, STATISTICS, queries.space.total)
            operands = Operands(q, q, k, k)
            if which == "dq":
                backward.run_dq(tables, operands, statistics, gradients[0])
            else:
                backward.run_dkv(tables, operands, statistics, *gradients[1:])
    ((kernel, args),) = [each for each in launched if each[0].name.startswith(f"attention_{which}(")]
    return recorded(kernel, 1, args)  # the first block has the rows that see tiles


# --- Products ---------------------------------------------------------------------------------------------------------


def _product(scaling: Scaling, config: GemmConfig, promote: bool, k_iters: int, tiles: int) -> Protocol:
    """Of one cluster that computes so many tiles, each of ``k_iters`` K iterations."""
    spec = GemmSpec("e4m3", "e4m3", scaling, "float32", promote=promote)
    rows, columns = config.cluster_tile
    m, n, k = rows * max(tiles, 1), columns, 128 * k_iters
    a, b, out = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8), torch.zeros(m, n)
    scale_inv_a, scale_inv_b = (torch.ones(k_iters, each) for each in (m, n))
    map_a = Map(a, Box(config.a_rows_loaded, 128))
    maps = [map_a, Map(b, Box(config.b_rows_loaded, 128)), Map(out, Box(64, 32)) if config.smem_epilogue else map_a]
    for scales, rows_of_tile, wanted in (
        (scale_inv_a, config.tile_m, scaling.along_k),
        (scale_inv_b, config.tile_n, scaling.b_along_k_by_row),
    ):
        maps.append(Map(scales, Box(1, rows_of_tile, swizzle=False)) if wanted else map_a)
    args = [*maps, scale_inv_a, scale_inv_b, 0, 0, out, n, n, m if tiles else 0, n, k]
    return recorded(gemm_kernel(spec, config), config.cluster, args)


@cache
def pipelined() -> tuple[Pipelined, ...]:
    """All of them, with every role and ring that kernels have."""
    tiles = range(MOST_TILES + 1)
    found = [
        Pipelined(f"{which}-{head_dim}", partial(_attention, which, head_dim), tiles)
        for which, dims in (
            ("forward", (64, 128, 256)),
            ("dq", (64, 128, 256)),
            ("dkv", (64, 128)),
            ("dk", (256,)),
            ("dv", (256,)),
        )
        for head_dim in dims
    ]
    return tuple(found)
