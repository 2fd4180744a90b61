"""What the products of groups are tested with, against float64; see ``gemm_cases``."""

from __future__ import annotations

from typing import Any

import torch

from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.products import check_grouped_product
from tests.cuda_kernels.cases.gemm_cases import PAIRS, multiplying
from tests.cuda_kernels.cases.kernel_cases import BF16, E4M3, E5M2, FP16, FP32

RAGGED, SOME_EMPTY, ONE = (70, 133, 0, 1, 260, 64), (0, 300, 0, 0), (0, 0, 140)
"""Of six groups; all rows in one of several, which is not the first; and the same in the last one."""


def _case(
    tile: tuple[int, int, int],
    scaling: str,
    sizes: tuple[int, ...],
    shape: tuple[int, int],
    out: torch.dtype = BF16,
    fast: bool = False,
    **options: Any,
) -> Case:
    gemm = Gemm(*PAIRS[scaling], out, fast)
    words = [f"{key}={value}" for key, value in options.items() if key != "formats"]
    words += ["e5m2*e4m3"] * ("formats" in options) + ["fast"] * fast + [DTYPE_NAMES[out]] * (out is not BF16)
    numbers = "x".join(("+".join(map(str, sizes)), *map(str, shape))), "/".join(map(str, tile))
    name = "-".join(["grouped", scaling, *numbers, *words])

    def run(device: str) -> None:
        with multiplying("90a", *tile):
            check_grouped_product(gemm, sizes, shape, device, **options)

    return Case(name, run)


GRADIENT = {"formats": (E5M2, E4M3)}

CASES = [
    _case((2, 1, 256), "tensor", RAGGED, (272, 208), fast=True, rest=150),
    _case((2, 2, 128), "tensor", RAGGED, (272, 208), **GRADIENT),
    _case((2, 1, 192), "tensor", RAGGED, (272, 656), out=FP32, rest=1),
    _case((1, 1, 128), "tensor", RAGGED, (144, 272), fast=True, rest=64),
    _case((1, 1, 128), "tensor", SOME_EMPTY, (16, 16), **GRADIENT),
    _case((2, 1, 256), "row", RAGGED, (272, 208), fast=True, rest=150),
    _case((2, 2, 128), "row", RAGGED, (272, 208), exact=False, **GRADIENT),
    _case((1, 1, 128), "row", RAGGED, (272, 208), fast=True),
    _case((1, 1, 128), "row", SOME_EMPTY, (144, 272), out=FP16),
    _case((2, 2, 128), "block", RAGGED, (272, 208), rest=150),
    _case((2, 1, 192), "block", RAGGED, (400, 656)),
    _case((1, 1, 128), "block", RAGGED, (272, 208), out=FP32, rest=64),
    _case((1, 1, 128), "block", ONE, (144, 4304), rest=3),
    _case((2, 2, 128), "block", SOME_EMPTY, (144, 272), exact=False),
]
