"""A small model, its data and a Trainer of few steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8


class Mlp(LightningModule):
    """Four linear layers, of which two run in FP8."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))
        self.steps = 0
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(x.dtype)
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        (x,) = batch
        return F.mse_loss(self(x), x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(16, 16, generator=generator)), batch_size=8)


def trainer(*plugins: Any, callbacks: tuple[Callback, ...] = (), **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        plugins=list(plugins) or None,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "num_sanity_val_steps": 0, "logger": False} | options),
    )


def slots(module: Mlp, layer: int = 1) -> Any:
    linear = module.layers[layer]
    assert isinstance(linear, lightning_fp8.Linear)
    return linear.slots
