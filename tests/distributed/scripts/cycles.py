"""Run by two processes: a model in a reference cycle, which one rank's collector has found and the other's has not.

``python -m tests.distributed.scripts.cycles FOLDER``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_fp8 import Linear, fp8_autocast
from tests.distributed.launch import leave


def trained(features: int) -> int:
    model = Linear(features, features)
    model.owner = [model]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with fp8_autocast():
            loss = model(torch.randn(8, features)).sum()
        loss.backward()
        optimizer.step()
    assert model.history is not None
    return model.history.updates


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    gc.disable()
    first = [trained(16), trained(24)]
    if rank == 0:
        gc.collect()
    (folder / f"{rank}.json").write_text(json.dumps([*first, trained(32)]))
    leave()


if __name__ == "__main__":
    assert "RANK" in os.environ
    main(Path(sys.argv[1]))
