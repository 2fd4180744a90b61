"""The suite ``monitor``: the cost of a run is that of its steps, reports and samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.tiers import thorough


@thorough
def test_a_dry_run_adds_up_the_cost_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["--dry-run", "--only", "monitor", "--json", str(tmp_path / "out.json")]) == 0
    entries = json.loads((tmp_path / "out.json").read_text())["suites"]["monitor"]
    for recipe in ("delayed", "tensorwise", "blockwise"):
        of_recipe = {each["by"].partition(", ")[2]: each for each in entries if each["name"].endswith(f", {recipe}")}
        kinds = ("without a monitor", "following", "sampled", "what if", "report")
        plain, following, sampled, what_if, report = (of_recipe[kind]["milliseconds"]["low"] for kind in kinds)
        more = 50 * following + (sampled - plain) + (what_if - sampled) / 10 + report
        run = of_recipe["a run"]
        assert 1 / run["over"]["without a monitor"] == pytest.approx(1 + more / 50 / plain, rel=1e-3)
        assert run["target"] == {"over without a monitor": 1 / 1.01}
    assert capsys.readouterr().out.count("every 50 steps") == 3
