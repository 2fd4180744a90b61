"""Run by the processes of a mesh: the last rank ends after a step, and what the others find in the next one.

``python -m tests.distributed.scripts.lonely FOLDER STRATEGY``
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_fp8 import DotProductAttention, TransformerLayer, convert_module, fp8_autocast
from lightning_fp8.sharding import styles
from tests.distributed.scripts.tensor_parallel import SHAPE, WIDTH, blocks, cut

RANKS = {"FSDP2": 2, "TP": 2, "FSDP2 and TP": 4, "TE": 2, "context": 2}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = DotProductAttention(2, WIDTH // 2, qkv_format="bshd", cp_group=dist.group.WORLD)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, -1))
        return self.attention(x, x, x)  # type: ignore[no-any-return]


def model_of(strategy: str) -> nn.Module:
    if strategy == "context":
        return Attention()
    if strategy == "TE":
        return TransformerLayer(
            WIDTH, 2 * WIDTH, 2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
            tp_group=dist.group.WORLD, sequence_parallel=True, set_parallel_mode=True,
        )  # fmt: skip
    sizes = {"FSDP2": (2, 1), "TP": (1, 2), "FSDP2 and TP": (2, 2)}[strategy]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
    model = blocks()
    if sizes[1] > 1:
        cut(model, "plain", styles, mesh["tensor"])
    if sizes[0] > 1:
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return convert_module(model, first_last_layers_bf16=False)


def step(model: nn.Module) -> None:
    x = torch.randn(*SHAPE, WIDTH).bfloat16().requires_grad_()
    with fp8_autocast(fp8_recipe="delayed"):
        y = model(x)
    y.float().square().mean().backward()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = model_of(sys.argv[2])
    step(model)
    report: dict[str, object] = {"error": None}
    if dist.get_rank() != dist.get_world_size() - 1:
        begin = time.monotonic()
        try:
            step(model)
        except RuntimeError as error:
            report = {"error": str(error)[:300], "seconds": time.monotonic() - begin}
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    os._exit(0)
