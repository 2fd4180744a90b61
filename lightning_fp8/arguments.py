"""Checks that public functions and layers share; each says what is wrong before anything runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

TRANSFORM_WAYS_OUT = (
    "take gradients with backward() or torch.autograd.grad, one at a time, give a batch as leading dimensions, or run "
    "this part in high precision: with fp8_autocast(enabled=False)"
)


def plain(value: Any) -> Any:
    """Python's bool, int or float for a scalar of numpy; anything else as it is."""
    generic = getattr(sys.modules.get("numpy"), "generic", ())
    return value.item() if isinstance(value, generic) else value


def dtype_named(value: Any) -> Any:
    """The dtype that ``"bfloat16"`` or ``"torch.bfloat16"`` names; anything else as it is."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


def require_bool(name: str, value: Any) -> None:
    """Text is true whatever it says, ``"false"`` too.

    Raises:
        TypeError: ``value`` is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, without quotes")


def require_bools_or_none(**flags: Any) -> None:
    """As :func:`require_bool`, of each flag by its name; None passes."""
    for name, value in flags.items():
        if value is not None:
            require_bool(name, value)


def require_number(name: str, value: Any, largest: float) -> None:
    """A number from 0 to ``largest``; NaN is none.

    Raises:
        TypeError: not a number.
        ValueError: another number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number of at least 0, for example 1e-5")
    if not 0 <= value <= largest:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0 and at most {largest:.3g}")


def require_positive(name: str, value: Any) -> None:
    """Raises:
    ValueError: ``value`` is no positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """Raises:
    ValueError: another value.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, known))}")
    return str(value)


def rows_by_name(parameters_split: Sequence[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """Rows of each part of ``parameters_split``, in order.

    Names lose the underscores at their ends, which ``_weight`` brings.

    Raises:
        TypeError: neither a sequence of names nor a mapping of names to rows.
        ValueError: parts that are empty, have one name, or do not add up to ``out_features``.
    """
    split: Any = parameters_split
    if isinstance(split, str) or not isinstance(split, (Sequence, Mapping)) or not all(map(_is_name, split)):
        raise TypeError(
            f"parameters_split={split!r} must be a sequence of names or a mapping of name to rows; names have no dots"
        )
    if not split:
        raise ValueError("parameters_split is empty; name at least one part, or pass None")
    names = [name.rstrip("_") for name in split]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameters_split names {twice} more than once; give each part a name of its own")
    if isinstance(split, Mapping):
        sizes = list(split.values())
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"parameters_split={dict(split)} must give each part a positive number of rows")
        if sum(sizes) != out_features:
            raise ValueError(f"parameters_split={dict(split)} must sum to out_features={out_features}")
        return dict(zip(names, sizes))
    if out_features % len(names):
        raise ValueError(f"out_features={out_features} does not divide into {len(names)} equal parts")
    return dict.fromkeys(names, out_features // len(names))


def require_module(function: str, model: Any) -> None:
    """Raises:
    TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, not {_what(model)}{_instead_of(model)}")


def require_mapping(function: str, state: Any) -> None:
    """Raises:
    TypeError: ``state`` is no mapping.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{function} takes a state dict, not {_what(state)}{_instead_of(state)}")
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"{function} takes a state dict, whose keys are names; this has the key {key!r}")


def one_dtype(
    params_dtype: torch.dtype | None, dtype: torch.dtype | None, allowed: Collection[torch.dtype]
) -> torch.dtype | None:
    """The one that is given of two names of the same argument; None if none is.

    Raises:
        TypeError: a dtype that is not ``allowed``.
        ValueError: both are given, and differ.
    """
    for name, value in (("params_dtype", params_dtype), ("dtype", dtype)):
        if value is not None and not (isinstance(value, torch.dtype) and value in allowed):
            raise TypeError(f"{name}={value!r} is not supported; use one of {', '.join(map(str, allowed))}")
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"params_dtype={params_dtype} and dtype={dtype} are the same argument; pass one of them")
    return dtype if params_dtype is None else params_dtype


def refuse_transforms(layer_name: str, *tensors: Tensor | None) -> None:
    """Refuse torch.func's transforms and forward-mode derivatives, which FP8 layers do not have, before anything runs.

    Args:
        layer_name: the layer's in the message.
        tensors: what it computes from.

    Raises:
        RuntimeError: a transform is active, or one of ``tensors`` carries a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{layer_name} does not run in FP8 under torch.func's transforms (vmap, grad, vjp, jvp, ...); "
            f"{TRANSFORM_WAYS_OUT}"
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise RuntimeError(f"{layer_name} has no forward-mode derivative in FP8; {TRANSFORM_WAYS_OUT}")


def refuse_sharded(layer_name: str, **tensors: Tensor | None) -> None:
    """Check that a layer computes with local tensors, as it does under FSDP2, which gathers its weights first.

    Raises:
        TypeError: one of ``tensors`` is a DTensor, as tensor parallelism makes them.
    """
    if torch.compiler.is_compiling():
        return
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, tensor in tensors.items():
        if isinstance(tensor, sharded):
            raise TypeError(
                f"{layer_name}'s {name} is a DTensor ({', '.join(map(str, tensor.placements))}), which it does not "
                "take in FP8. A Linear takes a DTensor as its weight, and Transformer Engine's arguments (tp_group) "
                "cut every layer. Or leave this layer in high precision, FP8Precision(skip=[...]) or "
                "convert_module(skip=[...]), or shard the model with fully_shard (FSDP2)"
            )


def _what(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _instead_of(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)):
        return f" {os.fspath(value)!r}; read the file first: torch.load(path)"
    if isinstance(value, type) and issubclass(value, nn.Module):
        return "; make one: " + value.__name__ + "(...)"
    return ""


def _has_tangent(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.strip("_") != "" and "." not in name
