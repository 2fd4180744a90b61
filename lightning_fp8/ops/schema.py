"""The schemas of ``torch.ops.lightning_fp8`` and their shapes on fake and meta tensors.

Operands are K-major: ``quantize`` takes ``x [R, K]`` and gives, where ``config`` asks (see ``config.py``),
the operand of x (``rowwise``) and the operand of xᵀ (``columnwise``, ``[K, R]``, scaled along R). What was not asked
for comes back empty. Layout ``tensor`` has one scale for both: ``scale_inv_t`` is empty.

``scale``, float32 ``[]``, is taken instead of the tensor's own, unless it is 0, and ``amax``, float32 ``[]``, is
raised to the amax. ``counts``, int64 ``[2]``, grows by how many values were saturated and how many were flushed to
zero, in the operand of x if it was asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import E8M0_DTYPE
from lightning_fp8.ops.config import QuantizeConfig, parse_quantize_config, parse_scaled_mm_config
from lightning_fp8.scaled import Layout, block_shape
from lightning_fp8.transforms import WAYS_OUT

NAMESPACE = "lightning_fp8"

CAST = "str config, Tensor? scale=None, Tensor(a!)? amax=None, Tensor(b!)? counts=None"
"""The last arguments of every op that casts."""

UNOBSERVED = "_unobserved"
"""Ends the name of an op that casts and takes neither ``amax`` nor ``counts``."""

OPERANDS = "Tensor data, Tensor scale_inv, Tensor data_t, Tensor scale_inv_t"


def define_cast(name: str, inputs: str, outputs: str) -> None:
    """Define an op that casts, and the same without what it may write to.

    Inductor leaves operations on E8M0 alone, also the one that stands for what an op may write to, and then fails: what
    gives MXFP8's scales has to be an op that writes nothing.
    """
    torch.library.define(f"{NAMESPACE}::{name}", f"({inputs}, {CAST}) -> ({outputs})")
    torch.library.define(
        f"{NAMESPACE}::{name}{UNOBSERVED}", f"({inputs}, {CAST.partition(', Tensor(')[0]}) -> ({outputs})"
    )


define_cast("quantize", "Tensor x", OPERANDS)
torch.library.define(f"{NAMESPACE}::observe", "(Tensor x, Tensor(a!) amax) -> ()")
torch.library.define(
    f"{NAMESPACE}::scaled_mm",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str config, Tensor? bias=None) -> Tensor",
)
# An op of its own: Inductor takes none that gives one tensor and may write to another, or not.
torch.library.define(
    f"{NAMESPACE}::scaled_mm_observed",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str config, Tensor? bias, Tensor(a!) amax) -> Tensor",
)
torch.library.define(
    f"{NAMESPACE}::scaled_mm_accumulate",
    "(Tensor(a!) out, Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str config) -> ()",
)
torch.library.define(
    f"{NAMESPACE}::update_scales",
    "(Tensor(a!) amax, Tensor(b!) amax_history, Tensor(c!) scale, Tensor fp8_max, float margin, str algorithm,"
    " bool recompute) -> ()",
)


_refusals = torch.library.Library(NAMESPACE, "IMPL")


def refuse_batches(*ops: str) -> None:
    """An op has no rule for vmap, whose own way around, a loop, cannot be taken by ops that write to an argument."""

    def refuse(*args: object) -> None:
        raise RuntimeError(f"FP8 ops do not run under vmap, is_grads_batched=True or vectorize=True; {WAYS_OUT}")

    for op in ops:
        _refusals.impl(op, refuse, "FuncTorchBatched")
        _refusals.impl(op, refuse, "Batched")  # torch.autograd.grad(is_grads_batched=True)


refuse_batches("quantize", "observe", "scaled_mm", "scaled_mm_observed", "scaled_mm_accumulate", "update_scales")


def scale_shape(layout: Layout, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of ``scale_inv`` of an ``[rows, columns]`` operand."""
    if layout is Layout.TENSOR:
        return ()
    block_rows, block_columns = block_shape(layout, rows, columns)
    return -(-rows // block_rows), -(-columns // block_columns)


def scale_dtype(layout: Layout) -> torch.dtype:
    return E8M0_DTYPE if layout is Layout.MX_1X32 else torch.float32


class Placed(NamedTuple):
    """A tensor of ``shape`` in memory of its own, of shape ``allocated`` and ``strides``.

    ``columns``: how many it takes of what is allocated; None for all.
    """

    shape: tuple[int, ...]
    allocated: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None


def operand_layout(layout: Layout, dtype: torch.dtype, rows: int, columns: int) -> tuple[Placed, Placed]:
    """How ``data`` and ``scale_inv`` of an ``[rows, columns]`` operand lie where kernels write and read them.

    Rows of ``data`` begin at multiples of 16 bytes; zeros fill the gap. Scales of blocks that lie along a row have the
    rows side by side, each block's beginning at a multiple of 16 bytes.
    """
    stride = -(-columns // 16) * 16
    data = Placed((rows, columns), (rows, stride), (stride, 1), dtype, None if stride == columns else columns)
    shape, kind = scale_shape(layout, rows, columns), scale_dtype(layout)
    if len(shape) < 2:
        return data, Placed(shape, shape, (), kind, None)
    alignment = 16 // kind.itemsize
    across = layout in (Layout.BLOCK_1X128, Layout.MX_1X32)
    strides = (1, -(-rows // alignment) * alignment) if across else (shape[1], 1)
    return data, Placed(shape, shape, strides, kind, None)


def empty_operand(
    device: torch.device, layout: Layout, dtype: torch.dtype, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """``data`` and ``scale_inv`` that lie as :func:`operand_layout` says."""
    data, scales = (
        torch.empty_strided(placed.allocated, placed.strides, dtype=placed.dtype, device=device)
        for placed in operand_layout(layout, dtype, rows, columns)
    )
    return data[:, :columns], scales


@torch.library.register_fake(f"{NAMESPACE}::quantize")
@torch.library.register_fake(f"{NAMESPACE}::quantize{UNOBSERVED}")
def _quantize(
    x: Tensor, config: str, scale: Tensor | None = None, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_operands(x, x.shape[0], x.shape[1], parse_quantize_config(config))


def fake_operands(x: Tensor, rows: int, columns: int, config: QuantizeConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a cast of ``[rows, columns]`` gives where ``x`` is."""
    layout, dtype = config.layout, config.float8.dtype
    results: list[Tensor] = []
    for transposed, wanted in enumerate((config.rowwise, config.columnwise)):
        r, k = (columns, rows) if transposed else (rows, columns)
        if not wanted:
            results += x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=scale_dtype(layout))
        elif x.device.type == "cuda":
            results += empty_operand(x.device, layout, dtype, r, k)
        else:
            # The reference quantizes in x's order: its transposed operand is a view.
            data = x.new_empty(k, r, dtype=dtype).t() if transposed else x.new_empty(r, k, dtype=dtype)
            results += data, x.new_empty(scale_shape(layout, r, k), dtype=scale_dtype(layout))
    data, scale_inv, data_t, scale_inv_t = results
    if layout is Layout.TENSOR:
        scale_inv, scale_inv_t = x.new_empty((), dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    return data, scale_inv, data_t, scale_inv_t


@torch.library.register_fake(f"{NAMESPACE}::observe")
def _observe(x: Tensor, amax: Tensor) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::scaled_mm")
@torch.library.register_fake(f"{NAMESPACE}::scaled_mm_observed")
def _scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    config: str,
    bias: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=parse_scaled_mm_config(config).out)


@torch.library.register_fake(f"{NAMESPACE}::scaled_mm_accumulate")
def _scaled_mm_accumulate(out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, config: str) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::update_scales")
def _update_scales(
    amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    return None
