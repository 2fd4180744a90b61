"""A kernel with a fault is refused by its proof, with the reason, and training goes on by what replaces it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from cuda_kernels.host import proofs
from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.ops import proving
from lightning_fp8.ops.cast import quantize_op
from tests.cuda_kernels.emulated import needs_compilers
from tests.proofs.emulated_card import BROKEN, CARD, emulated_card
from tests.tiers import thorough

pytestmark = needs_compilers

REASONS = {
    "wrong numbers": r"wrong results in its case 'small': data: \d+ of \d+ differ, first at \[0, 0\]",
    "a trap": r"EmulatorError in its case 'small': .*trap",
    "out of bounds": r"EmulatorError in its case 'small': .*out-of-bounds global write",
    "a hang": r"it was still running after 5 s \(with barriers that trap: RuntimeError in its case 'small': a barrier",
    "a crash": r"its process ended with SIGABRT",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the emulated card keeps its verdicts."""
    monkeypatch.delenv(proofs.VARIABLE, raising=False)
    return tmp_path


def verdicts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (folder / "proofs").glob("*.json")]


def processes(folder: Path) -> int:
    """How many processes proved kernels."""
    return len((folder / "log").read_text().split())


def losses(steps: int = 3) -> list[float]:
    """Of a small model's first steps with delayed scaling."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = torch.randn(24, 32), torch.randn(24, 16)
    found = []
    for _ in range(steps):
        with fp8_autocast(fp8_recipe="delayed"):
            loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@contextmanager
def on_kernels() -> Iterator[None]:
    """Casts of CPU tensors start kernels."""
    with patch.dict(quantize_op.implementations, cpu=quantize_op.implementations["cuda"]):
        yield


@pytest.mark.parametrize(
    "fault", [fault if fault == "wrong numbers" else pytest.param(fault, marks=thorough) for fault in REASONS]
)
def test_training_goes_on_without_a_faulty_kernel(
    fault: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "a hang":
        monkeypatch.setitem(proving.SECONDS, "starting", 5.0)
    expected = losses()
    with (
        on_kernels(),
        emulated_card(fault, folder) as emulator,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = losses()
        started = {kernel.name for kernel in emulator.launched}
    assert found == expected
    assert started
    assert not any(map(BROKEN.fullmatch, started))
    messages = [str(each.message) for each in caught if "does not run on" in str(each.message)]
    assert messages
    assert any(verdict["proven"] for verdict in verdicts(folder))
    broken = [verdict for verdict in verdicts(folder) if BROKEN.fullmatch(verdict["kernel"])]
    assert broken
    for verdict in broken:
        assert not verdict["proven"]
        assert re.search(REASONS[fault], verdict["reason"]), verdict["reason"]
    pattern = (
        rf"An FP8 kernel does not run on cpu: {BROKEN.pattern} is not used on {CARD.name} \(driver 1\.0\): .*; "
        r"repeat the test with lightning-fp8 doctor --prove\. Plain torch operations are used instead"
    )
    assert any(re.match(pattern, message, re.DOTALL) for message in messages), messages
    assert f"FP8 kernels are tested on {CARD}" in capfd.readouterr().err
    proving_processes = processes(folder)
    with on_kernels(), emulated_card(fault, folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert losses() == expected
    assert processes(folder) == proving_processes, "verdicts are kept"


@thorough
def test_right_kernels_are_proven_once(folder: Path) -> None:
    with on_kernels(), emulated_card("none", folder) as emulator:
        first = losses()
        assert emulator.launched
    assert processes(folder) == 1
    assert {verdict["proven"] for verdict in verdicts(folder)} == {True}
    with on_kernels(), emulated_card("none", folder) as emulator:
        assert losses() == first
        assert emulator.launched
    assert processes(folder) == 1
