"""Casts on CUDA tensors. They are planned once for each key of tensors, and then only allocate and launch.

They do not synchronize with the device; kernels check whether a given scale is 0. Each layout of scales has a class of
launches, which norms and activations also use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_kernels.casts.amax import amax_kernel, row_amax_kernel
from cuda_kernels.casts.quantize import quantize_columns_kernel, quantize_rows_kernel, quantize_tensor_kernel
from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel, takes_octets
from cuda_kernels.device.tile import TileLoader, experts_loader, num_tiles, tensor_loader
from cuda_kernels.host import launch
from cuda_kernels.host.launch import Argument
from cuda_kernels.kernel import Kernel
from lightning_fp8.numerics.formats import E8M0_DTYPE, float8_of
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import (
    Outputs,
    joined,
    kernel_allocations,
    observe_op,
    quantize_columns_op,
    quantize_op,
    reference_observe,
    reference_quantize,
    reference_quantize_columns,
)
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.memory import (
    Allocation,
    PlainKey,
    TensorKey,
    allocator,
    copy_bits,
    maker,
    operand_allocations,
    tensor_key,
)
from lightning_fp8.ops.plans import Run, check_not_empty, current_device, planned

LoaderArgs = Sequence[Argument]
"""The arguments of a kernel's tile loader: addresses and strides."""
RunKernel = Callable[..., None]
"""Launches a kernel, given the parameters that vary between launches."""
Loaders = tuple[TileLoader, "TileLoader | None", int]
"""A tile loader, the same loader with vectors of 16 bytes (None if rows are not aligned), and the number of columns."""


class CastVariant(NamedTuple):
    """A cast, and which of its optional tensors are passed. Kernels are compiled for each variant."""

    cast: Cast
    has_scale: bool
    has_amax: bool

    @property
    def current_scaling(self) -> dict[str, int | float]:
        """The parameters of a kernel for the computation of a scale that is not given.

        A given scale of 0 means that there is no scale yet. It is then computed from the tensor's amax as in delayed
        scaling, without the options of a recipe.
        """
        power_2, epsilon = (False, 0.0) if self.has_scale else (self.cast.power_2_scale, self.cast.amax_epsilon)
        return {"power_2": int(power_2), "epsilon": epsilon}

    @property
    def scale_is_known(self) -> bool:
        """Whether the cast does not need an amax first."""
        return self.has_scale and self.cast.scale_is_nonzero


def variant_key(cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Any:
    """The part of a plan's key that :func:`variant_of` converts to a :class:`CastVariant`."""
    return *cast.key, scale is not None, amax is not None


def variant_of(key: Sequence[Any]) -> CastVariant:
    """The variant of a :func:`variant_key`."""
    return CastVariant(Cast.from_flat(*key[:-2]), *key[-2:])


# --- Results ----------------------------------------------------------------------------------------------------------


STRIDES = "out_stride", "out_scale_inv_stride", "out_t_stride", "out_t_scale_inv_stride"
"""Kernel parameters, in elements: the row strides of codes, and the strides of scales from block to block along K, or
from row to row without blocks."""


class CastOutputs:
    """Allocates the results of a cast on a device.

    Attributes:
        strides: the strides of the four results by :data:`STRIDES`; 0 for results without strides.
        steps: the bytes from one expert's part of each result to the next one's; 0 for those that experts share.
    """

    def __init__(self, device: torch.device, cast: Cast, rows: int, columns: int, experts: int = 0) -> None:
        allocations = kernel_allocations(cast, rows, columns, experts or None)
        self._makers = tuple(maker(device, allocation) for allocation in allocations)
        self.steps = [each.strides[0] * each.dtype.itemsize if len(each.shape) == 3 else 0 for each in allocations]
        along = 1 if cast.layout.scale_major == "mn" else 0
        strides = (
            allocation.strides[-2:][dim] if len(allocation.shape) > 1 else 0
            for allocation, dim in zip(allocations, (0, along, 0, along))
        )
        self.strides = dict(zip(STRIDES, strides))

    def allocate(self) -> Outputs:
        """Allocate the four tensors on the current device."""
        make_data, make_scale_inv, make_data_t, make_scale_inv_t = self._makers
        return Outputs(make_data(), make_scale_inv(), make_data_t(), make_scale_inv_t())


def with_kernel_strides(reference: Run) -> Run:
    """Wrap a reference that casts one tensor or two, so that its results have the kernels' memory layout."""

    def op(*args: Any) -> tuple[Tensor, ...]:
        cast = next(each for each in args if isinstance(each, Cast))
        results = reference(*args)
        data, _, data_t, _ = results[:4]
        *experts, rows, columns = data.shape if cast.rowwise else data_t.mT.shape if cast.columnwise else (0, 0)
        allocations = kernel_allocations(cast, rows, columns, *experts)
        made = len(results) // 4 * 4
        return *map(_as_allocated, results[:made], allocations * (made // 4)), *results[made:]

    return op


def _as_allocated(result: Tensor, allocation: Allocation) -> Tensor:
    if result.stride() == allocation.strides and result.shape == allocation.shape:
        return result
    copy = allocation.empty(result.device)
    copy_bits(result, copy)
    return copy


# --- Launches ---------------------------------------------------------------------------------------------------------


def num_blocks(device: torch.device, rows: int, columns: int, tensors: int = 1) -> int:
    """The number of a tensor's blocks that run concurrently. Each of these n blocks processes every n-th tile."""
    return min(num_tiles(rows, columns), 4 // tensors * launch.multiprocessors(device))


Addresses = tuple[LoaderArgs, LoaderArgs, Sequence[Argument], Sequence[Argument], Sequence[Argument]]
"""The arguments of both loaders, and the addresses of scales, of amaxes and of results: 0 for what is not given. Those
of two tensors alternate. After each address of experts are the bytes to the next expert's."""


class CastLaunches:
    """The launches that cast the values ``[rows, columns]`` of a tile loader.

    Args:
        loader: the loader of the values.
        store_loader: the loader for the kernel that stores codes, which may have side effects; None is ``loader``.
        experts: the number of matrices of an :func:`~cuda_kernels.device.tile.experts_loader`; 0 for other loaders.

    Attributes:
        pointer: returns a launch's argument for a tensor.
    """

    def __init__(
        self,
        device: torch.device,
        loader: TileLoader,
        rows: int,
        columns: int,
        variant: CastVariant,
        store_loader: TileLoader | None = None,
        experts: int = 0,
    ) -> None:
        self.pointer: Callable[[Tensor], Argument] = launch.address_on(device)
        self.device = device
        self.rows = rows
        self.columns = columns
        self.outputs = CastOutputs(device, variant.cast, rows, columns, experts)
        self._allocate = allocator(device)
        self._tensors, self._experts = loader.tensors, max(experts, 1)
        self._bind_kernels(loader, store_loader or loader, variant)

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        """Bind the kernel that stores codes and the kernels before it."""
        raise NotImplementedError

    def _bind(
        self, kernel: Kernel, blocks: int, addresses: Sequence[str], joined: bool = False, /, **scalars: int | float
    ) -> RunKernel:
        """:func:`~cuda_kernels.host.launch.bind` a kernel that begins with the parameters of a loader and the shape.

        Args:
            blocks: blocks for each tensor.
            addresses: the parameters that vary between launches, after the loader's arguments.
            joined: whether the kernel takes all experts as one matrix.
            scalars: the parameters that are bound after the shape.
        """
        rows, experts = (self.rows * self._experts, 1) if joined else (self.rows, self._experts)
        shape, grid = {"rows": rows, "columns": self.columns}, (blocks * self._tensors, 1, experts)
        return launch.bind(kernel, grid, self.device, ("loader_args", *addresses), **shape, **scalars)

    def cast(
        self,
        loader_args: LoaderArgs,
        scale: Tensor | None,
        amax: Tensor | None,
        store_args: LoaderArgs | None = None,
    ) -> Outputs:
        """Allocate the results and launch the kernels. ``store_args`` are the arguments of ``store_loader``."""
        pointer = self.pointer
        data, scale_inv, data_t, scale_inv_t = outputs = self.outputs.allocate()
        self._launch((
            loader_args, store_args or loader_args,
            (0 if scale is None else pointer(scale),),
            (0 if amax is None else pointer(amax),),
            (pointer(data), pointer(scale_inv), pointer(data_t), pointer(scale_inv_t)),
        ))  # fmt: skip
        return outputs

    def cast_two(self, loader_args: LoaderArgs, *observed: Tensor | None) -> tuple[Tensor, ...]:
        """:meth:`cast` for a loader of two tensors. ``observed`` are a scale of each, and an amax of each."""
        pointer = self.pointer
        made = self.outputs.allocate(), self.outputs.allocate()
        given = [0 if x is None else pointer(x) for x in observed]
        results = [pointer(result) for pair in zip(*made) for result in pair]
        self._launch((loader_args, loader_args, given[:2], given[2:], results))
        return joined(*made)

    def cast_experts(self, loader_args: LoaderArgs, *observed: Tensor | None) -> Outputs:
        """:meth:`cast` for a loader of experts, which share the scale and the amax."""
        pointer = self.pointer
        outputs = self.outputs.allocate()
        scale, amax = ((0 if x is None else pointer(x), 0) for x in observed)
        results = [each for x, step in zip(outputs, self.outputs.steps) for each in (pointer(x), step)]
        self._launch((loader_args, loader_args, scale, amax, results))
        return outputs

    def _launch(self, given: Addresses) -> None:
        """Launch the kernels."""
        raise NotImplementedError


class TensorCast(CastLaunches):
    """One scale for the tensor. If it may be needed, the tensor's amax is computed first."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        cast = variant.cast
        blocks = num_blocks(self.device, self.rows * self._experts, self.columns, self._tensors)
        self._block_amaxes = (self._tensors * blocks,), (1,), torch.float32
        self._find_amax = None
        if not variant.scale_is_known:
            self._find_amax = self._bind(amax_kernel(loader, False), blocks, ("scale_ptr", "amax_ptr"), True)
        kernel = quantize_tensor_kernel(
            store_loader, cast.float8.name.lower(), cast.rowwise, cast.columnwise, variant.has_amax
        )
        self._store = self._bind(
            kernel,
            num_tiles(self.rows, self.columns),
            ("scale_ptr", "block_amax", "amax_out", "out", "out_scale_inv", "out_t"),
            num_block_amax=blocks,
            **variant.current_scaling,
            **{name: self.outputs.strides[name] for name in ("out_stride", "out_t_stride")},
        )

    def _launch(self, given: Addresses) -> None:
        loader_args, store_args, scales, amaxes, results = given
        block_amax_ptr: Argument = 0
        if self._find_amax is not None:
            block_amaxes = self._allocate(*self._block_amaxes)
            block_amax_ptr = self.pointer(block_amaxes)
            self._find_amax(*loader_args, *scales, block_amax_ptr)  # at once if the scale is not 0
        self._store(*store_args, *scales, block_amax_ptr, *amaxes, *results[: len(results) * 3 // 4])


class RowCast(CastLaunches):
    """One scale for each row, and for each column in the transposed operand. Amaxes are computed first."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        cast = variant.cast
        usage = cast.rowwise, cast.columnwise
        num_amaxes = self._tensors * self._experts * (self.rows + self.columns)
        tiles = num_tiles(self.rows, self.columns)
        self._find_amaxes = self._bind(row_amax_kernel(loader, *usage), tiles, ("amaxes",))
        self._new_amaxes = maker(self.device, Allocation.contiguous((num_amaxes,), torch.float32))
        self._zero = launch.zeroing(self.device, num_amaxes)
        self._store = self._bind(
            quantize_rows_kernel(store_loader, cast.float8.name.lower(), *usage),
            tiles,
            ("amaxes", "out", "out_scale_inv", "out_t", "out_t_scale_inv"),
            **variant.current_scaling,
            **self.outputs.strides,
        )

    def _launch(self, given: Addresses) -> None:
        loader_args, store_args, _, _, results = given
        row_amaxes = self._new_amaxes()
        row_amaxes_ptr = self.pointer(row_amaxes)
        self._zero(row_amaxes_ptr)
        self._find_amaxes(*loader_args, row_amaxes_ptr)
        self._store(*store_args, row_amaxes_ptr, *results)


class BlockCast(CastLaunches):
    """One scale for each block, computed from the values of the block."""

    def _bind_kernels(self, loader: TileLoader, store_loader: TileLoader, variant: CastVariant) -> None:
        cast = variant.cast
        kernel = quantize_blocks_kernel(
            store_loader, cast.float8.name.lower(), cast.layout.block, cast.layout.scale_dtype == E8M0_DTYPE,
            cast.rowwise, cast.columnwise,
        )  # fmt: skip
        self._store = self._bind(
            kernel,
            num_tiles(self.rows, self.columns),
            ("out", "out_scale_inv", "out_t", "out_t_scale_inv"),
            **variant.current_scaling,
            **self.outputs.strides,
        )

    def _launch(self, given: Addresses) -> None:
        _, store_args, _, _, results = given
        self._store(*store_args, *results)


def cast_launches(layout: Layout) -> type[CastLaunches]:
    """The class of launches for ``layout``."""
    return TensorCast if layout.has_one_scale else BlockCast if layout.scales_along_k else RowCast


# --- The ops ----------------------------------------------------------------------------------------------------------


def planned_cast(
    name: str, reference: Run, loaders: Callable[..., Loaders], num_tensors: int = 1, num_observed: int = 2,
    of_experts: bool = False,
) -> tuple[Run, Callable[..., Run]]:  # fmt: skip
    """A cast of values that tile loaders compute: ``(*tensors, *options, cast, *observed)``.

    It is returned with its plan cache, ``(device, current, *tensor_keys, variant_key(...), *options)``. If the rows of
    a tensor are not contiguous, all are made contiguous first.

    Args:
        name: the name of its plans.
        reference: computes the same without kernels.
        loaders: returns the tile loaders of the values, given ``(*tensor_keys, *options)``.
        num_observed: 2 for ``scale, amax``; 4 for ``scale, scale, amax, amax`` of two casts.
        of_experts: whether the option is the number of matrices that follow one another in the tensor.
    """

    @planned(fallback=with_kernel_strides(reference), name=name)
    def plan(device: torch.device, *key: Any) -> Run:
        plain_keys: Sequence[PlainKey] = key[:num_tensors]
        keys = [TensorKey(*plain_key, device) for plain_key in plain_keys]
        variant, options = variant_of(key[num_tensors]), key[num_tensors + 1 :]
        check_not_empty(keys[0].shape)
        if not all(each.has_contiguous_rows for each in keys):
            return lambda *args: op(*(x.contiguous() for x in args[:num_tensors]), *args[num_tensors:])
        loader, wide, columns = loaders(*keys, *options)
        # Vectors of 16 bytes are not faster if columns also share a scale.
        narrow = variant.cast.columnwise or not takes_octets(variant.cast.layout.block)
        amax_loader = wide or loader if variant.cast.layout.has_one_scale else loader
        store_loader = loader if narrow else wide or loader
        make, experts = cast_launches(variant.cast.layout), options[0] if of_experts else 0
        if experts:
            of_one = partial(experts_loader, one_scale=variant.cast.layout.has_one_scale)
            amax_loader, store_loader = of_one(amax_loader), of_one(store_loader)
        launches = make(device, amax_loader, keys[0].rows // max(experts, 1), columns, variant, store_loader, experts)
        cast: Run = launches.cast_experts if experts else launches.cast if num_observed == 2 else launches.cast_two
        pointer, stride, strides = launch.address_on(device), keys[0].stride, [each.stride for each in keys]
        if num_tensors > 1:
            return lambda *args: cast(
                [n for x, stride in zip(args, strides) for n in (pointer(x), stride)], *args[-num_observed:]
            )
        if options:
            return lambda x, *args: cast((pointer(x), stride), *args[-2:])
        return lambda x, _, scale, amax: cast((pointer(x), stride), scale, amax)

    def op(*args: Any) -> tuple[Tensor, ...]:
        *others, cast = args[:-num_observed]
        scale, amax = args[-num_observed], args[-1]
        if num_observed == 4 and amax is None:  # both casts have a scale, or none; one may have an amax
            amax = args[-2]
        x, *more = others[:num_tensors]
        key = *cast.key, scale is not None, amax is not None
        current = x.is_cuda and current_device()
        run = plan(x.device, current, tensor_key(x), *map(tensor_key, more), key, *others[num_tensors:])
        return run(*args)  # type: ignore[no-any-return]

    return op, plan


def tensor_loaders(x_key: TensorKey) -> Loaders:
    """The loaders of a tensor's values."""
    vector = next(n for n in (8, 4, 1) if n == 1 or x_key.is_vectorizable(n))
    wide = tensor_loader(DTYPE_NAMES[x_key.dtype], 8) if vector == 8 and x_key.dtype.itemsize == 2 else None
    return tensor_loader(DTYPE_NAMES[x_key.dtype], min(vector, 4)), wide, x_key.columns


quantize_on_cuda, _plan = planned_cast("quantize", reference_quantize, tensor_loaders)


def quantize_columns_on_cuda(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast row by row with a given scale for each column."""
    run = _columns_plan(x.device, x.is_cuda and current_device(), tensor_key(x), dtype)
    return run(x, scale, dtype)  # type: ignore[no-any-return]


@planned(fallback=reference_quantize_columns, name="quantize_columns")
def _columns_plan(device: torch.device, x_plain_key: PlainKey, dtype: torch.dtype) -> Callable[..., Tensor]:
    x_key = TensorKey(*x_plain_key, device)
    check_not_empty(x_key.shape)
    if not x_key.has_contiguous_rows:
        return lambda x, *args: quantize_columns_on_cuda(x.contiguous(), *args)
    loader, wide, columns = tensor_loaders(x_key)
    of_codes, _ = operand_allocations(Layout.TENSOR, dtype, x_key.rows, columns)
    run = launch.bind(
        quantize_columns_kernel(wide or loader, float8_of(dtype).name.lower()),
        num_tiles(x_key.rows, columns),
        device,
        ("loader_args", "scale", "out"),
        rows=x_key.rows,
        columns=columns,
        out_stride=of_codes.strides[0],
    )
    pointer, new, stride = launch.address_on(device), maker(device, of_codes), x_key.stride

    def quantize_columns(x: Tensor, scale: Tensor, _: torch.dtype) -> Tensor:
        codes = new()
        run(pointer(x), stride, pointer(scale), pointer(codes))
        return codes

    return quantize_columns


def observe_on_cuda(x: Tensor, amax: Tensor) -> None:
    """Update ``amax`` to ``max(amax, max |x|)``."""
    _observe_plan(x.device, x.is_cuda and current_device(), tensor_key(x))(x, amax)


@planned(fallback=reference_observe, name="observe")
def _observe_plan(device: torch.device, x_plain_key: PlainKey) -> Callable[[Tensor, Tensor], None]:
    x_key = TensorKey(*x_plain_key, device)
    shape = x_key.shape
    check_not_empty(shape)
    if len(shape) != 2:
        return lambda x, amax: observe_on_cuda(x.reshape(-1, shape[-1] if shape else 1), amax)
    if x_key.dtype == torch.float64:
        return lambda x, amax: observe_on_cuda(x.float(), amax)
    if x_key.dtype not in DTYPE_NAMES:
        raise TypeError(f"cannot observe {x_key.dtype}; cast to one of {', '.join(map(str, DTYPE_NAMES))} first")
    if not x_key.has_contiguous_rows:
        return lambda x, amax: observe_on_cuda(x.contiguous(), amax)
    loader, wide, _ = tensor_loaders(x_key)
    rows, columns = shape
    kernel, blocks = amax_kernel(wide or loader, True), num_blocks(device, rows, columns)
    run = launch.bind(kernel, blocks, device, ("loader_args", "scale_ptr", "amax_ptr"), rows=rows, columns=columns)
    pointer = launch.address_on(device)
    stride = x_key.stride
    return lambda x, amax: run(pointer(x), stride, 0, pointer(amax))


quantize_op.implement("cuda", quantize_on_cuda, _plan)
quantize_columns_op.implement("cuda", quantize_columns_on_cuda)
observe_op.implement("cuda", observe_on_cuda)
