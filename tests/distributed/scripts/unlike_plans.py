"""Run by two processes: ranks that cut, shard, convert or run a model differently, and what each says.

``python -m tests.distributed.scripts.unlike_plans FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from lightning_fp8 import Linear, convert_module, fp8_autocast
from lightning_fp8.sharding import styles
from tests.distributed.launch import leave
from tests.distributed.scripts.tensor_parallel import SHAPE, WIDTH, blocks, cut


def is_second() -> bool:
    return bool(dist.get_rank())


def converted(model: nn.Module, **options: Any) -> nn.Module:
    return convert_module(model, first_last_layers_bf16=False, **options)


def train(model: nn.Module, x: torch.Tensor, **region: Any) -> None:
    with fp8_autocast(**{"fp8_recipe": "delayed", **region}):
        model(x)


def inputs(is_cut: bool = True) -> torch.Tensor:
    x = torch.randn(*SHAPE, WIDTH).bfloat16()
    return x.chunk(2, 1)[dist.get_rank()].contiguous() if is_cut else x


def recipes(mesh: DeviceMesh) -> None:
    train(converted(cut(blocks(), "once", styles, mesh)), inputs(), fp8_recipe=["delayed", "rowwise"][is_second()])


def plans(mesh: DeviceMesh) -> None:
    train(converted(cut(blocks(), "plain" if is_second() else "once", styles, mesh)), inputs(not is_second()))


def plans_after(mesh: DeviceMesh) -> None:
    """Cut once they are converted."""
    model = converted(blocks())
    train(cut(model, "plain" if is_second() else "once", styles, mesh), inputs(not is_second()))


def scales(mesh: DeviceMesh) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    train(converted(cut(blocks(), "once", styles, mesh)), inputs(), fp8_group=alone)


def converted_layers(mesh: DeviceMesh) -> None:
    converted(cut(blocks(), "once", styles, mesh), skip=["*.mlp.up"] if is_second() else [])


def widths(mesh: DeviceMesh) -> None:
    layer = Linear(WIDTH, [128, 256][is_second()], parallel_mode="column", tp_group=mesh.get_group())
    train(layer, torch.randn(16, WIDTH))


def shards(mesh: DeviceMesh) -> None:
    model = blocks()
    for block in model:
        fully_shard(block if is_second() else block.mlp, mesh=mesh)
    converted(fully_shard(model, mesh=mesh))


def dimensions(mesh: DeviceMesh) -> None:
    """Converted before it is sharded, as in Fabric."""
    model = converted(blocks())
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda each: Shard(each.dim() - 1 if is_second() else 0))
    train(model, inputs(False))


def sharded_layers(mesh: DeviceMesh) -> None:
    converted(fully_shard(blocks(), mesh=mesh), skip=["*"] if is_second() else [])


def frozen(mesh: DeviceMesh) -> None:
    model = blocks()
    model[0].mlp.up.requires_grad_(not is_second())
    converted(fully_shard(model, mesh=mesh))


def precisions(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=[torch.bfloat16, torch.float16][is_second()])
    converted(fully_shard(blocks(), mesh=mesh, mp_policy=policy))


def kept(mesh: DeviceMesh) -> None:
    converted(fully_shard(blocks(), mesh=mesh, reshard_after_forward=not is_second()))


def regions(mesh: DeviceMesh) -> None:
    train(converted(fully_shard(blocks(), mesh=mesh)), inputs(False), enabled=not is_second())


CASES: dict[str, Callable[[DeviceMesh], None]] = {
    each.__name__: each
    for each in (
        recipes, plans, plans_after, scales, converted_layers, widths, shards, dimensions, sharded_layers, frozen,
        precisions, kept, regions,
    )
}  # fmt: skip


def error(case: str) -> str:
    try:
        CASES[case](init_device_mesh("cpu", (2,)))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {case: error(case) for case in CASES}
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    leave()
