"""Run by two processes: steps that Lightning does not see, in plain loops and in a Trainer, and what each rank saw.

``python -m tests.distributed.scripts.raw FOLDER``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import DelayedScaling, convert_module, fp8_autocast, fp8_state_dict
from tests.distributed.launch import leave
from tests.distributed.scripts.ddp import count_collectives
from tests.small import Regression, fp8_trainer, mlp, regression_data

STEPS = 4
RECIPE = DelayedScaling(amax_history_len=8)


def optimizers(first: nn.Module, second: nn.Module) -> list[torch.optim.Optimizer]:
    """One of torch's, and one around another, whose inner one holds other parameters on each rank."""
    return [
        torch.optim.AdamW(first.parameters(), 1e-2),
        ZeroRedundancyOptimizer(second.parameters(), torch.optim.SGD, lr=1e-2),
    ]


class Raw(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return optimizers(self.net[:4], self.net[4:])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]).float(), batch[1].float()))
        for optimizer in self.optimizers(use_pl_optimizer=False):
            optimizer.step()


def in_a_trainer() -> dict[str, Any]:
    L.seed_everything(1)
    trainer, model = fp8_trainer(RECIPE, strategy="ddp", devices=2, max_epochs=2), Raw()
    trainer.fit(model, regression_data())
    history = trainer.precision_plugin.histories["model"]
    return {"amax_history": history.amax_history.tolist(), "scale": history.scale.tolist(), "updates": history.updates}


def in_plain_loops() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    models = [DistributedDataParallel(convert_module(mlp())) for _ in range(2)]
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    stepped = optimizers(*models)
    calls = count_collectives()
    reduced = 0
    for _ in range(STEPS):
        for model, optimizer in zip(models, stepped):
            for _ in range(2):
                with fp8_autocast(fp8_recipe=RECIPE):
                    loss = model(torch.randn(8, 16)).square().mean()
                loss.backward()
            calls.clear()
            optimizer.step()
            reduced += calls.count("all_reduce")
            optimizer.zero_grad()
    states = [fp8_state_dict(model.module) for model in models]
    return [
        {"amax_history": state["amax_history"].tolist(), "scale": state["scale"].tolist(), "reduced": reduced}
        for state in states
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    report = {"trainer": in_a_trainer(), "plain": in_plain_loops()}
    (Path(sys.argv[1]) / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
