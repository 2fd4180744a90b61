"""The launches of a cast, planned once for tensors of one key: a class for each way in which elements share scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.casts.amax import amax_kernel, row_amax_kernel
from cuda_kernels.casts.quantize import quantize_rows_kernel, quantize_tensor_kernel
from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel
from cuda_kernels.device.tile import TileLoader, num_tiles
from cuda_kernels.host import launch
from cuda_kernels.host.launch import Argument
from cuda_kernels.kernel import Kernel
from lightning_fp8.formats import E8M0_DTYPE
from lightning_fp8.ops.core.allocation import Allocation, allocator, maker
from lightning_fp8.ops.core.checks import CheckedAddresses, require_contiguous
from lightning_fp8.ops.core.tensor_keys import KeyAndDevice, TensorKey, memoryless_key
from lightning_fp8.ops.quantize.options import QuantizeOptions, parse_quantize_options, refuse_scale
from lightning_fp8.ops.quantize.outputs import CastOutputs, Outputs
from lightning_fp8.ops.quantize.schema import CastIO, check_cast_io, check_overflow_counts
from lightning_fp8.scaled import Layout

LoaderArgs = Sequence[Argument]
"""The arguments of a kernel's tile loader: addresses and strides."""
RunKernel = Callable[..., None]
"""Starts a kernel, given the parameters of each launch."""
RunCast = Callable[..., Outputs]
"""``(loader_args, io, store_args=None) -> outputs``; see :meth:`CastLaunches.cast`."""


class CurrentScaling(NamedTuple):
    """How a kernel computes a scale from an amax, by the names of its parameters.

    Attributes:
        power_2: 1 for a scale that is rounded down to a power of two, else 0.
        epsilon: the least amax.
    """

    power_2: int
    epsilon: float


class CastVariant(NamedTuple):
    """A kind of cast, for which kernels are compiled: its options, and which tensors of :data:`CastIO` are given."""

    options: QuantizeOptions
    has_scale: bool
    has_amax: bool
    has_overflow_counts: bool

    @property
    def current_scaling(self) -> CurrentScaling:
        """How a kernel computes the scale that is not given.

        A given scale of 0 means that none is known yet: the tensor's own then replaces it as delayed scaling would
        compute it, without a recipe's options.
        """
        options = self.options
        return CurrentScaling(0, 0.0) if self.has_scale else CurrentScaling(int(options.power_2), options.epsilon)

    @property
    def scale_is_known(self) -> bool:
        """Whether no amax has to be found before the cast."""
        return self.has_scale and self.options.scale_is_nonzero


def overflow_counts_key(overflow_counts: Tensor) -> KeyAndDevice:
    """Make the key of ``overflow_counts`` for :func:`cast_variant`.

    Raises:
        ValueError: ``overflow_counts`` are not contiguous.
    """
    require_contiguous("overflow_counts", overflow_counts)
    return memoryless_key(overflow_counts)


def cast_variant(
    device: torch.device, options_text: str, has_scale: bool, has_amax: bool, overflow_counts: KeyAndDevice | None
) -> CastVariant:
    """Make a cast's variant of what its plan is kept by: planners get the last three as ``*given``.

    Args:
        overflow_counts: their key, if they are given.

    Raises:
        TypeError, ValueError: ``overflow_counts`` have another dtype, shape or device; ``options`` has another form.
    """
    check_overflow_counts(device, None if overflow_counts is None else TensorKey(*overflow_counts))
    return CastVariant(parse_quantize_options(options_text), has_scale, has_amax, overflow_counts is not None)


def num_blocks(device: torch.device, rows: int, columns: int) -> int:
    """Blocks that run side by side, each taking every n-th tile of ``[rows, columns]``."""
    return min(num_tiles(rows, columns), 4 * launch.multiprocessors(device))


class CastLaunches:
    """The launches that cast the values ``[rows, columns]`` that a tile loader gives.

    Args:
        loader: gives the values.
        store_loader: gives them to the kernel that stores codes, if not ``loader``; it may store something, too.

    Attributes:
        pointer: gives a launch's argument for a tensor.
    """

    def __init__(
        self,
        device: torch.device,
        loader: TileLoader,
        rows: int,
        columns: int,
        variant: CastVariant,
        store_loader: TileLoader | None = None,
    ) -> None:
        if variant.has_scale:
            refuse_scale(variant.options.layout)
        self.pointer: Callable[[Tensor], Argument] = launch.address_on(device)
        self.device = device
        self.rows = rows
        self.columns = columns
        self.outputs = CastOutputs(device, variant.options, rows, columns)
        self._allocate = allocator(device)
        self._bind_kernels(loader, store_loader or loader, variant)

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        """Bind the kernel that stores codes, and those before it."""
        raise NotImplementedError

    def _bind(self, kernel: Kernel, blocks: int, addresses: Sequence[str], **scalars: int | float) -> RunKernel:
        """:func:`~cuda_kernels.host.launch.bind` a kernel that takes a loader's arguments first, and the shape.

        Args:
            addresses: the parameters of each launch after the loader's arguments.
            scalars: the parameters that are bound after the shape.
        """
        shape = {"rows": self.rows, "columns": self.columns}
        return launch.bind(kernel, blocks, self.device, ("loader_args", *addresses), **shape, **scalars)

    def cast(self, loader_args: LoaderArgs, io: CastIO, store_args: LoaderArgs | None = None) -> Outputs:
        """Allocate the results and start the kernels; ``store_args``: those of ``store_loader``, if there is one."""
        raise NotImplementedError


class TensorCast(CastLaunches):
    """One scale for all; the tensor's own amax is found first where it may be needed."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        options = variant.options
        self._checked = CheckedAddresses(self.device)
        blocks = num_blocks(self.device, self.rows, self.columns)
        self._block_amaxes = (blocks,), (1,), torch.float32
        self._find_amax = None
        if not variant.scale_is_known:
            self._find_amax = self._bind(amax_kernel(loader, False), blocks, ("scale_ptr", "amax_ptr"))
        kernel = quantize_tensor_kernel(
            store_loader, options.float8.name.lower(), options.rowwise, options.columnwise, variant.has_amax,
            variant.has_overflow_counts,
        )  # fmt: skip
        strides = self.outputs.strides
        self._store = self._bind(
            kernel,
            num_tiles(self.rows, self.columns),
            ("scale_ptr", "block_amax", "amax_out", "counts", "out", "out_scale_inv", "out_t"),
            num_block_amax=blocks,
            **variant.current_scaling._asdict(),
            out_stride=strides.out_stride,
            out_t_stride=strides.out_t_stride,
        )

    def cast(self, loader_args: LoaderArgs, io: CastIO, store_args: LoaderArgs | None = None) -> Outputs:
        pointer = self.pointer
        checked = self._checked
        scale, amax, overflow_counts = io
        scale_ptr = 0 if scale is None else pointer(scale)
        amax_ptr = 0 if amax is None else pointer(amax)
        if scale_ptr not in checked or amax_ptr not in checked:
            check_cast_io(self.device, (scale, amax, None))
            checked.keep(scale_ptr, amax_ptr)
        outputs = data, scale_inv, data_t, _ = self.outputs.allocate()
        block_amax_ptr: Argument = 0
        if self._find_amax is not None:
            block_amaxes = self._allocate(*self._block_amaxes)
            block_amax_ptr = pointer(block_amaxes)
            self._find_amax(*loader_args, scale_ptr, block_amax_ptr)  # returns at once if a scale is given and not 0
        self._store(
            *(store_args or loader_args), scale_ptr, block_amax_ptr, amax_ptr,
            0 if overflow_counts is None else pointer(overflow_counts),
            pointer(data), pointer(scale_inv), pointer(data_t),
        )  # fmt: skip
        return outputs


class RowCast(CastLaunches):
    """One scale for each row, and in the transposed operand for each column, whose amaxes are found first."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        options = variant.options
        usage = options.rowwise, options.columnwise
        num_amaxes = self.rows + self.columns
        tiles = num_tiles(self.rows, self.columns)
        self._find_amaxes = self._bind(row_amax_kernel(loader, *usage), tiles, ("amaxes",))
        self._new_amaxes = maker(self.device, Allocation.contiguous((num_amaxes,), torch.float32))
        self._zero = launch.zeroing(self.device, num_amaxes)
        self._store = self._bind(
            quantize_rows_kernel(store_loader, options.float8.name.lower(), *usage, variant.has_overflow_counts),
            tiles,
            ("amaxes", "counts", "out", "out_scale_inv", "out_t", "out_t_scale_inv"),
            **variant.current_scaling._asdict(),
            **self.outputs.strides._asdict(),
        )

    def cast(self, loader_args: LoaderArgs, io: CastIO, store_args: LoaderArgs | None = None) -> Outputs:
        pointer = self.pointer
        overflow_counts = io[2]
        outputs = data, scale_inv, data_t, scale_inv_t = self.outputs.allocate()
        amaxes = self._new_amaxes()
        amaxes_ptr = pointer(amaxes)
        self._zero(amaxes_ptr)
        self._find_amaxes(*loader_args, amaxes_ptr)
        self._store(
            *(store_args or loader_args), amaxes_ptr,
            0 if overflow_counts is None else pointer(overflow_counts),
            pointer(data), pointer(scale_inv), pointer(data_t), pointer(scale_inv_t),
        )  # fmt: skip
        return outputs


class BlockCast(CastLaunches):
    """One scale for each block, from the block itself."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        options = variant.options
        kernel = quantize_blocks_kernel(
            store_loader, options.float8.name.lower(), options.layout.block, options.layout.scale_dtype == E8M0_DTYPE,
            options.rowwise, options.columnwise, variant.has_overflow_counts,
        )  # fmt: skip
        self._store = self._bind(
            kernel,
            num_tiles(self.rows, self.columns),
            ("counts", "out", "out_scale_inv", "out_t", "out_t_scale_inv"),
            **variant.current_scaling._asdict(),
            **self.outputs.strides._asdict(),
        )

    def cast(self, loader_args: LoaderArgs, io: CastIO, store_args: LoaderArgs | None = None) -> Outputs:
        pointer = self.pointer
        _, _, overflow_counts = io
        outputs = data, scale_inv, data_t, scale_inv_t = self.outputs.allocate()
        self._store(
            *(store_args or loader_args), 0 if overflow_counts is None else pointer(overflow_counts),
            pointer(data), pointer(scale_inv), pointer(data_t), pointer(scale_inv_t),
        )  # fmt: skip
        return outputs


def cast_launches(layout: Layout) -> type[CastLaunches]:
    """The class whose launches cast as ``layout`` asks."""
    return TensorCast if layout.has_one_scale else BlockCast if layout.scales_along_k else RowCast
