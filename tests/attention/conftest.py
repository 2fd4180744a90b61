from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lightning_fp8.convert.attention_calls import attach


@pytest.fixture
def no_other_models() -> None:
    """Those of other tests that still live would be attached by the next ``fp8_autocast`` with ``fp8_dpa``."""
    gc.collect()
    for model in list(attach._prepared):
        attach.detach(model)
        del attach._prepared[model]


@pytest.fixture
def nothing_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Dynamo compiled for other tests, and which attentions it traced, counts neither here nor there."""
    monkeypatch.setattr("lightning_fp8.traced._traced", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
