"""How tensors lie in a card's memory: whether vectors load, and how operands are allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from lightning_fp8.ops.config import QuantizeConfig
from lightning_fp8.ops.schema import Placed, operand_layout, scale_dtype
from lightning_fp8.scaled import Layout

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""``data``, ``scale_inv``, and the same of the transposed copy; what was not asked for is empty."""


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Of an uninitialized tensor, by shape, strides and dtype."""


def allocator(device: torch.device) -> Allocator:
    """Allocates where ``device`` is; on a card, on the current one."""
    try:  # Inductor's way passes the dispatcher by
        from torch._C._dynamo import guards

        return getattr(guards, f"_empty_strided_{device.type}")
    except (ImportError, AttributeError):
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device.type)


def comes_in_vectors(
    columns: int, stride: int, address: int, item: int, elements: int, size: int | None = None
) -> bool:
    """Whether rows are whole vectors of ``elements``, each at a multiple of ``size`` bytes; by default its own.

    ``stride``: from row to row, in elements of ``item`` bytes; ``address``: of the first row, modulo 16 or whole.
    """
    size = size or elements * item
    return columns % elements == 0 and stride * item % size == 0 and address % size == 0


class Operands:
    """The results of a cast of ``[rows, columns]``: described once, allocated at each call.

    Attributes:
        strides: of codes and scales, of the rowwise and of the transposed copy.
    """

    def __init__(self, device: torch.device, config: QuantizeConfig, rows: int, columns: int) -> None:
        layout, dtype = config.layout, config.float8.dtype
        by_columns = layout in (Layout.BLOCK_1X128, Layout.MX_1X32)
        empty, no_scale = partial(nothing, device, dtype), partial(nothing, device, scale_dtype(layout))
        self._makers: list[Callable[[], Tensor]] = []
        self.strides: list[int] = []
        for wanted, r, k in ((config.rowwise, rows, columns), (config.columnwise, columns, rows)):
            data, scales = operand_layout(layout, dtype, r, k)
            self._makers += (_maker(device, data), _maker(device, scales)) if wanted else (empty, no_scale)
            strides = scales.strides
            scale_stride = strides[1 if by_columns else 0] if len(strides) == 2 else 0
            self.strides += (data.strides[0], scale_stride) if wanted else (0, 0)
        if layout is Layout.TENSOR:  # which has one scale for both
            self._makers[1::2] = _maker(device, operand_layout(layout, dtype, rows, columns)[1]), no_scale

    def allocate(self) -> Outputs:
        """The four tensors, on the current device."""
        data, scale_inv, data_t, scale_inv_t = self._makers
        return data(), scale_inv(), data_t(), scale_inv_t()


def _maker(device: torch.device, placed: Placed) -> Callable[[], Tensor]:
    """Allocates a tensor that lies so."""
    _, allocated, strides, dtype, columns = placed
    new = partial(allocator(device), allocated, strides, dtype)
    return new if columns is None else lambda: new()[:, :columns]


@lru_cache(None)
@torch.inference_mode(False)  # it is given to training too
def nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The empty tensor that stands for what was not asked for."""
    return torch.empty(0, dtype=dtype, device=device)
