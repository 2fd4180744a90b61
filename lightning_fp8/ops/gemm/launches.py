"""What computes a GEMM: one of our kernels, ``torch._scaled_mm``, or the reference, which is exact and slower."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.gemm.mma import mma_gemm_kernel
from cuda_kernels.gemm.spec import GemmConfig, MmaConfig, Scaling
from cuda_kernels.gemm.wgmma import gemm_kernel
from cuda_kernels.host import launch, tensor_maps
from cuda_kernels.host.gemm_configs import Library, Plan
from cuda_kernels.host.tensor_maps import Box
from lightning_fp8.ops.core.allocation import allocator
from lightning_fp8.ops.gemm import reference
from lightning_fp8.ops.gemm.config import parse_scaled_mm_config
from lightning_fp8.ops.gemm.problem import BoundGemm
from lightning_fp8.ops.gemm.schema import Gemm, Operand


def build_gemm(gemm: BoundGemm, plan: Plan) -> Gemm:
    """The function that computes ``gemm`` as planned.

    Raises:
        KernelError: a kernel of the plan cannot be made.
    """
    if isinstance(plan, GemmConfig):
        return Sm90Gemm(gemm, plan).run
    if isinstance(plan, MmaConfig):
        return MmaGemm(gemm, plan).run
    return ScaledMm(gemm.config, reference_gemm).run if plan is Library.CUBLASLT else reference_gemm


def reference_gemm(
    a: Operand, b: Operand, config: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
) -> Tensor:
    """A GEMM in BF16 or float32 that rounds no operand."""
    result = reference.multiply(a, b, parse_scaled_mm_config(config), bias)
    return _finish_unfused(result, amax, out)


def _finish_unfused(result: Tensor, amax: Tensor | None, out: Tensor | None) -> Tensor:
    """The rest of an epilogue that no kernel has computed: observe the result, and add it to ``out``."""
    if amax is not None:
        torch.ops.lightning_fp8.observe.default(result, amax)
    return result if out is None else out.add_(result)


class Sm90Gemm:
    """Hopper's kernel with TMA and wgmma, bound to a tile configuration."""

    def __init__(self, gemm: BoundGemm, config: GemmConfig) -> None:
        device, problem = gemm.device, gemm.problem
        spec = problem.spec
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._out = (problem.m, problem.n), (problem.n, 1), parse_scaled_mm_config(gemm.config).out_dtype
        cluster = config.cluster
        rows = config.tile_m // (cluster if config.multicast_a else 1)
        columns = config.tile_n // (1 if config.multicast_a else cluster)
        map_on = partial(tensor_maps.map_on, device)
        self._map_a = map_on(Box(rows, 128))
        self._map_b = map_on(Box(columns, 128))
        epi_columns = 32 if spec.out == "float32" else 64
        self._map_out = map_on(Box(64, epi_columns)) if config.smem_epilogue else None
        self._map_scale_a = self._map_scale_b = None
        if spec.scaling.along_k:
            self._map_scale_a = map_on(Box(1, config.tile_m, swizzle=False, transposed=True))
        if spec.scaling is Scaling.BLOCKS:
            self._map_scale_b = map_on(Box(1, config.tile_n, swizzle=False, transposed=True))
        self._strides = gemm.stride, gemm.b.scale_stride if spec.scaling is Scaling.BLOCK else 0
        num_m_tiles = ceil_div(problem.m, config.tile_m)
        num_n_tiles = ceil_div(problem.n, config.tile_n)
        if config.multicast_a:
            num_cluster_tiles = num_m_tiles * ceil_div(num_n_tiles, cluster)
        else:
            num_cluster_tiles = ceil_div(num_m_tiles, cluster) * num_n_tiles
        blocks = min(num_cluster_tiles * cluster, launch.multiprocessors(device) // cluster * cluster)
        shape = problem.m, problem.n, problem.k
        self._launch = launch.Launch(gemm_kernel(spec, config), blocks, shape, device).start

    def run(
        self, a: Operand, b: Operand, config: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
    ) -> Tensor:
        pointer = self._pointer
        map_out, map_scale_a, map_scale_b = self._map_out, self._map_scale_a, self._map_scale_b
        (data_a, scale_a), (data_b, scale_b) = a, b
        if out is None:
            out = self._allocate(*self._out)
        tma_a = self._map_a(data_a)
        self._launch(
            tma_a,
            self._map_b(data_b),
            tma_a if map_out is None else map_out(out),
            tma_a if map_scale_a is None else map_scale_a(scale_a),
            tma_a if map_scale_b is None else map_scale_b(scale_b),
            pointer(scale_a),
            pointer(scale_b),
            0 if bias is None else pointer(bias),
            0 if amax is None else pointer(amax),
            pointer(out),
            *self._strides,
        )
        return out


class MmaGemm:
    """The kernel with mma.sync for Ada and later, bound to a tile configuration."""

    def __init__(self, gemm: BoundGemm, config: MmaConfig) -> None:
        device, problem, a, b = gemm.device, gemm.problem, gemm.a, gemm.b
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._out = (problem.m, problem.n), (problem.n, 1), parse_scaled_mm_config(gemm.config).out_dtype
        self._strides = a.data.stride, b.data.stride, a.scale_stride, b.scale_stride, gemm.stride
        blocks = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        shape = problem.m, problem.n, problem.k
        self._launch = launch.Launch(mma_gemm_kernel(problem.spec, config), blocks, shape, device).start

    def run(
        self, a: Operand, b: Operand, config: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
    ) -> Tensor:
        pointer = self._pointer
        stride_a, stride_b, scale_stride_a, scale_stride_b, stride = self._strides
        (data_a, scale_a), (data_b, scale_b) = a, b
        if out is None:
            out = self._allocate(*self._out)
        self._launch(
            pointer(data_a),
            stride_a,
            pointer(data_b),
            stride_b,
            pointer(scale_a),
            scale_stride_a,
            pointer(scale_b),
            scale_stride_b,
            0 if bias is None else pointer(bias),
            0 if amax is None else pointer(amax),
            pointer(out),
            stride,
        )
        return out


class ScaledMm:
    """``torch._scaled_mm``; once it has refused, with one warning, ``fallback`` in its place."""

    def __init__(self, config: str, fallback: Gemm) -> None:
        self._config = parse_scaled_mm_config(config)
        self._fallback = fallback
        self._refused = False

    def run(
        self, a: Operand, b: Operand, config: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if self._refused:
            return self._fallback(a, b, config, bias, amax, out)
        (data_a, scale_a), (data_b, scale_b) = a, b
        try:
            result = torch._scaled_mm(
                data_a,
                data_b.t(),
                scale_a=scale_a,
                scale_b=scale_b.t() if scale_b.dim() == 2 else scale_b,
                bias=bias,
                out_dtype=self._config.out_dtype,
                use_fast_accum=self._config.fast_accum,
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            self._refused = True
            warnings.warn(
                f"torch._scaled_mm refuses {tuple(data_a.shape)} x {tuple(data_b.t().shape)} on {data_a.device}: "
                f"{error}. Products run exactly in BF16, slower.",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._fallback(a, b, config, bias, amax, out)
        return _finish_unfused(result, amax, out)
