"""Triton's matrix products, against float64 or exact integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tests.foreign.case import BF16, E4M3, E5M2, FP16, FP32, NAMES, Case, assert_equal, integers
from tests.foreign.compiler import DEFAULT, Argument, Descriptor, Launcher, Options
from tests.foreign.kernels import hopper, products

# Matrix products


def _product(
    kernel: Any,
    options: Options = DEFAULT,
    tile: tuple[int, int, int] = (128, 128, 128),
    types: tuple[torch.dtype, torch.dtype, torch.dtype] = (E4M3, E4M3, FP32),
    shape: tuple[int, int, int] = (256, 256, 384),
    *,
    grid: Sequence[int] | None = None,
    takes_shape: bool = False,
    pointers: bool = False,
    **constants: Any,
) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        (m, n, k), (rows, columns, inner) = shape, tile
        a, b, c = integers((m, k), types[0], 1), integers((n, k), types[1], 2), torch.zeros(m, n, dtype=types[2])
        blocks = ((rows, inner), (columns, inner), (rows, columns))
        args: list[Argument] = [a, b, c]
        if not pointers:
            args = [Descriptor(tensor, block) for tensor, block in zip((a, b, c), blocks)]
        sizes = [m, n, k] if takes_shape else [k]
        tiles = grid or (-(-m // rows), -(-n // columns))
        launch(kernel, tiles, [*args, *sizes], options, BM=rows, BN=columns, BK=inner, **constants)
        assert_equal(c, (a.double() @ b.double().T).to(types[2]))

    return run


def _gluon_product(
    kernel: Any, options: Options, types: tuple[torch.dtype, ...], cga: Sequence[list[list[int]]], **constants: Any
) -> Callable[[Launcher], None]:
    """Two tiles each way of 128·n x 128, n blocks in a cluster; in K steps of 128 bytes, one less than fills the ring
    evenly."""

    def run(launch: Launcher) -> None:
        rows, columns, inner = 128 * options.num_ctas, 128, 128 // types[0].itemsize
        a, b = integers((2 * rows, 5 * inner), types[0], 1), integers((2 * columns, 5 * inner), types[1], 2)
        c = torch.zeros(2 * rows, 2 * columns, dtype=types[2])
        blocks = ((rows, inner), (columns, inner), (rows, columns))
        args = [
            Descriptor(tensor, block, gl.NVMMASharedLayout(128, 8 * tensor.itemsize, 2, cga_layout=split))
            for tensor, block, split in zip((a, b, c), blocks, cga)
        ]
        launch(kernel, (2, 2), [*args, a.shape[1]], options, **constants)
        assert_equal(c, (a.double() @ b.double().T).to(types[2]))

    return run


def _added_tiles(launch: Launcher) -> None:
    a, c = integers((256, 32), FP32, 1), integers((64, 32), FP32, 2)
    expected = c + a.view(4, 64, 32).sum(0)
    layout = gl.NVMMASharedLayout(128, 32, 2)
    launch(hopper.add_tiles, (4,), [Descriptor(a, (64, 32), layout), Descriptor(c, (64, 32), layout)], BM=64)
    assert_equal(c, expected)


_ALONE: list[list[int]] = []
_SHARED, _HALVES = [[0, 0]], [[1, 0]]  # of a cluster of two: both need all of it, or each has half of its rows
_CLUSTER_SUMS = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32], cga_layout=_HALVES)

_descriptor = products.descriptor_product
_pointer: dict[str, Any] = {"pointers": True, "takes_shape": True, "shape": (100, 80, 192), "PRECISION": "tf32"}

PRODUCTS = [
    Case("wgmma FP8", "128x128-4warps", _product(_descriptor)),
    Case("wgmma FP8", "128x256-8warps-4stages", _product(_descriptor, Options(90, 8, 4), (128, 256, 64))),
    Case("wgmma FP8", "256x128-8warps", _product(_descriptor, Options(90, 8, 2), (256, 128, 128))),
    Case("wgmma FP8", "64x64-e5m2", _product(_descriptor, Options(90, 4, 2), (64, 64, 64), (E4M3, E5M2, FP32))),
    Case("wgmma FP8", "e5m2-to-bf16", _product(_descriptor, DEFAULT, (64, 128, 128), (E5M2, E4M3, BF16))),
    Case("wgmma FP8", "ragged", _product(_descriptor, types=(E4M3, E4M3, FP16), shape=(200, 136, 208))),
    Case(
        "wgmma FP8",
        "through-cp.async",
        _product(products.pointer_product, Options(90), (64, 64, 64), **_pointer),
    ),
    Case("wgmma FP16", "bf16", _product(_descriptor, DEFAULT, (128, 128, 64), (BF16, BF16, BF16))),
    Case("wgmma FP16", "fp16-8warps", _product(_descriptor, Options(90, 8), (128, 128, 64), (FP16, FP16, FP16))),
    Case(
        "persistent",
        "persistent",
        _product(products.persistent_product, grid=(3,), takes_shape=True, SPECIALIZE=False),
    ),
    Case("warp-specialized", "one-tile", _product(products.specialized_product, Options(90, 8))),
    Case("warp-specialized", "64-rows", _product(products.specialized_product, tile=(64, 128, 128))),
    Case(
        "warp-specialized",
        "persistent",
        _product(products.persistent_product, Options(90, 8), grid=(3,), takes_shape=True, SPECIALIZE=True),
    ),
    Case(
        "warp-specialized",
        "gluon-fp8",
        _gluon_product(hopper.specialized, DEFAULT, (E4M3, E4M3, FP32), [_ALONE] * 3, STAGES=3),
    ),
    Case(
        "warp-specialized",
        "gluon-bf16-8warps",
        _gluon_product(hopper.specialized, Options(90, 8), (BF16, BF16, BF16), [_ALONE] * 3, STAGES=3),
    ),
    Case("cluster", "two-blocks", _product(_descriptor, Options(num_ctas=2), (256, 128, 128))),
    Case(
        "cluster",
        "multicast",
        _gluon_product(
            hopper.multicast,
            Options(num_ctas=2),
            (E4M3, E4M3, FP32),
            [_HALVES, _SHARED, _HALVES],
            BM=256,
            BN=128,
            BK=128,
            LAYOUT=_CLUSTER_SUMS,
        ),
    ),
    Case("tensor adds", "split-k", _product(products.split_product, grid=(2, 2, 2), PARTS=2)),
    Case("tensor adds", "gluon", _added_tiles),
    *(
        Case(
            "mma.sync FP8",
            f"sm_{arch}-{NAMES[a]}-{NAMES[b]}",
            _product(products.pointer_product, Options(arch), (64, 64, 64), (a, b, FP32), **_pointer),
        )
        for arch, a, b in ((89, E4M3, E4M3), (89, E4M3, E5M2), (89, E5M2, E4M3), (120, E4M3, E4M3))
    ),
    Case("mma.sync FP8", "sm_120-descriptors", _product(_descriptor, Options(120), (64, 64, 64))),
    *(
        Case(
            "mma.sync FP16",
            f"sm_89-{name}",
            _product(products.pointer_product, Options(89), (64, 64, 64), (dtype, dtype, dtype), **_pointer),
        )
        for name, dtype in (("bf16", BF16), ("fp16", FP16))
    ),
    Case(
        "fma",
        "sm_89-fp32",
        _product(products.pointer_product, Options(89), (32, 32, 32), (FP32,) * 3, **_pointer | {"PRECISION": "ieee"}),
    ),
]
