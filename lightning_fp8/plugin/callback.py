"""FP8Callback: checkpoints of Transformer Engine in a Trainer."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.plugin.precision import FP8Precision, TrainerHooks
from lightning_fp8.te.keys import has_te_state
from lightning_fp8.te.torch_file import CheckpointError
from lightning_fp8.te_checkpoints.load import planned_fp8_roles, take_te_states
from lightning_fp8.te_checkpoints.remap import LoadReport


class FP8Callback(TrainerHooks):
    """Lets a Trainer with :class:`lightning_fp8.FP8Precision` resume from checkpoints of Transformer Engine.

    ``ckpt_path`` may then be a checkpoint with the FP8 state of any version of Transformer Engine. FP8 training and
    this package's own checkpoints do not need the callback.

    Attributes:
        te_report: a report on each FP8 state of the last such checkpoint: loaded or not, and why.

    Raises:
        MisconfigurationException: If the Trainer has no ``FP8Precision``; raised before training.
    """

    te_report: LoadReport | None = None
    _load_hook: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin = trainer.precision_plugin
        if not isinstance(plugin, FP8Precision):
            raise MisconfigurationException(
                f"FP8Callback needs FP8Precision, but the Trainer's precision is {type(plugin).__name__}; add it: "
                "Trainer(plugins=[FP8Precision(...)], callbacks=[FP8Callback()]), without precision="
            )

        def take(_: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *others: Any) -> None:
            if prefix or not has_te_state(state_dict):
                return
            roles = planned_fp8_roles(pl_module, plan_conversion(pl_module, plugin.policy).summary)
            try:
                state, self.te_report = take_te_states(pl_module, state_dict, roles, strict)
            except CheckpointError as error:
                raise CheckpointError(f"{trainer.ckpt_path}: {error}") from None
            if state is not None:
                plugin.set_te_state(state)
            rank_zero_info(str(self.te_report))

        # Callback.on_load_checkpoint is called after the strict load, and only a hook of the module before it.
        self._load_hook = pl_module.register_load_state_dict_pre_hook(take)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.precision_plugin, FP8Precision):
            super().teardown(trainer, pl_module, stage)
        if self._load_hook is not None:
            self._load_hook.remove()
            self._load_hook = None
