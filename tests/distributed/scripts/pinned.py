"""Run by two processes: models with a recipe of their own, sharded by FSDP2 before or after their conversion, and DDP.

``python -m tests.distributed.scripts.pinned FOLDER RECIPE HOW...``: ddp, or FSDP2 before, after or "before compiled"
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.sharding import fsdp
from lightning_fp8.torchao.float8 import Float8LinearConfig, convert_to_float8_training
from tests.distributed.launch import leave
from tests.distributed.scripts.fsdp import blocks


def made(how: str, recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = blocks(width=256, hidden=512)().bfloat16()
    if "torchao" in how and recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    elif "after" not in how:
        convert_module(model, recipe=recipe, first_last_layers_bf16=False)
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:  # type: ignore[attr-defined]
        if "compiled" in how:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if "after" in how:
        convert_module(model, recipe=recipe, first_last_layers_bf16=False)
    return model


def train(how: str, recipe: str, pinned: bool) -> dict[str, Any]:
    """Losses, weights and scales of three steps of two micro-batches, and how many weights each forward had in FP8."""
    model = made(how, recipe if pinned else None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    losses, gathered = [], []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(16, 256, generator=generator).bfloat16()
            with nullcontext() if pinned else fp8_autocast(fp8_recipe=recipe):
                y = model(x)
            of_model = {*model.modules()}
            gathered.append(sum(each.recipe is not None for each in [*fsdp._attached] if each.layer in of_model))
            loss = F.mse_loss(y.float(), x.float().roll(1, 1))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.full_tensor() if how != "ddp" else value for name, value in model.state_dict().items()}
    state = fp8_state_dict(getattr(model, "module", model))
    return {
        "losses": losses,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "scales": state["scale"].tolist(),
        "gathered": gathered,
    }


def report(recipe: str, *hows: str) -> dict[str, Any]:
    found = {}
    for how in hows:
        in_region, own = (train(how, recipe, pinned) for pinned in (False, True))
        equal = {name: own[name] == in_region[name] for name in ("losses", "weights", "scales")}
        gathered = {"gathered": own["gathered"], "gathered in a region": in_region["gathered"]}
        found[how] = {**equal, **gathered, "of": own["scales"], "losses of": own["losses"]}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = report(*sys.argv[2:])
    texts = [str(each.message) for each in said if "lightning_fp8" in each.filename or "FP8" in str(each.message)]
    result["said"] = texts
    (Path(sys.argv[1]) / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(result))
    leave()
