"""GEMM kernels bound to a problem: tensor maps, grid, and the arguments of each launch by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.gemm.mma import mma_gemm_kernel
from cuda_kernels.gemm.spec import TILE_K, GemmConfig, MmaConfig, epi_tile_columns
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host.gemm_configs import GemmProblem, KernelConfig, num_blocks
from cuda_kernels.host.launch import Argument, Box, address_on, bind
from cuda_kernels.host.tensor_maps import map_on

GemmStart = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", Tensor], None]
"""``(a, scale_inv_a, b, scale_inv_b, bias, amax, out)`` of :func:`bind_gemm_kernel`: launch on the current stream."""


MapOf = Callable[[Box], Callable[[Tensor], Argument]]
"""From a matrix's box to a function that makes the tensor map of a tensor."""


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
    ``amax [1]`` in float32 and ``out [m, n]``, with the dtypes of ``problem.spec``. Bias and amax are None if the spec
    has none.

    Raises:
        KernelError: If the kernel cannot be compiled or loaded.
    """
    launcher = _wgmma_launcher if isinstance(config, GemmConfig) else _mma_launcher
    return launcher(device, problem, config, strides)  # type: ignore[arg-type]


def _wgmma_launcher(device: torch.device, problem: GemmProblem, config: GemmConfig, strides: GemmStrides) -> GemmStart:
    spec = problem.spec
    pointer = address_on(device)
    map_of = partial(map_on, device)
    map_a = map_of(Box(config.a_rows_loaded, TILE_K))
    map_b = map_of(Box(config.b_rows_loaded, TILE_K))
    map_out = map_of(Box(64, epi_tile_columns(spec.out_dtype))) if config.smem_epilogue else None
    map_scale_inv_a = _scale_inv_map(map_of, spec.scaling.a_scales_per_stage, config.tile_m)
    map_scale_inv_b = _scale_inv_map(map_of, spec.scaling.b_scales_per_stage, config.tile_n)
    launch = bind(
        gemm_kernel(spec, config),
        num_blocks(problem, config),
        device,
        (
            "map_a", "map_b", "map_out", "map_scale_inv_a", "map_scale_inv_b",
            "scale_inv_a", "scale_inv_b", "bias", "amax_out", "out", "out_stride", "scale_inv_b_stride",
        ),
        **_sizes(problem),
    )  # fmt: skip

    def run(
        a: Tensor,
        scale_inv_a: Tensor,
        b: Tensor,
        scale_inv_b: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        out: Tensor,
    ) -> None:
        absent = encoded_a = map_a(a)
        launch(
            encoded_a,
            map_b(b),
            absent if map_out is None else map_out(out),
            absent if map_scale_inv_a is None else map_scale_inv_a(scale_inv_a),
            absent if map_scale_inv_b is None else map_scale_inv_b(scale_inv_b),
            pointer(scale_inv_a),
            pointer(scale_inv_b),
            0 if bias is None else pointer(bias),
            0 if amax is None else pointer(amax),
            pointer(out),
            strides.out,
            strides.scale_inv_b,
        )

    return run


def _sizes(problem: GemmProblem) -> dict[str, int]:
    """The last parameters of both kernels."""
    return {"m": problem.m, "n": problem.n, "k": problem.k}


def _scale_inv_map(map_of: MapOf, scales: int, rows: int) -> Callable[[Tensor], Argument] | None:
    """Makes tensor maps of an operand's scales along K, with contiguous columns: ``scales`` of each of ``rows`` rows.

    None if no scales are copied.
    """
    return map_of(Box(scales, rows, swizzle=False, transposed=True)) if scales else None


def _mma_launcher(device: torch.device, problem: GemmProblem, config: MmaConfig, strides: GemmStrides) -> GemmStart:
    pointer = address_on(device)
    launch = bind(
        mma_gemm_kernel(problem.spec, config),
        num_blocks(problem, config),
        device,
        (
            "a", "a_stride", "b", "b_stride", "scale_inv_a", "scale_inv_a_stride", "scale_inv_b", "scale_inv_b_stride",
            "bias", "amax_out", "out", "out_stride",
        ),
        **_sizes(problem),
    )  # fmt: skip

    def run(
        a: Tensor,
        scale_inv_a: Tensor,
        b: Tensor,
        scale_inv_b: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        out: Tensor,
    ) -> None:
        launch(
            pointer(a),
            strides.a,
            pointer(b),
            strides.b,
            pointer(scale_inv_a),
            strides.scale_inv_a,
            pointer(scale_inv_b),
            strides.scale_inv_b,
            0 if bias is None else pointer(bias),
            0 if amax is None else pointer(amax),
            pointer(out),
            strides.out,
        )

    return run
