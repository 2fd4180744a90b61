"""Run by two processes: FP8 layers split over both, computed once, recomputed, and recomputed from distributed inputs.

``python -m tests.distributed.scripts.recomputed FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import checkpoint, convert_module, fp8_autocast, fp8_state_dict
from tests.distributed.launch import leave
from tests.distributed.scripts.counted import Counted

BLOCKS, STEPS = 3, 3


class Sum(torch.autograd.Function):
    """Over ranks, of what each computes with its half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


class Copy(torch.autograd.Function):
    """To both halves, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        dx = dy.clone()
        dist.all_reduce(dx)
        return dx


class Tracker:
    """As Megatron's: a state of its own on each rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def get_states(self) -> dict[str, Tensor]:
        return {"model-parallel-rng": self.generator.get_state()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.generator.set_state(states["model-parallel-rng"])


class Block(nn.Module):
    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.tracker = tracker

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(Copy.apply(x)))
        h = h * (torch.rand(h.shape, generator=self.tracker.generator) > 0.1)
        return x + F.dropout(Sum.apply(self.down(h)), 0.1)


def called(block: nn.Module, y: Tensor, how: str, tracker: Tracker) -> Tensor:
    if how == "once":
        return block(y)  # type: ignore[no-any-return]
    if how == "nested":
        return checkpoint(lambda y: called(block, y, "distributed", tracker), y, get_rng_state_tracker=lambda: tracker)
    return checkpoint(
        block,
        y,
        get_rng_state_tracker=lambda: tracker,
        tp_group=dist.group.WORLD,
        distribute_saved_activations=how == "distributed",
    )


def backward_twice() -> list[bool]:
    """Whether a graph that is kept gives the gradients of one call, and what a second call of it adds."""
    tracker, found = Tracker(), []
    torch.manual_seed(dist.get_rank())
    block = Block(tracker)
    for how in ("once", "distributed"):
        torch.manual_seed(9)
        tracker.generator.manual_seed(1)
        x = torch.randn(16, 64).requires_grad_()
        loss = called(block, x, how, tracker).square().sum()
        found += [torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=retain) for retain in (True, False)]
    return [torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other)]


def run(how: str) -> dict[str, Any]:
    """Three steps; what they gave, what they kept, and how often they gathered."""
    tracker = Tracker()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(Block(tracker) for _ in range(BLOCKS)))
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    kept: list[int] = []
    gathers, values = [], []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.nbytes)
        return x

    for step in range(STEPS):
        torch.manual_seed(step)
        x = y = torch.randn(16, 64).requires_grad_()
        keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with Counted() as in_forward, keeping, fp8_autocast(fp8_recipe="delayed"):
            for block in model:
                y = called(block, y, how, tracker)
        loss = y.square().mean()
        with Counted() as in_backward:
            loss.backward()
        gathers.append([mode.found.get("all_gather", [0, 0]) for mode in (in_forward, in_backward)])
        optimizer.step()  # which updates the scales
        grads = [parameter.grad for parameter in model.parameters()]
        values += [each.double().tolist() for each in (y.detach(), x.grad, *grads) if each is not None]
        optimizer.zero_grad()
    values += [torch.rand(4, generator=tracker.generator).tolist(), torch.rand(4).tolist()]
    scales = fp8_state_dict(model)["scale"].tolist()
    return {"values": values, "scales": scales, "kept": sum(kept), "gathers": gathers}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    once, again, distributed, nested = (run(how) for how in ("once", "again", "distributed", "nested"))
    report = {
        "again": [again[key] == once[key] for key in ("values", "scales")],
        "distributed": [distributed[key] == once[key] for key in ("values", "scales")],
        "nested": [nested[key] == once[key] for key in ("values", "scales")],
        "twice": backward_twice(),
        "scales": once["scales"],
        "kept": [each["kept"] for each in (again, distributed)],
        "gathers": distributed["gathers"],
        "first": once["values"][0],
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()
