"""How long layers cache the FP8 copies of their weights over micro-batches, in the Trainer and in Fabric."""

from __future__ import annotations

from collections.abc import Hashable

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fp8 import optimizer_steps
from lightning_fp8.arguments import is_dtensor, plain, require_bool
from lightning_fp8.notices import say_once


class KeptWeights:
    """Decides whether weights cache their FP8 copies between forwards, and until when.

    The plugin sets :attr:`period` in the context of every forward, as ``weight_period``. The copies of one period are
    used by all its forwards and backwards, unless the weight changes: by an optimizer's step, in place, or by an
    assignment of ``data`` (:mod:`lightning_fp8.modules.weight_cache`). Only an in-place change of ``weight.data``
    cannot be detected. Callbacks that evaluate averages of the weights may make one (:meth:`period_ends`), and the
    update of a frozen teacher after a step: a period ends there unless ``cache_fp8_weights`` is True.

    Args:
        cache_fp8_weights: True caches copies, also in Fabric and for sharded weights. False caches none. None caches
            them in a Trainer that accumulates gradients, unless weights are sharded (FSDP2), because every rank would
            keep whole copies. It caches none in Fabric, where the plugin cannot detect accumulation:
            ``no_backward_sync`` does nothing on a single device.

    Raises:
        TypeError: If ``cache_fp8_weights`` is neither a bool nor None.
    """

    def __init__(self, cache_fp8_weights: bool | None) -> None:
        self.chosen = plain(cache_fp8_weights)
        if self.chosen is not None:
            require_bool("cache_fp8_weights", self.chosen)
        self._accumulates = False
        self._said: dict[Hashable, str] = {}
        self._periods = 0

    @property
    def period(self) -> Hashable:
        """What tells the current period from others; None if no copies are cached."""
        by_step = (self._periods, optimizer_steps.number) if self.chosen is None and self._accumulates else None
        return self._periods if self.chosen else by_step

    def period_ends(self) -> None:
        """Called when callbacks may have swapped weights: where a Trainer's epoch or evaluation begins or ends.

        In Fabric the plugin does not know these events, and a period never ends.
        """
        self._periods += 1

    def micro_batch_begins(self, model: nn.Module, accumulate_grad_batches: int) -> None:
        """Called when a Trainer's micro-batch begins. ``accumulate_grad_batches`` may change between epochs."""
        self._accumulates = accumulate_grad_batches > 1 and not any(map(is_dtensor, model.parameters()))
        if self.chosen is None and self._accumulates:
            say_once(
                self._said,
                f"FP8 weights: cast once for the {accumulate_grad_batches} micro-batches of a step and kept, 2 bytes "
                "for each of their parameters; cache_fp8_weights=False casts them in every forward and backward pass "
                "instead",
                "kept",
                tell=rank_zero_info,
            )
