"""The quantization errors of casts, counted on samples of tensors: the ops ``sample_cast`` and ``sample_recipes``.

They are plain torch on every device. Of a larger tensor than :data:`MOST_ELEMENTS`, they only read blocks of 128
rows at equal distances. They do not affect training.
"""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import E4M3, Float8, float8_of
from lightning_fp8.numerics.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from lightning_fp8.numerics.scaled import Cast, Layout, Role, ScaledTensor
from lightning_fp8.ops.cast import absolute_max, block_scales, blocks_of, saturating_cast
from lightning_fp8.ops.checks import require_matrix
from lightning_fp8.ops.op import op

MOST_ELEMENTS = 2**18
"""The number of elements above which a tensor with at least 256 rows is sampled. About as many are then counted."""

COUNTS = ("elements", "zeros", "nonfinite", "clipped", "flushed", "signal", "noise", "casts")
"""The counters of ``sample_cast``, float64 ``[8]``.

- ``elements``: the number of elements; ``zeros`` and ``nonfinite`` (inf and NaN): the numbers of such elements
- ``clipped``: finite values beyond :func:`largest_rounded` times ``scale_inv``, whose error is more than rounding
- ``flushed``: nonzero values whose code is 0
- ``signal`` and ``noise``: the sums of squares of finite values, and of their quantization errors
- ``casts``: the number of tensors
"""

LOSSES = ("nonzero", "flushed", "signal", "noise")
"""The counters of ``sample_recipes`` for each recipe, float64 ``[4, 4]``. ``nonzero`` counts finite nonzero values."""

SAMPLED_RECIPES: tuple[Recipe, ...] = (
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
)
"""The recipes that ``sample_recipes`` tries. They compute the scales of a tensor from its values."""

EXPONENTS = 256
"""The number of biased exponents of float32. Bin 0 counts zeros and subnormal numbers, and bin 255 inf and NaN."""

_ROWS = 128
"""The number of consecutive rows in a sample, a multiple of the block sizes of all layouts."""


def largest_rounded(float8: Float8) -> float:
    """The largest magnitude that rounds to ``float8.max`` without saturation: 464 for E4M3, 61440 for E5M2."""
    mantissa_bits = 3 if float8 is E4M3 else 2
    return float8.max + 2.0 ** (int(log2(float8.max)) - mantissa_bits - 1)


def sample_cast(x: Tensor, operand: ScaledTensor, counts: Tensor, *, transposed: bool = False) -> None:
    """Add the quantization errors of the cast of ``x`` to ``operand`` to ``counts``.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32.
        operand: the operand of x, or of xᵀ if ``transposed`` is True.
        counts: float64 ``[8]``, see :data:`COUNTS`.
    """
    sample_cast_op.call(x, operand.data, operand.scale_inv, operand.layout.code, transposed, counts)


def sample_recipes(x: Tensor, role: Role, losses: Tensor, exponents: Tensor) -> None:
    """Add the quantization errors that ``x`` would have under each of :data:`SAMPLED_RECIPES` to ``losses``.

    If a recipe has different blocks for x and xᵀ, both operands are cast, and the larger error is added.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32.
        role: the role of x in a linear layer.
        losses: float64 ``[4, 4]``, a row of :data:`LOSSES` for each recipe.
        exponents: float64 ``[256]``, a histogram of exponents, to which those of x are added.
    """
    sample_recipes_op.call(x, role.value, losses, exponents)


# --- The ops ----------------------------------------------------------------------------------------------------------


@op("sample_cast", check=require_matrix, writes=("counts",))
def sample_cast_op(x: Tensor, data: Tensor, scale_inv: Tensor, layout: str, transposed: bool, counts: Tensor) -> None:
    return None


@op("sample_recipes", check=require_matrix, writes=("losses", "exponents"))
def sample_recipes_op(x: Tensor, role: str, losses: Tensor, exponents: Tensor) -> None:
    return None


def _count_cast(x: Tensor, data: Tensor, scale_inv: Tensor, layout: str, transposed: bool, counts: Tensor) -> None:
    operand = ScaledTensor(data, scale_inv, Layout(layout))
    stride = _stride(x)
    values = _rows_of(x, stride, 0).float()
    codes, scales = _part(operand, stride, 1 if transposed else 0, x.shape[0])
    if transposed:
        codes, scales = codes.t(), scales.t()
    finite = torch.isfinite(values)
    magnitude = values.abs()
    nonzero = values != 0
    error = torch.where(finite, codes.float() * scales - values, 0.0)
    signal = torch.where(finite, values, 0.0)
    counts += torch.stack(
        [
            counts.new_full((), values.numel()),
            (~nonzero).sum(),
            (~finite).sum(),
            (finite & (magnitude > largest_rounded(float8_of(data.dtype)) * scales)).sum(),
            (nonzero & finite & (codes.view(torch.uint8) & 0x7F == 0)).sum(),
            signal.double().square().sum(),
            error.double().square().sum(),
            counts.new_ones(()),
        ]
    )


def _try_recipes(x: Tensor, role: str, losses: Tensor, exponents: Tensor) -> None:
    if not x.numel():
        return
    values = _rows_of(x, _stride(x), 0).float()
    whole = x.nan_to_num(0.0, 0.0, 0.0)
    of_columns = absolute_max(whole, 0).float()[:, None]
    biased = values.contiguous().view(torch.int32) >> 23 & 0xFF
    exponents += torch.histc(biased.float(), EXPONENTS, 0, EXPONENTS)  # bincount would synchronize with a GPU
    values = torch.where(torch.isfinite(values), values, 0.0)
    signal, nonzero = values.double().square().sum(), (values != 0).sum()
    for recipe, sums in zip(SAMPLED_RECIPES, losses):
        cast = recipe.cast(Role(role))
        # The scale of a tensor, or of a column, depends on rows that are not sampled.
        of_tensor = of_columns.amax(0, keepdim=True) if cast.layout.has_one_scale else None
        tries = [_try(values, cast, of_tensor)]
        if not cast.layout.transposes:
            tries.append(_try(values.t(), cast, of_columns if cast.layout == Layout.ROW else None))
        flushed, noise = torch.stack([torch.stack(each) for each in tries]).amax(0)
        sums += torch.stack([nonzero, flushed, signal, noise])


def _try(values: Tensor, cast: Cast, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """The number of values that a cast flushes to zero, and the sum of its squared errors.

    ``amax`` are those of its blocks; ``None`` computes them from ``values``.
    """
    blocks = blocks_of(values, cast.layout.block)
    if amax is None:
        amax = absolute_max(absolute_max(blocks, 3), 1)
    scale = block_scales(amax, cast)[0][:, None, :, None]
    cast_values = saturating_cast(blocks.clone(), scale, cast.float8).float() / scale
    flushed = ((blocks != 0) & (cast_values == 0)).sum(dtype=torch.float64)
    return flushed, (cast_values - blocks).double().square().sum()


def _stride(x: Tensor) -> int:
    """The number n such that every n-th block of :data:`_ROWS` rows is sampled."""
    return -(-x.numel() // MOST_ELEMENTS) if x.shape[0] >= 2 * _ROWS else 1


def _rows_of(x: Tensor, stride: int, dim: int) -> Tensor:
    """Every ``stride``-th block of rows of ``x``. Its rows are dimension ``dim``."""
    if stride == 1:
        return x
    whole = x.narrow(dim, 0, x.shape[dim] // _ROWS * _ROWS)
    blocks = whole.unflatten(dim, (-1, _ROWS))
    index = torch.arange(0, blocks.shape[dim], stride, device=x.device)
    return blocks.index_select(dim, index).flatten(dim, dim + 1)


def _part(operand: ScaledTensor, stride: int, dim: int, rows: int) -> tuple[Tensor, Tensor]:
    """The codes of every ``stride``-th block of rows, and their scales, expanded to one for each element."""
    codes = _rows_of(operand.data.view(torch.uint8), stride, dim).view(operand.data.dtype)
    scales = operand.scale_inv.float()
    if operand.layout.has_one_scale:
        return codes, scales
    for each, block in enumerate(operand.layout.block_shape(*operand.data.shape)):
        if scales.shape[each] > 1 and block > 1:
            scales = scales.repeat_interleave(block, each)
        scales = scales.narrow(each, 0, min(scales.shape[each], operand.data.shape[each]))
    if scales.shape[dim] > 1:
        scales = _rows_of(scales, stride, dim)
    return codes, scales


for device in ("cpu", "cuda"):
    sample_cast_op.implement(device, _count_cast)
    sample_recipes_op.implement(device, _try_recipes)
