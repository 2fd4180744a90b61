"""The backends of a GEMM: one of our kernels, ``torch._scaled_mm``, or the reference, which is slower."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cuda_kernels.host.gemm_configs import GemmChoice, KernelConfig, Library
from cuda_kernels.host.launchers.gemm import GemmStrides, bind_gemm_kernel
from lightning_fp8.ops.core.allocation import allocator
from lightning_fp8.ops.gemm import reference
from lightning_fp8.ops.gemm.options import parse_scaled_mm_options
from lightning_fp8.ops.gemm.problem import BoundGemm
from lightning_fp8.ops.gemm.schema import Gemm, Operand


def build_gemm(gemm: BoundGemm, choice: GemmChoice) -> Gemm:
    """The function that computes ``gemm`` by the kernel or library of ``choice``.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """
    if not isinstance(choice, Library):
        return KernelGemm(gemm, choice).run
    return ScaledMm(gemm.options_text, reference.gemm).run if choice is Library.CUBLASLT else reference.gemm


class KernelGemm:
    """One of our kernels, bound to a GEMM and a tile configuration."""

    def __init__(self, gemm: BoundGemm, kernel_config: KernelConfig) -> None:
        device, problem, a, b = gemm.device, gemm.problem, gemm.a, gemm.b
        self._allocate = allocator(device)
        self._out = (problem.m, problem.n), (problem.n, 1), parse_scaled_mm_options(gemm.options_text).out_dtype
        strides = GemmStrides(a.data.stride, b.data.stride, a.scale_inv_stride, b.scale_inv_stride, gemm.stride)
        self._run = bind_gemm_kernel(device, problem, kernel_config, strides)

    def run(
        self, a: Operand, b: Operand, options_text: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Start the kernel; it adds to ``out`` if there is one, or else gives a new tensor."""
        if out is None:
            out = self._allocate(*self._out)
        self._run(*a, *b, bias, amax, out)
        return out


class ScaledMm:
    """``torch._scaled_mm``; once it has refused, with one warning, ``fallback`` in its place."""

    def __init__(self, options_text: str, fallback: Gemm) -> None:
        self._options = parse_scaled_mm_options(options_text)
        self._fallback = fallback
        self._refused = False

    def run(
        self, a: Operand, b: Operand, options_text: str, bias: Tensor | None, amax: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Call ``torch._scaled_mm``, or ``fallback`` after a refusal."""
        if self._refused:
            return self._fallback(a, b, options_text, bias, amax, out)
        (data_a, scale_inv_a), (data_b, scale_inv_b) = a, b
        try:
            result = torch._scaled_mm(
                data_a,
                data_b.t(),
                scale_a=scale_inv_a,
                scale_b=scale_inv_b.t() if scale_inv_b.dim() == 2 else scale_inv_b,
                bias=bias,
                out_dtype=self._options.out_dtype,
                use_fast_accum=self._options.fast_accum,
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
            return self._fallback(a, b, options_text, bias, amax, out)
        return reference.finish_unfused(result, amax, out)
