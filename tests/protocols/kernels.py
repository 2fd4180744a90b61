"""Pipelined kernels, each launched on so many tiles. Numbers are zero: no program depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from cuda_kernels.attention.backward.memory import FLUSH
from cuda_kernels.attention.backward.statistics import STATISTICS
from cuda_kernels.attention.host.backward import BackwardLaunch, Operands
from cuda_kernels.attention.host.forward import AttentionProblem, ForwardLaunch, PackedCodes
from cuda_kernels.attention.host.tiles import Visible
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.device.sizes import DtypeName
from cuda_kernels.gemm.spec import SCALE_N, TILE_K, GemmConfig, GemmSpec, Scaling, epi_tile_columns
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host.launch import Argument, executing
from cuda_kernels.host.tensor_maps import Box, Map
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.cases.attention_kernel_cases import rows_of
from tests.protocols.protocol import Protocol
from tests.protocols.record import recorded

CPU = torch.device("cpu")
MOST_TILES = 5
OUT: dict[str, DtypeName] = {"dk": "float32", "dv": "float32"}
FLUSHES = {"dk": 128, "dv": 128}
"""As other tests of the default run compile these kernels."""


class Pipelined(NamedTuple):
    """A kernel, and its protocol for numbers of tiles.

    Attributes:
        sizes: the arguments of ``protocol``: numbers of tiles, of products with those of K iterations of each.
    """

    name: str
    protocol: Callable[..., Protocol]
    sizes: tuple[tuple[int, ...], ...]


# --- Attention --------------------------------------------------------------------------------------------------------


def _codes(rows: int, head_dim: int) -> PackedCodes:
    data = torch.zeros(1, rows, head_dim, dtype=torch.uint8)
    return PackedCodes(data, data.mT.contiguous(), torch.ones(1, rows // ROWS))


def _attention(which: str, head_dim: int, tiles: int) -> Protocol:
    """Of a block with 128 rows of its own that visits so many tiles of 128 others."""
    own, others = ((rows_of(torch.tensor([length]), ROWS * max(tiles, 1))) for length in (ROWS, ROWS * tiles))
    queries, keys = (others, own) if which in ("dk", "dv", "dkv") else (own, others)
    problem = AttentionProblem(
        AttentionSpec(head_dim, OUT.get(which, "bfloat16")),
        (1, 1),
        queries.space,
        keys.space,
        Visible(),
        head_dim**-0.5,
    )
    q, k = (_codes(each.space.total, head_dim) for each in (queries, keys))
    dtype = getattr(torch, problem.spec.out_dtype)
    gradients = [torch.zeros(each.space.total, 1, head_dim, dtype=dtype) for each in (queries, keys, keys)]
    strides = (0, head_dim, head_dim)
    launched: list[tuple[Kernel, Sequence[Argument | float]]] = []
    with executing(lambda kernel, blocks, args: launched.append((kernel, args))):
        if which == "forward":
            launch = ForwardLaunch(problem, strides, CPU)
            m, l = (torch.zeros(1, queries.space.total) for _ in range(2))  # noqa: E741
            launch.run(problem.visible.tiles_of_queries(queries, keys), q, k, k, gradients[0], m, l)
        else:
            backward = BackwardLaunch(problem, strides, strides, CPU, FLUSHES.get(which, FLUSH))
            statistics = torch.zeros(1, STATISTICS, queries.space.total)
            operands = Operands(q, q, k, k)
            if which == "dq":
                backward.run_dq(problem.visible.tiles_of_queries(queries, keys), operands, statistics, gradients[0])
            else:
                backward.run_dkv(problem.visible.tiles_of_keys(keys, queries), operands, statistics, *gradients[1:])
    ((kernel, args),) = [each for each in launched if each[0].name.startswith(f"attention_{which}(")]
    return recorded(kernel, args)  # the first block has the rows that see tiles


# --- Products ---------------------------------------------------------------------------------------------------------


def _product(spec: GemmSpec, config: GemmConfig, tiles: int, k_iters: int) -> Protocol:
    """Of one block that computes so many tiles, each in ``k_iters`` K iterations."""
    m, n, k = config.tile_m * max(tiles, 1), config.tile_n, TILE_K * k_iters
    a, b = (torch.zeros(lines, k, dtype=torch.uint8) for lines in (m, n))
    out = torch.zeros(m, n, dtype=getattr(torch, spec.out_dtype))
    scale_inv_a = torch.ones(k_iters, m)
    scale_inv_b = torch.ones(-(-n // SCALE_N), k_iters) if spec.scaling.b_along_k_by_block else torch.ones(k_iters, n)
    absent = map_a = Map(a, Box(config.tile_m, TILE_K))
    maps = (
        map_a,
        Map(b, Box(config.tile_n, TILE_K)),
        Map(out, Box(64, epi_tile_columns(spec.out_dtype))),
        Map(scale_inv_a, Box(1, config.tile_m, swizzle=False)) if spec.scaling.along_k else absent,
        Map(scale_inv_b, Box(1, config.tile_n, swizzle=False)) if spec.scaling.b_along_k_by_row else absent,
    )
    bias = torch.zeros(n, dtype=getattr(torch, spec.bias_dtype)) if spec.bias_dtype else 0
    addresses = scale_inv_a, scale_inv_b, bias, out, 0
    strides_and_sizes = n, scale_inv_b.stride(0), m if tiles else 0, n, k
    return recorded(gemm_kernel(spec, config), (*maps, *addresses, *strides_and_sizes))


ROW, BLOCK, BLOCKS = Scaling.ROW, Scaling.BLOCK_1X128_128X128, Scaling.BLOCK_1X128_1X128
PRODUCTS = {
    "two warpgroups": (
        GemmSpec("e4m3", "e4m3", ROW, "bfloat16", "bfloat16", promote=False),
        GemmConfig(2, 1, 256, stages=4),
    ),
    "scales of both": (
        GemmSpec("e4m3", "e4m3", BLOCKS, "float32", accumulate=True),
        GemmConfig(2, 2, 128, stages=4, epi_stages=1),
    ),
    "block scales": (
        GemmSpec("e4m3", "e4m3", BLOCK, "bfloat16", "bfloat16"),
        GemmConfig(2, 2, 128, stages=4, epi_stages=1),
    ),
    "192 columns": (
        GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", "bfloat16", promote=False),
        GemmConfig(2, 1, 192, stages=4),
    ),
    "one warpgroup": (
        GemmSpec("e4m3", "e4m3", BLOCK, "bfloat16"),
        GemmConfig(1, 1, 128, stages=8),
    ),
}
"""Products by name, as other tests compile them."""

# --- All --------------------------------------------------------------------------------------------------------------

TILES = tuple((tiles,) for tiles in range(MOST_TILES + 2))
"""One more: dQ does not release the last tile's stage."""


def _sizes_of(scaling: Scaling) -> tuple[tuple[int, int], ...]:
    """Tiles, and K iterations of each: some turn the ring between tiles, some within one, some are all its stages.

    With 128x128 scales a block loads the first before it looks for a tile: there, a grid never has more blocks.
    """
    of_each = 1 if scaling.along_k else 3  # such kernels take the emulator longer
    tiles = range(1 if scaling.b_along_k_by_block else 0, MOST_TILES + 1)
    return (*((each, of_each) for each in tiles), (3, 3), (2, 5), (2, 4))


KERNELS = [
    *(
        Pipelined(f"{which}-{head_dim}", partial(_attention, which, head_dim), TILES)
        for which, head_dim in (
            ("forward", 64), ("forward", 256), ("dq", 64), ("dq", 256), ("dkv", 64), ("dk", 256), ("dv", 256),
            ("forward", 96), ("forward", 128), ("dq", 96), ("dq", 128), ("dkv", 96), ("dkv", 128),
        )
    ),
    *(
        Pipelined(name, partial(_product, spec, config), _sizes_of(spec.scaling))
        for name, (spec, config) in PRODUCTS.items()
    ),
]  # fmt: skip
