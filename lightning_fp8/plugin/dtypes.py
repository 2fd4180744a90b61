"""The dtypes of parameters and activations: of a model, supported pairs, casts of a model and of a batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_fp8 import ops
from lightning_fp8.arguments import dtype_named
from lightning_fp8.convert.codes import codes_of
from lightning_fp8.numerics.formats import holds_codes


class Dtypes(NamedTuple):
    """The dtypes in which a model trains."""

    weights: torch.dtype  # of most of their elements; inputs and new tensors have it, too
    compute: torch.dtype  # of what does not run in FP8
    autocast: bool

    @property
    def precision(self) -> str:
        """Lightning's name for the precision of the rest of the model, which its summaries and monitors accept."""
        return f"{table_name(self.compute).lower().removeprefix('fp')}-{'mixed' if self.autocast else 'true'}"

    @contextmanager
    def context(self) -> Iterator[None]:
        """New floating-point tensors are ``weights``, and ``torch.autocast`` is on if a model needs it."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.weights)
            for device_type in ["cpu", *["cuda"] * torch.cuda.is_available()] if self.autocast else ():
                # a cache would keep weights of before an optimizer's step in the same training_step
                stack.enter_context(torch.autocast(device_type, dtype=self.compute, cache_enabled=False))
            yield


def requested_dtypes(
    weights_dtype: torch.dtype | str | None, compute_dtype: torch.dtype | str | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of parameters and of activations, from dtypes or names; the latter is by default the former.

    Raises:
        ValueError: If a dtype is not supported, or if the two are not supported together.
    """
    weights, compute = (None if each is None else dtype_named(each) for each in (weights_dtype, compute_dtype))
    for name, dtype in (("weights_dtype", weights), ("compute_dtype", compute)):
        if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in ops.HIGH_PRECISION):
            raise ValueError(f"{name}={dtype!r} is not supported; use one of {', '.join(map(str, ops.HIGH_PRECISION))}")
    if weights not in (None, torch.float32, compute or weights):
        raise ValueError(
            f"compute_dtype={compute} with weights in {weights}: only float32 weights can compute "
            "in another dtype; pass weights_dtype=torch.float32 or leave compute_dtype out"
        )
    if torch.float16 in (weights, compute):
        name = "weights_dtype" if weights == torch.float16 else "compute_dtype"
        rank_zero_warn(
            f"{name}=torch.float16 runs without a loss scaler: small gradients become 0; compute in bfloat16, or "
            "scale the loss yourself"
        )
    return weights, compute or weights


def dtypes_of(model: nn.Module, compute_dtype: torch.dtype | None) -> tuple[Dtypes, str]:
    """The dtypes for the weights that ``model`` has, and a line that says so.

    What the model itself keeps in float32, see :func:`cast_module`, does not count.

    Raises:
        ValueError: If BF16 or float16 weights would compute in another ``compute_dtype``.
    """
    kept, sizes = _kept(model, torch.bfloat16), Counter[torch.dtype]()
    for each in model.parameters():
        if each.dtype in ops.HIGH_PRECISION and id(each) not in kept:
            sizes[each.dtype] += 0 if is_lazy(each) else each.numel()
    found = [dtype for dtype, _ in sizes.most_common()] or [torch.float32]
    half = [dtype for dtype in found if dtype != torch.float32]
    for dtype in half:
        requested_dtypes(dtype, compute_dtype)
    compute = compute_dtype or (half or [torch.bfloat16])[0]
    dtypes = Dtypes(found[0], compute, autocast=found != [compute])
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
    return dtypes, (
        f"Weights stay {names}, and what does not run in FP8 computes in {table_name(compute)}"
        f"{' under torch.autocast' * dtypes.autocast} ({dtypes.precision}); weights_dtype= would cast them\n"
    )


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


@contextmanager
def naming_kept_buffers(models: Mapping[nn.Module, Dtypes]) -> Iterator[None]:
    """In forwards, add to errors about dtypes which buffers have another dtype than the weights.

    Raises:
        RuntimeError, TypeError: The same error, with what to do about these buffers.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        kept = [
            f"{name}.{buffer}".lstrip(".")
            for model, dtypes in models.items()
            for name, module in model.named_modules()
            for buffer in sorted(module._non_persistent_buffers_set)
            if (values := module._buffers.get(buffer)) is not None and _is_to_cast(values, dtypes.weights, {})
        ]
        if (
            not kept
            or type(error) not in (RuntimeError, TypeError)
            or not re.search(r"dtype|torch\.float32", str(error))
        ):
            raise
        raise type(error)(
            f"{error}. Buffers that are not saved keep their dtypes: {', '.join(kept[:3])}{', ...' * (len(kept) > 3)}. "
            "Cast their values where they meet activations, buffer.to(x.dtype); or use float32 weights, "
            "weights_dtype='fp32', compute_dtype='bf16', with which torch.autocast does it"
        ) from error


def cast_floating_point(data: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in ``dtype``, except those of one byte."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and not holds_codes(tensor) else tensor

    return apply_to_collection(data, function=cast, dtype=Tensor)
