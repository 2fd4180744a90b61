"""The cache of a linear layer's FP8 weight, which the micro-batches of a step share.

A plugin enables it for layers that are called without ``is_first_microbatch`` by ``FP8Context.weight_period``, see
``plugin/kept_weights.py``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_fp8 import ops, optimizer_steps
from lightning_fp8.arguments import is_dtensor
from lightning_fp8.capture import is_capturing
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.product import Product, without_gradient
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import Quantized
from lightning_fp8.weights.coded import codes_in, replace_codes, save_codes
from lightning_fp8.weights.fp8_tensor import FP8Tensor, is_cast_for, quantized_tensor


@dataclass
class _KeptWeight:
    """The cached FP8 copies of a weight.

    Attributes:
        made_from: the cache's key: recipe, stream, step and the versions of the weight's parameters.
        automatic: True if the copies were cached because of ``weight_period``, not of ``is_first_microbatch``.
        observed: True if the amax of the weight was written to its slot.
        sources: weak references to the parameters and to their storages. The latter keep addresses from being reused.
    """

    made_from: tuple[Any, ...]
    copies: Quantized
    automatic: bool
    observed: bool
    sources: tuple[tuple[weakref.ref[Tensor], StorageWeakRef], ...]

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters that the copies were made from, and not new ones at their addresses."""
        return all(source() is parameter for (source, _), parameter in zip(self.sources, parameters))


class WeightCachingModule(FP8Module):
    """A module that caches the FP8 copies of its weight.

    | ``is_first_microbatch`` of a forward | |
    |---|---|
    | True | casts the weight and caches the copies |
    | False | uses the cached copies; if they are stale or missing, casts the weight and caches the copies |
    | None, in a context with a ``weight_period`` | the same, with copies that were cached automatically |
    | None, in any other context | caches nothing, and drops copies that were cached automatically |

    Copies are stale after an optimizer's step, after a parameter was replaced or changed in place, and with another
    recipe or CUDA stream. Those of a frozen weight outlive steps, unless its scale is delayed; changes of its ``data``
    in place, or of FSDP2's shards of it, cannot be detected. Automatic copies are also stale with another
    ``weight_period``, after an update of the scales, and after training mode, gradients or inference mode were
    switched. Copies that were cached automatically are not used with ``is_first_microbatch``, and vice versa. Nothing
    is cached while a CUDA graph is captured, or after the capture of an optimizer step.

    Recomputation in a backward pass uses the context of the layer's last forward. This is the wrong context if the
    layer has run in another one since. Copies are not pickled, and compiled code does not cache.

    Attributes:
        weight_names: the names of the parameters that hold the rows of the weight, or of all weights.
        weight_scale_inv, weight_scale: None; torch.distributed.checkpoint looks all keys of a ``state_dict`` up.
    """

    weight_scale_inv: ClassVar[None] = None
    weight_scale: ClassVar[None] = None

    weight_names: tuple[str, ...] = ("weight",)
    _weight_cache: dict[tuple[str, ...], _KeptWeight] | None = None  # keys: the names of a weight's parameters

    def forget_weight(self) -> None:
        """Drop the cached copies."""
        self._weight_cache = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._weight_cache = None  # before super(): a parameter with weak references cannot be swapped
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        in_fp8 = [(name, weight) for name in self.weight_names if isinstance(weight := self._held(name), FP8Tensor)]
        preserved = {name: weight.high_precision_init_val for name, weight in in_fp8}
        for name in self.weight_names:
            if codes_in(held := self._held(name)) is not None:
                state_dict, error = replace_codes(held, args[0], args[1], name)
                args = (state_dict, *args[1:])
                args[-1].extend([error] if error else [])
        before = self._values_if_watched()
        self._weight_cache = None  # before super(), as in _apply
        super()._load_from_state_dict(*args)
        for name, weight in in_fp8:
            loaded = self._held(name)
            if loaded is not None and not isinstance(loaded, FP8Tensor):  # assign=True
                weight = quantized_tensor(loaded.detach(), weight.cast)
                self._parameters[name] = nn.Parameter(weight, requires_grad=loaded.requires_grad)
            value = args[0].get(args[1] + name)
            if preserved.get(name) is not None and isinstance(value, Tensor) and value.shape == weight.shape:
                held = self._held(name)
                assert isinstance(held, FP8Tensor)
                held.high_precision_init_val = value.detach().to("cpu", held.dtype, copy=True)
        if self.history is not None:
            given = {name: args[0].get(args[1] + name) for name in before}
            self.history.watch.weights_loaded |= any(
                _is_in_place(given[name], self._held(name)) or _differ(values, self._held(name))
                for name, values in before.items()
            )

    def _values_if_watched(self) -> dict[str, Tensor]:
        """Copies of this rank's values of the parameters, if the history has scales that may be those of other ones."""
        if self.history is None or self.history.watch.weights_loaded or not bool(self.history.scale.any()):
            return {}
        return {name: _local(own).clone() for name, own in self._parameters.items() if own is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save FP8 weights as plain tensors: dequantized, or as the codes and scales of a checkpoint."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        for name in self.weight_names:
            weight = destination.get(prefix + name)
            if codes_in(weight) is not None:
                save_codes(weight, destination, prefix, name)
            elif not keep_vars and isinstance(weight, FP8Tensor):
                destination[prefix + name] = weight.dequantize()

    def _held(self, name: str) -> Tensor | None:
        return self._parameters.get(name)

    def _cached_weight(
        self,
        weight: Tensor,
        parameter_names: tuple[str, ...],
        product: Product,
        is_first_microbatch: bool | None,
        context: FP8Context,
    ) -> Quantized | None:
        """The cached FP8 copies of ``weight [N, K]`` and of its transpose; None if this forward does not cache.

        Args:
            product: the product that casts the weight.
            parameter_names: the names of the parameters that hold its rows.
            context: decides whether to cache if ``is_first_microbatch`` is None.
        """
        if is_dtensor(weight):
            return None
        if isinstance(weight, FP8Tensor) and (weight.is_gathered or is_cast_for(weight, product.cast(Role.WEIGHT))):
            return None  # already in FP8
        if is_capturing() or optimizer_steps.are_captured:
            self._weight_cache = None
            text = "FP8 weights are not cached in a CUDA graph, nor after it captured an optimizer step, whose replays"
            warnings.warn(f"{text} change them without a trace", stacklevel=2)
            return None
        automatic = is_first_microbatch is None
        cache = self._weight_cache or {}
        kept = cache.get(parameter_names)
        if automatic and context.weight_period is None:
            if kept is not None and kept.automatic:
                self._weight_cache = None
            return None
        parameters: list[Any] = [self._parameters.get(name) for name in parameter_names]  # a read may compute it
        if not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
            return None  # made in each forward, by a parametrization, or by transformers' expert parallelism
        if any(parameter.is_inference() for parameter in parameters):
            return None  # inference tensors have no version counter
        stream = torch._C._cuda_getCurrentRawStream(weight.device.index) if weight.is_cuda else None
        changes = isinstance(product.recipe, DelayedScaling) or any(p.requires_grad for p in parameters)
        is_constant = not (changes or product.is_sampled(Role.WEIGHT))
        # The versions of gathered weights do not advance when an optimizer steps FSDP2's DTensors: count steps, too.
        number, updates = optimizer_steps.number, product.slots[Role.WEIGHT].history.updates
        number, updates = (0, 0) if is_constant else (number, updates)
        versions = [(id(p), p._version, p.untyped_storage()._cdata) for p in parameters]
        made_from: tuple[Any, ...] = (product.recipe, number, stream, *versions)
        # Without gradients the copy of the transpose is not needed.
        columnwise = not automatic or self.training or torch.is_grad_enabled()
        if automatic:
            made_from = (*made_from, context.weight_period, updates, torch.is_inference_mode_enabled(), columnwise)
        if is_first_microbatch or kept is None or kept.made_from != made_from or not kept.is_of(parameters):
            others = {cached: copies for cached, copies in cache.items() if cached != parameter_names}
            self._weight_cache = kept = None  # frees its memory for the new copies
            w8 = product.quantize(without_gradient(weight), Role.WEIGHT, columnwise=columnwise)
            kept = _KeptWeight(made_from, w8, automatic, product.observe, _sources(parameters))
            self._weight_cache = {**others, parameter_names: kept}
        elif product.observe and not kept.observed:
            if isinstance(product.recipe, DelayedScaling):
                ops.observe(weight.detach(), product.slots[Role.WEIGHT].amax)
            kept.observed = True
        return kept.copies


def _local(values: Tensor) -> Tensor:
    """This rank's part of ``values``."""
    sharded: Any = values
    return sharded.detach().to_local() if is_dtensor(values) else values.detach()  # type: ignore[no-any-return]


def _differ(before: Tensor, held: Tensor | None) -> bool:
    """Whether ``held`` has other values than ``before``, in the dtype of ``before``."""
    if held is None or before.shape != (after := _local(held)).shape:
        return False
    return before.is_meta != after.is_meta or not (before.is_meta or torch.equal(after.to(before), before))


def _is_in_place(given: Any, held: Tensor | None) -> bool:
    """Whether a sharded state dict has the memory of ``held``, which distributed checkpoints are read into."""
    if not isinstance(given, Tensor) or held is None or not (is_dtensor(given) and is_dtensor(held)):
        return False
    return _local(given).data_ptr() == _local(held).data_ptr()


def _sources(parameters: Sequence[Tensor]) -> tuple[tuple[weakref.ref[Tensor], StorageWeakRef], ...]:
    return tuple((weakref.ref(parameter), StorageWeakRef(parameter.untyped_storage())) for parameter in parameters)
