"""The cache of a linear layer's FP8 weight: micro-batches of one step share what the first one cast.

Whether a plugin lets layers keep copies unasked, and until when, is its choice of ``FP8Context.weight_period``:
``plugin/kept_weights.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_fp8 import ops
from lightning_fp8.delayed.update import optimizer_step_number
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.fp8_tensor import FP8Tensor, is_cast_for, quantized_tensor
from lightning_fp8.functions.linear import Product
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.ops import Quantized
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import Role


@dataclass
class _KeptWeight:
    """The FP8 copies of a weight.

    Attributes:
        made_from: the weight's parameters and all else that they were made from.
        automatic: no ``is_first_microbatch`` asked for them, but the context's ``weight_period``.
        observed: the weight's slot of the amax history has its amax.
        sources: the parameters that they were made from, and their storages, whose addresses nothing else gets
            meanwhile.
    """

    made_from: tuple[Any, ...]
    copies: Quantized
    automatic: bool
    observed: bool
    sources: tuple[tuple[weakref.ref[Tensor], StorageWeakRef], ...]

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it was made from, and not others in the place of such as are gone."""
        return all(source() is parameter for (source, _), parameter in zip(self.sources, parameters))


class WeightCachingModule(FP8Module):
    """A module that keeps the FP8 copies of its weight where ``is_first_microbatch`` or the context says so.

    | a forward with ``is_first_microbatch`` | |
    |---|---|
    | True | makes the copies, and keeps them |
    | False | takes what is kept, unless it is stale; else makes and keeps them |
    | None, in a context with a ``weight_period`` | the same, with copies that were made so |
    | None, in any other | keeps nothing, and lets go of copies that were made in such a context |

    Copies are stale once an optimizer has stepped, or a parameter was replaced or changed in place, or the recipe or
    the CUDA stream is another. While a CUDA graph is captured only ``is_first_microbatch`` keeps copies. Those that
    ``is_first_microbatch`` did not ask for serve no forward that does, nor the other way round, and are stale, too,
    once the ``weight_period`` is another number, the scales were updated, or training, gradients or inference mode were
    switched on or off. What a backward pass recomputes has the context of the layer's last forward, which is another
    than its own where the layer ran in another context in between. A pickle has no copies; code that is compiled keeps
    none.

    Attributes:
        weight_names: the names of the parameters that hold the weight's rows; of several weights, of all of them.
    """

    weight_names: tuple[str, ...] = ("weight",)
    _weight_cache: dict[tuple[str, ...], _KeptWeight] | None = None  # by the names of a weight's parameters

    def forget_weight(self) -> None:
        """Let go of the copies."""
        self._weight_cache = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._weight_cache = None  # first: a parameter that is referred to weakly cannot be swapped
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        in_fp8 = [(name, weight) for name in self.weight_names if isinstance(weight := self._held(name), FP8Tensor)]
        preserved = {name: weight.high_precision_init_val for name, weight in in_fp8}
        super()._load_from_state_dict(*args)
        self._weight_cache = None
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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Weights in FP8 as plain tensors of their values."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        for name in self.weight_names:
            if not keep_vars and isinstance(weight := destination.get(prefix + name), FP8Tensor):
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
        """The operands of ``weight [N, K]`` and of its transpose; None where nothing is to be kept.

        Args:
            product: casts it.
            parameter_names: of the parameters that hold its rows.
            context: says whether to keep them where ``is_first_microbatch`` does not.
        """
        if torch.compiler.is_compiling():
            return None  # before anything is read that the compiled code would be guarded by
        if isinstance(weight, FP8Tensor) and (weight.is_gathered or is_cast_for(weight, product.cast(Role.WEIGHT))):
            return None  # cast already
        automatic = is_first_microbatch is None
        cache = self._weight_cache or {}
        kept = cache.get(parameter_names)
        if automatic and context.weight_period is None:
            if kept is not None and kept.automatic:
                self._weight_cache = None
            return None
        computed = self._modules.get("parametrizations")
        if computed is not None and any(name in computed for name in parameter_names):  # type: ignore[operator]
            return None  # a weight that is computed anew has nothing to keep
        parameters = [getattr(self, name) for name in parameter_names]
        if any(parameter.is_inference() for parameter in parameters):
            return None  # changes of such leave no trace
        stream = None
        if weight.is_cuda:
            if automatic and torch._C._cuda_isCurrentStreamCapturing():
                return None  # a replay would read the copies of another step
            stream = torch._C._cuda_getCurrentRawStream(weight.device.index)
        # Where optimizers step DTensors and FSDP2 gathers, no version advances, but the number of steps does.
        versions = [(id(p), p._version, p.untyped_storage()._cdata) for p in parameters]
        made_from: tuple[Any, ...] = (product.recipe, optimizer_step_number(), stream, *versions)
        # Who never takes gradients of it needs no copy of its transpose.
        columnwise = not automatic or self.training or torch.is_grad_enabled()
        if automatic:
            updates = product.slots[Role.WEIGHT].history.updates
            made_from = (*made_from, context.weight_period, updates, torch.is_inference_mode_enabled(), columnwise)
        if is_first_microbatch or kept is None or kept.made_from != made_from or not kept.is_of(parameters):
            others = {cached: copies for cached, copies in cache.items() if cached != parameter_names}
            self._weight_cache = kept = None  # its memory serves the new copies
            w8 = product.quantize(weight.detach(), Role.WEIGHT, columnwise=columnwise)
            kept = _KeptWeight(made_from, w8, automatic, product.observe, _sources(parameters))
            self._weight_cache = {**others, parameter_names: kept}
        elif product.observe and not kept.observed:
            if isinstance(product.recipe, DelayedScaling):
                ops.observe(weight.detach(), product.slots[Role.WEIGHT].amax)
            kept.observed = True
        return kept.copies


def _sources(parameters: Sequence[Tensor]) -> tuple[tuple[weakref.ref[Tensor], StorageWeakRef], ...]:
    return tuple((weakref.ref(parameter), StorageWeakRef(parameter.untyped_storage())) for parameter in parameters)
