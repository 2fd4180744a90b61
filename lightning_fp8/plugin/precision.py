"""FP8 as a precision plugin of the Trainer, and the callback by which the Trainer reports its steps to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import getdoc
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8.convert.first_step import FirstStep, watch_first_steps
from lightning_fp8.convert.host_limit import backward_ended
from lightning_fp8.convert.plan import Plan
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory, validated_state
from lightning_fp8.delayed.watch import EVAL, PATIENCE
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.modules.weight_cache import WeightCachingModule
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.plugin.fabric import FP8FabricPrecision, pieces_of
from lightning_fp8.proofs import model_shapes
from lightning_fp8.te.keys import has_te_state
from lightning_fp8.traced import any_traced
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from lightning_fp8.weights.masters import with_master_weights

_NOT_FOR_FABRIC = "FP8Precision is for the Trainer; pass FP8FabricPrecision to Fabric instead"


class FP8Precision(FP8FabricPrecision, HalfPrecision):  # type: ignore[misc]
    """FP8 training as a precision plugin of the Trainer: ``Trainer(plugins=[FP8Precision(recipe="delayed")])``.

    Linear layers run in FP8 inside forwards, everything else in BF16 by default. Conversion is in place and keeps
    parameters and ``state_dict`` keys. Every step of a
    ``torch.optim.Optimizer`` that holds parameters of the model updates the scales with one collective, whether or not
    Lightning calls the step; see ``FP8FabricPrecision.update_scales``. To resume from a checkpoint of Transformer
    Engine, add :class:`lightning_fp8.FP8Callback` to the Trainer.
    """

    _place = "for the Trainer; Fabric takes FP8FabricPrecision"
    watched: FirstStep | None = None
    """The first training steps of the last model, whose FLOPs are counted."""
    _te_state: dict[str, Any] | None = None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer: Any = module._trainer if isinstance(module, LightningModule) else None
        if trainer is not None and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "FP8Precision does not support DeepSpeedStrategy, whose engine computes the backward and the steps "
                "itself; shard the model with ModelParallelStrategy, or train with DDPStrategy"
            )
        if trainer is not None and not any(isinstance(each, TrainerHooks) for each in trainer.callbacks):
            trainer.callbacks.insert(0, TrainerHooks())  # ModelCheckpoint stays the last
        if trainer is not None and isinstance(trainer.strategy, DDPStrategy) and (layers := pieces_of(module)):
            raise MisconfigurationException(
                f"{layers}: DDP would copy the shards of rank 0 to all ranks. Use ModelParallelStrategy with "
                "parallelize_module, or a loop of your own with a data-parallel group"
            )
        self._models = WeakKeyDictionary({each: self._models[each] for each in self._models if each is module})
        return super().convert_module(module)

    def _report_glob(self, wrong: str) -> None:
        raise MisconfigurationException(wrong)

    def _register_history(self, history: AmaxHistory) -> bool:
        # A Trainer trains one model at a time; its checkpoints must not contain the previous model's state.
        is_new = self.histories.get("model") is not history
        self.histories = {"model": history}
        return is_new

    def _watch(self, module: nn.Module, plan: Plan, is_new: bool) -> None:
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
        for module in (module for model in list(self._models) for module in model.modules()):
            if isinstance(module, WeightCachingModule):
                module.forget_weight()  # the FP8 copies

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Let optimizers of weights from ``fp8_model_init`` keep float32 master weights."""
        if any(isinstance(each, FP8Tensor) for each in model.parameters()):
            for optimizer in optimizers:
                if isinstance(optimizer, Optimizer):
                    with_master_weights(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._observes = False
        try:
            with self.forward_context(), model_shapes.paused():
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
        raise MisconfigurationException(_NOT_FOR_FABRIC)  # only Fabric calls it, after the first forward

    @override
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if not isinstance(module, LightningModule) or module._trainer is None:  # a model without Fabric's setup
            raise MisconfigurationException(_NOT_FOR_FABRIC)
        return super().pre_backward(tensor, module)

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        # A compiled block that activation checkpointing recomputes uses the current context, not its forward's.
        # Contexts are thread-local, so autograd must not recompute it in a device thread.
        one_thread = torch.autograd.set_multithreading_enabled(False) if any_traced() else nullcontext()
        with fp8_context(FP8Context(self.recipe)), one_thread, self._counted():
            super().backward(tensor, model, *args, **kwargs)


if FP8Precision.__doc__:  # it is None under python -OO
    _arguments = (getdoc(FP8FabricPrecision) or "").partition("Args:")[2]
    FP8Precision.__doc__ = f"{getdoc(FP8Precision)}\n\nArgs:{_arguments}"


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
                history.watch.said[EVAL] = ""  # the warning below names them
            rank_zero_warn(
                f"{len(idle)} FP8 layers train in eval mode ({', '.join(idle[:3])}{', ...' * (len(idle) > 3)}), in "
                "which delayed scaling observes nothing: their scales become stale. Call model.train() before fit; "
                "Lightning does not change the mode, and transformers' from_pretrained returns models in eval mode"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = _plugin(trainer)
        plugin.kept_weights.period_ends()
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
        _plugin(trainer).kept_weights.period_ends()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _plugin(trainer).kept_weights.period_ends()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _say_if_scales_are_missing(trainer)
        _plugin(trainer).kept_weights.period_ends()

    on_predict_start = on_test_start

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
