"""Attention's kernels bound to the layout of a batch: grid, tables, tensor maps and parameters of each launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.casts.cast import quantize_heads_kernel
from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.casts.means import mean_heads_kernel, sum_heads_kernel
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.host.launch import Argument, Launch, address_on
from cuda_kernels.host.launchers.attention_kernels import forward_kernel, operand_on
from cuda_kernels.host.launchers.attention_tiles import PackedRows, cast_table, limits, sequence_table, tile_table
from cuda_kernels.host.tensor_maps import Box

_LOG2_E = math.log2(math.e)


class PackedCodes(NamedTuple):
    """A tensor of heads as E4M3 codes in packed rows (:mod:`cuda_kernels.attention.spec`).

    Attributes:
        data: uint8 ``[H, R, D]``, or None.
        data_t: uint8 ``[H, D, R]``, or None.
        scale_inv: float32 ``[H, R / 128]``.
    """

    data: Tensor | None
    data_t: Tensor | None
    scale_inv: Tensor


class Visible(NamedTuple):
    """Which keys a query sees: see :func:`cuda_kernels.host.launchers.attention_tiles.tile_table`."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False


class CastLaunch:
    """The cast of a tensor of heads, for one layout of a batch.

    Args:
        head_dim: channels of a head, side by side.
        dtype: of the tensor, by its name.
        heads: of the tensor.
        rows: of the batch.
        strides: of the tensor in elements: from a sequence to the next (0 where they lie one after the other), from a
            row, from a head.
        copies: whether there is a row copy, and a transposed one.
        centered: whether each channel's mean over the sequence is subtracted first.
        aligned: whether the tensor's address is a multiple of four elements.

    Raises:
        KernelError: a kernel cannot be compiled or loaded.
    """

    def __init__(
        self,
        head_dim: int,
        dtype: str,
        heads: int,
        rows: PackedRows,
        strides: tuple[int, int, int],
        copies: tuple[bool, bool],
        centered: bool,
        aligned: bool,
        device: torch.device,
    ) -> None:
        vector = 4 if aligned and not any(stride % 4 for stride in strides) else 1
        spec = HeadsSpec(head_dim, dtype, vector)
        self._heads, self._total, self._head_dim, self._copies = heads, rows.total, head_dim, copies
        self._sequences = len(rows.lengths)
        table = cast_table(rows)
        self._table, self._sequence_table = table.to(device), sequence_table(rows).to(device)
        self._address, self._device = address_on(device), device
        blocks = len(table) * heads
        kernel = quantize_heads_kernel(spec, *copies, centered)
        self._cast = Launch(kernel, blocks, (heads, rows.total, self._sequences, *strides), device)
        self._sum = self._mean = None
        if centered:
            self._sum = Launch(sum_heads_kernel(spec), blocks, (heads, rows.total, *strides), device)
            mean = mean_heads_kernel(head_dim)
            self._mean = Launch(mean, self._sequences * heads, (heads, rows.total, self._sequences), device)

    def start(self, x: Tensor) -> PackedCodes:
        """The codes of ``x``; what no copy was asked for is None."""
        shape = self._heads, self._total, self._head_dim
        data, data_t = (
            torch.empty(size, dtype=torch.uint8, device=self._device) if wanted else None
            for size, wanted in zip((shape, (shape[0], shape[2], shape[1])), self._copies)
        )
        scale_inv = torch.empty(self._heads, self._total // ROWS, device=self._device)
        if not self._cast.blocks:
            return PackedCodes(data, data_t, scale_inv)
        address = self._address
        means = self._means(x)
        absent: Argument = 0
        self._cast.start(
            address(x), address(self._table), absent if means is None else address(means),
            absent if data is None else address(data), absent if data_t is None else address(data_t),
            address(scale_inv),
        )  # fmt: skip
        return PackedCodes(data, data_t, scale_inv)

    def _means(self, x: Tensor) -> Tensor | None:
        if self._sum is None or self._mean is None:
            return None
        address = self._address
        sums = torch.empty(self._heads, self._total // ROWS, self._head_dim, device=self._device)
        means = torch.empty(self._heads, self._sequences, self._head_dim, device=self._device)
        self._sum.start(address(x), address(self._table), address(sums))
        self._mean.start(address(sums), address(self._sequence_table), address(means))
        return means


class ForwardLaunch:
    """The forward pass for one layout of a batch.

    Args:
        spec: head_dim and the result's dtype.
        heads: of queries, and of keys and values; the first is a multiple of the second.
        queries, keys: the rows of the batch.
        visible: the mask.
        softmax_scale: greater than 0.
        strides: of the result in elements: from a sequence to the next (0 where they lie one after the other), from a
            row, from a head. They are multiples of 16 bytes, as is the result's address.

    Raises:
        ValueError: ``softmax_scale`` or ``strides`` are none that the kernel takes.
        KernelError: the kernel cannot be compiled or loaded.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        heads: tuple[int, int],
        queries: PackedRows,
        keys: PackedRows,
        visible: Visible,
        softmax_scale: float,
        strides: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        item = 4 if spec.out == "float32" else 2
        if not softmax_scale > 0:
            raise ValueError(
                f"softmax_scale={softmax_scale}: the kernel folds it into a maximum, and needs it positive"
            )
        if any(stride * item % 16 for stride in strides):
            raise ValueError(f"strides={strides} of {spec.out}: rows of the result begin at multiples of 16 bytes")
        table = tile_table(queries, keys, *visible)
        self.table = table.to(device)
        self._box = operand_on(device, Box(ROWS, 128))
        self._values_box = operand_on(device, Box(spec.head_dim, 128))
        self._address = address_on(device)
        scalars = (
            heads[0], heads[0] // heads[1], queries.total, keys.total,
            *limits(visible.left, visible.right), softmax_scale * _LOG2_E, *strides,
        )  # fmt: skip
        self._launch = Launch(forward_kernel(spec, device), len(table) * heads[0], scalars, device)

    def start(self, q: PackedCodes, k: PackedCodes, v: PackedCodes, out: Tensor, m: Tensor, l: Tensor) -> None:  # noqa: E741
        """Write ``out``, and the statistics ``m`` and ``l``, float32 ``[H, R]`` of packed rows of queries.

        ``q`` and ``k`` have row copies, ``v`` has a transposed one.
        """
        assert q.data is not None
        assert k.data is not None
        assert v.data_t is not None
        if not self._launch.blocks:
            return
        address = self._address
        self._launch.start(
            self._box(q.data.flatten(0, 1)), self._box(k.data.flatten(0, 1)), self._values_box(v.data_t.flatten(0, 1)),
            address(self.table), address(q.scale_inv), address(k.scale_inv), address(v.scale_inv),
            address(out), address(m), address(l),
        )  # fmt: skip
