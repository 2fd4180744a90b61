"""What docs/cuda_graphs.md shows runs as it stands there, with a planted flag instead of a capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_fp8 import optimizer_steps
from lightning_fp8.modules.base import FP8Module
from tests.captures import capture
from tests.docs.given import Model, given
from tests.docs.pages import ROOT, blocks
from tests.tiers import thorough

PAGE = ROOT / "docs/cuda_graphs.md"


class Graph:
    """A graph that can be replayed, and does nothing."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "are_captured", False)
    adamw: Callable[..., Any] = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, capturable=False: adamw(parameters))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, *_: module)


@pytest.mark.usefixtures("card")
def test_a_step_is_captured_and_modules_are_graphed() -> None:
    names = given(PAGE)
    whole_step, modules, _ = blocks(PAGE, "python")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(whole_step.text, str(PAGE), "exec"), names)
    model = names["model"]
    assert isinstance(model, Model)
    assert names["graph"].replays == 4
    (history,) = {module.history for module in model.modules() if isinstance(module, FP8Module)}
    assert history is not None
    assert history.updates == 4
    assert optimizer_steps.are_captured
    head = model.head
    exec(compile(modules.text, str(PAGE), "exec"), names)
    assert model.head is head


@thorough
def test_a_trainer_compiles_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATOR=cpu", "MAX_STEPS=2", "LOGGER=False", "ENABLE_CHECKPOINTING=False"):
        monkeypatch.setenv(*f"PL_TRAINER_{name}".split("="))
    names = given(PAGE)
    exec(compile(blocks(PAGE, "python")[-1].text, str(PAGE), "exec"), names)
    assert names["model"].trainer.global_step == 2
