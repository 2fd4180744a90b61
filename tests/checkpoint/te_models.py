"""Models of the shapes that Transformer Engine's checkpoints come from, and files for them."""

from __future__ import annotations

import multiprocessing
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fp8 import Linear, fp8_state_dict
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.numerics.scaled import ATTENTION_ROLES
from tests.checkpoint.te_writer import VERSIONS, Columns, write_all
from tests.small import Regression, fp8_trainer, regression_data

# Where Transformer Engine keeps each tensor: direction, and column among (input, weight, output) and (grad_output,
# grad_input) of each GEMM.
LINEAR = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
ATTENTION = {
    **{"qkv": ("fwd", 2), "o": ("fwd", 3), "s": ("fwd", 8)},
    **{"dqkv": ("bwd", 0), "do": ("bwd", 3), "dp": ("bwd", 5)},
}


class CoreAttention(FP8Module):
    """Attention's slots of a history, without attention."""

    roles = ATTENTION_ROLES

    def __init__(self) -> None:
        super().__init__()
        self.use_history(AmaxHistory(self.history_slots()))

    def forward(self, qkv: Tensor) -> Tensor:
        return qkv.chunk(3, -1)[2]


class MultiheadAttention(nn.Module):
    def __init__(self, linear: type[nn.Linear] = Linear) -> None:
        super().__init__()
        self.qkv = linear(16, 48)
        self.core_attention = CoreAttention()
        self.proj = linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.core_attention(self.qkv(x)))


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear] = Linear) -> None:
        super().__init__()
        self.self_attention = MultiheadAttention(linear)
        self.fc = linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.self_attention(x))


def blocks(linear: type[nn.Linear] = Linear, depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block(linear) for _ in range(depth)))


def random_columns(gemms: int, length: int, seed: int) -> Columns:
    """A run's state: no two values are equal, and the staging row is empty as it is between steps."""
    generator = torch.Generator().manual_seed(seed)
    columns: list[Tensor] = []
    for slots in (3 * gemms, 2 * gemms):
        amax_history = torch.rand(length, slots, generator=generator) + 0.5
        amax_history[0] = 0
        columns += [torch.rand(slots, generator=generator) * 100 + 2, amax_history]
    return columns[0], columns[1], columns[2], columns[3]


def te_files(specs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the versions named in ``specs`` would save; see ``tests.checkpoint.te_writer``."""
    writer = multiprocessing.get_context("fork").Process(target=write_all, args=(specs, folder / "files.pt"))
    writer.start()
    writer.join(120)
    assert writer.exitcode == 0
    return torch.load(folder / "files.pt", weights_only=True)


def spec(version: str, parameters: Mapping[str, Tensor], modules: list[str], length: int = 8) -> dict[str, Any]:
    """A file of ``version`` in which all ``modules`` have random states, of the GEMMs that their names say."""
    attention = [name for name in modules if name.endswith("core_attention")]
    gemms = {name: 3 if name in attention else 1 + name.endswith("mlp") for name in modules}
    states = {name: random_columns(gemms[name], length, seed) for seed, name in enumerate(modules, start=1)}
    return {"version": version, "parameters": dict(parameters), "states": states, "attention": attention}


def expected_rows(states: dict[str, Any], attention: bool = True) -> dict[str, tuple[float, Tensor]]:
    rows = {}
    in_two = {name: columns for name, columns in states.items() if name.endswith("mlp")}
    states = {name: columns for name, columns in states.items() if name not in in_two}
    for name, (scale, amax_history, scale_bwd, amax_history_bwd) in in_two.items():
        states[f"{name}.fc1"] = (scale[:3], amax_history[:, :3], scale_bwd[:2], amax_history_bwd[:, :2])
        states[f"{name}.fc2"] = (scale[3:], amax_history[:, 3:], scale_bwd[2:], amax_history_bwd[:, 2:])
    for name, columns in states.items():
        for role, (direction, column) in (ATTENTION if name.endswith("core_attention") else LINEAR).items():
            scale, amax_history = columns[:2] if direction == "fwd" else columns[2:]
            empty = name.endswith("core_attention") and not attention
            rows[f"{name}.{role}"] = (
                (0.0, torch.zeros(len(amax_history))) if empty else (scale[column], amax_history[:, column])
            )
    return rows


def assert_rows(model: nn.Module, rows: dict[str, tuple[float, Tensor]]) -> None:
    state = fp8_state_dict(model)
    assert set(state["names"]) == set(rows)
    for index, name in enumerate(state["names"]):
        scale, amax_history = rows[name]
        assert state["scale"][index] == scale, name
        assert torch.equal(state["amax_history"][:, index], amax_history), name


def lightning_checkpoints(folder: Path) -> dict[str, tuple[dict[str, Any], Path]]:
    """For every version what was saved, and a Lightning checkpoint as its plugin would make of ``Regression``."""
    L.seed_everything(1)
    trainer = fp8_trainer("delayed", max_epochs=1)
    trainer.fit(Regression(), regression_data())
    trainer.save_checkpoint(folder / "ours.pt")
    ours = torch.load(folder / "ours.pt", weights_only=True)
    del ours["FP8Precision"]
    linears = sorted({key.rpartition(".")[0] for key in ours["state_dict"]})
    specs = [spec(version, ours["state_dict"], linears) for version in VERSIONS]
    paths = {}
    for written, state_dict in zip(specs, te_files(specs, folder)):
        path = folder / f"{written['version']}.ckpt"
        torch.save({**ours, "state_dict": OrderedDict(state_dict)}, path)
        paths[written["version"]] = written, path
    return paths
