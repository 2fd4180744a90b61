"""Run by two processes: small models with experts under DDP and FSDP2, beside one process.

``python -m tests.distributed.scripts.expert_models FOLDER {ddp,fsdp} MODEL RECIPE``. It needs transformers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.modules.experts import Experts
from tests.distributed.launch import leave

STEPS, ROWS = 3, 4


def model_of(name: str) -> Any:
    from tests.convert.zoo import ZOO

    torch.manual_seed(0)
    return ZOO[name].make().train()


def train(model: nn.Module, recipe: str, rows: slice, run: Any = None) -> dict[str, Any]:
    """The losses of a rank's rows of each batch; the weights and the FP8 state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(3)
    losses, amaxes = [], []
    for _ in range(STEPS):
        tokens = torch.randint(3, 96, (ROWS, 12), generator=generator)[rows]
        with fp8_autocast(fp8_recipe=recipe):
            loss = (run or model)(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        amaxes.append(
            [
                float(slot.amax)
                for module in model.modules()
                if isinstance(module, Experts)
                for slots in module.ensure_slots()
                for slot in slots.values()
            ]
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: _whole(value) for name, value in model.state_dict().items()}
    return {"losses": losses, "amaxes": amaxes, "weights": weights, "state": fp8_state_dict(model)}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main(how: str, name: str, recipe: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = convert_module(model_of(name), first_last_layers_bf16=False)
    run = None
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    made = train(model, recipe, slice(rank, None, world), run)
    alone = train(convert_module(model_of(name), first_last_layers_bf16=False), recipe, slice(None))
    near = max(  # not of biases, which begin with zeros: they are sums of few gradients
        float((value - alone["weights"][key]).norm() / alone["weights"][key].norm().clamp_min(1e-6))
        for key, value in made["weights"].items()
        if value.dim() > 1 and not key.endswith("_bias")
    )
    names = made["state"]["names"]
    scales = {key: float(scale) for key, scale in zip(names, made["state"]["scale"]) if ".experts." in key}
    return {
        "losses": made["losses"],
        "alone": alone["losses"],
        "near": near,
        "amaxes": made["amaxes"],
        "scales": scales,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = main(*sys.argv[2:])
    (Path(sys.argv[1]) / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
