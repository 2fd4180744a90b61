"""GEMM kernels bound to a problem: tensor maps, grid, and the arguments of each launch by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.gemm.mma import mma_gemm_kernel
from cuda_kernels.gemm.spec import TILE_K, GemmConfig, MmaConfig, epi_tile_columns
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host.gemm_configs import GemmProblem, KernelConfig, num_blocks
from cuda_kernels.host.launch import Box, address_on, bind
from cuda_kernels.host.tensor_maps import map_on

GemmStart = Callable[..., None]
"""``(a, scale_inv_a, b, scale_inv_b, bias, out)`` of :func:`bind_gemm_kernel`: launch on the current stream."""


class GemmStrides(NamedTuple):
    """Strides of a GEMM's tensors in elements.

    Attributes:
        a, b: between rows.
        scale_inv_a, scale_inv_b: between a row's consecutive scales along K; for 128x128 scales between rows of blocks;
            else 0.
        out: between rows.
    """

    a: int
    b: int
    scale_inv_a: int
    scale_inv_b: int
    out: int


def bind_gemm_kernel(
    device: torch.device, problem: GemmProblem, config: KernelConfig, strides: GemmStrides
) -> GemmStart:
    """Bind ``config``'s kernel to the sizes of ``problem`` and these strides; returns a function that launches it.

    A launch takes aligned operands: FP8 codes ``a [m, k]`` and ``b [n, k]`` and their float32 scales; ``bias [n]``,
    or None if the spec has none; ``out [m, n]``, with the dtypes of ``problem.spec``; and of a grouped one the table
    of :mod:`cuda_kernels.gemm.groups`.

    Raises:
        KernelError: If the kernel cannot be compiled or loaded.
    """
    if isinstance(config, GemmConfig):
        return _bind_wgmma(device, problem, config, strides)
    return _bind_mma(device, problem, config, strides)


def _bind_wgmma(device: torch.device, problem: GemmProblem, config: GemmConfig, strides: GemmStrides) -> GemmStart:
    spec, scaling, pointer = problem.spec, problem.spec.scaling, address_on(device)
    map_a, map_b = map_on(device, Box(config.tile_m, TILE_K)), map_on(device, Box(config.tile_n, TILE_K))
    map_out = map_on(device, Box(64, epi_tile_columns(spec.out_dtype)))
    map_scale_inv_a, map_scale_inv_b = (
        map_on(device, Box(1, rows, swizzle=False, transposed=True)) for rows in (config.tile_m, config.tile_n)
    )
    launch = bind(
        gemm_kernel(spec, config),
        num_blocks(problem, config),
        device,
        (
            "map_a", "map_b", "map_out", "map_scale_inv_a", "map_scale_inv_b",
            "scale_inv_a", "scale_inv_b", "bias", "out", "row_tiles",
        ),
        out_stride=strides.out, scale_inv_b_stride=strides.scale_inv_b, m=problem.m, n=problem.n, k=problem.k,
    )  # fmt: skip

    def run(
        a: Tensor, scale_inv_a: Tensor, b: Tensor, scale_inv_b: Tensor, bias: Tensor | None, out: Tensor,
        row_tiles: Tensor | None = None,
    ) -> None:  # fmt: skip
        absent = encoded_a = map_a(a)
        launch(
            encoded_a,
            map_b(b),
            map_out(out) if config.smem_epilogue else absent,
            map_scale_inv_a(scale_inv_a) if scaling.along_k else absent,
            map_scale_inv_b(scale_inv_b) if scaling.b_along_k_by_row else absent,
            pointer(scale_inv_a),
            pointer(scale_inv_b),
            0 if bias is None else pointer(bias),
            pointer(out),
            0 if row_tiles is None else pointer(row_tiles),
        )

    return run


def _bind_mma(device: torch.device, problem: GemmProblem, config: MmaConfig, strides: GemmStrides) -> GemmStart:
    pointer = address_on(device)
    launch = bind(
        mma_gemm_kernel(problem.spec, config),
        num_blocks(problem, config),
        device,
        (
            "a", "a_stride", "b", "b_stride", "scale_inv_a", "scale_inv_a_stride", "scale_inv_b", "scale_inv_b_stride",
            "bias", "out", "out_stride",
        ),
        m=problem.m, n=problem.n, k=problem.k,
    )  # fmt: skip

    def run(a: Tensor, scale_inv_a: Tensor, b: Tensor, scale_inv_b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        launch(
            pointer(a), strides.a, pointer(b), strides.b,
            pointer(scale_inv_a), strides.scale_inv_a, pointer(scale_inv_b), strides.scale_inv_b,
            0 if bias is None else pointer(bias), pointer(out), strides.out,
        )  # fmt: skip

    return run
