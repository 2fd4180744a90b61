"""No other test compiled before."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a shape that another test compiled are left out of the count."""
    monkeypatch.setattr("lightning_fp8.traced._traced", set())
