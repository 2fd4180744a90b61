"""The kernels of attention's backward pass bound to the layout of a batch, in the order in which they run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cuda_kernels.attention.backward.delta import attention_delta_kernel
from cuda_kernels.attention.backward.dkv import attention_dkv_kernel
from cuda_kernels.attention.backward.dq import attention_dq_kernel
from cuda_kernels.attention.backward.memory import FLUSH, QUERIES, scratch_floats
from cuda_kernels.attention.backward.statistics import CORRECTED, STATISTICS
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.host.launch import Argument, Launch, address_on
from cuda_kernels.host.launchers.attention import PackedCodes, Visible
from cuda_kernels.host.launchers.attention_tiles import PackedRows, limits, tile_table
from cuda_kernels.host.tensor_maps import Box, map_on

Strides = tuple[int, int, int]
"""In elements: from a sequence to the next (0 where they lie one after the other), from a row, from a head."""


class BackwardLaunch:
    """The backward pass for one layout of a batch.

    Args:
        spec: head_dim, of at most 128, and the dtype of the gradients.
        heads: of queries, and of keys and values; the first is a multiple of the second.
        queries, keys: the rows of the batch.
        visible: the mask.
        softmax_scale: greater than 0.
        query_strides: of o and dq; multiples of 16 bytes, as are the addresses.
        key_strides: the same of dk and dv.
        flush: see :data:`cuda_kernels.attention.backward.memory.FLUSH`.

    Raises:
        ValueError: an argument is none that the kernels take.
        KernelError: a kernel cannot be compiled or loaded.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        heads: tuple[int, int],
        queries: PackedRows,
        keys: PackedRows,
        visible: Visible,
        softmax_scale: float,
        query_strides: Strides,
        key_strides: Strides,
        device: torch.device,
        flush: int = FLUSH,
    ) -> None:
        if spec.panels > 1:
            raise ValueError(f"head_dim={spec.head_dim}: the backward kernels are for 64, 96 and 128 channels")
        if not softmax_scale > 0:
            raise ValueError(f"softmax_scale={softmax_scale}: the kernels fold it into exponents, and need it positive")
        for strides in (query_strides, key_strides):
            if any(stride % 8 for stride in strides):
                raise ValueError(f"strides={strides}: rows of o and of gradients begin at multiples of 8 elements")
        left, right, bottom_right = visible
        of_queries = tile_table(queries, keys, left, right, bottom_right)
        of_keys = tile_table(keys, queries, right, left, bottom_right, QUERIES)
        self._tables = of_queries.to(device), of_keys.to(device)
        self._heads, self._rows, self._device = heads, queries.total, device
        group = heads[0] // heads[1]
        stages = (of_keys[:, 3] + 1 >> 1) - (of_keys[:, 2] >> 1)
        needs_scratch = max(stages.tolist(), default=0) * ROWS * group > flush
        self._scratch_floats = len(of_keys) * heads[1] * scratch_floats(spec) if needs_scratch else 0
        rows = queries.total, keys.total
        scales = softmax_scale * math.log2(math.e), softmax_scale
        blocks = len(of_queries) * heads[0]
        self._delta = Launch(
            attention_delta_kernel(spec.head_dim), blocks, (heads[0], queries.total, *query_strides), device
        )
        scalars = heads[0], group, *rows, *limits(left, right), *scales, *query_strides
        self._dq = Launch(attention_dq_kernel(spec), blocks, scalars, device)
        scalars = heads[1], group, *rows, *limits(right, left), *scales, *key_strides
        self._dkv = Launch(attention_dkv_kernel(spec, flush), len(of_keys) * heads[1], scalars, device)
        self._address = address_on(device)
        self._box, self._transposed = map_on(device, Box(ROWS, 128)), map_on(device, Box(spec.head_dim, 128))
        self._statistics_box = map_on(device, Box(STATISTICS - CORRECTED, ROWS, swizzle=False))

    def start(
        self,
        do: PackedCodes,
        q: PackedCodes,
        k: PackedCodes,
        v: PackedCodes,
        o: Tensor,
        m: Tensor,
        l: Tensor,  # noqa: E741
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Write ``dq``, ``dk`` and ``dv``.

        ``do``, ``q`` and ``k`` have both copies, ``v`` has a row copy. ``o`` is in bfloat16; ``m`` and ``l`` are as
        the forward pass left them, float32 ``[H, R]`` of packed rows of queries.
        """
        statistics = self.start_delta(do, q, o, m, l)
        self.start_dq(do, q, k, v, statistics, dq)
        self.start_dkv(do, q, k, v, statistics, dk, dv)

    def start_delta(self, do: PackedCodes, q: PackedCodes, o: Tensor, m: Tensor, l: Tensor) -> Tensor:  # noqa: E741
        """What the others know of each query: float32 ``[H, 5, R]``; ``backward/statistics.py`` names its rows."""
        assert o.dtype == torch.bfloat16
        statistics = torch.empty(self._heads[0], STATISTICS, self._rows, device=self._device)
        if self._delta.blocks:
            inputs = self._tables[0], _row_copy(do), do.scale_inv, q.scale_inv, o, m, l, statistics
            self._delta.start(*map(self._address, inputs))
        return statistics

    def start_dq(
        self, do: PackedCodes, q: PackedCodes, k: PackedCodes, v: PackedCodes, statistics: Tensor, dq: Tensor
    ) -> None:
        """Write ``dq`` and the statistic ``CORRECTED``."""
        if self._dq.blocks:
            maps = (*map(self._codes, (q, do, k, v)), self._codes_t(k))
            inputs = self._tables[0], k.scale_inv, v.scale_inv, statistics, dq
            self._dq.start(*maps, *map(self._address, inputs))

    def start_dkv(
        self,
        do: PackedCodes,
        q: PackedCodes,
        k: PackedCodes,
        v: PackedCodes,
        statistics: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Write ``dk`` and ``dv``."""
        if self._dkv.blocks:
            absent: Argument = 0
            scratch = torch.zeros(self._scratch_floats, device=self._device) if self._scratch_floats else None
            maps = (
                *map(self._codes, (k, v, q, do)), *map(self._codes_t, (q, do)),
                self._statistics_box(statistics.flatten(0, 1)),
            )  # fmt: skip
            inputs = self._tables[1], k.scale_inv, v.scale_inv, dk, dv
            self._dkv.start(*maps, *map(self._address, inputs), absent if scratch is None else self._address(scratch))

    def _codes(self, x: PackedCodes) -> Argument:
        return self._box(_row_copy(x).flatten(0, 1))

    def _codes_t(self, x: PackedCodes) -> Argument:
        assert x.data_t is not None
        return self._transposed(x.data_t.flatten(0, 1))


def _row_copy(x: PackedCodes) -> Tensor:
    assert x.data is not None
    return x.data
