"""Evaluation never moves what training knows, whatever its gradients and modes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DelayedScaling, Format, Linear, fp8_autocast, fp8_state_dict, update_fp8_scales
from lightning_fp8.delayed.watch import UPDATES_IN_EVAL
from lightning_fp8.numerics.scaled import Role
from tests.small import Regression, fp8_trainer, mlp, regression_data
from tests.tiers import thorough

LOUD = 1000.0


class Watched(Regression):
    """Validates, tests and predicts on loud inputs, with gradients and backward, in either mode."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.mode = mode
        self.differentiated: list[Tensor] = []

    def _evaluate(self, batch: list[Tensor]) -> None:
        self.train(self.mode)
        with torch.enable_grad():
            x = (LOUD * batch[0]).detach().requires_grad_()
            with fp8_autocast(fp8_recipe="delayed"):  # a region inside the Trainer's is evaluation too
                y = checkpoint(self.net, x, use_reentrant=False)
            self.differentiated.append(torch.autograd.grad(y.float().square().sum(), x)[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate(batch)

    test_step = predict_step = validation_step

    def on_validation_end(self) -> None:
        self.train()


class Seen(Callback):
    """``seen`` and ``scale`` before and after every validation."""

    def __init__(self) -> None:
        self.states: list[tuple[Tensor, Tensor]] = []

    def _note(self, trainer: Any, *args: Any) -> None:
        history = trainer.precision_plugin.histories["model"]
        self.states.append((history.amax.clone(), history.scale.clone()))

    on_validation_start = on_validation_end = _note


@pytest.mark.parametrize("mode", [False, True], ids=["eval", "train"])
def test_validation_with_gradients_moves_nothing(mode: bool) -> None:
    model, watch = Watched(mode), Seen()
    trainer = fp8_trainer(
        callbacks=[watch],
        inference_mode=False,
        max_epochs=2,
        num_sanity_val_steps=1,
        val_check_interval=1,
        accumulate_grad_batches=2,  # amaxes wait while validation runs
    )
    trainer.fit(model, regression_data(), regression_data(16, seed=1))
    assert len(model.differentiated) == 9
    assert all(gradient.abs().sum() > 0 for gradient in model.differentiated)
    assert len(watch.states) == 2 * 9
    assert any(amax.any() for amax, _ in watch.states)
    for before, after in zip(watch.states[::2], watch.states[1::2]):
        assert all(torch.equal(one, two) for one, two in zip(before, after))
    history = trainer.precision_plugin.histories["model"]
    state = history.state_dict()
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(model, regression_data(16, seed=1))
        assert not history.amax.any()
        assert torch.equal(history.scale, state["scale"])
        assert torch.equal(history.amax_history, state["amax_history"])
    assert len(model.differentiated) == 9 + 3


@pytest.mark.parametrize("cached", [None, True])
@pytest.mark.parametrize("run", [lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=True)])
def test_a_model_in_eval_mode_is_not_observed(run: Callable[..., Tensor], cached: bool | None) -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    for _ in range(2):
        with fp8_autocast():
            y = linear(x)
        y.sum().backward()
    update_fp8_scales(linear)
    before = fp8_state_dict(linear)
    assert before["scale"][0] == 448 / x.abs().max()
    linear.eval()
    loud = (LOUD * x).requires_grad_()
    with fp8_autocast():
        y = run(lambda x: linear(x, is_first_microbatch=cached), loud)
    y.backward(LOUD * torch.ones(4, 8))
    update_fp8_scales(linear)
    after = fp8_state_dict(linear)
    assert torch.equal(before["scale"], after["scale"])
    assert torch.equal(before["amax_history"][1:], after["amax_history"][1:])
    assert not after["seen"].any()
    assert loud.grad is not None
    assert loud.grad.abs().sum() > 0


def test_calibration_observes_in_eval_mode() -> None:
    linear = Linear(16, 8).eval()
    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True):
        linear(torch.full((2, 16), 4.0))
    assert linear.slots[Role.INPUT].scale == 112


def test_calibration_does_not_touch_models_of_no_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        other = Linear(16, 8)  # on a GPU that this process may not have
    calibrated = Linear(16, 8)
    with fp8_autocast(enabled=False, calibrating=True):
        calibrated(torch.full((2, 16), 4.0))
    assert other.slots[Role.INPUT].scale.device.type == "cuda"
    assert calibrated.slots[Role.INPUT].scale == 112
    del other
    gc.collect()


@thorough
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=thorough)])
def test_compiled_evaluation_with_gradients_moves_nothing(backend: str) -> None:
    torch._dynamo.reset()
    model = mlp(Linear)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    recipe, x = DelayedScaling(amax_history_len=8), torch.randn(4, 16)
    for _ in range(2):
        with fp8_autocast(fp8_recipe=recipe):
            y = compiled(x)
        y.sum().backward()
    before = fp8_state_dict(model)
    assert (before["seen"] > 0).all()
    model.eval()
    with fp8_autocast(fp8_recipe=recipe, enabled=False), fp8_autocast(fp8_recipe=recipe):
        updated = fp8_state_dict(model)
        F.mse_loss(compiled(LOUD * x), torch.zeros(4, 4)).backward()
    after = fp8_state_dict(model)
    assert all(torch.equal(updated[key], after[key]) for key in ("scale", "amax_history", "seen"))
    model.train()
    with fp8_autocast(fp8_recipe=recipe):
        compiled(LOUD * x)
    assert fp8_state_dict(model)["seen"][0] == (LOUD * x).abs().max()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_training_in_eval_mode_is_told(recipe: str) -> None:
    """Lightning keeps the mode that a model comes in; transformers' ``from_pretrained`` gives eval mode."""
    model = Regression()
    model.net[4] = Linear(32, 32, parameters_split=("query", "key"))
    model.net.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp8_trainer(recipe).fit(model, regression_data())
    told = [str(warning.message) for warning in caught if "eval mode" in str(warning.message)]
    assert len(model.losses) == 4
    if recipe == "delayed":
        assert any("2 FP8 layers train in eval mode (net.2, net.4)" in text for text in told)
    else:
        assert not [text for text in told if "FP8" in text]


def test_a_model_put_into_eval_mode_during_training_is_told() -> None:
    class Frozen(Regression):
        def on_train_batch_start(self, *args: Any) -> None:
            self.net.eval()

    with pytest.warns(UserWarning, match=f"train in eval mode.*did not change for {UPDATES_IN_EVAL} updates") as caught:
        fp8_trainer(max_epochs=UPDATES_IN_EVAL // 2).fit(Frozen(), regression_data())
    assert sum("eval mode" in str(warning.message) for warning in caught) == 1


def test_a_crash_leaves_the_model_to_who_trains_it_next() -> None:
    class Crash(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ZeroDivisionError

    model = Regression()
    trainer = fp8_trainer(callbacks=[Crash()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, regression_data())
    history = trainer.precision_plugin.histories["model"]
    model.train()
    for _ in range(2):
        with fp8_autocast(fp8_recipe=DelayedScaling(margin=3)):
            y = model.net(torch.randn(4, 16))
        y.sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert history.updates == 1 + 2  # the Trainer's, and the two steps'
    assert history.span == (Format.HYBRID, 3)  # by the region's recipe
