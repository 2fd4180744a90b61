"""ScaledTensor: FP8 codes, the scales that divide them back, and the layout that pairs the two.

Two factors, two names, Transformer Engine's, in casts, GEMMs and their kernels: ``scale`` multiplies a value before it
is rounded to a code; ``scale_inv``, its reciprocal, multiplies a code and gives the value back. A GEMM knows only
``scale_inv``: those of A and B are ``scale_inv_a`` and ``scale_inv_b``. Only as arguments of the op ``scaled_mm`` they
are ``scale_a`` and ``scale_b``, as ``torch._scaled_mm`` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.formats import E8M0_DTYPE, Float8


class Role(Enum):
    """The part that a tensor plays in the GEMMs of its layer."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"

    # Attention: softmax(q kᵀ) = s, s v = o, and their gradients. q, k and v share a scale.
    QKV = "qkv"
    S = "s"
    O = "o"  # noqa: E741
    DQKV = "dqkv"
    DO = "do"
    DP = "dp"

    @property
    def is_gradient(self) -> bool:
        return self in (Role.GRAD_OUTPUT, Role.DQKV, Role.DO, Role.DP)


LINEAR_ROLES = (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)
ATTENTION_ROLES = (Role.QKV, Role.S, Role.O, Role.DQKV, Role.DO, Role.DP)


_BLOCKS_AND_DTYPES: dict[str, tuple[tuple[int | None, int | None], torch.dtype]] = {
    "tensor": ((None, None), torch.float32),
    "row": ((1, None), torch.float32),
    "1x128": ((1, 128), torch.float32),
    "128x128": ((128, 128), torch.float32),
    "1x32": ((1, 32), E8M0_DTYPE),
}


class Layout(Enum):
    """The elements of a K-major GEMM operand ``[R, K]`` that share one scale.

    Attributes:
        block: rows and columns that share a scale; None stands for all of them.
        scale_dtype: the dtype of ``scale_inv``.
    """

    TENSOR = "tensor"
    """One scale, shape ``[]``."""
    ROW = "row"
    """One scale per row, shape ``[R, 1]``."""
    BLOCK_1X128 = "1x128"
    """Shape ``[R, ceil(K / 128)]``."""
    BLOCK_128X128 = "128x128"
    """Shape ``[ceil(R / 128), ceil(K / 128)]``."""
    MX_1X32 = "1x32"
    """E8M0 scales of shape ``[R, ceil(K / 32)]``."""

    def __init__(self, value: str) -> None:
        self.block, self.scale_dtype = _BLOCKS_AND_DTYPES[value]

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale serves the whole tensor, and its transposed copy; only such a scale can be given."""
        return self.block == (None, None)

    @property
    def scales_along_k(self) -> bool:
        """Whether a row has several scales."""
        return self.block[1] is not None

    @property
    def has_one_scale_per_row(self) -> bool:
        """Whether each row has one scale of its own."""
        return self.block == (1, None)

    @property
    def scale_major(self) -> Literal["k", "mn"]:
        """The dimension along which kernels keep neighbouring scales side by side in memory."""
        return "mn" if self.scales_along_k and self.block[0] == 1 else "k"

    @property
    def transposes(self) -> bool:
        """Whether the transposed tensor has the same blocks, so that its codes are these codes transposed."""
        return self.block[0] == self.block[1]

    def block_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of one block of a ``[rows, columns]`` operand; at least 1 × 1."""
        block_rows, block_columns = self.block
        return block_rows or max(rows, 1), block_columns or max(columns, 1)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of ``scale_inv`` of a ``[rows, columns]`` operand."""
        if self.has_one_scale:
            return ()
        block_rows, block_columns = self.block_shape(rows, columns)
        return ceil_div(rows, block_rows), ceil_div(columns, block_columns)


@dataclass(frozen=True)
class Cast:
    """The cast of one role under a recipe: format, layout, and how an amax becomes a scale."""

    float8: Float8
    layout: Layout
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    text: str = field(init=False, repr=False, compare=False)
    """The cast as options of an op: ``"e4m3 1x128 power_2"``; see ``lightning_fp8.ops.quantize.options``."""

    def __post_init__(self) -> None:
        options = " power_2" * self.power_2_scale + f" epsilon={self.amax_epsilon!r}" * bool(self.amax_epsilon)
        object.__setattr__(self, "text", f"{self.float8.name.lower()} {self.layout.value}{options}")


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 GEMM operand: ``data * scale_inv`` is the value it stands for.

    Attributes:
        data: ``[R, K]`` codes in an FP8 dtype; K is the GEMM's contraction.
        scale_inv: float32 (or E8M0 for :attr:`Layout.MX_1X32`), shaped as ``layout`` says.
        layout: which elements share a scale.
    """

    data: Tensor
    scale_inv: Tensor
    layout: Layout

    def t(self) -> ScaledTensor:
        """The transposed operand as a view.

        Raises:
            ValueError: the layout's blocks run along K and differ in the transposed tensor.
        """
        if not self.layout.transposes:
            raise ValueError(f"layout {self.layout.value!r} cannot be transposed; quantize xᵀ instead")
        scale_inv = self.scale_inv if self.layout.has_one_scale else self.scale_inv.t()
        return ScaledTensor(self.data.t(), scale_inv, self.layout)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``data * scale_inv`` as ``[R, K]`` in ``dtype``; computed in float32."""
        rows, columns = self.data.shape
        scale_inv = self.scale_inv.float()
        if not self.layout.has_one_scale:
            block_rows, block_columns = self.layout.block_shape(rows, columns)
            scale_inv = scale_inv.repeat_interleave(block_rows, 0)[:rows]
            scale_inv = scale_inv.repeat_interleave(block_columns, 1)[:, :columns]
        return (self.data.float() * scale_inv).to(dtype)
