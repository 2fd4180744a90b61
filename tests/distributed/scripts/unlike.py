"""Run by two processes: regions that only one of them enters, and models that differ.

``python -m tests.distributed.scripts.unlike FOLDER``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fp8 import DelayedScaling, Float8CurrentScaling, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.delayed.update import update
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.modules.state import fp8_modules
from tests.distributed.launch import leave

STEPS = 3
SHORT, LONG = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=8)


def converted(*names: str) -> nn.Sequential:
    model = nn.Sequential(OrderedDict((name, nn.Linear(16, 16)) for name in names))
    convert_module(model, first_last_layers_bf16=False)
    return model


def inputs(rank: int) -> torch.Tensor:
    """The largest value is 2 on rank 0 and 8 on rank 1."""
    return torch.linspace(-1, 1, 16 * 16).view(16, 16) * (2 if rank == 0 else 8)


def scale_of_input(model: nn.Module) -> list[float]:
    state = fp8_state_dict(model)
    return [scale for name, scale in zip(state["names"], state["scale"].tolist()) if name.endswith("input")]


def in_a_plugin_without_state(rank: int) -> dict[str, Any]:
    """As a plugin does it; only rank 0 runs the region of delayed scaling, and may not wait for rank 1."""
    model, stateless = converted("0"), Float8CurrentScaling()
    histories = [module.history for _, module in fp8_modules(model) if module.history is not None]
    for history in histories:
        history.plugin_recipe = stateless
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            with fp8_context(FP8Context(stateless)):
                if rank == 0:
                    with fp8_autocast(fp8_recipe=SHORT):
                        model(inputs(rank))
                else:
                    model(inputs(rank))
            update(histories)
    told = sum("each rank has its own scales" in str(warning.message) for warning in caught)
    return {"scale": scale_of_input(model), "told": told}


def without_a_plugin(rank: int) -> list[list[float]]:
    """A region inside has another recipe on rank 0: still one collective for both models, and the same scales."""
    models = [converted("0") for _ in range(2)]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.0)
    for _ in range(STEPS):
        with fp8_autocast(fp8_recipe=SHORT):
            if rank == 0:
                with fp8_autocast(fp8_recipe=LONG):
                    models[0](inputs(rank))
            else:
                models[0](inputs(rank))
            models[1](inputs(rank))
        optimizer.step()
    return [scale_of_input(model) for model in models]


def error_of(model: nn.Module, rank: int) -> str:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    try:
        with fp8_autocast(fp8_recipe=SHORT):
            model(inputs(rank))
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    names = {"names": [["first", "second"][rank]], "lengths": ["first", "second"][: 1 + rank], "alike": ["first"]}
    report = {
        "plugin": in_a_plugin_without_state(rank),
        "plain": without_a_plugin(rank),
        "errors": {case: error_of(converted(*own), rank) for case, own in names.items()},
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    assert "RANK" in os.environ
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
