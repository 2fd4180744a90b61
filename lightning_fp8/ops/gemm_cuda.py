"""FP8 GEMMs on CUDA tensors. Their implementation is chosen once for each key of operands, and cached.

:mod:`cuda_kernels.host.gemm_selection` chooses one of this package's kernels or ``torch._scaled_mm``, which
:mod:`lightning_fp8.ops.torch_scaled_mm` calls. GEMMs that ``torch._scaled_mm`` refuses and no kernel supports run
slower, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_kernels.gemm.spec import GemmSpec, Scaling
from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import (
    GemmChoice,
    GemmProblem,
    KernelConfig,
    Library,
    fastest_by_estimate,
    legal_configs,
)
from cuda_kernels.host.gemm_launcher import GemmStrides, bind_gemm_kernel
from cuda_kernels.kernel import KernelError
from lightning_fp8.numerics.formats import float8_of
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.gemm import Gemm, implement_gemm, reference_gemm
from lightning_fp8.ops.memory import (
    OperandKey,
    PlainKey,
    TensorKey,
    aligned_copy,
    allocator,
    has_aligned_pairs,
    is_aligned_operand,
    is_aligned_result,
    operand_allocations,
    operand_key,
    tensor_key,
)
from lightning_fp8.ops.plans import check_not_empty, current_device, planned, proven, warn_of_fallback, warn_once
from lightning_fp8.ops.torch_scaled_mm import (
    Fit,
    is_refusal,
    multiplies_blocks,
    multiplies_mx_blocks,
    multiply,
    ways_to_fit,
)

PLAN = "gemm"
"""The name of the plans of GEMMs."""

Multiply = Callable[..., Tensor]
"""``(a, scale_a, b, scale_b, gemm, bias, out) -> out``. It adds to the argument ``out``; None allocates."""

SCALINGS = {(Layout(each.layouts[0]), Layout(each.layouts[1])): each for each in Scaling}
"""The pairs of layouts that kernels multiply."""
MX_LAYOUTS = Layout.MX_1X32, Layout.MX_1X32
"""A pair that only ``torch._scaled_mm`` multiplies."""

_IN_BF16 = "The GEMM runs in BF16 instead, which is exact but slower"


# --- The problem that kernels solve -----------------------------------------------------------------------------------


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
        """An operand with the memory layout of a cast's results."""
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
        """Whether GEMMs can read the operand in place; see :mod:`lightning_fp8.ops.memory`."""
        return is_aligned_operand(self.layout, self.data, self.scale_inv)

    @property
    def scale_inv_stride(self) -> int:
        """The stride in elements between lines of scales, if there are several along K; else 0."""
        if not self.layout.scales_along_k:
            return 0
        return self.scale_inv.strides[1 if self.layout.scale_major == "mn" else 0]


def aligned_operand(data: Tensor, scale_inv: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The operand if GEMMs can read it in place, else an aligned copy."""
    is_aligned = GemmOperand.from_key(layout, operand_key(data, scale_inv), data.device).is_aligned
    return (data, scale_inv) if is_aligned else aligned_copy(layout, data, scale_inv)


class BoundGemm(NamedTuple):
    """A GEMM of aligned operands on a device.

    Attributes:
        problem: the problem for which an implementation is chosen.
        gemm: the GEMM's options.
        stride: the row stride of the result in elements.
    """

    device: torch.device
    problem: GemmProblem
    a: GemmOperand
    b: GemmOperand
    gemm: Gemm
    stride: int


def bind_gemm(
    device: torch.device,
    a: GemmOperand,
    b: GemmOperand,
    gemm: Gemm,
    bias_key: TensorKey | None = None,
    out_key: TensorKey | None = None,
    kernels: bool = True,
    groups: int = 0,
) -> BoundGemm:
    """The GEMM of these operands, which adds to ``out`` unless that is None; with ``groups``, ``b`` has all their rows.

    Without ``kernels`` its problem has no architecture, so that only libraries are chosen.
    """
    n = b.rows // max(groups, 1)
    spec = GemmSpec(
        float8_of(a.data.dtype).name.lower(),
        float8_of(b.data.dtype).name.lower(),
        SCALINGS[a.layout, b.layout],
        DTYPE_NAMES[gemm.out_dtype],
        bias_dtype=None if bias_key is None else DTYPE_NAMES[bias_key.dtype],
        accumulate=out_key is not None,
        promote=not gemm.fast_accum,
        grouped=groups > 0,
    )
    out_key = out_key or TensorKey(gemm.out_dtype, (a.rows, n), (n, 1), 0, device)
    problem = GemmProblem(
        a.rows,
        n,
        a.k,
        spec,
        launch.architecture_of(device) if kernels else "none",
        launch.multiprocessors(device),
        out_aligned=is_aligned_result(out_key),
        even=has_aligned_pairs(out_key, bias_key, b.scale_inv),
        library_blocks=multiplies_blocks(device),
        groups=groups,
    )
    return BoundGemm(device, problem, a, b, gemm, out_key.stride)


# --- Implementations --------------------------------------------------------------------------------------------------


def build_gemm(bound: BoundGemm, choice: GemmChoice, plan_key: Sequence[Any] = ()) -> Multiply:
    """The function that computes ``bound`` by the kernel or library of ``choice``.

    Args:
        plan_key: the key of the plan, for the proof of a kernel that replaces a library.

    Raises:
        KernelError: If the kernel cannot be compiled or loaded.
    """
    if not isinstance(choice, Library):
        return _kernel(bound, choice)
    return _library(bound, plan_key) if choice is Library.CUBLASLT else reference_gemm


def _library(bound: BoundGemm, plan_key: Sequence[Any]) -> Multiply:
    """``torch._scaled_mm``, followed by a last fallback.

    The last fallback is the reference, which multiplies in BF16. For scales along K, which the reference multiplies in
    float32, it is a kernel.
    """
    problem = bound.problem
    run, said = reference_gemm, _IN_BF16
    if problem.spec.scaling.along_k:
        said = "The GEMM runs in float32 instead, which is slower"
        if legal_configs(problem):
            run, said = _kernel_when_called(bound, plan_key), "A kernel of this package is used instead"
    return _in_all_ways(bound.a, bound.b, bound.gemm, problem.spec.bias_dtype is not None, run, said)


def _in_all_ways(
    a: GemmOperand, b: GemmOperand, gemm: Gemm, has_bias: bool, run: Multiply = reference_gemm, said: str = _IN_BF16
) -> Multiply:
    """``torch._scaled_mm`` in all ways that fit, each as the fallback of the one before, followed by ``run``."""
    layouts, sizes = (gemm.layout_a, gemm.layout_b), (a.rows, b.rows, a.k)
    for fit in reversed(ways_to_fit(layouts, sizes, b.data.dtype, gemm.out_dtype, has_bias, gemm.fast_accum)):
        run, said = _scaled_mm(fit, run, said), "Its float32 result is scaled afterwards instead, which is slower"
    return run


def _kernel_when_called(bound: BoundGemm, plan_key: Sequence[Any]) -> Multiply:
    """The kernel with the lowest estimated time, compiled by the first call, or the reference if that fails."""

    @cache
    def built() -> Multiply:
        choice = fastest_by_estimate(bound.problem)
        assert not isinstance(choice, Library)
        try:
            return proven(PLAN, partial(_kernel, bound, choice), bound.device, plan_key)
        except KernelError as error:
            warn_of_fallback(bound.device, error)
            return reference_gemm

    return lambda *args: built()(*args)


def _kernel(bound: BoundGemm, config: KernelConfig) -> Multiply:
    """A kernel of this package, bound to a GEMM and a tile configuration."""
    problem, a_key, b_key = bound.problem, bound.a, bound.b
    allocate = allocator(bound.device)
    result = (problem.m, problem.n), (problem.n, 1), bound.gemm.out_dtype
    strides = GemmStrides(
        a_key.data.stride, b_key.data.stride, a_key.scale_inv_stride, b_key.scale_inv_stride, bound.stride
    )
    start = bind_gemm_kernel(bound.device, problem, config, strides)

    def run(
        a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, out: Tensor | None,
        *row_tiles: Tensor,
    ) -> Tensor:  # fmt: skip
        if out is None:
            out = allocate(*result)
        start(a, scale_a, b, scale_b, bias, out, *row_tiles)
        return out

    return run


def _scaled_mm(fit: Fit, instead: Multiply, said: str) -> Multiply:
    """``torch._scaled_mm``. Once it has refused, it warns and calls ``instead`` from then on."""
    # A GPU that does not support MXFP8 refuses all sizes.
    notice = f"{MX_LAYOUTS} {said}" if fit.layout_a is Layout.MX_1X32 else ""
    refused = False

    def run(
        a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, out: Tensor | None
    ) -> Tensor:
        nonlocal refused
        if not refused:
            try:
                result = multiply(fit, a, scale_a, b, scale_b, bias, gemm.out_dtype)
            except (RuntimeError, ValueError) as error:
                if not is_refusal(error):
                    raise
                refused = True
                what = f"{tuple(a.shape)} x {tuple(b.t().shape)} on {a.device}"
                warn_once(a.device, f"torch._scaled_mm refuses {what}: {error}. {said}.", key=notice)
            else:
                return result if out is None else out.add_(result)
        return instead(a, scale_a, b, scale_b, gemm, bias, out)

    return run


def gemm_on_cuda(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Multiply, and add to ``out`` unless it is None."""
    if out is not None and not (out.dtype == torch.float32 and out.stride(1) == 1):
        return out.add_(gemm_on_cuda(a, scale_a, b, scale_b, gemm, bias))
    bias = None if bias is None else bias.contiguous()
    return _plan(
        a.device, a.is_cuda and current_device(), operand_key(a, scale_a), operand_key(b, scale_b), gemm.flat,
        None if bias is None else tensor_key(bias), None if out is None else tensor_key(out),
    )(a, scale_a, b, scale_b, gemm, bias, out)  # fmt: skip


def _plan_gemm(
    device: torch.device,
    a_key: OperandKey,
    b_key: OperandKey,
    flat: tuple[Any, ...],
    bias_plain_key: PlainKey | None,
    out_plain_key: PlainKey | None,
    kernels: bool = True,
) -> Multiply:
    """Plan the choice of :mod:`cuda_kernels.host.gemm_selection`: a kernel, if ``kernels`` is True, or a library."""
    gemm = Gemm.from_flat(*flat)
    a = GemmOperand.from_key(gemm.layout_a, a_key, device)
    b = GemmOperand.from_key(gemm.layout_b, b_key, device)
    check_not_empty((a.rows, b.rows, a.k))
    layouts = gemm.layout_a, gemm.layout_b
    has_mx_blocks = layouts == MX_LAYOUTS and multiplies_mx_blocks(device) and gemm_selection.backend() != "numba"
    if layouts not in SCALINGS and not has_mx_blocks:
        if kernels:
            _warn_of_reference(device, layouts)
        return reference_gemm
    if not (a.is_aligned and b.is_aligned):
        return _multiply_aligned_copies
    if has_mx_blocks:
        return _in_all_ways(a, b, gemm, bias_plain_key is not None)
    bias_key = None if bias_plain_key is None else TensorKey(*bias_plain_key, device)
    out_key = None if out_plain_key is None else TensorKey(*out_plain_key, device)
    bound = bind_gemm(device, a, b, gemm, bias_key, out_key, kernels)
    choice = gemm_selection.choose_gemm_on(launch.name_of(device), bound.problem)
    if choice is Library.REFERENCE and kernels:
        _warn_of_reference(device, layouts)
    return build_gemm(bound, choice, (a_key, b_key, flat, bias_plain_key, out_plain_key))


_plan = planned(fallback=reference_gemm, planner_without_kernels=partial(_plan_gemm, kernels=False), name=PLAN)(
    _plan_gemm
)


def _warn_of_reference(device: torch.device, layouts: tuple[Layout, Layout]) -> None:
    """Warn once that only the reference supports operands of these layouts on a device that runs kernels."""
    warn_once(
        device,
        f"No FP8 GEMM multiplies operands scaled {layouts[0].code} and {layouts[1].code} in these formats on {device}; "
        "plain torch is used instead, which is slower. Kernels support recipe='blockwise' on compute capability 8.9, "
        "9.0 and 12.0; torch._scaled_mm supports recipe='tensorwise' and 'rowwise' everywhere, and 'mxfp8' on compute "
        "capability 10.0 and later from CUDA 12.8 on",
    )


def _multiply_aligned_copies(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, *epilogue: Tensor | None
) -> Tensor:
    """Multiply the operands, or aligned copies of them."""
    a, scale_a = aligned_operand(a, scale_a, gemm.layout_a)
    b, scale_b = aligned_operand(b, scale_b, gemm.layout_b)
    return gemm_on_cuda(a, scale_a, b, scale_b, gemm, *epilogue)


implement_gemm("cuda", gemm_on_cuda, _plan)
