"""Run by two processes: TransformerLayers that accumulate gradients on ranks, beside one process with all the data.

``python -m tests.distributed.scripts.accumulation FOLDER KIND...``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import DelayedScaling, TransformerLayer, fp8_autocast, fp8_state_dict, load_fp8_state_dict
from tests.distributed.launch import leave

STEPS, MICRO_BATCHES, RANKS = 2, 2, 2
RECIPE = DelayedScaling(amax_history_len=STEPS + 1)


class Layers(nn.Module):
    """The second layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
        self.layers = nn.ModuleList(TransformerLayer(16, 24, 2, **options) for _ in range(2))

    def forward(self, x: Tensor, leave_out: bool, first: bool) -> Tensor:
        for layer in self.layers[:1] if leave_out else self.layers:
            x = layer(x, is_first_microbatch=first)
        return x


def fresh() -> Layers:
    """Scales are there, so that no tensor is scaled by what one rank has of it."""
    torch.manual_seed(0)
    model = Layers()
    state = fp8_state_dict(model)
    load_fp8_state_dict(model, {**state, "scale": torch.full_like(state["scale"], 16.0), "steps": 0})
    return model


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def numbers_of_training(model: nn.Module, kind: str, ranks: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Each step's gradients, averaged over ranks, and the amax history after the last."""
    layers = model.module if isinstance(model, DistributedDataParallel) else model
    x = torch.randn(STEPS, MICRO_BATCHES, RANKS, 2, 5, 16, generator=torch.Generator().manual_seed(1))
    optimizer, gradients = torch.optim.AdamW(model.parameters(), 1e-2), list[Tensor]()
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            first = micro_batch == 0
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(not first)
            for rank in ranks:
                with model.no_sync() if first and isinstance(model, DistributedDataParallel) else nullcontext():
                    with fp8_autocast(fp8_recipe=RECIPE):
                        y = model(x[step, micro_batch, rank], kind == "unused" and rank == 1, first)
                    (y.square().sum() / 64).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad / len(ranks)
        gradients += [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return gradients, fp8_state_dict(layers)["amax_history"]


def on_ranks(kind: str) -> nn.Module:
    model = fresh()
    if kind != "sharded":
        return DistributedDataParallel(model, find_unused_parameters=kind == "unused")
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compared(kind: str) -> dict[str, Any]:
    gradients, history = numbers_of_training(on_ranks(kind), kind, [dist.get_rank()])
    expected, expected_history = numbers_of_training(fresh(), kind, range(RANKS))
    of_keys = ["key_bias" in name for name, _ in fresh().named_parameters()] * STEPS  # 0 but for rounding
    pairs = [pair for pair, of_key in zip(zip(gradients, expected), of_keys) if not of_key]
    return {
        "history": bool(history.any()) and torch.equal(history, expected_history),
        "gradients": max(float((found - exact).norm() / exact.norm()) for found, exact in pairs),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {kind: compared(kind) for kind in sys.argv[2:]}
    (Path(sys.argv[1]) / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
