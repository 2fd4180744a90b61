"""Transformer Engine's FP8 state of one module: the value of ``_extra_state``, in all formats.

:mod:`lightning_fp8.te.keys` has the keys and the columns of tensors.

| written by | container | value |
|---|---|---|
| 0.1 to 0.2 | list | scale, amax history forward; the same backward; ... |
| 0.3 to 0.5 | dict | ``scale_fwd``, ``amax_history_fwd``, ... |
| 0.6 to 0.11 | uint8 tensor, a pickle | dict |
| 0.12 to 1.13 | ``io.BytesIO``, a ``torch.save`` | dict with ``scale_inv_*``; up to 1.5 with ``global_fp8_*`` |
| 2.0 and later | uint8 tensor, a pickle; empty without FP8 | dict with ``recipe``; of ``te.ops`` one per direction |

A history ``[len, n]`` has the oldest amax first, as in this package.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.scaled import Role
from lightning_fp8.te.keys import FORWARD_SLOTS, column_of, is_state
from lightning_fp8.te.torch_file import CheckpointError, Standin, read_archive, read_pickle


class ForeignState(CheckpointError):
    """The value of an ``_extra_state`` key is not damaged, but is not a state of Transformer Engine."""


@dataclass(frozen=True)
class Columns:
    """The state of one direction of a module: ``scale`` float32 ``[n]`` and ``amax_history`` float32 ``[len, n]``."""

    scale: Tensor
    amax_history: Tensor


@dataclass(frozen=True)
class TensorState:
    """The state of one tensor. ``scale`` is 0 if Transformer Engine's is the initial one, which was never updated."""

    scale: float
    amax_history: Tensor


@dataclass(frozen=True)
class TEState:
    """The FP8 state of one module.

    Attributes:
        writer: the versions of Transformer Engine that write this format.
        forward, backward: the states of both directions; ``None`` if the module had no FP8 state.
        recipe_name: the class name of the recipe, if the format has one.
        dropped: the number of infinite or NaN amaxes, which were read as 0.
    """

    writer: str
    forward: Columns | None = None
    backward: Columns | None = None
    recipe_name: str | None = None
    dropped: int = 0

    @property
    def num_gemms(self) -> int:
        """The number of GEMMs: 1 for a linear layer, 2 for LayerNormMLP, 3 for attention; 0 without state."""
        return -(-len(self.forward.scale) // FORWARD_SLOTS) if self.forward else 0

    def tensor_state(self, role: Role, gemm: int = 0) -> TensorState:
        """The state of one tensor of GEMM ``gemm``. It raises a CheckpointError if the state has no column for it."""
        direction, index = column_of(role, gemm)
        te_columns = self.forward if direction == "fwd" else self.backward
        if te_columns is None or index >= len(te_columns.scale):
            raise CheckpointError(f"its FP8 state has no column for {role.value!r}")
        scale, amax_history = te_columns.scale[index].item(), te_columns.amax_history[:, index]
        return TensorState(0.0 if scale == 1.0 and not amax_history.any() else scale, amax_history)

    def tensor_states(self, slots: Mapping[str, tuple[Role, int]]) -> dict[str, TensorState]:
        """:meth:`tensor_state` by slot, given the role and the GEMM of each."""
        return {slot: self.tensor_state(role, gemm) for slot, (role, gemm) in slots.items()}


def te_states_in(state_dict: Mapping[Any, Any]) -> Iterator[tuple[str, TEState]]:
    """Transformer Engine's states by key; a damaged one raises an error with its key. Others' values are ignored."""
    for key, value in state_dict.items():
        if isinstance(key, str) and is_state(key):
            try:
                state = read_state_of(key, value)
            except ForeignState:
                continue
            yield key, state


def read_state_of(key: str, value: Any) -> TEState:
    """:func:`read_te_state`, whose error messages contain ``key``."""
    try:
        return read_te_state(value)
    except CheckpointError as error:
        raise type(error)(f"{key}: {error}") from None


def read_te_state(value: Any) -> TEState:
    """Parse the value of an ``_extra_state`` key. No code in it is executed.

    Args:
        value: ``None``, ``io.BytesIO``, uint8 tensor ``[n]``, bytes, dict or list.

    Raises:
        ForeignState: If the value is not a state of Transformer Engine.
        CheckpointError: If it is damaged, or names a class that is not allowed.
    """
    if value is None:
        return TEState("any version, without FP8")
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8 or value.dim() > 1:
            raise ForeignState(f"it is a {value.dtype} tensor of shape {tuple(value.shape)}, not bytes")
        require_stored("it", value)
        if not value.numel():
            return TEState("2.4 or later, without FP8")
        return _from_pickle(value.detach().cpu().numpy().tobytes())
    if isinstance(value, (bytes, bytearray)):
        return _from_pickle(bytes(value))
    if isinstance(value, io.BytesIO):
        state = read_archive(value.getvalue())
        return TEState("0.12 to 1.13, without FP8") if state is None else _from_dict(state, _version_1(state))
    if isinstance(value, list):
        if not all(isinstance(item, Tensor) for item in value[:2]):
            raise ForeignState("it is a list of other things than tensors")
        names = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
        return _from_dict(dict(zip(names, value)), "0.1 to 0.2")
    return _from_dict(value, "0.3 to 0.5")


def require_stored(key: str, value: Tensor) -> None:
    """Raise a CheckpointError unless a tensor stores each of its values: else a copy would take more memory."""
    if value.is_meta or value.layout != torch.strided:
        raise CheckpointError(f"{key} is a tensor on {value.device} of layout {value.layout}; it must hold values")
    stored = value.untyped_storage().nbytes() // value.element_size()
    if value.numel() > stored:
        raise CheckpointError(f"{key} has shape {tuple(value.shape)} and {stored} stored values")


def _from_pickle(data: bytes) -> TEState:
    state = read_pickle(data)
    if state is None:
        return TEState("0.6 to 0.11 or 2.0 to 2.3, without FP8")
    if isinstance(state, dict) and ("forward" in state or "backward" in state):
        directions = (state.get("forward"), state.get("backward"))
        items = [item for each in directions if isinstance(each, dict) for item in each.items()]
        return _from_dict(dict(items), "2.0 or later (te.ops)")
    return _from_dict(state, "2.0 or later" if isinstance(state, dict) and "recipe" in state else "0.6 to 0.11")


def _version_1(state: Any) -> str:
    of_state = state if isinstance(state, dict) else {}
    if "global_fp8_buffer" in of_state:
        return "0.12 to 1.5"
    extra = of_state.get("extra_fp8_variables")
    return "1.6 to 1.7" if isinstance(extra, dict) and "buffer_index_and_autocast_key" in extra else "1.6 to 1.13"


def _from_dict(state: Any, writer: str) -> TEState:
    if not isinstance(state, Mapping):
        raise ForeignState(f"it holds a {type(state).__name__}, not Transformer Engine's FP8 state")
    recipe = state.get("recipe")
    name = recipe.name.rpartition(".")[2] if isinstance(recipe, Standin) else None
    if "scale_fwd" not in state:
        if name is None:
            raise ForeignState("it holds neither 'scale_fwd' nor a recipe: this is not Transformer Engine's FP8 state")
        return TEState(writer, recipe_name=name)  # the recipe has no state
    forward, dropped_forward = _columns(state, "fwd")
    backward, dropped_backward = _columns(state, "bwd") if "scale_bwd" in state else (None, 0)
    return TEState(writer, forward, backward, name, dropped_forward + dropped_backward)


def _columns(state: Mapping[Any, Any], direction: str) -> tuple[Columns, int]:
    scale = _float32(state, f"scale_{direction}", 1)
    amax_history = _float32(state, f"amax_history_{direction}", 2)
    if amax_history.shape[1] != len(scale):
        shape = f"shape {tuple(amax_history.shape)} for {len(scale)} values of scale_{direction}"
        raise CheckpointError(f"amax_history_{direction} has {shape}")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CheckpointError(f"scale_{direction} holds zero, negative, infinite or NaN values")
    if bool((amax_history < 0).any()):
        raise CheckpointError(f"amax_history_{direction} holds negative values")
    usable = torch.isfinite(amax_history)  # an overflow in the saved run would keep the scale for a whole history
    return Columns(scale, torch.where(usable, amax_history, 0.0)), int((~usable).sum())


def _float32(state: Mapping[Any, Any], key: str, dim: int) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        raise CheckpointError(f"{key} is {getattr(value, 'dtype', type(value).__name__)}, not a float32 tensor")
    if value.dim() != dim:
        raise CheckpointError(f"{key} has shape {tuple(value.shape)}; it must have {dim} dimensions")
    require_stored(key, value)
    return value.detach().cpu().clone()
