"""Checks that public functions and layers share; each says what is wrong before anything runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

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


def require_bools(**flags: Any) -> None:
    """As :func:`require_bool`, of each flag by its name."""
    for name, value in flags.items():
        require_bool(name, value)


def require_bools_or_none(**flags: Any) -> None:
    """As :func:`require_bools`; None passes."""
    require_bools(**{name: value for name, value in flags.items() if value is not None})


def require_positive_or_none(**numbers: Any) -> None:
    """As :func:`require_positive`, of each number by its name; None passes."""
    for name, value in numbers.items():
        if value is not None:
            require_positive(name, value)


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


def require_init_method(name: str, value: Any) -> None:
    """Raises:
    TypeError: ``value`` is neither a function nor None.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name}={value!r} must be a function that fills a tensor in place, or None")


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


def refuse_what_is_not_here(asked: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raises:
    NotImplementedError: an argument asks for something; None, False and 1 do not. ``instead`` says the way out.
    """
    for name, value in asked.items():
        if not (value is None or value is False or (type(value) is int and value == 1)):
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}={shown} is not here: {instead[name]}")


_INSTEAD_IN_FORWARD = {
    "fp8_output": "the output is in high precision; the next layer casts it",
    "fp8_grad": "the gradient of the input is in high precision; leave it out",
    "weight": "Transformer Engine has removed it; a layer has its own weight",
    "bias": "Transformer Engine has removed it; a layer has its own bias",
}


def refuse_in_forward(**asked: Any) -> None:
    """Raises:
    NotImplementedError: an argument of Transformer Engine's forwards that asks for what is not here.
    """
    refuse_what_is_not_here(asked, _INSTEAD_IN_FORWARD)


class ParallelArguments(TypedDict, total=False):
    """Transformer Engine's arguments of tensor and sequence parallelism, and of what overlaps with it.

    A layer takes them at their defaults. ``get_rng_state_tracker`` gives the tracker whose state is forked, under
    ``rng_tracker_name``, while weights are initialized; ``ub_name`` and ``name`` are labels without effect.
    """

    sequence_parallel: bool
    tp_group: Any
    tp_size: int
    parallel_mode: str | None
    set_parallel_mode: bool
    get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None
    return_layernorm_output_gathered: bool
    ub_bulk_wgrad: bool
    ub_bulk_dgrad: bool
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_name: str | None
    delay_wgrad_compute: bool
    symmetric_ar_type: str | None
    save_original_input: bool
    name: str | None


NO_TENSOR_PARALLELISM = "layers are not tensor-parallel; leave it out, and shard the model with fully_shard (FSDP2)"
NO_CONTEXT_PARALLELISM = "context parallelism is not here; split the batch"
_NO_OVERLAP = "no communication to overlap with: layers are not tensor-parallel; leave it out"

_INSTEAD_OF_PARALLEL = {
    **dict.fromkeys(
        (
            "sequence_parallel",
            "tp_group",
            "tp_size",
            "parallel_mode",
            "set_parallel_mode",
            "symmetric_ar_type",
            "return_layernorm_output_gathered",
        ),
        NO_TENSOR_PARALLELISM,
    ),
    **dict.fromkeys([name for name in ParallelArguments.__annotations__ if name.startswith("ub_")], _NO_OVERLAP),
    "delay_wgrad_compute": "backward computes the weight's gradient at once; leave it out",
    "save_original_input": "backward keeps the FP8 copy; leave it out",
}
_REMOVED = {
    "skip_weight_param_allocation": "a layer has its own weight",
    "attention_softmax_in_fp32": "softmax is computed in float32",
    "apply_query_key_layer_scaling": "scores are scaled once, in float32",
}
_OF_NO_EFFECT = ("get_rng_state_tracker", "rng_tracker_name", "ub_name", "name")


def refuse_parallel(layer: str, arguments: ParallelArguments) -> None:
    """Check that the parallel arguments of the layer called ``layer`` ask for nothing that is not here.

    Raises:
        TypeError: an argument that Transformer Engine does not have, or has removed.
        NotImplementedError: tensor or sequence parallelism, or what comes with it, is asked for.
    """
    for name in [name for name in arguments if name in _REMOVED]:
        raise TypeError(f"{layer}: {name} was removed from Transformer Engine: {_REMOVED[name]}; leave it out")
    if unknown := [name for name in arguments if name not in ParallelArguments.__annotations__]:
        raise TypeError(f"{layer} got an unexpected keyword argument {unknown[0]!r}")
    asked = {name: value for name, value in arguments.items() if name not in _OF_NO_EFFECT}
    refuse_what_is_not_here(asked, _INSTEAD_OF_PARALLEL)


class SetsNoGroups:
    """The methods of Transformer Engine's modules that give them ranks to compute with, which is refused."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take None.

        Raises:
            NotImplementedError: any group.
        """
        refuse_what_is_not_here({"tp_group": tp_group}, _INSTEAD_OF_PARALLEL)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Take None.

        Raises:
            NotImplementedError: any group.
        """
        refuse_what_is_not_here({"cp_group": cp_group}, {"cp_group": NO_CONTEXT_PARALLELISM})


def initialization_rng(arguments: ParallelArguments) -> AbstractContextManager[Any]:
    """The context in which weights are initialized: Megatron's ``get_rng_state_tracker().fork()`` where it is given."""
    tracker, name = arguments.get("get_rng_state_tracker"), arguments.get("rng_tracker_name")
    if tracker is None:
        return nullcontext()
    fork: AbstractContextManager[Any] = tracker().fork() if name is None else tracker().fork(name)
    return fork


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


def refuse_transforms(layer: str, *tensors: Tensor | None) -> None:
    """Refuse torch.func's transforms and forward-mode derivatives, which FP8 layers do not have, before anything runs.

    Args:
        layer: the layer's name in the message.
        tensors: what it computes from.

    Raises:
        RuntimeError: a transform is active, or one of ``tensors`` carries a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{layer} does not run in FP8 under torch.func's transforms (vmap, grad, vjp, jvp, ...); "
            f"{TRANSFORM_WAYS_OUT}"
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise RuntimeError(f"{layer} has no forward-mode derivative in FP8; {TRANSFORM_WAYS_OUT}")


def refuse_sharded(layer: str, **tensors: Tensor | None) -> None:
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
                f"{layer}'s {name} is a DTensor ({', '.join(map(str, tensor.placements))}): tensor parallelism of FP8 "
                "layers is not supported. Leave this layer in high precision, FP8Precision(skip=[...]) or "
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
