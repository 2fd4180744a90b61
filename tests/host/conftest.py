"""A cache of kernels that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_kernels.host import cache_folder


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on disk and in memory."""
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_memory", {})
    yield tmp_path / "cache"
    cache_folder.warn_once.cache_clear()
