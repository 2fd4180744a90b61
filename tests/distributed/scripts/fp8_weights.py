"""Run by two processes: FP8 weights under DDP against one process, and under ``fully_shard``.

``python -m tests.distributed.scripts.fp8_weights FOLDER``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import (
    Float8CurrentScaling,
    Linear,
    convert_module,
    fp8_autocast,
    fp8_model_init,
    with_master_weights,
)
from tests.convert.codes.made import chain, copied, same_bits
from tests.distributed.launch import leave

RECIPE = Float8CurrentScaling(power_2_scale=True)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with fp8_model_init(preserve_high_precision_init_val=True):
        return nn.Sequential(Linear(32, 64), nn.GELU(), Linear(64, 32))


def train(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = with_master_weights(torch.optim.AdamW(net.parameters(), 1e-3))
    for x in batches:
        optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=RECIPE):
            y = net(x)
        F.mse_loss(y, x.roll(1, 1)).backward()
        optimizer.step()
    return list(net.state_dict().values())


def ddp(rank: int) -> dict[str, Any]:
    batches = [torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    net = DistributedDataParallel(model(seed=0))
    trained = train(net, [batch[rank] for batch in batches])
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, [value.tolist() for value in trained])
    alone = train(model(seed=0), [batch.reshape(-1, 32) for batch in batches])
    largest = max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(trained, alone))
    other = DistributedDataParallel(model(seed=rank))  # rank 0's weights are broadcast
    of_0 = model(seed=0).state_dict().values()
    return {
        "alike": everywhere[0] == everywhere[1],
        "difference": largest,
        "broadcast": all(torch.equal(ours, theirs) for ours, theirs in zip(other.state_dict().values(), of_0)),
    }


def coded() -> bool:
    """Whether DDP leaves the codes of a checkpoint as they are, when it broadcasts them and in a step."""
    net = chain()
    before = {name: each for name, each in copied(net.state_dict()).items() if name[0] in "12" and "weight" in name}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        net = DistributedDataParallel(convert_module(net))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with fp8_autocast(fp8_recipe="blockwise"):
        net(torch.randn(4, 128, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    after = net.module.state_dict()
    return same_bits({name: after[name] for name in before}, before)


def sharded() -> str:
    try:
        fully_shard(model(seed=0))
    except NotImplementedError as error:
        return str(error)
    return ""


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    report = {**ddp(rank), "coded": coded(), "sharded": sharded()}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main()
