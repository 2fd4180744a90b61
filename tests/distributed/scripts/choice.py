"""Run by two processes: FSDP2 with sequences of other lengths on each rank, by planted rates.

``python -m tests.distributed.scripts.choice FOLDER``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_fp8 import convert_module, fp8_autocast
from tests.convert.planted import planted
from tests.distributed.launch import leave


def trained(recipe: str, rows: int) -> dict[str, Any]:
    torch.manual_seed(0)
    # From 11 rows on in FP8, never, and from 11 rows on, which only the second rank has.
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(torch.randn(16, 64)[:rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return {
        "slower": [layer.slower for layer in model],
        "fp8": [layer.record.fp8 for layer in model],  # type: ignore[operator, union-attr]
        "losses": losses,
        "weights": whole,
    }


def staged(models: int) -> dict[str, Any]:
    """Each rank shards other numbers of models over its own mesh, as pipeline stages do."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    said = []
    for _ in range(models):
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        fully_shard(model, mesh=mesh)
        convert_module(model, first_last_layers_bf16=False)
        with fp8_autocast(fp8_recipe="tensorwise"):
            model(torch.randn(10, 64)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        said.append(model[0].slower)
    return {"slower": said}


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    with planted():
        found = {"stages": staged(1 + rank)}  # before delayed scaling, whose amaxes all ranks share
        found |= {
            f"{recipe} {rows}": trained(recipe, rows[rank])
            for recipe in ("delayed", "tensorwise")
            for rows in ((10, 16), (10, 9))
        }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
