"""Callbacks that report the begin and end of a Trainer's steps, epochs and evaluations to the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.host_limit import backward_ended
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.delayed.watch import PATIENCE
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.proofs import first_steps
from lightning_fp8.recipes import DelayedScaling

if TYPE_CHECKING:
    from lightning_fp8.plugin.precision import FP8Precision


class TrainerHooks(Callback):
    """Calls the Trainer's :class:`lightning_fp8.FP8Precision`, which adds it to the callbacks of each run.

    After the first training step, the plugin's table shows which layers ran in FP8, and a warning lists those that did
    not. Layers that were not called are listed only at the end of the first epoch, or after 50 steps.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _say_if_scales_are_missing(trainer)
        summary = _plugin(trainer).summary
        if pl_module.device.type == "cpu" and summary is not None and summary.num_fp8:
            rank_zero_info(
                "FP8 is emulated on the CPU: it computes what a GPU would, at a speed that depends on "
                "the processor and the model; small layers are slower than in BF16"
            )
        layers = [(name, module) for name, module in fp8_modules(pl_module) if module.fp8 and not module.training]
        idle = [name for name, module in layers if any(parameter.requires_grad for parameter in module.parameters())]
        if idle and isinstance(_plugin(trainer).recipe, DelayedScaling):
            for history in _plugin(trainer).histories.values():
                history.watch.has_warned_of_eval = True  # the warning below names them
            rank_zero_warn(
                f"{len(idle)} FP8 layers train in eval mode ({', '.join(idle[:3])}{', ...' * (len(idle) > 3)}), in "
                "which delayed scaling observes nothing: their scales become stale. Call model.train() before fit; "
                "Lightning does not change the mode, and transformers' from_pretrained returns models in eval mode"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = _plugin(trainer)
        plugin.kept_weights.epoch_begins()
        for history in plugin.histories.values():
            history.watch.patience = PATIENCE * trainer.accumulate_grad_batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        plugin = _plugin(trainer)
        plugin.kept_weights.micro_batch_begins(pl_module, trainer.accumulate_grad_batches)
        if plugin.watched is not None and not plugin.watched.begun:
            plugin.watched.begin()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Called after the closure of the step, before the parameters change."""
        backward_ended()
        first_steps.read([pl_module])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the plan with the layers that ran."""
        _report(_plugin(trainer), FirstStep.after_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report layers that were not called in a whole epoch."""
        _report(_plugin(trainer), FirstStep.settle)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what has changed since the first training step."""
        _report(_plugin(trainer), FirstStep.later)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn != "fit":
            _say_if_scales_are_missing(trainer)
        _plugin(trainer).kept_weights.evaluation_begins()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _plugin(trainer).kept_weights.validation_ends()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _say_if_scales_are_missing(trainer)
        _plugin(trainer).kept_weights.evaluation_begins()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _say_if_scales_are_missing(trainer)
        _plugin(trainer).kept_weights.evaluation_begins()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _plugin(trainer).release()
        if type(self) is TrainerHooks:  # which the plugin has added
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]


def _report(plugin: FP8Precision, find: Callable[[FirstStep], ConversionSummary | None]) -> None:
    if plugin.watched is not None and (summary := find(plugin.watched)) is not None:
        plugin.report_first_step(summary)


def _say_if_scales_are_missing(trainer: Trainer) -> None:
    """Report that weights were loaded without the scales of delayed scaling."""
    plugin = _plugin(trainer)
    scales = [history.scale for history in plugin.histories.values() if history.scale.numel()]
    if trainer.ckpt_path and isinstance(plugin.recipe, DelayedScaling) and scales and not any(map(torch.any, scales)):
        rank_zero_info(
            f"{trainer.ckpt_path} has no FP8 scales: they start empty, and until the first update each tensor is "
            "scaled by its own amax"
        )


def _plugin(trainer: Trainer) -> FP8Precision:
    return trainer.precision_plugin  # type: ignore[return-value]
