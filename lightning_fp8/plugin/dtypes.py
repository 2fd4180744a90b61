"""The dtypes of parameters and activations: supported pairs, Lightning's names, casts of a model and of a batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.arguments import dtype_named
from lightning_fp8.convert.conversion import codes_of
from lightning_fp8.formats import holds_codes


def weights_and_compute_dtypes(
    weights_dtype: torch.dtype | str, compute_dtype: torch.dtype | str | None
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of parameters and of activations, from dtypes or names; equal without ``compute_dtype``.

    Raises:
        ValueError: If a dtype is not supported, or if the two are not supported together.
    """
    weights: torch.dtype = dtype_named(weights_dtype)
    compute: torch.dtype = weights if compute_dtype is None else dtype_named(compute_dtype)
    for name, dtype in (("weights_dtype", weights), ("compute_dtype", compute)):
        if not isinstance(dtype, torch.dtype) or dtype not in ops.HIGH_PRECISION:
            raise ValueError(f"{name}={dtype!r} is not supported; use one of {', '.join(map(str, ops.HIGH_PRECISION))}")
    if weights != torch.float32 and compute != weights:
        raise ValueError(
            f"compute_dtype={compute} with weights_dtype={weights}: only float32 weights can compute "
            "in another dtype; pass weights_dtype=torch.float32 or leave compute_dtype out"
        )
    if compute == torch.float16:
        name = "weights_dtype" if weights == compute else "compute_dtype"
        rank_zero_warn(
            f"{name}=torch.float16 runs without a loss scaler: small gradients become 0; compute in bfloat16, or "
            "scale the loss yourself"
        )
    return weights, compute


def precision_name(weights_dtype: torch.dtype, compute_dtype: torch.dtype) -> str:
    """Lightning's name for the precision of the rest of the model, which its summaries and monitors accept."""
    short = {torch.bfloat16: "bf16", torch.float16: "16", torch.float32: "32"}
    return f"{short[compute_dtype]}-{'true' if weights_dtype == compute_dtype else 'mixed'}"


def table_name(compute_dtype: torch.dtype) -> str:
    """The name of a dtype in the table of layers: ``"BF16"``, ``"FP16"`` or ``"FP32"``."""
    return {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}[compute_dtype]


def cast_module(module: nn.Module, dtype: torch.dtype) -> tuple[Counter[torch.dtype], int]:
    """Cast parameters and persistent buffers in place.

    Returns:
        The numbers of parameters that were cast, by their dtypes, and that of float32 tensors that were not.

    These keep their dtypes: non-persistent buffers; complex and one-byte tensors; modules with float8 weights; and, if
    ``dtype`` is not float32, what a model of transformers lists in ``_keep_in_fp32_modules`` and
    ``_keep_in_fp32_modules_strict``.
    """
    kept = _kept(module, dtype)
    parameters = [each for each in module.parameters() if _is_to_cast(each, dtype, kept)]
    if not parameters and not any(_is_to_cast(each, dtype, kept) for each in module.buffers()):
        return Counter(), 0
    num_cast = Counter(each.dtype for each in parameters)
    num_kept = sum(each.dtype == torch.float32 for each in kept.values())
    kept |= {id(each.grad): each.grad for each in kept.values() if each.is_leaf and each.grad is not None}
    owners = [
        (vars(each), each._apply, vars(each).get("_apply"))
        for each in module.modules()
        if any(id(tensor) in kept for tensor in (*each._parameters.values(), *each._buffers.values()))
    ]
    for attributes, apply, _ in owners:
        attributes["_apply"] = _for_others(kept, apply)
    try:
        module.to(dtype=dtype)  # some classes note their dtype there
    finally:
        for attributes, _, own in owners:
            del attributes["_apply"]
            attributes |= {} if own is None else {"_apply": own}
    return num_cast, num_kept


def _is_to_cast(tensor: Tensor, dtype: torch.dtype, kept: Mapping[int, Tensor]) -> bool:
    return tensor.is_floating_point() and tensor.dtype != dtype and id(tensor) not in kept


def _for_others(kept: Mapping[int, Tensor], apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``apply``, a ``Module._apply``, for all tensors but ``kept``."""
    return lambda function, *args, **kwargs: apply(
        lambda tensor: tensor if id(tensor) in kept else function(tensor), *args, **kwargs
    )


def _kept(model: nn.Module, dtype: torch.dtype) -> dict[int, Tensor]:
    """The tensors of ``model`` that are not cast to ``dtype``, by ``id``."""
    kept: list[Tensor | None] = []
    for module in model.modules():
        kept += [module._buffers.get(name) for name in module._non_persistent_buffers_set]
        own = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        whole = bool(codes_of(module))  # with its scales
        kept += [each for each in own if whole or each.is_complex() or holds_codes(each)]
        lists = (getattr(module, f"_keep_in_fp32_modules{strict}", None) or () for strict in ("", "_strict"))
        globs = [f"(?:{glob.replace('*', '.*')})" for each in lists for glob in each]
        if globs and dtype != torch.float32:
            listed = re.compile("|".join(globs))  # searched for in keys, as in transformers.core_model_loading
            named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
            kept += [each for name, each in named if each.dtype.itemsize >= 4 and listed.search(name)]
    return {id(each): each for each in kept if each is not None}


_OF_DTYPES = re.compile(r"dtype|torch\.float32")


@contextmanager
def naming_kept_buffers(models: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """In forwards with weights in ``dtype``, add to errors about dtypes which buffers have another dtype.

    Raises:
        RuntimeError, TypeError: The same error, with what to do about these buffers.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        kept = [
            f"{name}.{buffer}".lstrip(".")
            for model in models
            for name, module in model.named_modules()
            for buffer in sorted(module._non_persistent_buffers_set)
            if (values := module._buffers.get(buffer)) is not None and _is_to_cast(values, dtype, {})
        ]
        if not kept or type(error) not in (RuntimeError, TypeError) or not _OF_DTYPES.search(str(error)):
            raise
        more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
        raise type(error)(
            f"{error}. Buffers that are not saved are not cast to weights_dtype={dtype}: {', '.join(kept[:3])}{more}. "
            "Cast their values where they meet activations, buffer.to(x.dtype); or keep float32 weights, "
            "weights_dtype='fp32', compute_dtype='bf16', with which torch.autocast does it"
        ) from error


def cast_floating_point(data: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in ``dtype``, except those of one byte."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and not holds_codes(tensor) else tensor

    return apply_to_collection(data, function=cast, dtype=Tensor)
