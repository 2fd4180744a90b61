"""FP8 as a precision plugin of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.attention.models.owners import any_traced as any_attention_traced
from lightning_fp8.convert.conversion import ConversionSummary
from lightning_fp8.convert.first_step import FirstStep, watch_first_steps
from lightning_fp8.delayed.history import AmaxHistory, validated_state
from lightning_fp8.delayed.owners import owned_by
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.fp8_tensor import FP8Tensor
from lightning_fp8.master_weights import with_master_weights
from lightning_fp8.modules.record import any_traced
from lightning_fp8.plugin.fabric import FP8FabricPrecision, pieces_of
from lightning_fp8.plugin.trainer_hooks import TrainerHooks
from lightning_fp8.proofs import first_steps
from lightning_fp8.te.keys import has_te_state

_NOT_FOR_FABRIC = "FP8Precision is for the Trainer; pass FP8FabricPrecision to Fabric instead"


class FP8Precision(FP8FabricPrecision, HalfPrecision):  # type: ignore[misc]
    """FP8 training as a precision plugin of the Trainer: ``Trainer(plugins=[FP8Precision(recipe="delayed")])``.

    Takes the same arguments and raises the same errors as :class:`FP8FabricPrecision`. Every step of a
    ``torch.optim.Optimizer`` that holds parameters of the model updates the scales with one collective, whether or not
    Lightning calls the step; see ``FP8FabricPrecision.update_scales``. To resume from a checkpoint of Transformer
    Engine, add :class:`lightning_fp8.FP8Callback` to the Trainer.
    """

    watched: FirstStep | None = None
    """The first training steps of the last model, whose FLOPs are counted."""
    _te_state: dict[str, Any] | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer: Any = module._trainer if isinstance(module, LightningModule) else None
        if trainer is not None and not any(isinstance(each, TrainerHooks) for each in trainer.callbacks):
            trainer.callbacks.insert(0, TrainerHooks())  # ModelCheckpoint stays the last
        if trainer is not None and isinstance(trainer.strategy, DDPStrategy) and (layers := pieces_of(module)):
            raise MisconfigurationException(
                f"{layers}: DDP would copy the shards of rank 0 to all ranks. Use ModelParallelStrategy with "
                "parallelize_module, or a loop of your own with a data-parallel group"
            )
        self._models = WeakKeyDictionary({each: self._models[each] for each in self._models if each is module})
        return super().convert_module(module)

    @override
    def __str__(self) -> str:
        return repr(self)

    def _report_glob(self, wrong: str) -> None:
        raise MisconfigurationException(wrong)

    def _register_history(self, history: AmaxHistory) -> bool:
        # A Trainer trains one model at a time; its checkpoints must not contain the previous model's state.
        is_new = self.histories.get("model") is not history
        self.histories = {"model": history}
        return is_new

    def _watch(self, module: nn.Module, plan: ConversionSummary, is_new: bool) -> None:
        self.watched = self._first_step(module, plan, begins=False)
        watch_first_steps(module, self.watched, by_optimizers=False)  # the Trainer's hooks begin it

    def set_te_state(self, state: dict[str, Any]) -> None:
        """Load the FP8 state of a Transformer Engine checkpoint once the Trainer restores this plugin's state.

        Raises:
            ValueError: If the state is malformed.
        """
        validated_state(state)
        self._te_state = {"model": state}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the state of a checkpoint that has none of this plugin: Transformer Engine's, or an empty one.

        If it has one, the Trainer calls :meth:`load_state_dict` next.
        """
        states, self._te_state = self._te_state, None
        if type(self).__qualname__ in checkpoint:
            return
        # Modules of this package have loaded Transformer Engine's state with their parameters.
        own_te_state = not states and has_te_state(checkpoint.get("state_dict", ()))
        if not (own_te_state and all(history.watch.state_loaded for history in self.histories.values())):
            self.load_state_dict(states or {})

    def _report_without_state(self, names: list[str]) -> None:
        return None  # the Trainer's hooks name the file

    def release(self) -> None:
        """Stop managing the models' scales, so that they can be trained elsewhere; called when the Trainer ends."""
        if self.watched is not None:
            self.watched.stop()  # if it failed
            self.watched = None
        self._te_state = None
        self.detach_attention()
        for history in self.histories.values():
            history.plugin_recipe = None
        for model in list(self._models):
            self.kept_weights.training_ends(model)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Register all optimizers before the first step, when the parameters of one of them may be frozen.

        Optimizers of weights from ``fp8_model_init`` keep float32 master weights.
        """
        for optimizer in optimizers:
            owned_by(optimizer)
            if isinstance(optimizer, Optimizer) and any(isinstance(each, FP8Tensor) for each in model.parameters()):
                with_master_weights(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._observes = False
        try:
            with self.forward_context(), first_steps.paused():
                yield
        finally:
            self._observes = True

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        with self.forward_context(), self._counted():
            yield

    def _counted(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.watched is None else self.watched.counted()

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
    def convert_output(self, data: Any) -> NoReturn:
        """Called by Fabric's wrappers of models, not by the Trainer."""
        raise MisconfigurationException(_NOT_FOR_FABRIC)

    @override
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if not isinstance(module, LightningModule) or module._trainer is None:
            raise MisconfigurationException(_NOT_FOR_FABRIC)
        return super().pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        # A compiled block that activation checkpointing recomputes uses the current context, not its forward's.
        # Contexts are thread-local, so autograd must not recompute it in a device thread.
        one_thread = (
            torch.autograd.set_multithreading_enabled(False)
            if any_traced() or any_attention_traced()
            else nullcontext()
        )
        with fp8_context(FP8Context(self.recipe)), one_thread, self._counted():
            super().backward(tensor, model, *args, **kwargs)
