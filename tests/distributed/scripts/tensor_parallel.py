"""Run by two processes: FP8 layers whose parameters tensor parallelism made DTensors, before and after conversion.

``python -m tests.distributed.scripts.tensor_parallel FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.recipes import RECIPES
from tests.distributed.launch import leave


def errors() -> dict[str, str]:
    """What each recipe says, and ``""`` where the layers are left in high precision."""
    mesh, said = init_device_mesh("cpu", (2,)), {}
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for recipe in RECIPES:
        for order in ("converted first", "parallelized first", "skipped"):
            model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            if order == "converted first":
                model = parallelize_module(convert_module(model, first_last_layers_bf16=False), mesh, plan)
            else:
                skip = ["0", "2"] if order == "skipped" else []
                model = convert_module(parallelize_module(model, mesh, plan), first_last_layers_bf16=False, skip=skip)
            try:
                with fp8_autocast(fp8_recipe=recipe):
                    model(torch.ones(16, 32)).sum().backward()
                said[f"{recipe}, {order}"] = ""
            except TypeError as error:
                said[f"{recipe}, {order}"] = str(error)
    return said


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report = Path(sys.argv[1], f"{os.environ['RANK']}.json")
    report.write_text(json.dumps(errors()))
    leave()
