"""Models whose first training step is watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Callback, FP8Precision
from lightning_fp8.convert.summary import ConversionSummary
from tests.small import quiet_trainer


class Experts(nn.Module):
    """Four matrices; each row meets two."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 24, 16) / 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return sum(F.linear(x[(chosen == i).any(1)], self.up[i]).sum() for i in range(4))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    """Whether it calls its layer or reads its weight, no source tells."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.fc, self.out, self.reads = nn.Linear(16, 16), nn.Linear(16, 16), reads

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.fc.weight) if self.reads else self.fc(x)
        return x + self.out(y)


class Mixed(nn.Module):
    """Products of every kind; no attention, whose own products belong to no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.reader = Block(reads=True)
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index == 1 else block(x)
        x = self.reader(x).flatten(0, 1)
        scores, chosen = self.router(x).topk(2, 1)
        return self.experts(x, chosen) + scores.sum()


class Attends(nn.Module):
    """A query of 3 rows and a key of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x.repeat(1, 2, 1)[:, :5], x.repeat(1, 2, 1)[:, :5], need_weights=False)[0]


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](checkpoint(self[0], x, use_reentrant=True))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


class Trained(L.LightningModule):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), *(blocks or (Block(), Block())), Block()])
        self.used: Callable[[int], bool] = lambda index: True

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if self.used(index) else x
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(module: Trained, plugin: FP8Precision, epochs: int = 1) -> list[str]:
    """The warnings of a fit that speak of the table."""
    trainer = quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()], max_epochs=epochs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.randn(8, 16), 4), DataLoader(torch.randn(4, 16), 4))
    return [text for warning in caught if "first training step" in (text := str(warning.message))]


def decision(summary: ConversionSummary | None, name: str) -> Any:
    assert summary is not None
    return next(layer for layer in summary.layers if layer.name == name)
