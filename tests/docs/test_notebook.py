"""The notebook in examples/ runs cell by cell, and is committed without outputs."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from tests.docs.pages import ROOT, anchors
from tests.tiers import thorough

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells(kind: str) -> list[tuple[int, str]]:
    """The numbers, from 0, and the texts of the notebook's cells of one kind, ``"code"`` or ``"markdown"``."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [(number, "".join(cell["source"])) for number, cell in enumerate(found) if cell["cell_type"] == kind]


def test_it_has_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_its_links_lead_somewhere() -> None:
    targets = [each for _, text in cells("markdown") for each in re.findall(r"\]\(([^()\s]+)\)", text)]
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        page = (NOTEBOOK.parent / path).resolve()
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page), target


@pytest.fixture
def as_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports find the modules of the notebook's folder. What the cells set in the process is put back."""
    pyplot.switch_backend("agg")
    monkeypatch.syspath_prepend(NOTEBOOK.parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)
    pyplot.close("all")


@thorough
def test_it_runs(as_jupyter: None, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, text in cells("code"):
        exec(compile(text, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "10 of 21 linear layers ran in FP8" in printed
    assert "60 steps after resuming: the same losses and weights" in printed
    drawn = [list(line.get_ydata()) for line in names["figure"].axes[0].lines]
    assert [len(each) for each in drawn] == [120, 120]
    for losses in drawn:  # from that of equal probabilities for 256 bytes
        assert 5.3 < losses[0] < 5.8
        assert sum(losses[-20:]) / 20 < 3.2
    assert drawn[0] != drawn[1]
