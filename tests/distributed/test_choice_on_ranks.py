"""Ranks with sequences of other lengths decide alike which layers stay in high precision, and gather them alike."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_on_two_ranks


def test_ranks_decide_alike_under_fsdp2(tmp_path: Path) -> None:
    first, second = run_on_two_ranks("choice", str(tmp_path), folder=tmp_path)
    stages = [each.pop("stages")["slower"] for each in (first, second)]
    assert [[bool(reason) for reason in each] for each in stages] == [[True], [True, True]]
    for case, of_first in first.items():
        of_second = second[case]
        assert of_first["slower"] == of_second["slower"]
        assert of_first["fp8"] == of_second["fp8"] == ([3, 1] if "16" in case else [1, 1])
        assert [bool(reason) for reason in of_first["slower"]] == ["16" not in case, True]
        assert of_first["weights"] == of_second["weights"]
