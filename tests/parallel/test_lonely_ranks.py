"""A rank that ends while others train: they end, too, with an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_on_ranks
from tests.distributed.scripts.lonely import RANKS


@pytest.mark.parametrize("strategy", RANKS)
def test_the_others_end_with_an_error(strategy: str, tmp_path: Path) -> None:
    *others, _ = run_on_ranks("lonely", str(tmp_path), strategy, folder=tmp_path, ranks=RANKS[strategy])
    for report in others:
        assert report["error"]
        assert report["seconds"] < 60
