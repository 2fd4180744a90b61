"""Models without FP8 tensors have no amaxes to reduce."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.delayed import update


def test_a_step_of_a_model_without_slots_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FP8FabricPrecision("delayed", skip=["*"])
    plugin.convert_module(nn.Sequential(nn.Linear(64, 64)))
    (history,) = plugin.histories.values()
    assert not history.names
    compared, reduced = [], []
    monkeypatch.setattr(update, "are_several_ranks", lambda group=None: True)
    monkeypatch.setattr(update, "_compare_names", lambda histories, group: compared.append(histories))
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: reduced.append(args))
    update.reduce_and_update({history: plugin.recipe})
    assert compared == [[history]]  # other ranks may have slots
    assert not reduced
