"""The cast of experts on CUDA tensors, all of them in one launch, and their GEMMs.

On Hopper a kernel multiplies, behind a small one that makes the table of its tiles, and the host does not ask the GPU
where groups end. Where there is no kernel, the loop of the specification asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.gemm.groups import group_rows_kernel, max_row_tiles
from cuda_kernels.gemm.spec import WGMMA_ARCHITECTURES
from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import GemmChoice, Library, fastest_by_estimate
from lightning_fp8.ops.cast import Outputs
from lightning_fp8.ops.cast_cuda import planned_cast, tensor_loaders
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import SCALINGS, BoundGemm, GemmOperand, aligned_operand, bind_gemm, build_gemm
from lightning_fp8.ops.grouped import grouped_mm_op, quantize_experts_op, reference_experts, reference_grouped_mm
from lightning_fp8.ops.memory import Allocation, OperandKey, maker, operand_key
from lightning_fp8.ops.plans import check_not_empty, current_device, planned, warn_once

GroupedMultiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Gemm], Tensor]
"""``(a, scale_a, b, scale_b, offs, gemm) -> out`` of the op ``grouped_mm``."""


def grouped_mm_on_cuda(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
    """Multiply the rows of each group."""
    keys = operand_key(a, scale_a), operand_key(*rows_of_all(b, scale_b)), len(offs), gemm.flat
    run: GroupedMultiply = _plan(a.device, a.is_cuda and current_device(), *keys)
    return run(a, scale_a, b, scale_b, offs.contiguous(), gemm)


def rows_of_all(b: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """``b [E, N, K]`` as ``[E * N, K]``, and its scales likewise: views if they are contiguous."""
    return b.flatten(0, 1), scale_b.flatten(0, 1) if scale_b.dim() else scale_b


def build_grouped_gemm(bound: BoundGemm, choice: GemmChoice) -> GroupedMultiply:
    """The function that computes ``bound`` by the kernel of ``choice``; see :func:`~.gemm_cuda.build_gemm`."""
    problem, device = bound.problem, bound.device
    assert not isinstance(choice, Library)
    table = Allocation.contiguous((max_row_tiles(problem.m, problem.groups, choice.tile_m) + 1, 4), torch.int32)
    new_table, pointer = maker(device, table), launch.address_on(device)
    make_table = launch.bind(
        group_rows_kernel(choice.tile_m), 1, device, ("offs", "row_tiles"), groups=problem.groups, rows=problem.m
    )
    multiply = build_gemm(bound, choice)

    def run(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
        row_tiles = new_table()
        make_table(pointer(offs), pointer(row_tiles))
        return multiply(a, scale_a, *rows_of_all(b, scale_b), gemm, None, None, row_tiles)

    return run


@planned(fallback=reference_grouped_mm, name="grouped_gemm")
def _plan(
    device: torch.device, a_key: OperandKey, b_key: OperandKey, groups: int, flat: tuple[Any, ...]
) -> GroupedMultiply:
    """Plan the kernel, or a loop; ``b_key`` is the key of :func:`rows_of_all`."""
    gemm = Gemm.from_flat(*flat)
    scaling = SCALINGS.get((gemm.layout_a, gemm.layout_b))
    has_kernel = scaling is not None and not scaling.b_along_k_by_row and gemm_selection.backend() != "cublaslt"
    if not has_kernel or launch.architecture_of(device) not in WGMMA_ARCHITECTURES:
        return reference_grouped_mm
    a, b = GemmOperand.from_key(gemm.layout_a, a_key, device), GemmOperand.from_key(gemm.layout_b, b_key, device)
    check_not_empty((a.rows, b.rows, a.k))
    if not a.is_aligned:
        return lambda a, scale_a, *rest: grouped_mm_on_cuda(*aligned_operand(a, scale_a, gemm.layout_a), *rest)
    bound = bind_gemm(device, a, b, gemm, groups=groups)
    if b.is_aligned and bound.problem.out_aligned:
        return build_grouped_gemm(bound, fastest_by_estimate(bound.problem))
    warn_once(
        device,
        f"No kernel multiplies tokens by {groups} experts of {bound.problem.n} x {a.k} on {device}, because rows do "
        "not begin at multiples of 16 bytes. A loop over experts is used instead, which is slower and waits for the "
        "GPU; features in multiples of 16 avoid it",
    )
    return reference_grouped_mm


grouped_mm_op.implement("cuda", grouped_mm_on_cuda)


def _reference(w: Tensor, experts: int, *args: Any) -> Outputs:
    return reference_experts(w.unflatten(0, (experts, len(w) // experts)), *args)


_quantize, _ = planned_cast("quantize_experts", _reference, lambda key, _: tensor_loaders(key), of_experts=True)
quantize_experts_op.implement(
    "cuda", lambda w, *args: _quantize(w.flatten(0, 1), len(w), *args) if len(w) else reference_experts(w, *args)
)
