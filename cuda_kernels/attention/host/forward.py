"""Attention's kernels bound to a batch's layout: grid, tables, tensor maps and parameters of each launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.casts.cast import quantize_heads_kernel, transpose_heads_kernel
from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.casts.means import mean_heads_kernel, sum_heads_kernel
from cuda_kernels.attention.host.kernels import forward_kernels, operand_on
from cuda_kernels.attention.host.order import Order, order_of
from cuda_kernels.attention.host.tiles import CastTables, RowSpace, Visible
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.device.sizes import ITEM_BYTES
from cuda_kernels.host.launch import Box, address_on, named_launch

Strides = tuple[int, int, int]
"""In elements: between sequences (0 if they are concatenated), rows and heads."""


def stride_parameters(strides: Strides) -> dict[str, int]:
    """``strides`` by the names of kernels' parameters."""
    return dict(zip(("stride_b", "stride_l", "stride_h"), strides, strict=True))


def require_aligned_rows(strides: Strides, elements: int = 8) -> None:
    """Raises:
    ValueError: If rows do not start at multiples of that many elements, of 16 bytes.
    """
    if any(stride % elements for stride in strides):
        raise ValueError(f"{strides=}: rows of o and of gradients must start at multiples of {elements} elements")


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

    def rows(self) -> Tensor:
        """The row copy of all heads: ``[H * R, D]``."""
        assert self.data is not None
        return self.data.flatten(0, 1)

    def columns(self) -> Tensor:
        """The transposed copy of all heads: ``[H * D, R]``."""
        assert self.data_t is not None
        return self.data_t.flatten(0, 1)


@dataclass(frozen=True)
class AttentionProblem:
    """What both passes of a call have in common; sequences' lengths are passed to each launch.

    Attributes:
        spec: head_dim, and the dtype of a pass's results.
        heads: number of query heads, and of heads of keys and values, which divides it.
        queries, keys: the packed rows of the batch.
        visible: the mask.
        softmax_scale: greater than 0.
        longest_query: upper bound of the query sequences' lengths; None is ``queries.length_or_total``.

    Raises:
        ValueError: If ``softmax_scale`` is not supported, or heads cannot be shared evenly.
    """

    spec: AttentionSpec
    heads: tuple[int, int]
    queries: RowSpace
    keys: RowSpace
    visible: Visible
    softmax_scale: float
    longest_query: int | None = None

    def __post_init__(self) -> None:
        if not self.softmax_scale > 0:
            raise ValueError(
                f"softmax_scale={self.softmax_scale}: kernels fold it into exponents and maxima, and need it positive"
            )
        if self.heads[0] % self.heads[1]:
            raise ValueError(
                f"{self.heads[0]} query heads cannot share {self.heads[1]} heads of keys and values evenly"
            )

    @property
    def group(self) -> int:
        """Number of query heads per head of keys and values."""
        return self.heads[0] // self.heads[1]

    def sizes(self, order: Order) -> dict[str, int]:
        """Sizes for a launch in this order, by the names of kernels' parameters."""
        rows = {"rows_q": self.queries.total, "rows_k": self.keys.total}
        return {"heads_at_once": order.heads_at_once, "group": self.group, **rows}

    def order_of_queries(self, copies: int, device: torch.device) -> Order:
        """The order of tiles of queries; their blocks read so many copies of a head's keys or values."""
        bytes_of_head = copies * self.spec.head_dim * self._read_together(self.keys)
        return order_of(self.heads[1], self.queries.blocks, bytes_of_head, device, self.group)

    def order_of_keys(self, copies: int, device: torch.device) -> Order:
        """The order of tiles of keys; their blocks read so many copies of a group's queries or their gradients."""
        bytes_of_head = copies * self.spec.head_dim * self._read_together(self.queries) * self.group
        return order_of(self.heads[1], self.keys.blocks, bytes_of_head, device)

    def _read_together(self, others: RowSpace) -> int:
        """Rows of the sequences whose blocks run together: without a mask one, since tiles are in their order.

        An estimate for padded batches with lengths, whose longest sequences come first.
        """
        in_order = self.visible.left is None and self.visible.right is None and not others.ragged
        return others.length_or_total if in_order else others.total

    @property
    def scale_of_exponent(self) -> float:
        """The factor that turns scores into exponents of 2."""
        return self.softmax_scale * math.log2(math.e)


class CastLaunch:
    """The cast of a tensor of heads, for a batch's layout.

    Args:
        spec: of the tensor.
        heads: number of heads.
        space: the rows of the batch.
        strides: the tensor's strides.
        copies: whether to make a row copy, and a transposed one.
        mean_blocks: number of entries of :attr:`CastTables.summed` if means are subtracted; else 0.
        device: where to launch.

    Raises:
        KernelError: If a kernel cannot be compiled or loaded.
    """

    def __init__(
        self, spec: HeadsSpec, heads: int, space: RowSpace, strides: Strides, copies: tuple[bool, bool],
        mean_blocks: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._heads, self._space, self._head_dim, self._copies = heads, space, spec.head_dim, copies
        self._pointer, self._device = address_on(device), device
        kernel = quantize_heads_kernel(spec, *copies, mean_blocks > 0)
        of_batch, of_x = {"heads": heads, "packed_rows": space.total}, stride_parameters(strides)
        self._cast = named_launch(kernel, space.blocks * heads, device, **of_batch, sequences=space.sequences, **of_x)
        self._sum = self._mean = None
        if mean_blocks:
            self._sum = named_launch(sum_heads_kernel(spec), mean_blocks * heads, device, **of_batch, **of_x)
            mean = mean_heads_kernel(spec.head_dim)
            self._mean = named_launch(mean, space.sequences * heads, device, **of_batch, sequences=space.sequences)

    def run(self, x: Tensor, tables: CastTables) -> PackedCodes:
        """The codes of ``x``; copies that were not requested are None."""
        shape = self._heads, self._space.total, self._head_dim
        data, data_t = (
            torch.empty(size, dtype=torch.uint8, device=self._device) if wanted else None
            for size, wanted in zip((shape, (shape[0], shape[2], shape[1])), self._copies)
        )
        scale_inv = torch.empty(self._heads, self._space.blocks, dtype=torch.float32, device=self._device)
        if self._cast.blocks:
            maybe = self._means(x, tables), data, data_t
            self._cast.run(
                self._pointer(x), self._pointer(tables.blocks), *(0 if y is None else self._pointer(y) for y in maybe),
                self._pointer(scale_inv),
            )  # fmt: skip
        return PackedCodes(data, data_t, scale_inv)

    def _means(self, x: Tensor, tables: CastTables) -> Tensor | None:
        if self._sum is None or self._mean is None:
            return None
        assert tables.summed is not None
        assert tables.counts is not None
        sums, means = (
            torch.empty(self._heads, parts, self._head_dim, dtype=torch.float32, device=self._device)
            for parts in (self._space.blocks, self._space.sequences)
        )
        self._sum.run(*map(self._pointer, (x, tables.summed, sums)))
        self._mean.run(*map(self._pointer, (sums, tables.counts, means)))
        return means


class TransposeLaunch:
    """The transposed copy of codes ``[H, R, D]``, from their row copy.

    Raises:
        KernelError: If the kernel cannot be compiled or loaded.
    """

    def __init__(self, head_dim: int, heads: int, space: RowSpace, device: torch.device) -> None:
        self._pointer = address_on(device)
        kernel = transpose_heads_kernel(head_dim)
        self._launch = named_launch(kernel, space.blocks * heads, device, heads=heads, packed_rows=space.total)

    def run(self, codes: PackedCodes) -> PackedCodes:
        """Both copies of ``codes``."""
        assert codes.data is not None
        data_t = torch.empty_like(codes.data.mT, memory_format=torch.contiguous_format)
        if self._launch.blocks:
            self._launch.run(self._pointer(codes.data), self._pointer(data_t))
        return codes._replace(data_t=data_t)


class ForwardLaunch:
    """The forward pass for a batch's layout.

    Args:
        problem: the parameters that both passes share.
        strides: the strides of the result; they and its address are multiples of 16 bytes.
        device: where to launch.

    Raises:
        ValueError: If ``strides`` are not supported.
        KernelError: If the kernel cannot be compiled or loaded.
    """

    def __init__(self, problem: AttentionProblem, strides: Strides, device: torch.device) -> None:
        spec = problem.spec
        require_aligned_rows(strides, 16 // ITEM_BYTES[spec.out_dtype])
        self._is_empty = not problem.queries.blocks
        self._queries_box, self._keys_box = (operand_on(device, Box(ROWS, 128)) for _ in range(2))
        self._values_box = operand_on(device, Box(spec.head_dim, 128))
        self._pointer = address_on(device)
        order = problem.order_of_queries(2, device)  # K and V
        scalars = {**problem.sizes(order), **problem.visible.limits(), "c": problem.scale_of_exponent}
        self._launches = [
            named_launch(kernel, order.grid(), device, **scalars, **stride_parameters(strides))
            for kernel in forward_kernels(spec, device)
        ]

    def run(
        self, tiles: Tensor, q: PackedCodes, k: PackedCodes, v: PackedCodes,
        out: Tensor, m: Tensor, l: Tensor,  # noqa: E741
    ) -> None:  # fmt: skip
        """Write ``out``, and the statistics ``m`` and ``l``, float32 ``[H, R]`` of packed rows of queries.

        ``tiles``: :meth:`Visible.tiles_of_queries`. ``q`` and ``k`` have row copies, ``v`` has a transposed one.
        """
        if self._is_empty:
            return
        maps = self._queries_box(q.rows()), self._keys_box(k.rows()), self._values_box(v.columns())
        addresses = map(self._pointer, (tiles, q.scale_inv, k.scale_inv, v.scale_inv, out, m, l))
        arguments = *maps, *addresses
        for launch in self._launches:
            launch.run(*arguments)
