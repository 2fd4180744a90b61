"""``examples/transformers_trainer.py`` runs, and resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import thorough

ROOT = Path(__file__).parents[2]

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")


@thorough
def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/transformers_trainer.py", "--steps", "4", "--output", str(tmp_path)]
    first, second = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for more in ([], ["--resume"])
    )
    assert "first step: 14 of 29 linear layers ran in FP8" in first
    assert "validation loss (delayed): 4." in first
    assert first.endswith("saved: Linear\n")
    assert "are loaded, after 4 updates" in second
