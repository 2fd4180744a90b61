"""GEMMs of experts on CUDA tensors: on Hopper in one launch, behind a small one that makes the table of its tiles.

The host knows neither where groups end nor how many tiles there are, and does not wait for either. Elsewhere, and where
the kernel does not fit, a loop multiplies the rows of each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.gemm.groups import group_rows_kernel, max_row_tiles
from cuda_kernels.gemm.spec import WGMMA_ARCHITECTURES, GemmConfig
from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import fastest_by_estimate
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import SCALINGS, BoundGemm, GemmOperand, bind_gemm, start_of
from lightning_fp8.ops.grouped import grouped_mm_op, reference_grouped_mm
from lightning_fp8.ops.memory import Allocation, OperandKey, maker, operand_key
from lightning_fp8.ops.plans import check_not_empty, current_device, planned, warn_once

GroupedMultiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Gemm], Tensor]
"""The arguments and the result of the op ``grouped_mm``."""


def grouped_mm_on_cuda(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
    """Multiply the rows of each group."""
    run: GroupedMultiply = _plan(
        a.device, a.is_cuda and current_device(), operand_key(a, scale_a), operand_key(*rows_of_all(b, scale_b)),
        len(offs), gemm.flat,
    )  # fmt: skip
    return run(a, scale_a, b, scale_b, offs, gemm)


def rows_of_all(b: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """``b [E, N, K]`` as ``[E * N, K]``, and its scales likewise; contiguous tensors are not copied."""
    return b.flatten(0, 1), scale_b.flatten(0, 1) if scale_b.dim() else scale_b


def bind_grouped_gemm(
    device: torch.device, a_key: OperandKey, b_key: OperandKey, groups: int, gemm: Gemm
) -> BoundGemm | None:
    """The GEMM that the kernel computes, or None where a loop does; ``b_key`` is that of the rows of all groups."""
    if (scaling := SCALINGS.get((gemm.layout_a, gemm.layout_b))) is None or scaling.b_along_k_by_row:
        return None
    if gemm_selection.backend() == "cublaslt" or launch.architecture_of(device) not in WGMMA_ARCHITECTURES:
        return None
    a, b = (
        GemmOperand.from_key(layout, key, device)
        for layout, key in ((gemm.layout_a, a_key), (gemm.layout_b, b_key))
    )
    check_not_empty((a.rows, b.rows, a.k))
    bound = bind_gemm(device, a, b, gemm, groups=groups)
    if not (a.is_aligned and b.is_aligned and bound.problem.out_aligned):
        warn_once(
            device,
            f"the kernel for experts does not multiply {groups} of {bound.problem.n} x {a.k} on {device}: rows of "
            "operands and of the result must begin at multiples of 16 bytes. A loop over experts is used instead, which"
            " is slower and waits for the GPU; make both sizes multiples of 16",
        )
        return None
    return bound


def build_grouped_gemm(bound: BoundGemm, config: GemmConfig) -> GroupedMultiply:
    """The function that computes ``bound`` by the kernel with these tiles.

    Raises:
        KernelError: If a kernel cannot be compiled or loaded.
    """
    problem, device = bound.problem, bound.device
    shape = max_row_tiles(problem.m, problem.groups, config.tile_m) + 1, 4
    new_table = maker(device, Allocation.contiguous(shape, torch.int32))
    new_out = maker(device, Allocation.contiguous((problem.m, problem.n), bound.gemm.out_dtype))
    make_table = launch.bind(
        group_rows_kernel(config.tile_m), 1, device, ("offs", "row_tiles"), groups=problem.groups, rows=problem.m
    )
    start, pointer = start_of(bound, config), launch.address_on(device)

    def run(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
        row_tiles, out = new_table(), new_out()
        make_table(pointer(offs), pointer(row_tiles))
        start(a, scale_a, *rows_of_all(b, scale_b), None, out, row_tiles)
        return out

    return run


@planned(fallback=reference_grouped_mm, name="grouped_gemm")
def _plan(
    device: torch.device, a_key: OperandKey, b_key: OperandKey, groups: int, flat: tuple[Any, ...]
) -> GroupedMultiply:
    bound = bind_grouped_gemm(device, a_key, b_key, groups, Gemm.from_flat(*flat))
    if bound is None:
        return reference_grouped_mm
    config = fastest_by_estimate(bound.problem)
    assert isinstance(config, GemmConfig)
    return build_grouped_gemm(bound, config)


grouped_mm_op.implement("cuda", grouped_mm_on_cuda, _plan)
