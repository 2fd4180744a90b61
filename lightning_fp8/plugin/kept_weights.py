"""When layers keep the FP8 copies of their weights: from one micro-batch to the next."""

from __future__ import annotations

import sys

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fp8.arguments import plain, require_bool
from lightning_fp8.modules.weight_cache import WeightCachingModule


class KeptWeights:
    """Whether weights keep their FP8 copies between forwards, and since when.

    Args:
        cache_fp8_weights: whether they do; None leaves it to :meth:`accumulate`.

    Raises:
        TypeError: ``cache_fp8_weights`` is neither a bool nor None.
    """

    def __init__(self, cache_fp8_weights: bool | None) -> None:
        self.chosen = plain(cache_fp8_weights)
        if self.chosen is not None:
            require_bool("cache_fp8_weights", self.chosen)
        self._accumulates = False
        self._told = False
        self._periods = 0

    @property
    def period(self) -> int | None:
        """A number that is another one after each :meth:`renew`; None while no copies are kept."""
        return self._periods if self.chosen or (self.chosen is None and self._accumulates) else None

    def renew(self) -> None:
        """Keep no copies of before: something else than an optimizer may have changed weights without a trace."""
        self._periods += 1

    def accumulate(self, model: nn.Module, micro_batches: int) -> None:
        """Note that a step of ``model`` has so many micro-batches: with several, weights that lie whole are kept."""
        self._accumulates = micro_batches > 1 and not _is_sharded(model)
        if self.chosen is None and self._accumulates and not self._told:
            self._told = True
            rank_zero_info(
                f"FP8 weights: cast once for the {micro_batches} micro-batches of a step and kept, 2 bytes for each of "
                "their parameters; cache_fp8_weights=False casts them in every forward and backward pass instead"
            )

    def release(self, model: nn.Module) -> None:
        """Free the copies of ``model``: training is over."""
        for module in model.modules():
            if isinstance(module, WeightCachingModule):
                module.forget_weight()


def _is_sharded(model: nn.Module) -> bool:
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(parameter, sharded) for parameter in model.parameters())
