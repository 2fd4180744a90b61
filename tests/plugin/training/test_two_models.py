"""Two models with an optimizer each train beside each other as each trains alone, to the bit.

Where the loop allows it, the other model runs forward, backward and its step between a model's forward and backward.
Delayed scales are those of a converted model: if it holds both, the inner one's step also updates what the outer one's
forward has observed, so that the outer one's scales follow its growing inputs sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import FP8FabricPrecision, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.numerics.recipes import RECIPES
from tests.small import fp8_trainer

STEPS = 3
OUTER, INNER = "outer", "inner"
"""The model whose backward comes after a step of the other one, and that other one."""


class Net(nn.Module):
    """Three linear layers; the first two read one tensor."""

    def __init__(self, reentrant: bool | None) -> None:
        """``reentrant`` is the kind of activation checkpointing, None without."""
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.reentrant = reentrant

    def _block(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self._block(x) if self.reentrant is None else checkpoint(self._block, x, use_reentrant=self.reentrant)


class Result(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]
    scales: Tensor
    windows: Tensor


Forward = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor], None]


def nets(names: Sequence[str], reentrant: bool | None) -> dict[str, Net]:
    """A net by each name begins the same whichever others there are."""
    made = {}
    for name in names:
        torch.manual_seed(len(name) + (name == OUTER))
        made[name] = Net(reentrant)
    return made


def batch(name: str, step: int) -> Tensor:
    """Inputs that grow from step to step, of the outer model faster: scales that another one moves are wrong."""
    generator = torch.Generator().manual_seed(step)
    return ((1 + step) ** (1 + (name == OUTER)) * torch.randn(8, 16, generator=generator)).requires_grad_()


def train_step(forwards: dict[str, Forward], backward: Backward, optimizers: dict[str, Any], step: int) -> list[float]:
    """One step of each model, the inner one's inside the outer one's; a loss for each, outer first."""
    ordered = [name for name in (OUTER, INNER) if name in forwards]
    losses = [forwards[name](batch(name, step)).float().square().mean() for name in ordered]
    for name, loss in reversed([*zip(ordered, losses)]):
        optimizers[name].zero_grad()
        backward(loss)
        optimizers[name].step()
    return [loss.item() for loss in losses]


def results(models: dict[str, Net], losses: list[list[float]]) -> dict[str, Result]:
    states = {name: fp8_state_dict(model) for name, model in models.items()}
    return {
        name: Result(
            [of_step[index] for of_step in losses],
            [parameter.detach().clone() for parameter in models[name].parameters()],
            states[name]["scale"].clone(),
            states[name]["amax_history"].clone(),
        )
        for index, name in enumerate(name for name in (OUTER, INNER) if name in models)
    }


def optimizer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 1e-3)


def plain(models: dict[str, Net], recipe: str, one_tree: bool = False) -> dict[str, Result]:
    for converted in [nn.ModuleDict(models)] if one_tree else models.values():
        convert_module(converted, first_last_layers_bf16=False)

    def in_region(model: Net) -> Forward:
        return fp8_autocast(fp8_recipe=recipe)(model)

    forwards = {name: in_region(model) for name, model in models.items()}
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    losses = [train_step(forwards, lambda loss: loss.backward(), optimizers, step) for step in range(STEPS)]
    with fp8_autocast(fp8_recipe=recipe):
        return results(models, losses)


def plain_tree(models: dict[str, Net], recipe: str) -> dict[str, Result]:
    return plain(models, recipe, one_tree=True)


def fabric(models: dict[str, Net], recipe: str) -> dict[str, Result]:
    plugin = FP8FabricPrecision(recipe, weights_dtype=torch.float32, first_last_layers_bf16=False)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    set_up = {name: fabric.setup(model, optimizer_of(model)) for name, model in models.items()}
    forwards = {name: module for name, (module, _) in set_up.items()}
    optimizers = {name: optimizer for name, (_, optimizer) in set_up.items()}
    return results(models, [train_step(forwards, fabric.backward, optimizers, step) for step in range(STEPS)])


class ByHand(LightningModule):
    """Steps by hand; with ``toggled`` one model after the other, and only one at a time requires gradients."""

    def __init__(self, models: dict[str, Net], toggled: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.models = nn.ModuleDict(models)
        self.toggled = toggled
        self.losses: list[list[float]] = []

    def configure_optimizers(self) -> list[Optimizer]:
        return [optimizer_of(model) for model in self.models.values()]

    def training_step(self, batch: Any, step: int) -> None:
        found: Any = self.optimizers()
        optimizers = dict(zip(self.models, found if isinstance(found, list) else [found]))
        if not self.toggled:
            self.losses.append(train_step(dict(self.models.items()), self.manual_backward, optimizers, step))
            return
        losses = []
        for name in (name for name in (OUTER, INNER) if name in optimizers):
            with optimizers[name].toggle_model():
                losses += train_step({name: self.models[name]}, self.manual_backward, optimizers, step)
        self.losses.append(losses)


def trainer(models: dict[str, Net], recipe: str, toggled: bool = False) -> dict[str, Result]:
    module = ByHand(models, toggled)
    fp8 = {"weights_dtype": torch.float32, "first_last_layers_bf16": False}
    fp8_trainer(recipe, fp8=fp8).fit(module, [torch.zeros(1)] * STEPS)
    return results(models, module.losses)


def trainer_toggled(models: dict[str, Net], recipe: str) -> dict[str, Result]:
    return trainer(models, recipe, toggled=True)


def errors_of(losses: list[float], reentrant: bool | None) -> list[float]:
    """How far the outer model's losses are from those of its training in high precision."""
    models = nets([OUTER], reentrant)
    optimizers = {OUTER: optimizer_of(models[OUTER])}
    exact = [train_step(dict(models), lambda loss: loss.backward(), optimizers, step)[0] for step in range(STEPS)]
    return [abs(loss - of_exact) for loss, of_exact in zip(losses, exact)]


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no checkpoint", "checkpoint", "reentrant"])
@pytest.mark.parametrize(
    "train", [plain, plain_tree, fabric, trainer, trainer_toggled], ids=lambda train: train.__name__
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_models_train_as_alone(
    recipe: str, train: Callable[[dict[str, Net], str], dict[str, Result]], reentrant: bool | None
) -> None:
    together = train(nets([OUTER, INNER], reentrant), recipe)
    for name in (OUTER, INNER):
        alone = train(nets([name], reentrant), recipe)[name]
        if name == OUTER and recipe == "delayed" and train in (plain_tree, trainer):
            assert (together[name].scales > 0).all()
            assert together[name].losses[0] == alone.losses[0]
            errors = [errors_of(result.losses, reentrant) for result in (together[name], alone)]
            assert all(error <= of_alone for error, of_alone in zip(*errors))
            continue
        assert together[name].losses == alone.losses
        assert all(map(torch.equal, together[name].parameters, alone.parameters))
        if recipe == "delayed":
            assert (alone.scales > 0).all()
            assert torch.equal(together[name].scales, alone.scales)
            assert torch.equal(together[name].windows, alone.windows)
