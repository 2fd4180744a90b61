"""Run by two processes: training in ``join()``, with more batches on rank 1 than on rank 0.

``python -m tests.distributed.scripts.joined FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import DelayedScaling, FP8FabricPrecision, convert_module, fp8_autocast, fp8_state_dict
from tests.distributed.launch import leave


def model(own_plugin: FP8FabricPrecision | None = None) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    if own_plugin is not None:
        return own_plugin.convert_module(made)
    return convert_module(made, first_last_layers_bf16=False)


def plugin(recipe: Any, weights_dtype: Any = torch.bfloat16) -> FP8FabricPrecision:
    return FP8FabricPrecision(recipe, weights_dtype=weights_dtype, first_last_layers_bf16=False)


def batches(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 64, generator=generator).bfloat16() for _ in range(number)]


def train(
    recipe: Any,
    how: str = "",
    numbers: tuple[int, int] = (2, 4),
    own_plugin: FP8FabricPrecision | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses and scales of this rank, or the error and in which iteration it was raised."""
    made = model(own_plugin)
    ddp = DistributedDataParallel(torch.compile(made, backend="aot_eager") if how == "compiled" else made)
    if how == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    context: AbstractContextManager[Any] = nullcontext()
    if how != "plain":
        context = Join([ddp, optimizer] if how == "zero" else [ddp], **options)
    losses: list[float] = []
    inputs = batches(dist.get_rank(), numbers[dist.get_rank()])

    @contextmanager
    def regions(inner: AbstractContextManager[Any]) -> Iterator[None]:
        """The region of a loop may be entered before ``join()``, too."""
        if how == "outside":
            with fp8_autocast(fp8_recipe=recipe), inner:
                yield
        else:
            with inner:
                yield

    try:
        with regions(context):
            for x in inputs:
                own = own_plugin.forward_context() if own_plugin is not None else fp8_autocast(fp8_recipe=recipe)
                with nullcontext() if how == "outside" else own:
                    loss = ddp(x.to(next(ddp.parameters()).dtype)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    except RuntimeError as error:
        return {"error": str(error), "iterations": len(losses)}
    scales = fp8_state_dict(made).get("scale", torch.zeros(0)) if own_plugin is None else torch.zeros(0)
    return {"error": "", "losses": losses, "scales": scales.tolist()}


def expected(recipe: str) -> list[list[float]]:
    """The losses of both ranks as one process has them: gradients are averages over the initial number of ranks."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    inputs = [batches(rank, number) for rank, number in enumerate((2, 4))]
    losses: list[list[float]] = [[], []]
    for step in range(4):
        for rank in (0, 1):
            if step < len(inputs[rank]):
                with fp8_autocast(fp8_recipe=recipe):
                    loss = made(inputs[rank][step]).float().square().mean()
                (loss / 2).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    of_ranks = {name: expected(name)[dist.get_rank()] for name in ("tensorwise", "mxfp8")}
    own = DelayedScaling(reduce_amax=False)
    report: dict[str, Any] = {
        "refused": {
            "uneven": train("delayed"),
            "even": train("delayed", numbers=(2, 2)),
            "outside": train("delayed", "outside"),
            "compiled": train("delayed", "compiled"),
            "zero": train("delayed", "zero"),
            "plugin": train("", own_plugin=plugin("delayed")),
        },
        "refused bfloat16": train("", own_plugin=plugin("tensorwise")),
        "works": {
            "tensorwise": train("tensorwise"),  # after regions of delayed scaling
            "mxfp8": train("mxfp8"),
            "zero": train("tensorwise", "zero"),
            "plugin": train("", own_plugin=plugin("tensorwise", torch.float32)),
            "own": train(own),
            "own zero": train(own, "zero"),
            "own plugin": train("", own_plugin=plugin(own, torch.float32)),
            "throws": train("delayed", numbers=(2, 2), throw_on_early_termination=True),
            "disabled": train("delayed", numbers=(2, 2), enable=False),
            "plain": train("delayed", "plain", numbers=(2, 2)),
        },
        "expected": of_ranks,
    }
    Path(sys.argv[1], f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
