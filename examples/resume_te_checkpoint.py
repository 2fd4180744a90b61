"""Resume a checkpoint that Lightning saved with Transformer Engine 1.7, whose library need not be installed.

    python examples/resume_te_checkpoint.py            # makes such a file first
    python examples/resume_te_checkpoint.py old.ckpt   # or takes one of this model

The Trainer's three lines are all it takes: FP8Callback reads the FP8 state, whichever version wrote it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import (
    FP8Callback,
    FP8Precision,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    update_fp8_scales,
)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[0].flip(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def write_1_7_checkpoint(path: Path, data: DataLoader[list[Tensor]]) -> None:
    """What a Trainer with Transformer Engine 1.7 leaves: ``layers.1._extra_state`` and so on, beside the weights."""
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    model = Net()
    trainer.fit(model, data)
    trainer.save_checkpoint(path)
    convert_module(model)
    for batch, _ in [next(iter(data))] * 3:
        with fp8_autocast():
            loss = F.mse_loss(model(batch), batch)
        loss.backward()
        update_fp8_scales(model)
    file = torch.load(path, weights_only=True)
    file["state_dict"] = export_te_state_dict(model, "1.7")
    torch.save(file, path)


def main(path: Path) -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x), batch_size=32)
    if not path.exists():
        write_1_7_checkpoint(path, data)

    callback = FP8Callback()
    trainer = L.Trainer(
        plugins=[FP8Precision(recipe="delayed")],
        callbacks=[callback],
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), data, ckpt_path=path)
    print(callback.te_report)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "te_1_7.ckpt")
