"""What a GEMM's kernels can read and write where it lies, against tables of strides and addresses."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops.memory import (
    TensorKey,
    aligned_copy,
    has_aligned_pairs,
    is_aligned_operand,
    is_aligned_result,
    operand_allocations,
)

CPU = torch.device("cpu")


def key(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], misalignment: int = 0) -> TensorKey:
    return TensorKey(dtype, shape, strides, misalignment, CPU)


@pytest.mark.parametrize(
    ("layout", "data", "data_misalignment", "scales", "scales_misalignment", "aligned"),
    [
        ("tensor", (208, 1), 0, (), 4, True),  # strides of codes in bytes
        ("tensor", (203, 1), 0, (), 0, False),
        ("tensor", (208, 1), 5, (), 0, False),
        ("tensor", (1, 48), 0, (), 0, False),
        ("tensor", (0, 1), 0, (), 0, False),
        ("row", (208, 1), 0, (1, 1), 4, True),
        ("row", (208, 1), 0, (2, 1), 0, False),
        ("1x128", (208, 1), 0, (1, 40), 0, True),  # MN-major float32: lines of 160 bytes
        ("1x128", (208, 1), 0, (1, 42), 0, False),
        ("1x128", (208, 1), 0, (1, 40), 4, False),
        ("1x128", (208, 1), 0, (2, 1), 0, False),
        ("128x128", (208, 1), 0, (2, 1), 4, True),  # K-major
        ("128x128", (208, 1), 0, (1, 2), 0, False),
    ],
)
def test_operands(
    layout: str,
    data: tuple[int, ...],
    data_misalignment: int,
    scales: tuple[int, ...],
    scales_misalignment: int,
    aligned: bool,
) -> None:
    of = Layout(layout)
    codes = key(E4M3.dtype, (40, 203), data, data_misalignment)
    scale_inv = key(of.scale_dtype, of.scale_shape(40, 203), scales, scales_misalignment)
    assert is_aligned_operand(of, codes, scale_inv) is aligned


@pytest.mark.parametrize("layout", Layout)
def test_what_casts_allocate_is_aligned(layout: Layout) -> None:
    """Whatever the sizes; a copy has the same codes and scales."""
    for rows, columns in product((1, 40, 131), (1, 32, 203)):
        data, scale_inv = operand_allocations(layout, E4M3.dtype, rows, columns)
        codes = key(data.dtype, (rows, columns), data.strides)
        assert is_aligned_operand(layout, codes, key(scale_inv.dtype, scale_inv.shape, scale_inv.strides))
    codes_of_40 = torch.randint(0, 100, (40, 203), dtype=torch.uint8).view(E4M3.dtype)
    scales = torch.randint(0, 100, layout.scale_shape(40, 203), dtype=torch.uint8).to(layout.scale_dtype)
    copies = aligned_copy(layout, codes_of_40, scales)
    assert copies[0].stride() == (208, 1)
    assert torch.equal(copies[0].view(torch.uint8), codes_of_40.view(torch.uint8))
    assert torch.equal(copies[1].float(), scales.float())


@pytest.mark.parametrize(
    ("dtype", "columns", "stride", "misalignment", "aligned", "pairs"),
    [
        (torch.bfloat16, 16, 16, 0, True, True),
        (torch.bfloat16, 13, 16, 0, True, False),
        (torch.bfloat16, 12, 12, 0, False, True),
        (torch.bfloat16, 13, 13, 0, False, False),
        (torch.bfloat16, 16, 16, 4, False, True),
        (torch.bfloat16, 16, 16, 2, False, False),
        (torch.float32, 12, 12, 0, True, True),
        (torch.float32, 16, 16, 4, False, False),
    ],
)
def test_results(dtype: torch.dtype, columns: int, stride: int, misalignment: int, aligned: bool, pairs: bool) -> None:
    out = key(dtype, (3, columns), (stride, 1), misalignment)
    assert is_aligned_result(out) is aligned
    assert has_aligned_pairs(out) is pairs
    assert has_aligned_pairs(out, None, key(torch.float32, (columns,), (1,), 8)) is pairs
    assert not has_aligned_pairs(out, None, key(torch.float32, (columns,), (1,), 4))
