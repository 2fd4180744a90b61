"""The fused ops on CUDA tensors: checks, allocates, and starts the kernels of :mod:`cuda_kernels`.

Nothing here waits for the device: whether a given scale is 0 is asked by the kernels. Where none run, the reference
serves, as in :mod:`lightning_fp8.ops.cuda`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops.cuda import How as Casting
from lightning_fp8.ops.cuda import Place, Plan, cast, falls_back, place_of, plan_of, reading_of, scratch
from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.schema import is_gated
from lightning_fp8.ops.operands import NAMES, Operands, Outputs, allocate, comes_in_vectors
from lightning_fp8.ops.schema import NAMESPACE
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.launch import Argument, Launch
    from cuda_kernels.tile import Source


class How(NamedTuple):
    """How to cast: the last arguments of every op here."""

    scale: Tensor | None
    seen: Tensor | None
    dtype: torch.dtype
    layout: str
    power_2: bool
    epsilon: float
    rowwise: bool
    columnwise: bool
    counts: Tensor | None
    may_be_0: bool

    @property
    def from_itself(self) -> bool:
        """Whether the tensor's own amax may be needed."""
        return self.scale is None or self.may_be_0

    @property
    def casting(self) -> Casting:
        """How to scale a tensor from itself; in place of a given scale of 0 without a recipe's options."""
        options = (self.power_2, self.epsilon) if self.scale is None else (False, 0.0)
        usage = self.rowwise, self.columnwise
        return Casting(self.dtype, self.layout, *options, *usage, self.seen is not None, self.counts is not None)


class Values(NamedTuple):
    """What to cast: a source of tiles, and what kernels take for it, a tensor first."""

    source: Source
    words: tuple[Argument, ...]


def cast_values(values: Values, rows: int, columns: int, how: How, storing: Values | None = None) -> Outputs:
    """Cast computed values ``[rows, columns]``; ``storing``: the same, read by the kernel that casts."""
    x = values.words[0]
    assert isinstance(x, Tensor)
    plan = plan_of(x.device, values.source, rows, columns, how.casting, storing.source if storing else None)
    stored = storing.words if storing else None
    return cast(plan, x, values.words, how.scale, how.seen, how.counts, how.from_itself, stored)


class NormPlan(NamedTuple):
    """What norms and casts of tensors that lie alike have in common: one read of x where that is possible, else two.

    Attributes:
        pitch, rows: of x.
        normalize: statistics and the cast with a given scale; leaves amaxes where the scale is 0.
        again: the cast with the scale that those amaxes give; returns at once where a scale is given.
        operands: the results of these two.
        statistics: mean and rstd alone.
        plan: the cast that follows them.
    """

    pitch: int
    rows: int
    normalize: Launch | None
    again: Launch | None
    operands: Operands | None
    statistics: Launch | None
    plan: Plan | None


@lru_cache(maxsize=4096)
def _norm_plan(
    place: Place,
    parameters: tuple[torch.dtype, int],
    bias: tuple[torch.dtype, int] | None,
    rms: bool,
    eps: float,
    zero_centered: bool,
    how: Casting,
) -> NormPlan | None:
    """``parameters``, ``bias``: dtype of weight and bias, and their address modulo 16; None as ``reading_of``."""
    from cuda_kernels import launch, norm_cast
    from cuda_kernels import norm as kernels
    from cuda_kernels.rows import THREADS, cast_spread

    reading = reading_of(place)
    if reading is None:
        return None
    device, dtype, *_, address = place
    pitch, rows, columns = reading.words
    norm = kernels.Norm(NAMES[dtype], NAMES[parameters[0]], not rms, bias is not None)
    addresses = [(dtype.itemsize, pitch, address), *((p[0].itemsize, 0, p[1]) for p in (parameters, bias) if p)]

    def come_in(elements: int, size: int | None = None) -> bool:
        """Whether all rows are made of vectors of so many elements, at multiples of their size."""
        return all(comes_in_vectors(columns, step, at, item, elements, size) for item, step, at in addresses)

    spread = cast_spread(norm.dtype, columns) if come_in(8, 16) else None
    only_rows = how.layout == "tensor" and how.rowwise and not how.columnwise and not how.count_losses
    if spread and only_rows:
        fp8, offset = float8_of(how.dtype).name.lower(), float(zero_centered)
        operands = Operands(device, Layout.TENSOR, how.dtype, rows, columns, True, False)
        kernel = norm_cast.normalize_kernel(norm, fp8, spread, how.observe_amax)
        groups = -(-rows * spread.threads // THREADS)
        blocks = min(groups, kernel.blocks_per_multiprocessor * launch.multiprocessors(device))
        normalize = launch.Launch(kernel, blocks, (rows, columns, offset, eps, operands.pitches[0]))
        own = blocks, int(how.power_2), how.epsilon
        again = launch.Launch(
            norm_cast.cast_normalized_kernel(norm, fp8, spread),
            blocks,
            (rows, columns, offset, *own, operands.pitches[0]),
        )
        return NormPlan(pitch, rows, normalize, again, operands, None, None)
    if spread:
        kernel, blocks = (
            kernels.statistics_of_rows_kernel(norm.dtype, norm.mean, spread),
            -(-rows * spread.threads // THREADS),
        )
    else:
        kernel, blocks = kernels.statistics_of_long_rows_kernel(norm.dtype, norm.mean, reading.quads), rows
    statistics = launch.Launch(kernel, blocks, (rows, columns, eps))
    plan = plan_of(device, kernels.normalized_source(norm, come_in(4)), rows, columns, how)
    return NormPlan(pitch, rows, None, None, None, statistics, plan)


def norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, eps: float, zero_centered: bool, *recipe: object
) -> tuple[Tensor, ...]:
    how = How(*recipe)  # type: ignore[arg-type]
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    of_bias = None if bias is None else (bias.dtype, bias.data_ptr() % 16)
    of_weight = weight.dtype, weight.data_ptr() % 16
    planned = _norm_plan(place_of(x), of_weight, of_bias, rms, eps, zero_centered, how.casting)
    if planned is None:
        return norm_quantize(x.contiguous(), weight, bias, rms, eps, zero_centered, *recipe)
    pitch, rows, normalize, again, operands, statistics, plan = planned
    mean, rstd = _float32(x, 0 if rms else rows), _float32(x, rows)
    if normalize and again and operands:
        outputs = operands.allocate()
        given, own = _or_0(how.scale), scratch(x, normalize.blocks)
        head = x, pitch, weight, _or_0(bias), mean, rstd, given, own
        normalize(*head, _or_0(how.seen), *outputs[:2])
        if how.from_itself:
            again(*head, *outputs[:2])
        return *outputs, mean, rstd
    assert statistics
    assert plan
    statistics(x, pitch, mean, rstd)
    words = x, pitch, weight, _or_0(bias), mean, rstd, int(zero_centered)
    return *cast(plan, x, words, how.scale, how.seen, how.counts, how.from_itself), mean, rstd


def _float32(x: Tensor, size: int) -> Tensor:
    return allocate[x.is_cuda]((size,), (1,), torch.float32)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, zero_centered: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from cuda_kernels import launch
    from cuda_kernels import norm_backward as kernels
    from cuda_kernels.norm import Norm

    dy, x, weight = _rows(dy), _rows(x), weight.contiguous()
    rows, columns = x.shape
    norm, dy_dtype = Norm(NAMES[x.dtype], NAMES[weight.dtype], not rms, bias), NAMES[dy.dtype]
    spread = None
    if _vectors(x) and _vectors(dy) and _vectors(weight):
        spread = kernels.backward_spread((norm.dtype, dy_dtype), columns)
    if spread:
        kernel = kernels.norm_backward_kernel(norm, dy_dtype, spread)
    else:
        aligned = _quads(x) and _quads(dy) and _quads(weight)
        kernel = kernels.long_norm_backward_kernel(norm, dy_dtype, aligned)
    blocks = min(rows, kernel.blocks_per_multiprocessor * launch.multiprocessors(x.device))
    pitch = _padded(columns)
    partials = x.new_empty(1 + bias, blocks, pitch, dtype=torch.float32)
    dx = x.new_empty(rows, columns)
    head = x, x.stride(0), dy, dy.stride(0), rows, columns
    kernel.launch(blocks, (*head, weight, float(zero_centered), mean, rstd, dx, partials, pitch))
    dweight = _column_sums(partials[0], columns, weight.dtype)
    return dx, dweight, _column_sums(partials[1], columns, weight.dtype) if bias else weight.new_empty(0)


def activation_quantize(x: Tensor, activation: str, *recipe: object) -> tuple[Tensor, ...]:
    from cuda_kernels.activation import activation_source

    how, x = How(*recipe), _rows(x)  # type: ignore[arg-type]
    rows, columns = x.shape[0], x.shape[1] // 2 if is_gated(activation) else x.shape[1]
    source = activation_source(activation, NAMES[x.dtype], _quads(x) and columns % 4 == 0)
    return cast_values(Values(source, (x, x.stride(0))), rows, columns, how)


def activation_backward_quantize(
    dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype | None, *recipe: object
) -> tuple[Tensor, ...]:
    from cuda_kernels.activation import activation_backward_source
    from cuda_kernels.column_sums import summed_source

    how, dy, x = How(*recipe), _rows(dy), _rows(x)  # type: ignore[arg-type]
    rows, columns = x.shape
    aligned = _quads(x) and _quads(dy)
    source = activation_backward_source(activation, NAMES[x.dtype], NAMES[dy.dtype], aligned)
    values = Values(source, (x, x.stride(0), dy, dy.stride(0)))
    if not bias_dtype:
        return *cast_values(values, rows, columns, how), x.new_empty(0, dtype=torch.float32)
    partials = x.new_empty(-(-rows // 16), _padded(columns), dtype=torch.float32)
    summed = Values(summed_source(source), (*values.words, partials))
    return *cast_values(values, rows, columns, how, summed), _column_sums(partials, columns, bias_dtype)


def _column_sums(partials: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    from cuda_kernels import column_sums

    out = partials.new_empty(columns, dtype=dtype)
    kernel = column_sums.column_sums_kernel(NAMES[dtype])
    kernel.launch(-(-columns // column_sums.COLUMNS), (partials, *partials.shape, columns, out))
    return out


def _rows(x: Tensor) -> Tensor:
    """``x`` with the elements of a row side by side."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _padded(columns: int) -> int:
    return -(-columns // 4) * 4


def _aligned(x: Tensor, elements: int, size: int) -> bool:
    """Whether rows are made of whole vectors of ``elements``, which begin at multiples of ``size`` bytes."""
    pitch = x.stride(0) if x.dim() == 2 else 0
    return comes_in_vectors(x.shape[-1], pitch, x.data_ptr(), x.element_size(), elements, size)


def _vectors(x: Tensor) -> bool:
    return _aligned(x, 8, 16)


def _quads(x: Tensor) -> bool:
    return _aligned(x, 4, 4 * x.element_size())


def _or_0(tensor: Tensor | None) -> Tensor | int:
    return 0 if tensor is None else tensor


for _op, _layout_at in (
    (norm_quantize, 9),
    (norm_backward, None),
    (activation_quantize, 5),
    (activation_backward_quantize, 7),
):
    _registered = falls_back(_op, getattr(reference, _op.__name__), _layout_at)
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _registered)
