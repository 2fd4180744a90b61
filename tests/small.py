"""Small models and Trainers that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from lightning_fp8 import FP8Callback, FP8Precision
from lightning_fp8.delayed.history import all_histories
from lightning_fp8.delayed.update import reduce_and_update


def assert_raises(action: Callable[[], object], error: type[Exception], message: str) -> None:
    """``action`` raises ``error``, whose text has a match of the pattern ``message``."""
    with pytest.raises(error, match=message):
        action()


def mlp(linear: type[nn.Linear] = nn.Linear, width: int = 32, depth: int = 4) -> nn.Sequential:
    """``depth`` linear layers, 16 -> width -> ... -> 4; all but the first and last are FP8 layers."""
    sizes = [16, *[width] * (depth - 1), 4]
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [linear(sizes[index], sizes[index + 1]), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Regression(L.LightningModule):
    """Fits a fixed random function; keeps every training loss."""

    def __init__(self, ours: bool = False, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = mlp(lightning_fp8.Linear if ours else nn.Linear)
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]).float(), batch[1].float())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]).float(), batch[1].float()))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]).float(), batch[1].float()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


def regression_data(rows: int = 64, batch_size: int = 16, seed: int = 0) -> DataLoader[Any]:
    """Always the same rows in the same order; they grow, so that amaxes move from step to step."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator) * torch.linspace(0.5, 2.0, rows)[:, None]
    y = torch.tanh(x[:, :4] + x[:, 4:8])
    return DataLoader(TensorDataset(x, y), batch_size)


def quiet_trainer(**options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **options})


def fp8_trainer(
    recipe: Any = "delayed", callbacks: Any = (), fp8: dict[str, Any] | None = None, **options: Any
) -> L.Trainer:
    plugin = FP8Precision(recipe=recipe, **(fp8 or {}))
    return quiet_trainer(plugins=[plugin], callbacks=[FP8Callback(), *callbacks], **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal_weights(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def step_in_backward(model: nn.Module) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.01)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """What ``torch.set_default_device`` does, inside."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def update_all_scales(recipe: Any) -> None:
    """Update the scales of every model of this process, as by a step of its optimizer, under ``recipe``."""
    reduce_and_update(dict.fromkeys(all_histories(), recipe))
