"""The cache of a linear layer's FP8 weight: micro-batches of one step share what the first one cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fp8.delayed.steps import generation
from lightning_fp8.functions.linear import Slots, quantize_role
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.ops import Quantized
from lightning_fp8.recipes import Recipe
from lightning_fp8.scaled import Role


class WeightCachingModule(FP8Module):
    """A module that keeps the FP8 copies of its weight while ``is_first_microbatch`` says so; a pickle has none.

    The copies are stale, and made again, once an optimizer has stepped or a parameter was replaced or changed in place.

    Attributes:
        weight_names: the names of the parameters that hold the weight's rows; of several weights, of all of them.
    """

    weight_names: tuple[str, ...] = ("weight",)
    _weight_cache: dict[tuple[str, ...], tuple[Any, Quantized]] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._weight_cache = None
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._weight_cache = None

    def _cached_weight(
        self,
        weight: Tensor,
        names: tuple[str, ...],
        recipe: Recipe,
        slots: Slots,
        observe: bool,
        is_first_microbatch: bool | None,
    ) -> Quantized | None:
        """The operands of ``weight [N, K]`` and of its transpose; None where no micro-batches are told apart.

        ``names``: of the parameters that hold its rows.
        """
        if is_first_microbatch is None:
            return None
        parameters = [getattr(self, name) for name in names]
        # Optimizers on DTensors and FSDP2's gathering move no version; what moves one made the copy stale all the same.
        key = (recipe, generation(), *((id(p), p._version, p.untyped_storage()._cdata) for p in parameters))
        cache = self._weight_cache or {}
        if is_first_microbatch or names not in cache or cache[names][0] != key:
            w8 = quantize_role(weight.detach(), Role.WEIGHT, recipe, slots, observe=observe, columnwise=True)
            self._weight_cache = cache = {**cache, names: (key, w8)}
        return cache[names][1]
