"""The first run on a card, rehearsed on the CPU: hangs, errors, what is missing, and a run that is broken off."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_run
from benchmarks.__main__ import _parser as benchmarks_parser
from benchmarks.first_run import Stage, Step, python, stages
from lightning_fp8.proofs.kinds import KINDS
from tests.cuda_kernels.emulated import builders, kernels_of, needs_compilers
from tests.cuda_kernels.run_case import CASES, fits
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
HANGS = """
import os, time
if os.environ.get("LIGHTNING_FP8_TRAP") == "1":
    raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED: 719")
print("waiting for a barrier", flush=True)
time.sleep(600)
"""
"""In place of a kernel that waits for ever, or traps if it was built so."""


def quick(name: str, code: str, limit: int = 60, **more: Any) -> Step:
    """A step that runs a line of Python."""
    return Step(name, python("-c", code), limit, **more)


def outcomes(document: dict[str, Any]) -> dict[str, str]:
    return {place: each["outcome"] for place, each in document["steps"].items()}


def one(step: Step, out: Path, **more: Any) -> dict[str, Any]:
    """What is known of a single step after a run."""
    document = first_run.run([Stage("stage", 600, [step])], out, 600, **more)
    told: dict[str, Any] = document["steps"][f"stage/{step.name}"]
    return told


# --- The plan ---------------------------------------------------------------------------------------------------------


def test_what_comes_first_fits_into_twelve_minutes(tmp_path: Path) -> None:
    planned = stages(tmp_path, False)
    assert sum(stage.limit for stage in planned if stage.first) <= first_run.BUDGET == 720
    assert [stage.first for stage in planned] == sorted((stage.first for stage in planned), reverse=True)
    for stage in planned:
        assert stage.limit <= 600
        assert all(step.limit <= stage.limit for step in stage.steps)
    names = [f"{stage.name}/{step.name}" for stage in planned for step in stage.steps]
    assert len(set(map(first_run._file_name, names))) == len(names)  # a log for each


def test_one_of_each_kernel_is_started_alone_the_simplest_first() -> None:
    assert tuple(KINDS) == first_run.KERNELS
    assert {*first_run.DRY_KERNELS, *first_run.CHANGED, *itertools.chain(*first_run.SANITIZED)} <= KINDS.keys()
    started = [{kernel.function.__name__ for kernel in kernels_of(CASES[name].run)} for name in first_run.KERNELS]
    assert set.union(*started) >= {name for name in builders() if not name.startswith("mma_attention")}
    assert started[0] == {"amax"}
    hopper = [kind.key[-1] for kind in KINDS.values() if kind.plan == "gemm" and len(kind.key[-1]) > 2]
    assert [tile[0] for tile in hopper] == sorted(tile[0] for tile in hopper)  # warpgroups


def test_cases_know_their_cards() -> None:
    names = "product, 2 warpgroups", "product, mma.sync", "observe-bf16", "attention forward, 96 channels"
    assert [fits(name, "90a") for name in names] == [True, False, True, True]
    assert [fits(name, "89") for name in names] == [False, True, True, True]
    assert [fits(name, "100") for name in names] == [False, False, True, False]


# --- Steps ------------------------------------------------------------------------------------------------------------


def test_what_becomes_of_a_step(tmp_path: Path) -> None:
    assert one(quick("right", "print('right')"), tmp_path)["outcome"] == "ok"
    wrong = one(quick("wrong", "import sys; print('x: right'); raise ValueError('3 of 7 differ')"), tmp_path)
    assert (wrong["outcome"], wrong["said"]) == ("failed", "ValueError: 3 of 7 differ")
    assert "Traceback" in (tmp_path / wrong["log"]).read_text()
    crashed = one(quick("crashed", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), tmp_path)
    assert crashed["outcome"] == "failed"
    assert crashed["said"].startswith("ended by SIGSEGV")
    assert one(quick("other card", "raise SystemExit(77)"), tmp_path)["outcome"] == "not for this card"
    missing = one(Step("tool", ["no-such-profiler"], 60), tmp_path)
    assert (missing["outcome"], missing["said"]) == ("missing", "no-such-profiler is not on PATH")
    assert (
        one(quick("variable", "import os; assert os.environ['WISH'] == 'x'", variables={"WISH": "x"}), tmp_path)[
            "outcome"
        ]
        == "ok"
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return state != "Z"


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_hang_is_ended_with_its_children_and_leaves_its_stack(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
def waits_for_ever():
    time.sleep(600)
waits_for_ever()
"""
    told = one(quick("hangs", code, limit=5), tmp_path)
    log = (tmp_path / told["log"]).read_text()
    assert (told["outcome"], told["said"]) == ("hung", "still running after 5 s")
    assert "in waits_for_ever" in log
    (child,) = (int(line.split()[1]) for line in log.splitlines() if re.match(r"child \d", line))
    assert eventually(lambda: not alive(child))


def test_a_kernel_that_hangs_is_tried_with_traps(tmp_path: Path) -> None:
    told = one(quick("kernel", HANGS, limit=5, traps=True), tmp_path)
    assert told["outcome"] == "hung"
    assert "with traps: failed, RuntimeError: CUDA_ERROR_LAUNCH_FAILED: 719" in told["said"]
    assert "719" in (tmp_path / "logs" / "stage-kernel.traps.log").read_text()


def test_steps_of_a_stage_run_at_the_same_time(tmp_path: Path) -> None:
    meet = """
import sys, time
from pathlib import Path
folder, own, other = Path(sys.argv[1]), *sys.argv[2:]
(folder / own).touch()
while not (folder / other).exists():
    time.sleep(0.05)
"""
    steps = [Step(own, python("-c", meet, str(tmp_path), own, other), 60) for own, other in ("ab", "ba")]
    document = first_run.run([Stage("meeting", 600, steps, at_once=2)], tmp_path, 600)
    assert outcomes(document) == {"meeting/a": "ok", "meeting/b": "ok"}


def test_what_would_hang_too_is_left_out(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    kernels = Stage("kernels", 600, [quick("product, one", HANGS, limit=2), quick("amax", "pass")])
    writes = f"open({str(marker)!r}, 'w')"
    after = Stage("after", 600, [quick("products", writes, unless_hung="kernels/product"), quick("casts", "pass")])
    document = first_run.run([kernels, after], tmp_path, 600)
    assert outcomes(document) == {
        "kernels/product, one": "hung", "kernels/amax": "ok", "after/products": "left out", "after/casts": "ok",
    }  # fmt: skip
    assert not marker.exists()
    mended = Stage("kernels", 600, [quick("product, one", "pass")])
    first_run.run([mended], tmp_path, 600, again=True)
    assert outcomes(first_run.run([kernels, after], tmp_path, 600))["after/products"] == "ok"


def test_a_step_whose_file_is_not_there_waits_for_it(tmp_path: Path) -> None:
    needs = tmp_path / "products.json"
    step = quick("choose", "pass", needs=needs)
    assert one(step, tmp_path)["said"] == "products.json does not exist"
    needs.touch()
    assert one(step, tmp_path)["outcome"] == "ok"


# --- Calls ------------------------------------------------------------------------------------------------------------


def noting(folder: Path, name: str) -> str:
    return f"open({str(folder / name)!r}, 'a').write('ran\\n')"


def counting(folder: Path, name: str, **more: Any) -> Step:
    """A step that leaves a line for each time it ran."""
    return quick(name, noting(folder, name), **more)


def runs(folder: Path, *names: str) -> list[int]:
    return [len((folder / name).read_text().splitlines()) if (folder / name).exists() else 0 for name in names]


def test_what_is_done_is_not_repeated_unless_it_is_asked_for(tmp_path: Path) -> None:
    planned = [Stage("a", 600, [counting(tmp_path, "one")]), Stage("b", 600, [counting(tmp_path, "two")])]
    first_run.run(planned[:1], tmp_path, 600)
    first_run.run(planned, tmp_path, 600)
    assert runs(tmp_path, "one", "two") == [1, 1]
    first_run.run(planned[1:], tmp_path, 600, again=True)
    assert runs(tmp_path, "one", "two") == [1, 2]


def test_what_does_not_fit_waits_for_the_next_call(tmp_path: Path) -> None:
    planned = [Stage("a", 100, [counting(tmp_path, "one", limit=60), counting(tmp_path, "long", limit=120)]),
               Stage("b", 600, [counting(tmp_path, "two", limit=200)])]  # fmt: skip
    document = first_run.run(planned, tmp_path, seconds=100)
    assert outcomes(document) == {"a/one": "ok", "a/long": "waiting", "b/two": "waiting"}
    assert "2 steps are not done, a/long first" in (tmp_path / "report.md").read_text()
    first_run.run([Stage("a", 200, planned[0].steps), planned[1]], tmp_path, seconds=600)
    assert runs(tmp_path, "one", "long", "two") == [1, 1, 1]


BROKEN_OFF = """
import sys
from pathlib import Path
from benchmarks import first_run
out, *codes = sys.argv[1:]
steps = [first_run.Step(name, [sys.executable, "-c", code], 300) for name, code in zip(("one", "two", "three"), codes)]
first_run.stages = lambda out, dry: [first_run.Stage("a", 1000, steps)]
first_run.main(["--out", out])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_broken_off_leaves_whole_files_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "logs" / "a-two.log"
    codes = noting(tmp_path, "one"), "import os, time; print(os.getpid(), flush=True); time.sleep(600)", "pass"
    process = subprocess.Popen([sys.executable, "-c", BROKEN_OFF, str(tmp_path), *codes], cwd=ROOT)
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n") and log.read_text().count("\n") > 1)
    child = int(log.read_text().splitlines()[-1])
    process.send_signal(number)
    process.wait(60)
    known = json.loads((tmp_path / "first_run.json").read_text())
    assert outcomes(known) == {"a/one": "ok", "a/two": "waiting", "a/three": "waiting"}
    assert "| a/two | **waiting** |" in (tmp_path / "report.md").read_text()
    if number == signal.SIGTERM:
        assert eventually(lambda: not alive(child))  # the step that ran was ended too
    else:
        os.kill(child, signal.SIGKILL)
    codes = noting(tmp_path, "one"), noting(tmp_path, "two"), noting(tmp_path, "three")
    subprocess.run([sys.executable, "-c", BROKEN_OFF, str(tmp_path), *codes], cwd=ROOT, check=True)
    assert set(outcomes(json.loads((tmp_path / "first_run.json").read_text())).values()) == {"ok"}
    assert runs(tmp_path, "one", "two", "three") == [1, 1, 1]


def test_stages_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="unknown stages: kernel; stages are changed, models, graphs"):
        first_run.main(["--out", str(tmp_path), "--stages", "kernel"])


def test_a_rehearsal_is_not_taken_for_a_run(tmp_path: Path) -> None:
    first_run.run([Stage("a", 600, [counting(tmp_path, "one")])], tmp_path, 600, dry=True)
    with pytest.raises(SystemExit, match="holds a dry run; use another --out"):
        first_run.main(["--out", str(tmp_path)])


def test_nothing_is_imported_that_may_fail() -> None:
    code = """
import sys, benchmarks.first_run
print({"torch", "numba", "lightning_fp8", "cuda_kernels"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- The rehearsal ----------------------------------------------------------------------------------------------------

TOOL = """#!{python}
import os, sys
command = sys.argv[sys.argv.index({python!r}):]
print("stands in for", sys.argv[0], flush=True)
os.execv(command[0], command)
"""


@pytest.mark.parametrize("dry", [False, True])
def test_every_command_is_one_that_its_program_takes(dry: bool, tmp_path: Path) -> None:
    for step in (step for stage in stages(tmp_path, dry) for step in stage.steps):
        if step.command[1:3] == ["-m", "benchmarks"]:
            given = benchmarks_parser().parse_args(step.command[3:])
            assert given.command == "choose" or (given.dry_run == dry and given.json.parent == tmp_path)
        elif step.command[1:3] == ["-m", "pytest"]:
            assert (ROOT / step.command[-1]).is_file()


@thorough
@needs_compilers
def test_the_whole_run_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is run, but for suites and tests of one kind: with emulated kernels, tiny tensors and tools that only
    run what they are given; one of the kernels hangs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("compute-sanitizer", "ncu"):
        (tools / name).write_text(TOOL.format(python=sys.executable))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "out"

    def rehearsed(stage: Stage) -> Stage:
        steps = [replace(step, limit=600) for step in stage.steps]
        if stage.name == "compile":
            steps = [replace(step, command=step.command[:-2]) for step in steps]  # one kernel of three
        if stage.name == "kernels":
            steps[1] = replace(steps[1], command=python("-c", HANGS), limit=5)
        # test_a_dry_run_walks_everything runs suites
        if stage.name in ("models", "sizes", "hardware", "casts", "products", "experts", "attention", "host"):
            steps = [replace(step, command=python("-c", "")) for step in steps]
        if stage.name == "tests":
            steps[1:] = [replace(step, command=python("-c", "")) for step in steps[1:]]
        return Stage(stage.name, 3000, steps, stage.at_once)

    document = first_run.run([rehearsed(stage) for stage in stages(out, True)], out, 3000, dry=True)
    found = outcomes(document)
    assert found.pop("doctor/doctor") in ("ok", "failed")  # as it finds this machine
    assert found == {
        "compile/compile": "ok",
        "kernels/amax": "ok",
        "kernels/product, 1 warpgroup": "hung",
        "kernels/product, 2 warpgroups": "ok",
        "tests/casts": "ok",  # skipped: there is no card
        "tests/products": "left out",
        "tests/attention": "ok",
        "sanitizer/memcheck, amax": "ok",
        "sanitizer/memcheck, product, 2 warpgroups": "left out",
        "casts/casts": "ok",
        "experts/experts": "left out",
        "products/products": "left out",
        "attention/attention": "ok",
        "models/models": "ok",
        "graphs/graphs": "ok",  # skipped: there is no card
        "sizes/sizes": "ok",
        "hardware/hardware": "ok",
        "host/host": "ok",
        "choose/choose": "left out",
        "ncu/cast": "ok",
        "ncu/fprop": "left out",
    }
    assert "with traps: failed, RuntimeError: CUDA_ERROR_LAUNCH_FAILED: 719" in (out / "report.md").read_text()
    assert "stands in for" in (out / "logs" / "sanitizer-memcheck-amax.log").read_text()

    # The kernel is mended: what was left out is made up for.
    mended = [stage for stage in stages(out, True) if stage.name in ("kernels", "products", "choose")]
    mended = [Stage(stage.name, 3000, [replace(step, limit=600) for step in stage.steps]) for stage in mended]
    first_run.run([mended[0]._replace(steps=mended[0].steps[1:2])], out, 3000, again=True, dry=True)
    document = first_run.run(mended, out, 3000, dry=True)
    found = outcomes(document)
    assert {found["kernels/product, 1 warpgroup"], found["products/products"]} == {"ok"}
    results = json.loads((out / "products.json").read_text())
    assert not results["errors"]
    assert all(results["suites"].values())
    assert found["choose/choose"] == "failed"
    assert "no product that was timed on a GPU" in document["steps"]["choose/choose"]["said"]
