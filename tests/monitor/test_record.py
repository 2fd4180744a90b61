"""The record of a run: merging, ranks, and its file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_fp8.monitor.record import (
    FIELDS,
    INDEX,
    MOST_INTERVALS,
    Interval,
    Record,
    empty_values,
    merged,
    of_ranks,
)
from tests.monitor.recorded import record as recorded


def figures(**values: float) -> np.ndarray:
    found = empty_values(1)
    for name, value in values.items():
        found[0, INDEX[name]] = value
    return found


FIRST = figures(
    updates=3, clipped_steps=1, clipped_bits=2.0, clipped_at=7, head_room=-2.0, amax=5.0, scale=1.0, window=9.0,
    elements=10, flushed=1, signal=4.0,
)  # fmt: skip
SECOND = figures(
    updates=4, clipped_steps=2, clipped_bits=1.0, clipped_at=12, head_room=0.5, amax=2.0, scale=3.0,
    elements=20, flushed=2, signal=5.0,
)  # fmt: skip


def test_intervals_merge() -> None:
    both = merged([Interval(1, 3, 2.0, FIRST), Interval(4, 4, 6.0, SECOND)])
    assert (both.first_step, both.last_step, both.loss) == (1, 4, 3.0)
    expected = figures(updates=7, clipped_steps=3, clipped_bits=2.0, clipped_at=7, head_room=-2.0, amax=5.0, scale=3.0,
                       window=9.0, elements=30, flushed=3, signal=9.0)  # fmt: skip
    np.testing.assert_array_equal(both.values, expected)


def test_ranks_add_what_they_sampled_and_count_steps_once() -> None:
    values = of_ranks([FIRST, SECOND])
    found = {
        name: values[0, INDEX[name]] for name in ("updates", "clipped_steps", "clipped_bits", "elements", "flushed")
    }
    assert found == {"updates": 4, "clipped_steps": 2, "clipped_bits": 2.0, "elements": 30, "flushed": 3}


def test_a_long_run_keeps_few_intervals() -> None:
    record = Record(["a.input"], ["input"])
    number = 5 * MOST_INTERVALS
    for index in range(number):
        record.add(Interval(10 * index + 1, 10 * index + 10, float(index), figures(updates=10, amax=float(index))))
    assert len(record.intervals) <= MOST_INTERVALS
    assert record.num_steps == 10 * number
    steps = [(each.first_step, each.last_step) for each in record.intervals]
    assert all(one[1] + 1 == two[0] for one, two in zip(steps, steps[1:]))
    total = record.total()
    assert total["updates"].tolist() == [10 * number]
    assert total["amax"].tolist() == [number - 1]
    assert total.loss == pytest.approx((number - 1) / 2)


def test_a_record_is_saved_and_loaded(tmp_path: Path) -> None:
    record = Record(
        ["a.input", "b.input"],
        ["input"] * 2,
        "delayed",
        "DelayedScaling()",
        environment={"torch": "2"},
        formats=["E4M3"] * 2,
    )
    record.add(Interval(1, 50, 2.5, np.concatenate([FIRST, SECOND])))
    record.losses += 3
    record.exponents[1, 7] = 4
    record.alarms = [{"rule": "clips", "layers": ["a"]}]
    path = tmp_path / "new" / "run.npz"
    record.save(path)
    loaded = Record.load(path)
    for name in ("names", "roles", "recipe", "recipe_fields", "recipes", "alarms", "environment", "formats"):
        assert getattr(loaded, name) == getattr(record, name), name
    np.testing.assert_array_equal(loaded.losses, record.losses)
    np.testing.assert_array_equal(loaded.exponents, record.exponents)
    np.testing.assert_array_equal(loaded.intervals[0].values, record.intervals[0].values)
    assert (loaded.intervals[0].first_step, loaded.intervals[0].last_step, loaded.intervals[0].loss) == (1, 50, 2.5)
    assert [each.name for each in path.parent.iterdir()] == ["run.npz"]  # nothing half-written beside it


def test_a_record_without_intervals_and_casts_is_saved(tmp_path: Path) -> None:
    Record([], []).save(tmp_path / "run.npz")
    loaded = Record.load(tmp_path / "run.npz")
    assert loaded.names == loaded.intervals == []
    with pytest.raises(ValueError, match="no interval"):
        loaded.total()


def test_files_that_are_no_records_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('a pickle was executed')",)

    evil = tmp_path / "evil.npz"
    np.savez(evil, description=np.array([Evil()], dtype=object))
    pickled = tmp_path / "pickled.npz"
    pickled.write_bytes(pickle.dumps(Evil()))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros(3))
    text = tmp_path / "text.npz"
    text.write_text("loss,step")
    short, torn = tmp_path / "short.npz", tmp_path / "torn.npz"
    sound = recorded()
    sound.losses = sound.losses[:2]
    sound.save(short)
    recorded().save(torn)
    data = bytearray(torn.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 99  # the method of compression
    torn.write_bytes(data)
    for path in (evil, pickled, other, text, short, torn):
        with pytest.raises(ValueError, match="not a record of FP8Monitor"):
            Record.load(path)
    with pytest.raises(FileNotFoundError):
        Record.load(tmp_path / "none.npz")


def test_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.monitor.record.VERSION", 2)
    Record([], []).save(tmp_path / "run.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2.*update this one"):
        Record.load(tmp_path / "run.npz")


def test_figures_have_names() -> None:
    assert len(set(FIELDS)) == len(FIELDS)
    interval = Interval(
        1, 1, 1.0, figures(elements=10, zeros=2, nonfinite=1, flushed=1, clipped=5, signal=100, noise=1)
    )
    assert interval.flushed_share.tolist() == [1 / 7]
    assert interval.decibels.tolist() == [20.0]
    assert np.isnan(Interval(1, 1, 1.0, figures()).flushed_share).all()
