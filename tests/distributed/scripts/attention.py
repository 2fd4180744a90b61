"""Run by two processes: FP8 attention, of torch's function and of ours, under DDP and FSDP2; what each rank saw.

``python -m tests.distributed.scripts.attention FOLDER STRATEGY``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fp8 import DelayedScaling, DotProductAttention
from lightning_fp8.convert.summary import ATTENTION
from tests.distributed.launch import leave
from tests.distributed.scripts.ddp import Record
from tests.small import fp8_trainer

WIDTH, HEADS, ROWS = 16, 2, 12
REENTRANT = {"plain": None, "reentrant": True, "not reentrant": False}


class Block(nn.Module):
    """Attention of ours, whose rows delayed scaling keeps, and torch's, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q = self.core(q, k, v).unflatten(-1, (HEADS, -1))
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Attending(L.LightningModule):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant, self.losses = REENTRANT[recompute], []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not hasattr(self, "sharded"):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            self.sharded = True

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        y = x.clone().requires_grad_()
        for block in self.blocks:
            y = block(y) if self.reentrant is None else checkpoint(block, y, use_reentrant=self.reentrant)
        loss = (y - x.flip(1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        x = torch.randn(16, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(x * torch.linspace(0.5, 2, 16)[:, None, None], 2)  # type: ignore[arg-type]


def train(
    strategy: str, recompute: str, epochs: int, ckpt_path: Path | None = None
) -> tuple[L.Trainer, Attending, Record]:
    L.seed_everything(1)
    record, module = Record(), Attending(recompute)
    trainer = fp8_trainer(
        DelayedScaling(amax_history_len=4),
        fp8={"attention": True},
        strategy="ddp" if strategy == "ddp" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        max_epochs=epochs,
        accumulate_grad_batches=2,
    )
    trainer.callbacks.insert(0, record)  # before FP8Callback, so that it sees amaxes that are not reduced yet
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module, record


def of(strategy: str, folder: Path) -> dict[str, Any]:
    """Straight through, and half of it recomputed in one way, saved, and the rest recomputed in the other."""
    straight, module, record = train(strategy, "plain", 2)
    summary, history = straight.precision_plugin.summary, straight.precision_plugin.histories["model"]
    first, half, before = train(strategy, "reentrant", 1)
    first.save_checkpoint(folder / f"{strategy}.ckpt")
    _, resumed, after = train(strategy, "not reentrant", 2, folder / f"{strategy}.ckpt")
    return {
        "names": list(history.names),
        "amax": record.amax,
        "scales": record.scales,
        "ran": {each.name: each.ran for each in summary.layers if each.kind == ATTENTION},
        "losses": half.losses + resumed.losses == module.losses,
        "same amax": before.amax + after.amax == record.amax,
        "same scales": before.scales + after.scales == record.scales,
        "weights": equal(resumed, module),
    }


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        map(torch.equal, *([getattr(p, "_local_tensor", p) for p in each.parameters()] for each in (one, other)))
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    report = of(sys.argv[2], folder)
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
