"""What an FP8 tensor is: codes, the scale that divides them back, and how the two line up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from lightning_fp8.formats import Float8


class Role(Enum):
    """What a tensor is to the GEMMs of its layer."""

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


class Layout(Enum):
    """Which elements of a K-major GEMM operand ``[R, K]`` share one scale."""

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

    @property
    def transposes(self) -> bool:
        """Whether the transposed tensor has the same blocks, so that its codes are these codes transposed."""
        return self in (Layout.TENSOR, Layout.BLOCK_128X128)


@dataclass(frozen=True)
class Cast:
    """How a recipe casts one role: format, layout, and how an amax becomes a scale."""

    float8: Float8
    layout: Layout
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    text: str = field(init=False, repr=False, compare=False)
    """In words: ``"e4m3 1x128 power_2"``; see :mod:`lightning_fp8.ops.config`."""

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
        scale_inv = self.scale_inv if self.layout is Layout.TENSOR else self.scale_inv.t()
        return ScaledTensor(self.data.t(), scale_inv, self.layout)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``data * scale_inv`` as ``[R, K]`` in ``dtype``; computed in float32."""
        rows, columns = self.data.shape
        scale_inv = self.scale_inv.float()
        if self.layout is not Layout.TENSOR:
            block_rows, block_columns = block_shape(self.layout, rows, columns)
            scale_inv = scale_inv.repeat_interleave(block_rows, 0)[:rows]
            scale_inv = scale_inv.repeat_interleave(block_columns, 1)[:, :columns]
        return (self.data.float() * scale_inv).to(dtype)


def block_shape(layout: Layout, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of one block of a ``[rows, columns]`` operand; at least 1 × 1."""
    return {
        Layout.TENSOR: (max(rows, 1), max(columns, 1)),
        Layout.ROW: (1, max(columns, 1)),
        Layout.BLOCK_1X128: (1, 128),
        Layout.BLOCK_128X128: (128, 128),
        Layout.MX_1X32: (1, 32),
    }[layout]
