"""Run by four processes: blocks that tensor parallelism cuts and FSDP2 shards, with both of its gathers.

``python -m tests.distributed.scripts.mesh FOLDER RECIPE``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.convert import apply
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.sharding import styles
from lightning_fp8.sharding.fsdp import GatheredParam, _groups, _sharded_modules
from tests.distributed.launch import leave
from tests.distributed.scripts.tensor_parallel import SHAPE, WIDTH, blocks, cut

STEPS = 3


def train(model: nn.Sequential, recipe: str, rank: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(*SHAPE, WIDTH, generator=generator).bfloat16()
        with fp8_autocast(fp8_recipe=recipe):
            y = model(x)
        y = y.to_local() if isinstance(y, DTensor) else y
        loss = (y.float() - x.float().roll(1, 1)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    params = [each for _, state in _sharded_modules(model) for group in _groups(state) for each in group.fsdp_params]
    return {
        "losses": losses,
        "weights": [each.full_tensor().double().sum().item() for each in model.parameters()],  # type: ignore[attr-defined]
        "scales": [slot.scale.item() for _, module in fp8_modules(model) for _, slot in module.named_slots()],
        "records": [module.record.fp8 for _, module in fp8_modules(model)],
        "in_fp8": sum(isinstance(each, GatheredParam) and each.recipe is not None for each in params),
    }


def reports(recipe: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = {}
    for gather in ("FP8", "BF16"):
        model = cut(blocks(), "plain", styles, mesh["tensor"])
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        with patch.object(apply, "gather_in_fp8", apply.gather_in_fp8 if gather == "FP8" else lambda _: None):
            convert_module(model, first_last_layers_bf16=False)
        found[gather] = train(model, recipe, mesh["data"].get_local_rank())
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(reports(sys.argv[2])))
    leave()
