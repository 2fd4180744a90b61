"""Run by two processes: a loop of accelerate and a Trainer of transformers, on the CPU, and loops by hand.

``python -m tests.distributed.scripts.hf_accelerate FOLDER``, with RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* set. All
scripts of this folder are imported by one program, so this one imports accelerate where it needs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_fp8 import FP8State, convert_module, fp8_autocast, fp8_state_dict
from tests.distributed.launch import leave

STEPS = 4


def fingerprint(model: nn.Module) -> list[float]:
    """Sums that differ where a bit of a weight or of a scale does."""
    state = fp8_state_dict(model)
    tensors = [*model.state_dict().values(), state["scale"], state["amax_history"]]
    return [float(each.double().mul(torch.arange(each.numel()).view(each.shape) + 1).sum()) for each in tensors]


def by_accelerate(folder: Path) -> dict[str, Any]:
    """Four steps, and the last two again, from what was saved after two."""
    from accelerate import Accelerator

    from tests.hf_trainer.small import Tokens, llama

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")

    def prepared(seed: int) -> tuple[nn.Module, Any, nn.Module, DataLoader[Any]]:
        model = convert_module(llama(seed), recipe="delayed")
        accelerator.register_for_checkpointing(FP8State(model))
        wrapped, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Tokens(), batch_size=2)
        )
        return model, optimizer, wrapped.train(), loader

    model, optimizer, wrapped, loader = prepared(0)
    for step, batch in enumerate(loader):
        if step == 2:
            accelerator.save_state(str(folder / "saved"))
        if step == STEPS:
            break
        accelerator.backward(wrapped(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    again, optimizer, wrapped, loader = prepared(7)
    accelerator.load_state(str(folder / "saved"))
    for step, batch in enumerate(loader):
        if 2 <= step < STEPS:
            accelerator.backward(wrapped(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "accelerate": fingerprint(model),
        "accelerate resumed": fingerprint(again),
        "type": type(wrapped).__name__,
        "updates": fp8_state_dict(model)["updates"],
    }


def by_hand() -> list[float]:
    """The same in DistributedDataParallel, in a region."""
    from tests.hf_trainer.small import Tokens, llama

    model = convert_module(llama()).train()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, tokens = dist.get_rank(), Tokens().tokens
    for step in range(STEPS):
        batch = tokens[2 * (2 * step + rank) :][:2]
        with fp8_autocast(fp8_recipe="delayed"), torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(model)


def by_trainer(folder: Path) -> dict[str, Any]:
    from tests.hf_trainer.small import trainer

    trained = trainer(folder / "trainer")
    trained.train()
    resumed = trainer(folder / "trainer", seed=7)
    resumed.train(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-2"))
    return {"trainer": fingerprint(trained.model), "trainer resumed": fingerprint(resumed.model)}


def main(folder: str) -> None:
    reports = by_accelerate(Path(folder))
    reports["by hand"] = by_hand()
    reports |= by_trainer(Path(folder))
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(reports))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
