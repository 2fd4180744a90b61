"""FP8 as a precision of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_fp8.attention.owners import any_traced as any_attention_traced
from lightning_fp8.autocast import FP8Context, fp8_context
from lightning_fp8.convert.conversion import ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.modules.record import any_traced
from lightning_fp8.plugin.fabric import FP8FabricPrecision


# Lightning's own plugins have this order too. Its Precision.optimizer_step calls no super(): each of our two classes
# updates the scales around its own.
class FP8Precision(Precision, FP8FabricPrecision):  # type: ignore[misc]
    """FP8 training as a precision plugin of the Trainer, together with :class:`lightning_fp8.FP8Callback`.

    ``Trainer(plugins=[FP8Precision(recipe="delayed")], callbacks=[FP8Callback()])``. Arguments and errors are
    :class:`FP8FabricPrecision`'s.
    """

    _has_callback = False

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        in_trainer = isinstance(module, LightningModule) and module._trainer is not None
        if in_trainer and not self._has_callback:
            raise MisconfigurationException(
                "FP8Precision needs FP8Callback, which tells it when steps begin and what they ran in FP8; add it: "
                "Trainer(plugins=[FP8Precision(...)], callbacks=[FP8Callback()])"
            )
        return super().convert_module(module)

    def _report_glob(self, wrong: str) -> None:
        raise MisconfigurationException(wrong)

    def _register_history(self, history: AmaxHistory) -> bool:
        # A Trainer trains one model at a time; its checkpoints must not carry the one before.
        is_new = self.histories.get("model") is not history
        self.histories = {"model": history}
        return is_new

    def _first_step_of(self, module: nn.Module, summary: ConversionSummary) -> None:
        return None  # the callback knows when a step begins

    def attach_callback(self) -> None:
        """Note that the running Trainer has an ``FP8Callback``, without which nothing is converted."""
        self._has_callback = True

    def release(self) -> None:
        """Leave the models' scales to whoever trains them next; called when the Trainer is done."""
        self._has_callback = False
        self.detach_attention()
        for history in self.histories.values():
            history.after_step = None
        for model in list(self._models):
            self.kept_weights.training_ends(model)

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._one_update():
            return super().optimizer_step(optimizer, *args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._observes = False
        try:
            with self.forward_context():
                yield
        finally:
            self._observes = True

    @override
    def val_step_context(self) -> Any:
        return self._evaluating()

    @override
    def test_step_context(self) -> Any:
        return self._evaluating()

    @override
    def predict_step_context(self) -> Any:
        return self._evaluating()

    @override
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if not isinstance(module, LightningModule) or module._trainer is None:
            raise MisconfigurationException("FP8Precision is for the Trainer; give Fabric FP8FabricPrecision instead")
        return super().pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        # A compiled block that activation checkpointing recomputes reads the current context, not its forward's, and a
        # context is a thread's: autograd shall not recompute it in a thread of a device.
        one_thread = (
            torch.autograd.set_multithreading_enabled(False)
            if any_traced() or any_attention_traced()
            else nullcontext()
        )
        with fp8_context(FP8Context(self.recipe)), one_thread:
            super().backward(tensor, model, *args, **kwargs)
