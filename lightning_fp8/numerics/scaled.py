"""ScaledTensor: FP8 codes, their inverse scales, and the layout that assigns scales to codes.

Casts, GEMMs and kernels use Transformer Engine's names for the two factors: a value is multiplied by ``scale`` before
it is rounded to a code, and a code is multiplied by ``scale_inv``, the reciprocal, to restore the value. GEMMs use only
``scale_inv``, called ``scale_inv_a`` and ``scale_inv_b`` for A and B. The arguments of the op ``scaled_mm`` are called
``scale_a`` and ``scale_b``, as in ``torch._scaled_mm``.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.numerics.formats import E8M0_DTYPE, Float8, float8_of


class _FastToHash:
    """Hashes without a Python frame. A base class, because Dynamo of torch 2.10 and 2.11 rejects a class's own hash."""

    __hash__ = object.__hash__


class Role(_FastToHash, Enum):
    """The role of a tensor in the GEMMs of its layer."""

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


class Layout(_FastToHash, Enum):
    """The elements of a K-major GEMM operand ``[R, K]`` that share one scale.

    Attributes:
        code: the value that ops accept.
        block: the rows and columns that share a scale; None is all of them.
        scale_dtype: the dtype of ``scale_inv``.
        has_one_scale: whether the tensor and its transposed copy have one scale. Only such a scale can be passed.
        scales_along_k: whether a row has several scales.
        has_one_scale_per_row: whether each row has one scale.
        transposes: whether the transposed tensor has the same blocks, so that its codes are these codes transposed.
        scale_major: the dimension along which kernels store neighbouring scales contiguously.
    """

    scale_major: Literal["k", "mn"]

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
        self.code = value
        self.block, self.scale_dtype = block, _ = _BLOCKS_AND_DTYPES[value]
        self.has_one_scale = block == (None, None)
        self.scales_along_k = block[1] is not None
        self.has_one_scale_per_row = block == (1, None)
        self.transposes = block[0] == block[1]
        self.scale_major = "mn" if self.scales_along_k and block[0] == 1 else "k"

    def block_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of one block of a ``[rows, columns]`` operand; at least 1 × 1."""
        block_rows, block_columns = self.block
        return block_rows or max(rows, 1), block_columns or max(columns, 1)

    def scale_shape(self, *shape: int) -> tuple[int, ...]:
        """Shape of ``scale_inv`` of a ``[rows, columns]`` operand, or ``[experts, rows, columns]``."""
        if self.has_one_scale:
            return ()
        *experts, rows, columns = shape
        block_rows, block_columns = self.block_shape(rows, columns)
        return *experts, ceil_div(rows, block_rows), ceil_div(columns, block_columns)


@dataclass(frozen=True)
class Cast:
    """One cast: the recipe's choice for a role, the options of every op that casts, and the variant of its kernels.

    Attributes:
        float8: the format of the codes.
        layout: which elements share a scale.
        power_2_scale: whether scales from the tensor's own amaxes are rounded down to powers of two.
        amax_epsilon: a lower bound on these amaxes.
        rowwise: whether the operand of x is requested.
        columnwise: whether the operand of xᵀ is requested.
        scale_is_nonzero: whether the given scale is known not to be 0.
        key: :attr:`flat`, computed once.
    """

    float8: Float8
    layout: Layout
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    rowwise: bool = True
    columnwise: bool = False
    scale_is_nonzero: bool = False

    schema: ClassVar[str] = (
        "ScalarType dtype, str layout, bool power_2_scale, float amax_epsilon, bool rowwise, bool columnwise, "
        "bool scale_is_nonzero"
    )
    key: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _epsilon: str = field(init=False, repr=False, compare=False)
    _usages: tuple[Cast, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # All usages are created at once, because torch.compile cannot create one.
        own = self.rowwise, self.columnwise, self.scale_is_nonzero
        usages = []
        for usage in product((False, True), repeat=3):
            cast = self if usage == own else copy(self)
            for name, value in zip(("rowwise", "columnwise", "scale_is_nonzero"), usage):
                object.__setattr__(cast, name, value)
            scales = self.layout.value, bool(self.power_2_scale), float(self.amax_epsilon)
            object.__setattr__(cast, "key", (self.float8.dtype, *scales, *usage))
            object.__setattr__(cast, "_epsilon", repr(float(self.amax_epsilon)))
            usages.append(cast)
        for cast in usages:
            object.__setattr__(cast, "_usages", tuple(usages))

    def usage(self, rowwise: bool, columnwise: bool, scale_is_nonzero: bool = False) -> Cast:
        """The same cast, for these operands."""
        return self._usages[4 * rowwise + 2 * columnwise + scale_is_nonzero]

    @property
    def flat(self) -> tuple[Any, ...]:
        """The fields as arguments of an op, as ``schema`` names them."""
        # torch.compile may make a float attribute dynamic, which a backward pass does not support. It cannot for text.
        epsilon = float(self._epsilon)
        usage = self.rowwise, self.columnwise, self.scale_is_nonzero
        return self.float8.dtype, self.layout.code, self.power_2_scale, epsilon, *usage

    @classmethod
    def from_flat(cls, *flat: Any) -> Cast:
        """The cast of :attr:`flat`.

        Raises:
            ValueError: If the dtype is not an FP8 format, or if there is no such layout.
        """
        return _cast_of(flat)


@lru_cache(maxsize=4096)
def _cast_of(flat: tuple[Any, ...]) -> Cast:
    dtype, layout, *others = flat
    return Cast(float8_of(dtype), Layout(layout), *others)


@dataclass(eq=False, slots=True)
class ScaledTensor:
    """An FP8 GEMM operand, whose values are ``data * scale_inv``.

    Attributes:
        data: ``[R, K]`` codes in an FP8 dtype, or ``[E, R, K]`` of experts; K is the GEMM's contraction.
        scale_inv: float32 (or E8M0 for :attr:`Layout.MX_1X32`), in the shape of ``layout``.
        layout: which elements share a scale.
    """

    data: Tensor
    scale_inv: Tensor
    layout: Layout

    def t(self) -> ScaledTensor:
        """The transposed operand as a view.

        Raises:
            ValueError: If the layout's blocks run along K and differ in the transposed tensor.
        """
        if not self.layout.transposes:
            raise ValueError(f"layout {self.layout.value!r} cannot be transposed; quantize xᵀ instead")
        scale_inv = self.scale_inv if self.layout.has_one_scale else self.scale_inv.mT
        return ScaledTensor(self.data.mT, scale_inv, self.layout)

    def of_expert(self, expert: int) -> ScaledTensor:
        """One of experts' operands ``[E, N, K]``."""
        scale_inv = self.scale_inv if self.layout.has_one_scale else self.scale_inv[expert]
        return ScaledTensor(self.data[expert], scale_inv, self.layout)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``data * scale_inv`` in ``dtype`` and the shape of ``data``; computed in float32."""
        rows, columns = self.data.shape[-2:]
        scale_inv = self.scale_inv.float()
        if not self.layout.has_one_scale:
            block_rows, block_columns = self.layout.block_shape(rows, columns)
            scale_inv = scale_inv.repeat_interleave(block_rows, -2)[..., :rows, :]
            scale_inv = scale_inv.repeat_interleave(block_columns, -1)[..., :columns]
        return (self.data.float() * scale_inv).to(dtype)
