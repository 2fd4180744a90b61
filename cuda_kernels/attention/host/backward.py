"""Kernels of attention's backward pass bound to a batch's layout, in the order in which they run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.backward.delta import quantize_gradients_kernel
from cuda_kernels.attention.backward.memory import FLUSH, scratch_floats
from cuda_kernels.attention.backward.statistics import CORRECTED, STATISTICS
from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.host.forward import (
    AttentionProblem,
    PackedCodes,
    Strides,
    require_aligned_rows,
    stride_parameters,
)
from cuda_kernels.attention.host.kernels import blocks_of_tile, dkv_kernels, dq_kernel, multiplies_in_warps, operand_on
from cuda_kernels.attention.host.tiles import RowSpace
from cuda_kernels.attention.spec import ROWS
from cuda_kernels.host.launch import Box, address_on, named_launch


class Operands(NamedTuple):
    """The operands of the backward pass: ``do``, ``q`` and ``k`` have both copies, ``v`` has a row copy."""

    do: PackedCodes
    q: PackedCodes
    k: PackedCodes
    v: PackedCodes


class GradientLaunch:
    """The cast of dO, and the statistics of queries.

    Args:
        spec: of dO.
        heads: number of heads.
        space: the rows of queries.
        strides: strides of dO.
        o_strides: strides of o, multiples of 8; its address is a multiple of 16 bytes.
        device: the device to launch on.

    Raises:
        ValueError: If ``o_strides`` are not supported.
        KernelError: If the kernel cannot be compiled or loaded.
    """

    def __init__(
        self, spec: HeadsSpec, heads: int, space: RowSpace, strides: Strides, o_strides: Strides, device: torch.device
    ) -> None:
        require_aligned_rows(o_strides)
        self._shape, self._pointer, self._device = (heads, space.total, spec.head_dim), address_on(device), device
        sizes = {"heads": heads, "packed_rows": space.total, **stride_parameters(strides)}
        of_o = {f"o_{name}": stride for name, stride in stride_parameters(o_strides).items()}
        kernel = quantize_gradients_kernel(spec)
        self._launch = named_launch(kernel, space.blocks * heads, device, **sizes, **of_o)

    def run(
        self, do: Tensor, blocks: Tensor, o: Tensor, m: Tensor, l: Tensor, q: PackedCodes,  # noqa: E741
    ) -> tuple[PackedCodes, Tensor]:  # fmt: skip
        """Both copies of dO's codes, and statistics of queries, float32 ``[H, 5, R]``; see ``backward/statistics.py``.

        ``blocks``: of :class:`~cuda_kernels.attention.host.tiles.CastTables`. ``o`` is in bfloat16; ``m`` and ``l``
        come from the forward pass, float32 ``[H, R]`` of packed rows of queries.
        """
        assert o.dtype == torch.bfloat16
        heads, rows, channels = self._shape
        data, data_t = (
            torch.empty(heads, *shape, dtype=torch.uint8, device=self._device)
            for shape in ((rows, channels), (channels, rows))
        )
        scale_inv, statistics = (
            torch.empty(heads, *shape, dtype=torch.float32, device=self._device)
            for shape in ((rows // ROWS,), (STATISTICS, rows))
        )
        if self._launch.blocks:
            inputs = do, blocks, data, data_t, scale_inv, o, m, l, q.scale_inv, statistics
            self._launch.run(*map(self._pointer, inputs))
        return PackedCodes(data, data_t, scale_inv), statistics


class BackwardLaunch:
    """The backward pass for a batch's layout.

    Args:
        problem: the parameters that both passes share.
        query_strides: strides of dq; multiples of 8, with addresses that are multiples of 16 bytes.
        key_strides: strides of dk and dv, with the same requirements.
        device: the device to launch on.
        flush: see :data:`cuda_kernels.attention.backward.memory.FLUSH`.

    Raises:
        ValueError: If an argument is not supported by the kernels.
        KernelError: If a kernel cannot be compiled or loaded.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        query_strides: Strides,
        key_strides: Strides,
        device: torch.device,
        flush: int = FLUSH,
    ) -> None:
        spec, heads, group = problem.spec, problem.heads, problem.group
        for strides in (query_strides, key_strides):
            require_aligned_rows(strides)
        seen, seeing = problem.visible, problem.visible.transposed()
        self._problem, self._device = problem, device
        seen_by_a_key = seeing.most_seen(problem.queries, problem.longest_query) * group
        needs_scratch = not multiplies_in_warps(device) and seen_by_a_key > flush
        self._scratch_floats = problem.keys.blocks * heads[1] * scratch_floats(spec) if needs_scratch else 0
        scales = {"c": problem.scale_of_exponent, "softmax_scale": problem.softmax_scale}
        of_queries, of_keys = stride_parameters(query_strides), stride_parameters(key_strides)
        # Blocks of queries read K, V and transposed K; blocks of keys read Q and dO, both also transposed.
        query_order, key_order = problem.order_of_queries(3, device), problem.order_of_keys(4, device)
        scalars = {**problem.sizes(query_order), **seen.limits(), **scales, **of_queries}
        of_tile = blocks_of_tile(spec, device)
        self._dq = named_launch(dq_kernel(spec, device), query_order.grid(of_tile), device, **scalars)
        scalars = {**problem.sizes(key_order), **seeing.limits(), **scales, **of_keys}
        kernels = dkv_kernels(spec, device, flush)
        self._dkv = [named_launch(kernel, key_order.grid(of_tile), device, **scalars) for kernel in kernels]
        self._pointer = address_on(device)
        row_box, transposed_box = Box(ROWS, 128), Box(min(spec.head_dim, 128), 128)
        self._of_queries, self._of_keys = operand_on(device, row_box), operand_on(device, row_box)
        self._of_queries_t, self._of_keys_t = operand_on(device, transposed_box), operand_on(device, transposed_box)
        self._statistics_box = operand_on(device, Box(STATISTICS - CORRECTED, ROWS, swizzle=False))

    def run_dq(self, tiles: Tensor, operands: Operands, statistics: Tensor, dq: Tensor) -> None:
        """Write ``dq``, and ``CORRECTED`` of the ``statistics`` of :class:`GradientLaunch`.

        ``tiles``: :meth:`~cuda_kernels.attention.host.tiles.Visible.tiles_of_queries`.
        """
        do, q, k, v = operands
        if self._dq.blocks:
            maps = (
                *(self._of_queries(x.rows()) for x in (q, do)), *(self._of_keys(x.rows()) for x in (k, v)),
                self._of_keys_t(k.columns()),
            )  # fmt: skip
            inputs = tiles, k.scale_inv, v.scale_inv, statistics, dq
            self._dq.run(*maps, *map(self._pointer, inputs))

    def run_dkv(self, tiles: Tensor, operands: Operands, statistics: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write ``dk`` and ``dv``, after :meth:`run_dq`.

        ``tiles``: :meth:`~cuda_kernels.attention.host.tiles.Visible.tiles_of_keys`.
        """
        do, q, k, v = operands
        if self._problem.keys.blocks:
            maps = (
                *(self._of_keys(x.rows()) for x in (k, v)), *(self._of_queries(x.rows()) for x in (q, do)),
                *(self._of_queries_t(x.columns()) for x in (q, do)),
                self._statistics_box(statistics.flatten(0, 1)),
            )  # fmt: skip
            scratch = None
            if self._scratch_floats:
                scratch = torch.empty(self._scratch_floats, dtype=torch.float32, device=self._device)
            inputs = tiles, k.scale_inv, v.scale_inv, dk, dv
            for launch in self._dkv:
                launch.run(*maps, *map(self._pointer, inputs), 0 if scratch is None else self._pointer(scratch))
