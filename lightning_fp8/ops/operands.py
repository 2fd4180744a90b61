"""How tensors lie in a card's memory: whether vectors load, and how operands are allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lightning_fp8.ops.schema import Placed, operand_layout, scale_dtype
from lightning_fp8.scaled import Layout

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
"""What kernels call the dtypes of their inputs."""

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""``data``, ``scale_inv``, and the same of the transposed copy; what was not asked for is empty."""


def _plain_allocators() -> dict[bool, Callable[..., Tensor]]:
    return {
        is_cuda: lambda shape, strides, dtype, on="cuda" if is_cuda else "cpu": torch.empty_strided(
            shape, strides, dtype=dtype, device=on
        )
        for is_cuda in (False, True)
    }


try:  # Inductor's way to allocate passes the dispatcher by
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
        _empty_strided_cpu,
        _empty_strided_cuda,
    )

    allocate = {False: _empty_strided_cpu, True: _empty_strided_cuda}
except ImportError:
    allocate = _plain_allocators()


def comes_in_vectors(columns: int, pitch: int, address: int, item: int, elements: int, size: int | None = None) -> bool:
    """Whether rows are whole vectors of ``elements``, each at a multiple of ``size`` bytes; by default its own.

    ``pitch``: from row to row, in elements of ``item`` bytes; ``address``: of the first row, modulo 16 or whole.
    """
    size = size or elements * item
    return columns % elements == 0 and pitch * item % size == 0 and address % size == 0


class Operands:
    """The results of a cast of ``[rows, columns]``: described once, allocated at each call.

    Attributes:
        pitches: of codes and scales, of the rowwise and of the transposed copy; a kernel's last parameters.
    """

    def __init__(
        self,
        device: torch.device,
        layout: Layout,
        dtype: torch.dtype,
        rows: int,
        columns: int,
        rowwise: bool,
        columnwise: bool,
    ) -> None:
        self._allocate = allocate[device.type == "cuda"]
        self._nothing = _nothing(device, layout, dtype)
        by_columns = layout in (Layout.BLOCK_1X128, Layout.MX_1X32)
        self.specs: list[tuple[Placed, Placed] | None] = []
        self.pitches: list[int] = []
        for wanted, r, k in ((rowwise, rows, columns), (columnwise, columns, rows)):
            data, scales = operand_layout(layout, dtype, r, k)
            self.specs.append((data, scales) if wanted else None)
            strides = scales.strides
            scale_pitch = strides[1 if by_columns else 0] if len(strides) == 2 else 0
            self.pitches += (data.strides[0], scale_pitch) if wanted else (0, 0)

    def allocate(self) -> Outputs:
        """The four tensors, on the current device."""
        results: list[Tensor] = []
        for spec in self.specs:
            if spec is None:
                results += self._nothing
                continue
            (_, shape, strides, dtype, columns), (_, scale_shape, scale_strides, scale_dtype, _) = spec
            data = self._allocate(shape, strides, dtype)
            results.append(data if columns is None else data[:, :columns])
            results.append(self._allocate(scale_shape, scale_strides, scale_dtype))
        return tuple(results)  # type: ignore[return-value]


@lru_cache(None)
def _nothing(device: torch.device, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=scale_dtype(layout), device=device)
