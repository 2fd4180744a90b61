"""Train by ``strategy="ddp_spawn"``, which sends the Trainer and its plugin to processes that it starts.

``python -m tests.distributed.scripts.spawned FOLDER``; each rank, and the process that started them, writes a report
there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Callback, FP8Precision

STEPS = 4


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def report(model: nn.Module, plugin: FP8Precision) -> dict[str, Any]:
    return {
        "weights": [parameter.float().sum().item() for parameter in model.parameters()],
        "scales": {name: history.scale.tolist() for name, history in plugin.histories.items()},
        "updates": {name: history.updates for name, history in plugin.histories.items()},
    }


class Report(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, FP8Precision)
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(report(pl_module, plugin)))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    data, model, plugin = torch.randn(2 * STEPS * 16, 16), Model(), FP8Precision()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", plugins=[plugin], callbacks=[FP8Callback(), Report(folder)],
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=16))
    (folder / "parent.json").write_text(json.dumps(report(model, plugin)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
