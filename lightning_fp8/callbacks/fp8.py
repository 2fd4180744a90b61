"""FP8Callback: when scales are updated."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_fp8.precision import FP8Precision


class FP8Callback(Callback):
    """Updates the scales of :class:`lightning_fp8.FP8Precision` once per optimizer step, in one collective.

    Raises:
        MisconfigurationException: the Trainer has no ``FP8Precision``; raised before training.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _plugin(trainer).updated_by_callback = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _plugin(trainer).updated_by_callback = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """All micro-batches have run their backward; the weights have not moved yet."""
        _plugin(trainer).update_scales()


def _plugin(trainer: Trainer) -> FP8Precision:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, FP8Precision):
        raise MisconfigurationException(
            f"FP8Callback needs FP8Precision, but the Trainer's precision is {type(plugin).__name__}; add it: "
            "Trainer(plugins=[FP8Precision(...)], callbacks=[FP8Callback()]), without precision="
        )
    return plugin
