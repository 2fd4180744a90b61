"""One update of the scales for each optimizer step, however the step is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_fp8 import (
    DelayedScaling,
    FP8Callback,
    FP8FabricPrecision,
    fp8_autocast,
)
from lightning_fp8.delayed.history import AmaxHistory
from tests.small import Regression, fp8_trainer, mlp, regression_data, step_in_backward

WINDOW = 64


class Manual(Regression):
    """Steps by hand as ``step`` says; ``optimizer`` is torch's own, never Lightning's."""

    def __init__(
        self, step: Callable[[Optimizer, Tensor], None], optimizer: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step_by = step
        self.make = optimizer or (lambda parameters: SGD(parameters, 0.1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0]).float(), batch[1].float())
        self.losses.append(loss.item())
        self.zero_grad()
        self.manual_backward(loss)
        self.step_by(self.optimizers(use_pl_optimizer=False), loss)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def fitted(model: Regression, epochs: int = 2, recipe: DelayedScaling | None = None, **options: Any) -> AmaxHistory:
    trainer = fp8_trainer(recipe or DelayedScaling(amax_history_len=WINDOW), max_epochs=epochs, **options)
    trainer.fit(model, regression_data())
    return trainer.precision_plugin.histories["model"]


def assert_updated(history: AmaxHistory, steps: int) -> None:
    """Each of ``steps`` updates found amaxes in every row, and the scales follow from the window."""
    assert history.updates == steps
    assert (history.amax_history[-steps:] > 0).all()
    assert not history.amax_history[: WINDOW - steps].any()
    largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in history.names])
    torch.testing.assert_close(history.scale, largest / history.amax_history.amax(0))
    assert not history.amax.any()


def raw(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.step()


def by_grad_scaler(optimizer: Optimizer, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss.detach())
    scaler.step(optimizer)
    scaler.update()


def compiled(optimizer: Optimizer, loss: Tensor) -> None:
    torch.compile(optimizer.step, backend="eager")()


@pytest.mark.parametrize("step", [raw, by_grad_scaler, compiled])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_raw_step_in_the_trainer_updates_once(step: Any, foreach: bool) -> None:
    model = Manual(step, lambda parameters: SGD(parameters, 0.1, foreach=foreach))
    assert_updated(fitted(model), 8)


def test_a_raw_step_equals_lightnings() -> None:
    torch.manual_seed(3)
    one = Manual(raw)
    two = copy.deepcopy(one)
    two.step_by = lambda optimizer, loss: two.optimizers().step()  # type: ignore[union-attr]
    histories = [fitted(model) for model in (one, two)]
    assert one.losses == two.losses
    assert torch.equal(histories[0].amax_history, histories[1].amax_history)


def test_an_optimizer_that_lightning_never_saw() -> None:
    own: list[Optimizer] = []

    def step(optimizer: Any, loss: Tensor) -> None:
        own[0].step()

    model = Manual(step, lambda parameters: own.append(SGD(list(parameters), 0.1)))
    assert_updated(fitted(model), 8)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_is_none(fused: bool) -> None:
    """Fused optimizers are stepped all the same, and skip it themselves."""

    def skipping(optimizer: Optimizer, loss: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss.detach())
        if len(model.losses) % 2:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    model = Manual(skipping, lambda parameters: SGD(parameters, 0.1, fused=fused))
    assert_updated(
        fitted(model, fp8={"weights_dtype": torch.float32}), 4
    )  # the amaxes of the skipped step wait for the next


@pytest.mark.parametrize("manual", [False, True])
def test_many_closures_are_one_step(manual: bool) -> None:
    calls: list[int] = []

    class Closures(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if self.automatic_optimization:
                calls.append(1)
                return super().training_step(batch, batch_idx)

            def closure() -> Tensor:
                calls.append(1)
                self.zero_grad()
                loss = F.mse_loss(self(batch[0]).float(), batch[1].float())
                self.manual_backward(loss)
                return loss

            self.optimizers(use_pl_optimizer=False).step(closure)
            return None

        def configure_optimizers(self) -> Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    model = Closures()
    model.automatic_optimization = not manual
    history = fitted(model, epochs=1, fp8={"weights_dtype": torch.float32})
    assert len(calls) > 4
    assert_updated(history, 4)


class Nested(Optimizer):
    """An optimizer around another, as ZeroRedundancyOptimizer is; both are torch's and both call hooks."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = SGD(parameters, 0.1)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Duck:
    """What Lightning takes for an optimizer and torch has never heard of."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.defaults: dict[str, Any] = {}
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("optimizer", [Nested, Duck])
def test_wrapped_and_foreign_optimizers_under_lightning(optimizer: Any) -> None:
    model = Regression()
    model.configure_optimizers = lambda: optimizer(model.parameters())  # type: ignore[method-assign]
    assert_updated(fitted(model), 8)


def test_a_second_callback_updates_no_second_time() -> None:
    for interval in (1, 2):
        recipe = DelayedScaling(amax_history_len=WINDOW, interval=interval)
        history = fitted(Regression(), recipe=recipe, callbacks=[FP8Callback()])
        assert_updated(history, 8)


def test_an_interval_counts_the_updates_that_saw_a_row() -> None:
    """Two optimizers step after one backward: every other update finds nothing."""

    class Halves(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            halves = [list(self.parameters())[index::2] for index in range(2)]
            return [SGD(half, 0.1) for half in halves]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.zero_grad()
            self.manual_backward(F.mse_loss(self(batch[0]).float(), batch[1].float()))
            for optimizer in self.optimizers():
                optimizer.step()

    history = fitted(Halves(), recipe=DelayedScaling(amax_history_len=WINDOW, interval=2))
    assert history.updates == 16
    largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in history.names])
    torch.testing.assert_close(history.scale, largest / history.amax_history[-8:].amax(0))


def test_optimizers_inside_the_backward_pass_are_one_step() -> None:
    model = Manual(lambda optimizer, loss: None, lambda parameters: step_in_backward(model))
    trainer = fp8_trainer(DelayedScaling(amax_history_len=WINDOW), max_epochs=2)
    trainer.fit(model, regression_data())
    assert_updated(trainer.precision_plugin.histories["model"], 8)


# Fabric


@pytest.mark.parametrize("set_up", [False, True])
def test_fabric_with_and_without_its_optimizer(set_up: bool) -> None:
    plugin = FP8FabricPrecision(DelayedScaling(amax_history_len=WINDOW))
    fabric, model = Fabric(accelerator="cpu", devices=1, plugins=[plugin]), mlp()
    optimizer: Any = SGD(model.parameters(), 0.1)
    if set_up:
        module, optimizer = fabric.setup(model, optimizer)
    else:
        module = fabric.setup(model)
    for _ in range(5):
        optimizer.zero_grad()
        fabric.backward(module(torch.randn(8, 16)).square().mean())
        optimizer.step()
    assert_updated(plugin.histories["model"], 5)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_delayed_region_inside_another_recipes_plugin_is_updated(in_backward: bool) -> None:
    plugin = FP8FabricPrecision("tensorwise", first_last_layers_bf16=False, weights_dtype=torch.float32)
    fabric, model = Fabric(accelerator="cpu", devices=1, plugins=[plugin]), Delayed()
    if in_backward:
        step_in_backward(model)
        module, optimizers = fabric.setup(model), list[Any]()
    else:
        module, *optimizers = fabric.setup(model, SGD(model.parameters(), 0.1))
    for _ in range(5):
        model.zero_grad()
        fabric.backward(module(torch.randn(8, 16)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    assert_updated(plugin.histories["model"], 5)


class Delayed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=WINDOW)):
            return self.net(x)
