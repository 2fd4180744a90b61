"""The decision how long layers keep the FP8 copies of their weights over micro-batches, for the Trainer and Fabric."""

from __future__ import annotations

import sys

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fp8.arguments import plain, require_bool
from lightning_fp8.modules.weight_cache import WeightCachingModule


class KeptWeights:
    """Decides whether weights keep their FP8 copies between forwards, and until when.

    The plugin puts :attr:`period` into the context of every forward, as ``weight_period``. Copies of one period serve
    all its forwards and backwards, and what happens to the weight ends them before: an optimizer's step, a change in
    place, other data (:mod:`lightning_fp8.modules.weight_cache`). Only a change of ``weight.data`` in place leaves no
    trace, and whoever evaluates averages of the weights may make one. Hence a Trainer's period ends where an epoch of
    training begins, where an evaluation begins, and where a validation ends. In Fabric, whose loop is the user's,
    nobody says where that is: there one period lasts for good.

    Args:
        cache_fp8_weights: True keeps copies, also in Fabric and of sharded weights; False keeps none; None keeps them
            in a Trainer that accumulates gradients, unless weights are sharded (FSDP2): every rank would keep whole
            ones. It keeps none in Fabric, where nobody says whether a loop accumulates: ``no_backward_sync`` does
            nothing on a single device.

    Raises:
        TypeError: If ``cache_fp8_weights`` is neither a bool nor None.
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
        """The number of the current period; None while no copies are kept."""
        return self._periods if self.chosen or (self.chosen is None and self._accumulates) else None

    def epoch_begins(self) -> None:
        """A Trainer's epoch of training begins: after what callbacks did at the end of the one before."""
        self._periods += 1

    def micro_batch_begins(self, model: nn.Module, accumulate_grad_batches: int) -> None:
        """A micro-batch of a Trainer begins; a schedule may change ``accumulate_grad_batches`` between epochs."""
        self._accumulates = accumulate_grad_batches > 1 and not _is_sharded(model)
        if self.chosen is None and self._accumulates and not self._told:
            self._told = True
            rank_zero_info(
                f"FP8 weights: cast once for the {accumulate_grad_batches} micro-batches of a step and kept, 2 bytes "
                "for each of their parameters; cache_fp8_weights=False casts them in every forward and backward pass "
                "instead"
            )

    def evaluation_begins(self) -> None:
        """A Trainer validates, tests or predicts: other weights may have been put in place for it."""
        self._periods += 1

    def validation_ends(self) -> None:
        """A Trainer goes on with a step that a validation interrupted: the weights may have been put back."""
        self._periods += 1

    def training_ends(self, model: nn.Module) -> None:
        """A Trainer is done with ``model``: its copies are freed."""
        for module in model.modules():
            if isinstance(module, WeightCachingModule):
                module.forget_weight()


def _is_sharded(model: nn.Module) -> bool:
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(parameter, sharded) for parameter in model.parameters())
