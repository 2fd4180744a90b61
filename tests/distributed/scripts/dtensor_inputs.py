"""Run by two processes: inputs of DTensor layers that change in place, that no layer takes, and that ranks scale apart.

``python -m tests.distributed.scripts.dtensor_inputs FOLDER``
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_fp8 import DelayedScaling, convert_module, fp8_autocast
from lightning_fp8.sharding import styles
from tests.distributed.launch import leave

WIDTH = 64


def error(found: Any, expected: Tensor) -> float:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return float((found.detach() - expected).norm() / expected.norm())


def changed_in_place(mesh: DeviceMesh) -> list[float]:
    """A residual that is added in place between two layers that read it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    reference = copy.deepcopy(layers)
    whole = styles.ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(layers, mesh, {"0": whole, "1": whole})
    convert_module(layers, first_last_layers_bf16=False)
    x = torch.randn(32, WIDTH)
    with torch.no_grad():
        expected = reference[1](x + reference[0](x))
        placed = DTensor.from_local(x.clone(), mesh, [Replicate()])
        with fp8_autocast(fp8_recipe="tensorwise"):
            placed += layers[0](placed)
            return [error(layers[1](placed), expected)]


class PreNorm(nn.Module):
    """Its input is read by a norm and by the residual, and by no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))) + x


def read_by_no_layer(mesh: DeviceMesh) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(PreNorm())
    reference = copy.deepcopy(model)
    plan = {
        "0": styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "0.norm": _whole(),
        "0.up": styles.ColwiseParallel(),
        "0.down": styles.RowwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for step in range(3):
        x = 50 * torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(step))
        with fp8_autocast(fp8_recipe="delayed"):
            y = model(x.chunk(2, 1)[dist.get_rank()].contiguous())
        (y.to_local() if isinstance(y, DTensor) else y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(error(y, reference(x)))
    return errors


def _whole() -> Any:
    """A norm of the whole sequence, with replicated parameters."""

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            for name, parameter in module.named_parameters():
                placed = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()])
                module.register_parameter(name, nn.Parameter(placed))
            return module

    return Whole()


def scaled_apart(mesh: DeviceMesh) -> list[float]:
    """Pieces of different magnitudes, on ranks that do not share their scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    reference = copy.deepcopy(model)
    column = styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"0": column})
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    for step in range(3):
        x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(step))
        x[:, 16:] *= 8
        with fp8_autocast(fp8_recipe=DelayedScaling(reduce_amax=False, amax_history_len=1)):
            y = model(x.chunk(2, 1)[dist.get_rank()].contiguous())
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(error(y, reference(x)))
    return errors


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = {each.__name__: each(mesh) for each in (changed_in_place, read_by_no_layer, scaled_apart)}
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    leave()
