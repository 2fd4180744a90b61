"""The page of a record: its numbers are the record's, and names cannot leave their cells."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_fp8.cli.main import main
from lightning_fp8.monitor.record import Interval, Record, empty_values
from lightning_fp8.monitor.report.page import difference, page
from tests.monitor.recorded import baseline, record


class Page(HTMLParser):
    """The cells of its tables by row, its data, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.data = ""
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._in.append(f"{tag} {dict(attrs).get('id', '')}".strip())
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop().partition(" ")[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script data" in self._in:
            self.data += data
        elif "td" in self._in:
            self.rows[-1][-1] += data
        if not {"script", "style"} & {each.partition(" ")[0] for each in self._in}:
            self.text += data


def decoded(grid: dict[str, Any], columns: int) -> np.ndarray:
    cells = np.frombuffer(base64.b64decode(grid["cells"]), np.uint8).reshape(-1, columns).astype(float)
    values = grid["low"] + (cells - 1) / 254 * (grid["high"] - grid["low"])
    values = 10**values if grid["log"] else values
    return np.where(cells > 0, values, np.nan)


def test_pictures_have_the_numbers_of_the_record() -> None:
    run = record()
    data = json.loads(Page(page(run, baseline())).data)
    assert data["steps"] == [[50 * number + 1, 50 * number + 50] for number in range(6)]
    assert data["loss"][0]["points"] == [[50 * number + 50, 5.0 - number / 2] for number in range(6)]
    assert [each["label"] for each in data["loss"]] == ["FP8, delayed", "bf16-true"]
    assert data["events"] == [{"step": 121, "text": "outlier step: 5.0 bits"}]
    grids = {grid["title"]: grid for grid in data["grids"]}
    kinds = ("Clipped", "Flushed to zero", "Headroom")
    assert list(grids) == [f"{kind}: {role}" for kind in kinds for role in ("inputs", "weights", "gradients")]
    for offset, role in enumerate(("inputs", "weights", "gradients")):
        casts = slice(offset, None, 3)
        shares = np.stack([each["flushed"][casts] / 4000 for each in run.intervals], 1)
        np.testing.assert_allclose(decoded(grids[f"Flushed to zero: {role}"], 6), shares, rtol=0.03)
        room = np.stack([each["head_room"][casts] for each in run.intervals], 1)
        np.testing.assert_allclose(decoded(grids[f"Headroom: {role}"], 6), room, atol=0.04)
    clipped = decoded(grids["Clipped: inputs"], 6)
    assert clipped[0, 2] == pytest.approx(5, abs=0.02)
    assert np.isnan(clipped).sum() == 17
    lines = data["lines"]
    assert lines["names"] == run.names
    amax = decoded({**lines, "cells": lines["amax"], "log": False}, 6)
    expected = np.log2(np.stack([each["amax"] for each in run.intervals], 1))
    np.testing.assert_allclose(amax, expected, atol=(lines["high"] - lines["low"]) / 254)


def test_histograms_have_the_exponents_of_the_record() -> None:
    run = record()
    found = json.loads(Page(page(run)).data)["exponents"]
    shares = decoded(found, found["columns"])
    assert found["first"] == -48
    assert shares[0, 100 - 127 + 48] == pytest.approx(0.5, rel=0.03)  # zeros do not count
    assert shares[1, 120 - 127 + 48 : 130 - 127 + 48] == pytest.approx(0.1, rel=0.03)
    assert np.isfinite(shares).sum() == len(run.names) * 10 + 1
    # scale 448: half of the smallest code, 2**-10, and 464, divided by it; of E5M2 2**-17 and 61440
    assert found["range"][0] == pytest.approx([-10 - np.log2(448), np.log2(464 / 448)])
    assert found["range"][2] == pytest.approx([-17 - np.log2(448), np.log2(61440 / 448)])
    assert json.loads(Page(page(record(delayed=False))).data)["exponents"]["range"][0] is None
    assert json.loads(Page(page(baseline())).data)["exponents"] == {}


def test_tables_have_the_numbers_of_the_record() -> None:
    run = record()
    found = Page(page(run))
    rows = {row[0]: row for row in found.rows if row}
    worst = rows[run.names[0]]
    assert worst[1:4] == ["5.00", "121", "1"]
    shares = max(each["flushed"][0] / 4000 for each in run.intervals)
    assert worst[5:7] == [f"{shares:.3%}", "30.0"]
    assert next(row[0] for row in found.rows if row and row[0] in run.names) == run.names[0]  # the worst first
    assert rows["tensorwise"][1] == "2.500%"
    assert rows["rowwise"][1] == "0.625%"
    assert "The cheapest recipe without state within the budget is rowwise" in found.text
    assert "FP8: 300 steps, 9 quantized tensors, 2 alarms, worst clip 5.0 bits" in found.text


def test_names_cannot_leave_their_cells() -> None:
    text = page(record(), baseline())
    found = Page(text)
    assert "b" not in found.tags
    assert found.tags.count("script") == 2
    assert record().names[0] in [row[0] for row in found.rows if row]
    assert "c</script>" in found.text
    assert "a<b" in [row[0] for row in found.rows if row]


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page(record())
    assert not re.findall(r"(?:src|href)=\"(?!data:)[^#]", text)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}  # a name


def test_a_large_model_and_a_long_run_have_a_small_page() -> None:
    """A Llama of 32 blocks, 672 casts."""
    assert len(page(record(layers=224, intervals=256))) < 2**20


@pytest.mark.parametrize("run", [baseline(), Record([], []), record(intervals=0), record(delayed=False, alarm=False)])
def test_runs_that_lack_something_have_a_page(run: Record) -> None:
    found = Page(page(run))
    json.loads(found.data)
    assert "main" in found.tags


def test_numbers_that_are_not_finite_are_null() -> None:
    run = record()
    run.intervals[1].loss = float("nan")
    run.alarms[0]["first_step"] = 121
    data = Page(page(run)).data
    assert "NaN" not in data
    assert "Infinity" not in data
    assert len(json.loads(data)["loss"][0]["points"]) == 5


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record().save(tmp_path / "logs" / "fp8_monitor.npz")
    baseline().save(tmp_path / "bf16.npz")
    main(["report", str(tmp_path / "logs"), str(tmp_path / "bf16.npz")])
    text = (tmp_path / "logs" / "fp8_monitor.html").read_text()
    runs = [record(), baseline()]
    for run, path in zip(runs, (tmp_path / "logs" / "fp8_monitor.npz", tmp_path / "bf16.npz")):
        run.environment = {"record": str(path), **run.environment}
        assert f"<td>{path}</td>" in text
    assert text == page(*runs)
    assert f'<p class="about">record {runs[0].environment["record"]}, torch &lt;2&gt;</p>' in text
    assert "fp8_monitor.html" in capsys.readouterr().out
    main(["report", str(tmp_path / "logs" / "fp8_monitor.npz"), "-o", str(tmp_path / "other.html")])
    assert (tmp_path / "other.html").read_text() == page(runs[0])


def test_the_difference_of_two_losses_is_a_number() -> None:
    """Worked out by hand, for intervals of 50, 100 and 10 steps."""
    run, other = record(intervals=0), baseline(0)
    shared = ((50, 50, 5.0, 4.0), (150, 100, 3.0, 2.0), (160, 10, 2.0, 2.5), (170, 10, 9.0, np.nan))
    for last, steps, ours, theirs in shared:
        for each, loss in ((run, ours), (other, theirs)):
            each.add(Interval(last - steps + 1, last, loss, empty_values(len(each.names))))
    run.add(Interval(171, 175, 1.0, empty_values(len(run.names))))  # of which the other run has other steps
    other.add(Interval(171, 180, 1.0, empty_values(0)))
    rows = {row[0]: row[1:] for row in Page(difference(run, other)).rows if row}
    assert rows["last interval"] == ["-0.5000", "-20.00%", "2.0000", "2.5000", "151 to 160"]
    assert rows["last quarter"] == rows["last interval"]
    assert rows["all"] == ["+0.9062", "+34.12%", "3.5625", "2.6562", "1 to 160"]  # 570 / 160, 425 / 160
    assert "no interval of the same steps" in difference(run, baseline(0))
    negative = Page(difference(baseline(40), baseline(40))).rows[-1]
    assert negative[1:3] == ["+0.0000", ""]  # nothing is relative to a negative loss


def damaged(path: Path, change: Any) -> Path:
    """A record whose description and arrays are what ``change`` makes of them."""
    record().save(path)
    arrays = dict(np.load(path))
    described = json.loads(str(arrays.pop("description")))
    change(described, arrays)
    np.savez(path, description=np.array(json.dumps(described)), **arrays)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda described, arrays: described.pop("roles"), "its description lacks 'roles'"),
        (lambda described, arrays: described.pop("version"), "its description lacks 'version'"),
        (
            lambda described, arrays: described.update(names=3),
            r"its description\['names'\] is '3', of type int, not list",
        ),
        (lambda described, arrays: described["roles"].pop(), "it has 8 roles, not 9, as many as names"),
        (lambda described, arrays: described["fields"].remove("amax"), r"its fields lack \['amax'\]"),
        (lambda described, arrays: described["formats"].__setitem__(0, "E3M4"), "its formats have 'E3M4'"),
        (lambda described, arrays: arrays.pop("loss"), "it lacks the array 'loss'"),
        (lambda described, arrays: arrays.update(loss=np.array(["a"] * 6)), "its array 'loss' is <U1"),
        (lambda described, arrays: arrays["steps"].__imul__(-1), "it has an interval from step -1 to step -50"),
        (lambda described, arrays: described["alarms"][1].pop("cause"), r"alarms\[1\] lacks 'cause'"),
        (lambda described, arrays: described["layers"][0].update(shape=None), r"layers\[0\]\['shape'\] is 'None'"),
    ],
)
def test_a_damaged_record_is_a_sentence(change: Any, message: str, tmp_path: Path) -> None:
    path = damaged(tmp_path / "run.npz", change)
    with pytest.raises(SystemExit, match=f"run.npz .*: {message}"):
        main(["report", str(path)])
    assert [each.name for each in tmp_path.iterdir()] == ["run.npz"]


def test_a_list_in_place_of_the_description_is_a_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "run.npz", description=np.array("[1]"))
    with pytest.raises(SystemExit, match=r"its description is '\[1\]', of type list, not dict"):
        main(["report", str(tmp_path / "run.npz")])


def test_files_of_other_kinds_are_a_sentence(tmp_path: Path) -> None:
    record().save(tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    for content, message in ((b"", "it is empty"), (b'{"a": 1}', "is no .npz"), (whole[:-40], "its end is missing")):
        (tmp_path / "run.npz").write_bytes(content)
        with pytest.raises(SystemExit, match=f"run.npz is not a record of FP8Monitor: .*{message}"):
            main(["report", str(tmp_path / "run.npz")])


def test_no_page_replaces_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record().save(tmp_path / "run.npz")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    for out in (tmp_path / "folder", "."):
        with pytest.raises(SystemExit, match="it is a folder; name a file in it.*with -o"):
            main(["report", str(tmp_path / "run.npz"), "-o", str(out)])
    assert {each.name for each in tmp_path.rglob("*")} == {"run.npz", "folder"}


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    def refused(*args: object, message: str) -> None:
        with pytest.raises(SystemExit, match=message):
            main(["report", *map(str, args)])

    refused(tmp_path / "none", message="does not exist; pass the file of FP8Monitor")
    refused(tmp_path, message=r"has no fp8_monitor\*.npz; train with callbacks")
    for name in ("fp8_monitor.npz", "fp8_monitor-v1.npz"):
        record().save(tmp_path / name)
    refused(tmp_path, message="several records: fp8_monitor-v1.npz, fp8_monitor.npz")
    whole = tmp_path / "fp8_monitor.npz"
    before = whole.read_bytes()
    refused(whole, "-o", whole, message="fp8_monitor.npz is a record, which the page would replace")
    assert whole.read_bytes() == before
    (tmp_path / "text.npz").write_text("text")
    refused(tmp_path / "text.npz", message="not a record of FP8Monitor")
    refused(tmp_path / "fp8_monitor.npz", "-o", tmp_path / "none" / "page.html", message="cannot write .* with -o")
