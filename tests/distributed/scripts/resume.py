"""Run by the processes of a mesh: blocks that tensor parallelism cuts and FSDP2 shards are saved, and training goes on.

``python -m tests.distributed.scripts.resume FOLDER {trainer,fabric} DATA TENSOR {full,sharded} {exactly,FROM,-} TO``

``exactly``: one run, one that stops in its middle, and one that goes on. Otherwise: load the file of this name, unless
that is ``-``, train an epoch, and save as TO.
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
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.sharding import styles
from lightning_fp8.sharding.fsdp import GatheredParam, _groups, _sharded_modules
from tests.distributed.launch import leave
from tests.distributed.scripts.tensor_parallel import WIDTH, blocks, cut
from tests.small import fp8_trainer

ROWS, BATCH, LENGTH, EPOCHS = 16, 8, 8, 2
FP8 = {"first_last_layers_bf16": False}


def prepared(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Cut and sharded, wherever there is more than one rank; a mesh of one rank is sharded over it."""
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        cut(model, "plain", styles, tensor)
    if data.size() > 1 or tensor.size() == 1:
        for block in model:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y = y.to_local() if isinstance(y, DTensor) else y
    return F.mse_loss(y.float(), x.float().roll(1, 1))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = blocks(bias=False)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not _sharded_modules(self.net):
            prepared(self.net, self.device_mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trained_by_trainer(
    sizes: tuple[int, int], sharded_file: bool, epochs: int, load: Path | None, save: Path | None
) -> tuple[nn.Module, list[float], AmaxHistory]:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(*sizes, save_distributed_checkpoint=sharded_file)
    devices = sizes[0] * sizes[1]
    trainer = fp8_trainer("delayed", fp8=FP8, strategy=strategy, devices=devices, max_epochs=epochs)
    model = Module()
    trainer.fit(model, DataLoader(dataset(), BATCH // sizes[0]), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.net, model.losses, trainer.precision_plugin.histories["model"]


def trained_by_fabric(
    sizes: tuple[int, int], sharded_file: bool, epochs: int, load: Path | None, save: Path | None
) -> tuple[nn.Module, list[float], AmaxHistory]:
    plugin = FP8FabricPrecision("delayed", **FP8)
    strategy = FabricStrategy(prepared, *sizes, save_distributed_checkpoint=sharded_file)  # type: ignore[arg-type]
    fabric = Fabric(accelerator="cpu", devices=sizes[0] * sizes[1], strategy=strategy, plugins=[plugin])
    fabric.launch()
    fabric.seed_everything(1)
    model = fabric.setup_module(blocks(bias=False))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "fp8": plugin, "epoch": 0}
    if load is not None:
        fabric.load(load, state)
        if state["fp8"] is not plugin:  # of a folder Fabric gives what was saved
            plugin.load_state_dict(state["fp8"])
            state["fp8"] = plugin
    data_mesh = fabric.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
    sampler = DistributedSampler(dataset(), data_mesh.size(), data_mesh.get_local_rank(), shuffle=False)
    losses = []
    for _ in range(state["epoch"], epochs):
        for (x,) in DataLoader(dataset(), BATCH // sizes[0], sampler=sampler):
            loss = loss_of(model, x)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state["epoch"] += 1
    if save is not None:
        fabric.save(save, state)
    return model.module, losses, plugin.histories["model"]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def described(model: nn.Module, losses: list[float], history: AmaxHistory) -> dict[str, Any]:
    params = [each for _, state in _sharded_modules(model) for group in _groups(state) for each in group.fsdp_params]
    return {
        "losses": losses,
        "scales": history.scale.tolist(),
        "records": [module.record.fp8 for _, module in fp8_modules(model)],
        "gathered in fp8": sum(isinstance(each, GatheredParam) and each.recipe is not None for each in params),
        "cut": sum(isinstance(each, DTensor) for each in model.parameters()),
    }


def report(folder: Path, door: str, sizes: tuple[int, int], file: str, load: str, save: str) -> dict[str, Any]:
    train = trained_by_trainer if door == "trainer" else trained_by_fabric
    is_sharded = file == "sharded"
    if load != "exactly":
        epochs = {"-": 1}.get(load, int(save[-1]))
        return described(*train(sizes, is_sharded, epochs, None if load == "-" else folder / load, folder / save))
    straight = train(sizes, is_sharded, EPOCHS, None, None)
    half = train(sizes, is_sharded, 1, None, folder / save)
    resumed = train(sizes, is_sharded, EPOCHS, folder / save, None)
    pairs = zip(whole_weights(straight[0]).values(), whole_weights(resumed[0]).values())
    return {
        **described(*resumed),
        "straight": described(*straight),
        "half": half[1],
        "weights": all(torch.equal(one, other) for one, other in pairs),
        "is a folder": (folder / save).is_dir(),
    }


if __name__ == "__main__":
    folder, door, data, tensor, file, load, save = sys.argv[1:]
    made = report(Path(folder), door, (int(data), int(tensor)), file, load, save)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(made))
    leave()
