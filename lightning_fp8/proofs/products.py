"""Products of FP8 operands against float64.

Values are small integers times powers of two, so that sums are exact and the result is the exact one, rounded once. If
scales are not powers of two, the result is within float32's rounding of the sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import E4M3, float8_of
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import aligned_operand, gemm_on_cuda
from lightning_fp8.ops.grouped import groups_of
from lightning_fp8.ops.grouped_cuda import grouped_mm_on_cuda
from lightning_fp8.proofs.comparing import (
    assert_rows_within,
    assert_within,
    nan_in_new_memory,
    part_of,
    parts_of,
    reference_of,
    require,
)
from lightning_fp8.proofs.drawing import apart, moved, numbers, sizes_of_blocks

BF16 = torch.bfloat16
TENSOR_CORE = {False: 2.0**-6, True: 2.0**-4}
"""Largest error of a product on a GPU relative to the results' root mean square, without and with the fast accumulator.
Hopper's tensor cores accumulate with about 14 bits (DeepSeek-V3, arXiv:2412.19437); without it, over 128 products."""


def operand(x: Tensor, dtype: torch.dtype, layout: Layout, power_2: bool) -> ScaledTensor:
    """Cast ``x [R, K]`` by the specification."""
    data, scale_inv, *_ = reference_of(quantize_op)(x, Cast(float8_of(dtype), layout, power_2))
    return ScaledTensor(data, scale_inv, layout)


def aligned(x: ScaledTensor, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Codes and scales on ``device``, aligned for kernels."""
    return aligned_operand(moved(x.data, device), moved(x.scale_inv, device), x.layout)


def check_product(
    layouts: tuple[Layout, Layout],
    shape: tuple[int, int, int],
    device: str,
    *,
    multiply: Callable[..., Tensor] = gemm_on_cuda,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3.dtype, E4M3.dtype),
    out: torch.dtype = BF16,
    bias: torch.dtype | None = None,
    accumulate: bool = False,
    fast: bool = False,
    exact: bool = True,
    gap: int = 0,
) -> None:
    """Check ``a @ bᵀ + bias``, or its sum with a result.

    Args:
        layouts: the layouts of the scales of a and b.
        shape: ``(m, n, k)``.
        device: the device on which kernels run.
        multiply: ``(a, scale_a, b, scale_b, gemm, bias, out) -> out``.
        formats: FP8 dtypes of a and b.
        out: the dtype of the result.
        bias: the dtype of the bias; None for no bias.
        accumulate: add the product to a result.
        fast: use the fast accumulator.
        exact: use values whose sums are exact: small integers, times powers of two per block of scales.
        gap: additional elements between rows of the operands and of the result that is added to.
    """
    m, n, k = shape
    a, b = (
        operand(_drawn(rows, k, seed, exact, layout), dtype, layout, exact)
        for rows, seed, dtype, layout in zip((m, n), (0, 1), formats, layouts)
    )
    added = None if bias is None else numbers(1, n, 2, exact)[0].to(bias)
    before = numbers(m, n, 3, exact) if accumulate else None
    right = a.dequantize().double() @ b.dequantize().double().t()
    size = float(right.abs().max())
    for more in (added, before):
        right = right if more is None else right + more.double()
    actual = None if before is None else apart(moved(before.clone(), device), gap)
    gemm = Gemm(a.layout, b.layout, out, fast)
    codes_a, scale_a, codes_b, scale_b = *aligned(a, device), *aligned(b, device)
    operands = apart(codes_a, gap), scale_a, apart(codes_b, gap), scale_b
    with nan_in_new_memory():
        actual = multiply(*operands, gemm, moved(added, device), actual)
    require(actual.is_contiguous() or before is not None, "the result is not contiguous")
    _assert_product(actual, right, size, k, gemm, exact)


def _assert_product(actual: Tensor, right: Tensor, size: float, k: int, gemm: Gemm, exact: bool) -> None:
    """Check a product whose sums of ``k`` terms are at most ``size``."""
    out = gemm.out_dtype
    if exact:
        assert_within(actual, right.to(out), 0.0, 0.0, "the product")
    else:
        relative = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, BF16: 2.0**-8}[out]
        require(actual.dtype == out, f"{actual.dtype} for {out}")
        allowed = size * (k + 2) * 2.0**-24
        if actual.is_cuda:
            allowed += TENSOR_CORE[gemm.fast_accum] * float(right.nan_to_num().square().mean().sqrt())
        assert_within(actual.cpu().double(), right, relative, allowed, "the product")


NAN = 0x7F  # the code in both formats


def check_grouped_product(
    gemm: Gemm,
    sizes: Sequence[int],
    shape: tuple[int, int],
    device: str,
    *,
    multiply: Callable[..., Tensor] = grouped_mm_on_cuda,
    formats: tuple[torch.dtype, torch.dtype] = (E4M3.dtype, E4M3.dtype),
    exact: bool = True,
    rest: int = 0,
) -> None:
    """Check the rows of a in groups of these ``sizes``, each times its own b ``[n, k]``, which are multiples of 16.

    NaN are the last group's first row, the ``rest`` behind the groups, and each b whose group is empty.
    """
    (n, k), groups, ends = shape, len(sizes), list(itertools.accumulate(sizes))
    a = operand(_drawn(ends[-1] + rest, k, 0, exact, gemm.layout_a), formats[0], gemm.layout_a, exact)
    drawn, one = _drawn(groups * n, k, 1, exact, gemm.layout_b), gemm.layout_b.has_one_scale
    cast = [operand(each, formats[1], gemm.layout_b, exact) for each in drawn.split(groups * n if one else n)]
    b = torch.cat([each.data.view(torch.uint8) for each in cast]).view(groups, n, k)
    scale_b = cast[0].scale_inv if one else torch.stack([each.scale_inv for each in cast])
    codes = a.data.view(torch.uint8)
    codes[ends[-1] :] = codes[max(end - size for end, size in zip(ends, sizes) if size)] = NAN
    b[torch.tensor(sizes) == 0] = NAN
    right = torch.zeros(len(codes), n, dtype=torch.float64)
    for group, (end, size) in enumerate(zip(ends, sizes)):
        of_b = ScaledTensor(b[group].view(formats[1]), scale_b if one else scale_b[group], gemm.layout_b)
        right[end - size : end] = a.dequantize()[end - size : end].double() @ of_b.dequantize().double().t()
    others = b.view(formats[1]), scale_b, torch.tensor(ends, dtype=torch.int32)
    with nan_in_new_memory():
        actual = multiply(*aligned(a, device), *(moved(each, device) for each in others), gemm)
    _assert_product(actual, right, float(right.nan_to_num().abs().max()), k, gemm, exact)


def parts_of_product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Callable[[Tensor | None], None]:  # fmt: skip
    """A check of the corners of the product, or of what it will be added to, against float64."""
    parts = [(rows, columns) for rows in parts_of(a.shape[0]) for columns in parts_of(b.shape[0])]
    before = [None if out is None else out[place].double() for place in parts]

    def check(result: Tensor | None) -> None:
        made = result if out is None else out
        assert made is not None
        for (rows, columns), start in zip(parts, before):
            left = part_of(a, scale_a, gemm.layout_a, rows).dequantize(torch.float64)
            right = part_of(b, scale_b, gemm.layout_b, columns).dequantize(torch.float64)
            exact, magnitude = left @ right.t(), left.abs() @ right.abs().t()
            for added in (None if bias is None else bias[columns].double(), start):
                if added is not None:
                    exact, magnitude = exact + added, magnitude + added.abs()
            slack = 2.0**-8 if gemm.fast_accum else 2.0**-10
            assert_rows_within(made[rows, columns], exact, magnitude, slack, "the product")

    return check


def parts_of_group(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm
) -> Callable[[Tensor], None]:
    """:func:`parts_of_product` for ``grouped_mm``: of the last group with rows, or of none."""
    for group, start, end in [*groups_of(offs)][-1:]:
        of_a, of_b = scale_a[start:end] if scale_a.dim() else scale_a, scale_b[group] if scale_b.dim() else scale_b
        check = parts_of_product(a[start:end], of_a, b[group], of_b, gemm)
        return lambda out: check(out[start:end])
    return lambda out: None


def _drawn(rows: int, k: int, seed: int, exact: bool, layout: Layout) -> Tensor:
    x = numbers(rows, k, seed, exact)
    return x * sizes_of_blocks(rows, k, seed, layout.block) if exact else x
