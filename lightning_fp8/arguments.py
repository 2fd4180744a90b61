"""Argument checks shared by public functions and layers; they raise before anything runs."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from typing_extensions import TypeIs

TRANSFORM_WAYS_OUT = (
    "take gradients with backward() or torch.autograd.grad, one at a time, give a batch as leading dimensions, or run "
    "this part in high precision: with fp8_autocast(enabled=False)"
)


_P = ParamSpec("_P")
_R = TypeVar("_R")
_SKIPS = ("exclude", "ignore", "ignored_modules", "filter", "filter_fn", "module_filter_fn", "modules_to_not_convert")
"""What other packages call ``skip``."""


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's bool, int or float; any other value is returned unchanged."""
    generic = getattr(sys.modules.get("numpy"), "generic", ())
    return value.item() if isinstance(value, generic) else value


_SHORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dtype_named(value: Any) -> Any:
    """The dtype named by ``"bfloat16"``, ``"torch.bfloat16"`` or ``"bf16"``; any other value is returned unchanged."""
    if isinstance(value, str) and value in _SHORT_DTYPES:
        return _SHORT_DTYPES[value]
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


def require_bool(name: str, value: Any) -> None:
    """Check that ``value`` is True or False; a string such as ``"false"`` would count as true.

    Raises:
        TypeError: If ``value`` is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, without quotes")


def require_bools_or_none(**flags: Any) -> None:
    """:func:`require_bool` for each flag, by its name; None is allowed."""
    for name, value in flags.items():
        if value is not None:
            require_bool(name, value)


def require_number(name: str, value: Any, largest: float) -> None:
    """Check that ``value`` is a number between 0 and ``largest``, inclusive. NaN is not allowed.

    Raises:
        TypeError: If ``value`` is not an int or float.
        ValueError: If ``value`` is outside this range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number of at least 0, for example 1e-5")
    if not 0 <= value <= largest:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0 and at most {largest:.3g}")


def require_positive(name: str, value: Any) -> None:
    """Check that ``value`` is a positive integer.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """Return ``value`` if it is one of ``known``.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, known))}")
    return str(value)


def unknown_name(owner: str, kind: str, name: object, known: Collection[str]) -> str:
    """The error about a ``name`` that ``owner`` does not have, which lists the ``known`` ones and the nearest."""
    text = str(name)  # a mapping may have other keys
    if text in _SKIPS and "skip" in known:
        near = ["skip"]
    else:
        near = [each for each in known if text in each or each in text] or get_close_matches(text, known, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{owner} has no {kind} {name!r}; its {kind}s are {', '.join(map(repr, known))}{meant}"


def naming_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``function``, or the ``__init__`` of a class, list its arguments if it is called with others."""
    parameters = signature(function).parameters
    names = tuple(parameters)
    by_position = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    is_method = names[0] == "self"

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        owner = type(args[0]).__name__ if is_method else function.__name__
        for name in kwargs:
            if name not in names:
                raise TypeError(unknown_name(owner, "argument", name, names[is_method:]))
        if len(names) > len(by_position) < len(args):
            first, named = ", ".join(by_position[is_method:]), ", ".join(names[len(by_position) :])
            too_many = reprlib.repr(args[len(by_position)])
            raise TypeError(f"{owner}({first}) got {too_many} by position; pass by name: {named}")
        return function(*args, **kwargs)

    return checked


def rows_by_name(parameters_split: Sequence[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """Number of rows of each part of ``parameters_split``, in order.

    Trailing underscores are removed from the names; the weight of a part is named ``<name>_weight``.

    Raises:
        TypeError: If it is neither a sequence of names nor a mapping of names to rows.
        ValueError: If there are no parts, if names are duplicate, or if rows do not add up to ``out_features``.
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
        raise ValueError(f"parameters_split names {twice} more than once; give each part a different name")
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
    """Check that ``model`` is a module; ``function`` is named in the error.

    Raises:
        TypeError: If ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        instead = f" {model!r}; load the model first" if isinstance(model, str) else _instead_of(model)
        raise TypeError(f"{function} takes a torch.nn.Module, not {_what(model)}{instead}")


def require_mapping(function: str, state: Any) -> None:
    """Check that ``state`` is a mapping whose keys are strings; ``function`` is named in the error.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"{function} takes a state dict, not {_what(state)}{_instead_of(state)}")
    for key in state:
        if not isinstance(key, str):
            raise TypeError(f"{function} takes a state dict, whose keys are names; this has the key {key!r}")


def one_dtype(
    params_dtype: torch.dtype | None, dtype: torch.dtype | None, allowed: Collection[torch.dtype]
) -> torch.dtype | None:
    """The dtype of an argument that has two names; None if neither is passed.

    Raises:
        TypeError: If a dtype is not ``allowed``.
        ValueError: If both are passed, and differ.
    """
    for name, value in (("params_dtype", params_dtype), ("dtype", dtype)):
        if value is not None and not (isinstance(value, torch.dtype) and value in allowed):
            raise TypeError(f"{name}={value!r} is not supported; use one of {', '.join(map(str, allowed))}")
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"params_dtype={params_dtype} and dtype={dtype} are the same argument; pass one of them")
    return dtype if params_dtype is None else params_dtype


def refuse_transforms(layer_name: str, *tensors: Tensor | None) -> None:
    """Refuse torch.func transforms and forward-mode derivatives, which FP8 layers do not support.

    Args:
        layer_name: named in the error.
        tensors: the layer's inputs and parameters.

    Raises:
        RuntimeError: If a transform is active, or one of ``tensors`` carries a tangent.
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


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Whether ``tensor`` is divided over ranks."""
    return isinstance(tensor, DTensor)


def refuse_sharded(layer_name: str, **tensors: Tensor | None) -> None:
    """Check that a layer computes with local tensors. Under FSDP2 it does, since weights are gathered before a forward.

    Raises:
        TypeError: If one of ``tensors`` is a DTensor, as under tensor parallelism.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(
                f"{layer_name}'s {name} is a DTensor ({', '.join(map(str, tensor.placements))}), which is not "
                "supported in FP8. A Linear takes a DTensor as its weight, and Transformer Engine's arguments "
                "(tp_group) shard every layer. Or leave this layer in high precision, FP8Precision(skip=[...]) or "
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
