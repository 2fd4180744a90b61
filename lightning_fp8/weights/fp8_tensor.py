"""FP8Tensor: a tensor of a high-precision dtype that is stored as FP8 GEMM operands.

It represents a weight that FSDP2 gathered in FP8, a primary weight of ``fp8_model_init``, or an activation that
sequence parallelism gathered in FP8. FP8 layers use its operands directly; all other operations compute with its
values.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8 import ops
from lightning_fp8.notices import say_once
from lightning_fp8.numerics.formats import holds_codes
from lightning_fp8.numerics.recipes import Recipe
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.traced import note_traced

_aten = torch.ops.aten
_SAME_VALUES = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default)
_COPIES = (_aten.clone.default, _aten._to_copy.default)
_CAST = ("_cast", "scaling", "codes")
_PARTS = ("_row_data", "_row_scale_inv", "_column_data", "_column_scale_inv")


class StoredScale(NamedTuple):
    """How a checkpoint stores the scales of a weight: the key beside the weight's, the dtype, and the shape."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


class FP8Tensor(Tensor):
    """A tensor ``[..., K]`` of a high-precision dtype, stored as the operand of ``[R, K]``, of its transpose, or both.

    The weight of experts ``[E, N, K]`` is stored as the operand of this shape, of ``[E, K, N]``, or both. In-place
    operations cast the new values again.

    Attributes:
        scaling: the layout of scales in :attr:`cast`.
        codes: the dtype of the operands in :attr:`cast`.
        recipe: the recipe whose layers use the operands; None for every recipe whose casts have the same format and
            blocks.
        observed: float32 ``[]``, the amax before the cast, if layers that use the operands must observe it; else None.
        takers: the slots of the layers that have used the operands; shared by views.
        high_precision_init_val: for a primary weight, its values before the first cast, on the CPU.
        stored: for a weight whose codes and scales are those of a checkpoint, how these are stored. It is frozen.
    """

    ATTRIBUTES: ClassVar = (*_CAST, *_PARTS, "high_precision_init_val", "observed", "stored", "takers")

    is_gathered: ClassVar[bool] = False
    """Whether the operands belong to a gather, and are freed with it."""
    scaling: Layout
    codes: torch.dtype
    recipe: Recipe | None = None
    observed: Tensor | None
    takers: list[Any]
    high_precision_init_val: Tensor | None = None
    stored: StoredScale | None = None
    _row_data: Tensor | None
    _row_scale_inv: Tensor | None
    _column_data: Tensor | None
    _column_scale_inv: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        operands: Quantized,
        cast: Cast,
        shape: torch.Size,
        dtype: torch.dtype,
        requires_grad: bool = False,
        observed: Tensor | None = None,
        strides: Sequence[int] | None = None,
    ) -> FP8Tensor:
        held = operands.rowwise or operands.columnwise
        if held is None:
            raise ValueError("an FP8Tensor needs the operand of x or that of xᵀ")
        strides = strides or torch._prims_common.make_contiguous_strides_for(shape)
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=dtype, device=held.data.device, requires_grad=requires_grad
        )
        made.cast = cast
        made.observed = observed
        made.takers = []
        made.operands = operands
        return made  # type: ignore[no-any-return]

    @property
    def cast(self) -> Cast:
        """How the values are cast."""
        return self._cast

    @cast.setter
    def cast(self, cast: Cast) -> None:
        self._cast = cast
        self.scaling, self.codes = cast.layout, cast.float8.dtype

    @property
    def operands(self) -> Quantized:
        """The operands of ``[R, K]`` and of its transpose; None for one that is not stored."""
        return _operands(self)

    @operands.setter
    def operands(self, operands: Quantized) -> None:
        row, column = operands
        self._row_data, self._row_scale_inv = (None, None) if row is None else (row.data, row.scale_inv)
        self._column_data, self._column_scale_inv = (None, None) if column is None else (column.data, column.scale_inv)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As ``torch.Tensor.data``; assigned values are cast to FP8, as by ``copy_``.

        Raises:
            ValueError: If the assigned values have another shape or device.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        if isinstance(values, FP8Tensor):
            Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
            self.operands, self.cast = values.operands, values.cast
            return
        if values.shape != self.shape or values.device != self.device:
            raise ValueError(
                f"data of shape {list(values.shape)} on {values.device} is assigned to an FP8 weight of shape "
                f"{list(self.shape)} on {self.device}; assign a tensor like it, or a new torch.nn.Parameter"
            )
        with torch.no_grad():
            self.copy_(values)

    def requires_grad_(self, requires_grad: bool = True) -> FP8Tensor:
        """As of ``torch.Tensor``.

        Raises:
            RuntimeError: If gradients are required of the codes of a checkpoint.
        """
        if requires_grad and self.stored is not None:
            raise RuntimeError(CODES_ARE_FROZEN)
        super().requires_grad_(requires_grad)
        return self

    def quantized(self, *, rowwise: bool, columnwise: bool) -> Quantized:
        """The requested operands; one that is not stored is transposed from the other, or cast from the values.

        It is cast, which rounds a second time, if the layout's blocks differ in the transposed tensor.
        """
        return kept_operands(self, rowwise, columnwise)

    def is_cast_of(self, values: Tensor) -> bool:
        """Whether storing ``values`` would change nothing; synchronizes with the device."""
        if values.shape != self.shape:
            return False
        row, column = self.operands
        made = _cast(self._castable(values), self.cast, rowwise=row is not None, columnwise=column is not None)
        return all(
            torch.equal(old.data.view(torch.uint8), new.data.view(torch.uint8))
            and torch.equal(old.scale_inv, new.scale_inv)
            for old, new in zip((row, column), made)
            if old is not None and new is not None
        )

    def _castable(self, values: Tensor) -> Tensor:
        """``values`` as operands are shaped, on this device, in a dtype that casts support: they are rounded once."""
        values = values.detach().to(self.device, values.dtype if values.dtype in ops.HIGH_PRECISION else self.dtype)
        values = values.expand(self.shape)
        return values if _is_of_experts(self) else values.reshape(-1, self.shape[-1])

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values kept by ``fp8_model_init(preserve_high_precision_init_val=True)``, on the CPU; None without it."""
        return self.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the values of :meth:`get_high_precision_init_val`."""
        self.high_precision_init_val = None

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The values as a plain tensor of :attr:`dtype`."""
        row, column = self.operands
        if row is not None:
            return row.dequantize(self.dtype).view(self.shape)
        assert column is not None
        return column.dequantize(self.dtype).mT.reshape(self.shape)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write to a part of the values, which are then all cast again."""
        values = self.dequantize()
        values[key] = value
        self.copy_(values)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FP8Tensor(shape={tuple(self.shape)}, {self.dtype}, {self.scaling.code}, device='{self.device}')"

    def share_memory_(self) -> Any:
        """Not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "share_memory_() of a weight that is kept in FP8, by fp8_model_init or as in its checkpoint, is not "
            "supported; send model.state_dict(), or construct the model outside of fp8_model_init"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle with the codes as uint8: pickling without ``torch.save`` does not support FP8 dtypes."""
        parts = {
            name: (part.dtype, part.contiguous().view(torch.uint8) if part.itemsize == 1 else part)
            for name in _PARTS
            if (part := getattr(self, name)) is not None
        }
        others = {key: value for key, value in vars(self).items() if key not in (*_CAST, *_PARTS)}
        return _unpickled, (parts, self.cast, self.shape, self.dtype, self.requires_grad, others)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in (*_PARTS, "observed") if getattr(self, name) is not None]
        return names, (self.cast, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], kept: Any, size: torch.Size, stride: Any) -> FP8Tensor:
        cast, dtype = kept
        row, column = (
            ScaledTensor(parts[data], parts[scale_inv], cast.layout) if data in parts else None
            for data, scale_inv in (_PARTS[:2], _PARTS[2:])
        )
        return cls(Quantized(row, column), cast, size, dtype, observed=parts.get("observed"), strides=stride)

    def _stable_hash_for_caching(self) -> str:
        """All that compiled code depends on, as a string that is the same in every process; called by torch's cache."""
        parts = [
            (name, part.dtype, part.shape, part.stride(), part.storage_offset())
            for name in _PARTS
            if (part := getattr(self, name)) is not None
        ]
        own = type(self).__qualname__, self.shape, self.dtype, str(self.device), self.requires_grad
        key = repr((own, self.cast, self.recipe, self.observed is not None, parts))
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FP8Tensor):
            if function is _aten.detach.default:
                _refuse_distribution(first, sys._getframe().f_back)
            if function in _SAME_VALUES:
                size = first.shape if len(args) == 1 else _filled_in(args[1], first.numel())
                of_experts = _is_of_experts(first)  # other operands are [R, K] for any leading dimensions
                if [*size] == [*first.shape] if of_experts else tuple(size[-1:]) == first.shape[-1:]:
                    return first._same(torch.Size(size))
            if transposes(function, first, args) and not first.is_gathered:
                (*experts, rows, columns), (row, column) = first.shape, first.operands
                return FP8Tensor(Quantized(column, row), first.cast, torch.Size((*experts, columns, rows)), first.dtype)
            if function is _aten.empty_like.default and first.device.type == "meta":  # to_empty
                return first._copied(kwargs.get("device"), kwargs.get("dtype"), empty=True)
            if function in _FSDP2 and (found := _shards(function, first, args)) is not None:
                return found
            if function in _COPIES and kwargs.get("dtype", first.dtype) in ops.HIGH_PRECISION:
                return first._copied(kwargs.get("device"), kwargs.get("dtype"))
            if function is _aten.copy_.default:
                return first.store_(args[1])
        return _on_values(function, args, kwargs)

    def _same(self, size: torch.Size) -> FP8Tensor:
        """The same values in another shape."""
        made = type(self)(self.operands, self.cast, size, self.dtype, observed=self.observed)
        made.takers, made.stored = self.takers, self.stored
        made.high_precision_init_val = self.high_precision_init_val  # nn.Parameter detaches
        return made

    def _copied(self, device: torch.device | None, dtype: torch.dtype | None, empty: bool = False) -> FP8Tensor:
        device = device or self.device

        def copied(part: Tensor) -> Tensor:
            return torch.empty_like(part, device=device) if empty else part.to(device, copy=True)

        operands = [
            None if each is None else ScaledTensor(copied(each.data), copied(each.scale_inv), each.layout)
            for each in self.operands
        ]
        cls = FP8Tensor if self.is_gathered else type(self)
        made = cls(Quantized(*operands), self.cast, self.shape, dtype or self.dtype, observed=self.observed)
        made.takers, made.stored = self.takers, self.stored
        made.high_precision_init_val = self.high_precision_init_val  # Module.to keeps it so
        return made

    def store_(self, values: Tensor) -> FP8Tensor:
        """Cast ``values`` into the operands' memory; codes are copied if ``values`` has the same cast."""
        row, column = self.operands
        if isinstance(values, FP8Tensor) and values.cast == self.cast:
            new = values.quantized(rowwise=row is not None, columnwise=column is not None)
        else:
            plain = values.dequantize() if isinstance(values, FP8Tensor) else values
            if self.stored is not None and holds_codes(plain):
                raise TypeError(CODES_WITHOUT_SCALES)
            plain = self._castable(plain)
            if self.stored is not None and not plain.is_meta:
                own = self.dequantize().to(plain.dtype).view(plain.shape)
                if torch.allclose(plain, own, rtol=0, atol=0, equal_nan=True):
                    return self  # the values of these codes, as DistributedDataParallel broadcasts them
                if isinstance(self, CodesShard):
                    raise NotImplementedError(CODES_ARE_SHARDED)
                say_once(_said, CODES_ARE_CAST_AGAIN, stacklevel=4)
            new = _cast(plain, self.cast, rowwise=row is not None, columnwise=column is not None)
        for old, made in zip((row, column), new):
            if old is not None and made is not None:
                old.data.view(torch.uint8).copy_(made.data.view(torch.uint8))
                old.scale_inv.copy_(made.scale_inv)
        return self


CODES_ARE_FROZEN = (
    "weights whose FP8 codes are those of a checkpoint are frozen: train adapters such as LoRA on top of them, or load "
    "the model with quantization_config=FineGrainedFP8Config(dequantize=True) to train its weights"
)
CODES_ARE_CAST_AGAIN = (
    "values were written to a weight whose FP8 codes are those of a checkpoint, as merging an adapter does: all of its "
    "codes and scales are cast again, which rounds the sum to FP8, and unmerging does not restore the codes. To merge "
    "without rounding, load the adapter on the model of quantization_config=FineGrainedFP8Config(dequantize=True)"
)
CODES_WITHOUT_SCALES = (
    "float8 codes without their scales are written to a weight whose FP8 codes are those of a checkpoint, as if they "
    "were its values: load both with load_state_dict"
)
CODES_ARE_SHARDED = (
    "values cannot be written to a weight whose FP8 codes are those of a checkpoint and which fully_shard has sharded, "
    "because its scales belong to all ranks: load codes with their scales, or merge adapters in an unsharded model"
)
_said: dict[Any, str] = {}


class CodesShard(FP8Tensor):
    """This rank's rows, or experts, of a weight whose codes are those of a checkpoint, as ``fully_shard`` stores them.

    It is the local tensor of a DTensor. FSDP2 gathers its codes, and the scales if rows have their own, and makes the
    whole FP8Tensor from them.
    """

    @classmethod
    def of(cls, whole: FP8Tensor, start: int, stop: int, zeros: bool = False) -> CodesShard:
        """The rows or experts ``start`` to ``stop`` of ``whole``, in its memory; or as many of ``zeros``."""
        row: Any = whole.operands.rowwise
        block, codes, scale_inv = _sharing_a_scale(whole), row.data[start:stop], row.scale_inv
        if zeros:
            codes = row.data.new_zeros(stop, *whole.shape[1:])
            scale_inv = scale_inv.new_zeros(row.layout.scale_shape(*codes.shape)) if block else scale_inv.clone()
        elif block:
            scale_inv = scale_inv[start // block : ceil_div(stop, block)]
        made = cls(Quantized(ScaledTensor(codes, scale_inv, row.layout), None), whole.cast, codes.shape, whole.dtype)
        made.stored = whole.stored
        return made

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Called by FSDP2: what it gathers of this rank, padded as that of the first rank, and what it keeps here."""
        row: Any = self.operands.rowwise
        codes = row.data.view(torch.uint8)
        missing = ceil_div(outer_size[0], mesh.size()) - len(codes)
        codes = torch.cat([codes, codes.new_zeros(missing, *codes.shape[1:])]) if missing else codes
        alone = row.layout.has_one_scale or mesh.size() == 1
        return (codes,) if alone else (codes, row.scale_inv), (outer_size, row.scale_inv)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], kept: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[FP8Tensor, tuple[()]] | None:
        """Called by FSDP2: the whole weight, in the memory of what was ``gathered``."""
        (size, own_scale), (codes, *scales) = kept, gathered
        row = ScaledTensor(codes.view(self.codes)[: size[0]], scales[0] if scales else own_scale, self.scaling)
        if out is not None:
            out.operands = Quantized(row, None)
            return None
        made = FP8Tensor(Quantized(row, None), self.cast, size, param_dtype)
        made.stored = self.stored
        return made, ()


def quantized_tensor(values: Tensor, cast: Cast, *, rowwise: bool = True, columnwise: bool = False) -> FP8Tensor:
    """Cast a weight, ``[N, K]`` or ``[E, N, K]``, to an FP8Tensor, with scales computed from its amaxes."""
    operands = _cast(values.detach(), cast, rowwise=rowwise, columnwise=columnwise)
    return FP8Tensor(operands, cast, values.shape, values.dtype)


def _cast(values: Tensor, cast: Cast, *, rowwise: bool, columnwise: bool) -> Quantized:
    quantize = ops.quantize_experts if values.dim() == 3 else ops.quantize
    return quantize(values, cast, rowwise=rowwise, columnwise=columnwise)


def _unpickled(
    parts: dict[str, tuple[torch.dtype, Tensor]],
    cast: Cast,
    shape: torch.Size,
    dtype: torch.dtype,
    requires_grad: bool,
    others: dict[str, Any],
) -> FP8Tensor:
    tensors = {name: part.view(of_part) for name, (of_part, part) in parts.items()}
    made = FP8Tensor.__tensor_unflatten__(tensors, (cast, dtype), shape, None)
    vars(made).update(others)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


# Used by layers in compiled graphs. They are neither methods nor properties, because Dynamo treats those of tensors as
# operations and their arguments as tensors. Before torch 2.12, Dynamo supports only enums, dtypes and the flattened
# parts of a tensor as attributes.


def is_cast_for(tensor: FP8Tensor, cast: Cast) -> bool:
    """Whether the operands of ``tensor`` have the format and blocks of ``cast``; scales may differ."""
    return tensor.scaling is cast.layout and tensor.codes is cast.float8.dtype


def _operands(x: FP8Tensor) -> Quantized:
    row = None if x._row_data is None else ScaledTensor(x._row_data, x._row_scale_inv, x.scaling)  # type: ignore[arg-type]
    column = None if x._column_data is None else ScaledTensor(x._column_data, x._column_scale_inv, x.scaling)  # type: ignore[arg-type]
    return Quantized(row, column)


def kept_operands(x: FP8Tensor, rowwise: bool, columnwise: bool) -> Quantized:
    """:meth:`FP8Tensor.quantized` as a function, in which compiled code has the operands as inputs.

    Raises:
        RuntimeError: If FSDP2 would have to gather an operand that is not stored.
    """
    if x.is_gathered and torch.compiler.is_compiling():
        note_traced("gathered", *x.shape)  # all ranks compile a sharded model in the same way
    row, column = _operands(x)
    is_view = not x.is_contiguous()  # the transposed view of gathered experts, with their operands
    if is_view:
        rowwise, columnwise = columnwise, rowwise
    if columnwise and column is None:
        column = _other_operand(x, row)
    if rowwise and row is None:
        row = _other_operand(x, column)
    row, column = row if rowwise else None, column if columnwise else None
    return Quantized(column, row) if is_view else Quantized(row, column)


def _other_operand(x: FP8Tensor, operand: ScaledTensor | None) -> ScaledTensor:
    assert operand is not None
    if x.scaling.transposes:
        return transposed(operand)
    if x.is_gathered:
        raise RuntimeError(
            f"layout {x.scaling.code!r} needs another operand in the backward pass, which FSDP2 gathers there, but "
            "compiled code does not see it: compile the modules themselves with module.compile(), or use "
            "recipe='delayed', 'tensorwise' or 'blockwise'"
        )
    values = operand.dequantize(x.dtype)
    other = _cast(values, x.cast, rowwise=False, columnwise=True).columnwise
    assert other is not None
    return other


def transposed(operand: ScaledTensor) -> ScaledTensor:
    """The operand of xᵀ, for a layout that transposes: a view on the CPU, a copy on a GPU, where GEMMs read rows."""
    view = operand.t()
    if not operand.data.is_cuda:
        return view
    return ScaledTensor(ops.transpose(operand.data), view.scale_inv.contiguous(), operand.layout)


_FSDP2 = (_aten.split.Tensor, _aten.new_zeros.default, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default)


def _is_of_experts(x: FP8Tensor) -> bool:
    """Whether the operands of ``x`` are ``[E, ..., ...]``."""
    data = x._column_data if x._row_data is None else x._row_data
    return data is not None and data.dim() == 3


def _sharing_a_scale(x: FP8Tensor) -> int:
    """How many rows, or experts, along the first dimension share a scale at least; 0 if all do."""
    block = x.scaling.block[0] or 0
    return min(block, 1) if _is_of_experts(x) else block


def transposes(function: Any, x: FP8Tensor, args: Any) -> bool:
    """Whether ``function`` transposes the matrices of ``x``."""
    if function is _aten.transpose.int and _is_of_experts(x):
        return {each % 3 for each in args[1:]} == {1, 2}
    return function is _aten.t.default and x.dim() == 2


def _shards(function: Any, x: FP8Tensor, args: Any) -> Any:
    """The result of an operation by which FSDP2 divides a weight, pads or flattens a shard; None for other uses."""
    size = args[1]
    if function is _aten.as_strided.default:  # of what was gathered
        return x._same(x.shape) if args[1:3] == ([*x.shape], [*x.stride()]) else None
    if isinstance(x, CodesShard):
        if function is _aten.slice.Tensor and args[1] == 0 and len(args) == 4:
            return CodesShard.of(x, *slice(*args[2:]).indices(len(x))[:2])
        if function is _aten.view.default and list(size) in ([-1], [x.numel()]):
            return x._same(torch.Size((x.numel(),)))
    elif function not in _FSDP2[:2] or not _refuse_sharding(x):
        return None
    if function is _aten.new_zeros.default and size[1:] == [*x.shape[1:]]:
        return CodesShard.of(x, 0, size[0], zeros=True)
    if function is _aten.split.Tensor and args[2:] in ((), (0,)):
        return [CodesShard.of(x, at, min(at + size, len(x))) for at in range(0, max(len(x), 1), size)]
    return None


def _refuse_sharding(weight: Any) -> bool:
    """Whether ``fully_shard`` is calling.

    Raises:
        NotImplementedError: If it cannot shard the codes of ``weight [N, K]``.
    """
    frame: Any = sys._getframe()
    calls: list[dict[str, Any]] = []
    while frame is not None:
        calls += [frame.f_locals] if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp.") else []
        frame = frame.f_back
    if not calls:
        return False
    if weight.stored is None:
        raise NotImplementedError(
            "fully_shard does not shard weights that fp8_model_init keeps in FP8. It gathers the weights of "
            "FP8 layers in FP8 by itself: construct the model outside of fp8_model_init"
        )
    param: Any = next((each["self"] for each in calls if "self" in each), None)
    rows, block, ranks = len(weight), _sharing_a_scale(weight), getattr(param.mesh_info, "shard_mesh_size", 1)
    if param.fsdp_placement.dim != 0:
        why = f"shard_placement_fn gives {param.fsdp_placement}, and codes are sharded by rows: Shard(0)"
    elif param.post_forward_mesh_info not in (None, param.mesh_info):
        why = "reshard_after_forward is a number of ranks: pass True or False"
    elif param.pin_memory:
        why = "CPUOffloadPolicy would pin its memory: pass CPUOffloadPolicy(pin_memory=False)"
    elif block and ranks > 1 and rows % (block * ranks):
        mesh = "" if rows % block else f"use a mesh whose number of ranks divides {rows // block}, or "
        what = "experts" if _is_of_experts(weight) else "rows"
        why = (
            f"{ranks} ranks cannot share its {rows} {what} in multiples of {block}, the {what} of a scale: {mesh}leave "
            "the weight whole on every rank, fully_shard(..., ignored_params={layer.weight})"
        )
    else:
        return True
    module = calls[-1].get("module")
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    name = next((name for name, each in named if each is weight), "a weight")
    raise NotImplementedError(f"fully_shard cannot shard {name} {list(weight.shape)}, codes of a checkpoint: {why}")


def _refuse_distribution(weight: FP8Tensor, frame: Any) -> None:
    """Raises:
    NotImplementedError: If ``detach`` is called by torch's function that makes a DTensor of a parameter; it would
        shard the values in high precision.
    """
    while frame is not None and frame.f_code.co_filename == _PARAMETER:  # nn.Parameter(...) detaches
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name in _DISTRIBUTES and _is_of_dtensor(frame):
        if weight.stored is not None:
            raise NotImplementedError(
                "parallelize_module, distribute_module and distribute_tensor do not distribute FP8 codes of a "
                f"checkpoint ({list(weight.shape)}): use fully_shard, or load the model with its weights dequantized"
            )
        raise NotImplementedError(
            "parallelize_module, distribute_module and distribute_tensor do not distribute weights that fp8_model_init "
            "keeps in FP8. Construct and convert the model outside of fp8_model_init, or pass tp_group to layers of "
            "lightning_fp8 in it, which keep their shards in FP8"
        )


def _is_of_dtensor(frame: Any) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor."))


_PARAMETER = nn.Parameter.__new__.__code__.co_filename
_DISTRIBUTES = ("distribute_tensor", "replicate_module_params_buffers", "_replicate_module_fn")


def _filled_in(size: Any, numel: int) -> list[int]:
    size = list(size)
    if -1 in size:
        size[size.index(-1)] = numel // -math.prod(size)
    return size


def _on_values(function: Any, args: Any, kwargs: Any) -> Any:
    """Call ``function`` with the dequantized values; values that it changed in place are cast to FP8 again."""
    values: dict[int, tuple[FP8Tensor, Tensor]] = {}

    def value_of(tensor: FP8Tensor) -> Tensor:
        if id(tensor) not in values:
            values[id(tensor)] = tensor, tensor.dequantize()
        return values[id(tensor)][1]

    results = function(*tree_map_only(FP8Tensor, value_of, args), **tree_map_only(FP8Tensor, value_of, kwargs))
    schema = function._schema
    if not schema.is_mutable:
        return results
    named = {argument.name: given for argument, given in zip(schema.arguments, args)} | kwargs
    written = [
        named.get(each.name) for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    originals = {id(value): tensor for tensor, value in values.values()}
    for tensor in tree_leaves(written):
        if isinstance(tensor, FP8Tensor):
            tensor.store_(values[id(tensor)][1])
    return tree_map_only(Tensor, lambda result: originals.get(id(result), result), results)
