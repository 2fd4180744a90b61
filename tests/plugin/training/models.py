"""Models, data and a Trainer for training, and what a test compares afterwards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from lightning_fp8 import FP8Callback, FP8FabricPrecision, FP8Precision
from lightning_fp8.delayed.history import AmaxHistory

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(x)))


class Blocks(nn.Module):
    def __init__(self, depth: int = 3, checkpointing: bool | None = None) -> None:
        """``checkpointing`` is None, or whether it is reentrant."""
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return x


class Regression(LightningModule):
    """Fits ``model`` to a fixed target; keeps its losses."""

    def __init__(
        self, model: nn.Module, lr: float = 3e-3, optimizer: type[torch.optim.Optimizer] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.optimizer_class = optimizer or torch.optim.Adam
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=self.lr)


def dataset(rows: int = 32, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return TensorDataset(x, torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator)))


def loader(rows: int = 32, batch_size: int = 32) -> DataLoader:
    return DataLoader(dataset(rows), batch_size=batch_size)


def fit(
    module: LightningModule,
    data: DataLoader | None = None,
    steps: int = 20,
    plugin: FP8Precision | None = None,
    callbacks: tuple[Callback, ...] = (),
    validation: DataLoader | None = None,
    **trainer: Any,
) -> FP8Precision:
    """Train in FP8 for ``steps`` optimizer steps; gives the plugin back."""
    plugin = plugin or FP8Precision()
    options = {"num_sanity_val_steps": 0, "max_epochs": -1, "max_steps": steps} | trainer
    Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        callbacks=[FP8Callback(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    ).fit(module, data or loader(), validation)
    return plugin


def fp8_modules(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, lightning_fp8.Linear) and m.fp8]


def assert_falls(losses: list[float], to: float = 0.7) -> None:
    """The end of training is better than its start by the factor ``to``."""
    assert all(map(math.isfinite, losses))
    start, end = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    assert end < to * start, f"loss {start:.4f} -> {end:.4f}"


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different


def history_of(plugin: FP8FabricPrecision) -> AmaxHistory:
    return plugin.histories["model"]


def differentiable_collate(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x, y = (torch.stack(column) for column in zip(*rows))
    return [x.bfloat16().requires_grad_(), y]
