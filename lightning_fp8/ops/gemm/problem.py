"""A GEMM as kernels see it: the memory layout of its operands, and the problem to plan for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.gemm.spec import GemmSpec, Scaling
from cuda_kernels.host import launch
from cuda_kernels.host.gemm_configs import GemmProblem
from lightning_fp8.formats import float8_of
from lightning_fp8.ops.core.alignment import (
    ALIGNMENT,
    aligned_copy,
    has_aligned_pairs,
    is_aligned_operand,
    is_aligned_result,
    operand_allocations,
)
from lightning_fp8.ops.core.options import DTYPE_NAMES
from lightning_fp8.ops.core.tensor_keys import TensorKey
from lightning_fp8.ops.gemm.options import parse_scaled_mm_options
from lightning_fp8.ops.gemm.schema import Operand
from lightning_fp8.scaled import Layout

SCALINGS = {(Layout(each.layouts[0]), Layout(each.layouts[1])): each for each in Scaling}
"""Pairs of layouts that kernels multiply."""


OperandKey = tuple[torch.dtype, torch.Size, tuple[int, ...], int, tuple[int, ...], int]


def operand_key(data: Tensor, scale_inv: Tensor) -> OperandKey:
    """The key of an operand, a plain tuple: ``tensor_key`` of ``data``, strides and misalignment of ``scale_inv``."""
    return (
        data.dtype, data.shape, data.stride(), data.data_ptr() % ALIGNMENT,
        scale_inv.stride(), scale_inv.data_ptr() % ALIGNMENT,
    )  # fmt: skip


class GemmOperand(NamedTuple):
    """The memory layout of a K-major operand ``[rows, k]`` and of its scales."""

    layout: Layout
    data: TensorKey
    scale_inv: TensorKey

    @classmethod
    def from_key(cls, layout: Layout, key: OperandKey, device: torch.device) -> GemmOperand:
        """The operand that :func:`operand_key` describes."""
        dtype, shape, strides, misalignment, scale_inv_strides, scale_inv_misalignment = key
        scale_shape = layout.scale_shape(*shape)
        return cls(
            layout,
            TensorKey(dtype, shape, strides, misalignment, device),
            TensorKey(layout.scale_dtype, scale_shape, scale_inv_strides, scale_inv_misalignment, device),
        )

    @classmethod
    def canonical(cls, layout: Layout, dtype: torch.dtype, rows: int, k: int) -> GemmOperand:
        """An operand as the ops that cast lay it out."""
        data, scale_inv = operand_allocations(layout, dtype, rows, k)
        device = torch.device("meta")
        return cls(
            layout,
            TensorKey(dtype, (rows, k), data.strides, 0, device),
            TensorKey(scale_inv.dtype, scale_inv.shape, scale_inv.strides, 0, device),
        )

    @property
    def rows(self) -> int:
        return self.data.rows

    @property
    def k(self) -> int:
        return self.data.columns

    @property
    def is_aligned(self) -> bool:
        """Whether GEMMs can read it where it lies; see :mod:`lightning_fp8.ops.core.alignment`."""
        return is_aligned_operand(self.layout, self.data, self.scale_inv)

    @property
    def scale_inv_stride(self) -> int:
        """Elements from one line of scales to the next, where scales change along K; else 0."""
        if not self.layout.scales_along_k:
            return 0
        return self.scale_inv.strides[1 if self.layout.scale_major == "mn" else 0]


def aligned_operand(operand: Operand, layout: Layout) -> Operand:
    """The operand where GEMMs can read it: itself, or an aligned copy."""
    is_aligned = GemmOperand.from_key(layout, operand_key(*operand), operand[0].device).is_aligned
    return operand if is_aligned else aligned_copy(layout, *operand)


class BoundGemm(NamedTuple):
    """A GEMM of aligned operands on a device.

    Attributes:
        problem: what a plan is chosen for.
        options_text: its options, as the op takes them.
        stride: of the result's rows, in elements.
    """

    device: torch.device
    problem: GemmProblem
    a: GemmOperand
    b: GemmOperand
    options_text: str
    stride: int


def bind_gemm(
    device: torch.device,
    a: GemmOperand,
    b: GemmOperand,
    options_text: str,
    bias_key: TensorKey | None = None,
    out_key: TensorKey | None = None,
    has_amax: bool = False,
    kernels: bool = True,
) -> BoundGemm:
    """The GEMM of these operands; ``out`` is what to add to, or None for a new tensor.

    Without ``kernels`` it is one for libraries: its architecture has none.
    """
    options = parse_scaled_mm_options(options_text)
    spec = GemmSpec(
        float8_of(a.data.dtype).name.lower(),
        float8_of(b.data.dtype).name.lower(),
        SCALINGS[a.layout, b.layout],
        DTYPE_NAMES[options.out_dtype],
        bias_dtype=None if bias_key is None else DTYPE_NAMES[bias_key.dtype],
        accumulate=out_key is not None,
        promote=not options.fast_accum,
        has_amax=has_amax,
    )
    out_key = out_key or TensorKey(options.out_dtype, (a.rows, b.rows), (b.rows, 1), 0, device)
    problem = GemmProblem(
        a.rows,
        b.rows,
        a.k,
        spec,
        launch.architecture_of(device) if kernels else "none",
        launch.multiprocessors(device),
        out_aligned=is_aligned_result(out_key),
        even=has_aligned_pairs(out_key, bias_key, b.scale_inv),
    )
    return BoundGemm(device, problem, a, b, options_text, out_key.stride)
