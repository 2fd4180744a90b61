"""One update of the scales for each optimizer step, however the step is made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_fp8 import (
    DelayedScaling,
    Format,
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    Linear,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
)
from lightning_fp8.history import PATIENCE, AmaxHistory
from tests.small import Regression, fp8_trainer, mlp, quiet_trainer, regression_data

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
    assert (history.window[-steps:] > 0).all()
    assert not history.window[: WINDOW - steps].any()
    largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in history.names])
    torch.testing.assert_close(history.scale, largest / history.window.amax(0))
    assert not history.seen.any()


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
    assert torch.equal(histories[0].window, histories[1].window)


def test_an_optimizer_that_lightning_never_saw() -> None:
    own: list[Optimizer] = []

    def step(optimizer: Any, loss: Tensor) -> None:
        own[0].step()

    model = Manual(step, lambda parameters: own.append(SGD(list(parameters), 0.1)))
    assert_updated(fitted(model), 8)


def test_a_step_that_grad_scaler_skips_is_none() -> None:
    def skipping(optimizer: Optimizer, loss: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(loss.detach())
        if len(model.losses) % 2:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    model = Manual(skipping)
    assert_updated(fitted(model), 4)  # the amaxes of the skipped step wait for the next


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
    torch.testing.assert_close(history.scale, largest / history.window[-8:].amax(0))


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


# Plain loops


def region_step(model: nn.Module, optimizer: Optimizer, recipe: DelayedScaling, micro_batches: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(micro_batches):
        with fp8_autocast(fp8_recipe=recipe):
            y = model(torch.randn(8, 16))
        y.square().mean().backward()
    optimizer.step()


def history(model: nn.Module) -> AmaxHistory:
    (found,) = {id(m.history): m.history for m in model.modules() if isinstance(m, Linear) and m.fp8}.values()
    assert found is not None
    return found


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_models_in_alternation_count_their_own_steps(interval: int) -> None:
    recipe = DelayedScaling(amax_history_len=WINDOW, interval=interval)
    models = [convert_module(mlp()) for _ in range(2)]
    optimizers = [SGD(model.parameters(), 0.1) for model in models]
    for _ in range(7):
        for model, optimizer in zip(models, optimizers):
            region_step(model, optimizer, recipe)
    with fp8_autocast(fp8_recipe=recipe):  # the update of the last steps
        pass
    for index, model in enumerate(models):
        found = history(model)
        assert found.updates == 7 + 1 + index  # the regions before its first step found nothing
        assert (found.window[-7:] > 0).all()
        due = 7 - 7 % interval  # the last update that recomputed
        largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in found.names])
        torch.testing.assert_close(found.scale, largest / found.window[: WINDOW - 7 + due].amax(0))


def test_alternation_without_optimizers_recomputes_too() -> None:
    recipe = DelayedScaling(amax_history_len=WINDOW, interval=2)
    models = [Linear(16, 4) for _ in range(2)]
    for _ in range(4):
        for model in models:
            with fp8_autocast(fp8_recipe=recipe):
                y = model(torch.randn(8, 16))
            y.sum().backward()
    assert all((model.slots[role].scale > 0) for model in models for role in model.roles)


def test_micro_batches_of_a_plain_loop_are_one_step() -> None:
    recipe, model = DelayedScaling(amax_history_len=WINDOW), convert_module(mlp())
    optimizer = SGD(model.parameters(), 0.1)
    region_step(model, optimizer, recipe)
    for _ in range(4):
        region_step(model, optimizer, recipe, micro_batches=3)
    assert history(model).updates == 1 + 4  # the first region found nothing; the fifth step's comes with the next
    with fp8_autocast(fp8_recipe=recipe):
        pass
    assert history(model).updates == 1 + 5
    assert (history(model).window[-5:] > 0).all()
    assert not history(model).window[:-5].any()


def test_closures_of_a_plain_loop_are_one_step_from_the_first_on() -> None:
    recipe, model = DelayedScaling(amax_history_len=WINDOW), convert_module(mlp())
    optimizer, calls = torch.optim.LBFGS(model.parameters(), max_iter=3), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert len(calls) > 2
    assert history(model).updates == 1  # the second step's comes with the next region
    assert (history(model).window[-1] > 0).all()


def test_an_optimizer_of_adapters_alone_steps_the_model() -> None:
    """Low-rank adapters train while every FP8 weight is frozen."""
    recipe, model = DelayedScaling(amax_history_len=WINDOW), mlp()
    model.append(nn.Linear(4, 4))
    convert_module(model, first_last_layers_bf16=False, skip=("7",))
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    optimizer = SGD(model[-1].parameters(), 0.1)
    for _ in range(3):
        region_step(model, optimizer, recipe, micro_batches=2)
    with fp8_autocast(fp8_recipe=recipe):
        pass
    assert history(model).updates == 2 + 3  # the first two regions knew of no optimizer yet
    assert (history(model).window[-4:, 0] > 0).all()
    assert not history(model).window[:-4].any()


# Told when nothing comes


def test_standing_scales_are_told_once() -> None:
    def by_hand(optimizer: Any, loss: Tensor) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    model = Manual(by_hand)
    with pytest.warns(UserWarning, match=rf"{PATIENCE} training forwards since update 0.*update_scales\(\)") as caught:
        fitted(model, epochs=PATIENCE)
    assert sum("stand still" in str(warning.message) for warning in caught) == 1


def test_training_and_evaluation_are_not_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(Regression(), epochs=30)
        trainer = fp8_trainer(max_epochs=2, accumulate_grad_batches=150)
        trainer.fit(Regression(), regression_data(rows=16 * 150))
        trainer = quiet_trainer(plugins=[FP8Precision()], callbacks=[FP8Callback()], inference_mode=False)
        for _ in range(4):
            trainer.validate(Regression(), regression_data(rows=600), verbose=False)
    assert not [warning for warning in caught if "stand still" in str(warning.message)]


def test_models_in_alternation_keep_their_own_recipes() -> None:
    recipes = [
        DelayedScaling(amax_history_len=16, interval=2, margin=1),
        DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
    ]
    start = [convert_module(mlp()) for _ in recipes]

    def train(models: list[nn.Module], recipes: list[DelayedScaling]) -> list[dict[str, Any]]:
        torch.manual_seed(4)
        optimizers = [SGD(model.parameters(), 0.1) for model in models]
        for _ in range(6):
            for model, optimizer, recipe in zip(models, optimizers, recipes):
                torch.manual_seed(5)
                region_step(model, optimizer, recipe)
        for recipe in recipes:
            with fp8_autocast(fp8_recipe=recipe):
                pass
        return [copy.deepcopy(fp8_state_dict(model)) for model in models]

    together = train(copy.deepcopy(start), recipes)
    for index, recipe in enumerate(recipes):
        (alone,) = train([copy.deepcopy(start[index])], [recipe])
        assert torch.equal(together[index]["scale"], alone["scale"])
        assert torch.equal(together[index]["amax_history"], alone["amax_history"])
        assert together[index]["amax_history"].shape[0] == recipe.amax_history_len


def test_scales_move_with_the_format() -> None:
    """From E5M2 to E4M3 a gradient's scale shrinks by 128, or every gradient would saturate for a step."""
    linear, x = Linear(16, 8, bias=False), torch.randn(32, 16)

    def gradient(recipe: DelayedScaling) -> Tensor:
        linear.weight.grad = None
        with fp8_autocast(fp8_recipe=recipe):
            y = linear(x)
        (y.square().sum() / 2).backward()
        assert linear.weight.grad is not None
        return linear.weight.grad

    for _ in range(3):
        gradient(DelayedScaling())
    exact = F.linear(x.double(), linear.weight.double()).T @ x.double()
    for recipe in (DelayedScaling(fp8_format=Format.E4M3), DelayedScaling(margin=4), DelayedScaling()):
        error = (gradient(recipe).double() - exact).norm() / exact.norm()
        assert error < 0.1


def test_an_optimizer_that_comes_to_hold_the_model_steps_it() -> None:
    """A frozen model's optimizer gets its parameters later, or the model is converted after the first step."""
    model, head = convert_module(mlp()), nn.Linear(4, 4)
    optimizer = SGD(head.parameters(), 0.1)
    optimizer.step()
    assert history(model).steps == -1
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step()
    assert history(model).steps == 1
    later = mlp()
    optimizer = SGD(later.parameters(), 0.1)
    optimizer.step()
    convert_module(later)
    optimizer.step()
    assert history(later).steps == 1
    twin = copy.deepcopy(later)
    optimizer.step()
    assert history(later).steps == 2
    assert history(twin).steps == -1


def test_calibration_waits_for_no_optimizer() -> None:
    recipe, model = DelayedScaling(amax_history_len=1), convert_module(mlp())
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(2):
        region_step(model, optimizer, recipe)
    with fp8_autocast(fp8_recipe=recipe):  # the last step's update: no step waits for its own
        pass
    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe):
        model(loud := torch.full((8, 16), 1000.0))
    with torch.no_grad():
        hidden = model[:2](loud)
    assert history(model).scale[0] == 448 / hidden.abs().max()
