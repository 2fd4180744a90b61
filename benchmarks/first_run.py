"""Twelve minutes on a GPU, in one command: what works, what hangs, how fast a step is, and what to do next.

    python -m benchmarks.first_run --out first_run                     # twelve minutes; repeat to continue after a stop
    python -m benchmarks.first_run --out first_run --seconds 2400      # everything, also what is not in the twelve
    python -m benchmarks.first_run --out first_run --stages kernels --again
    python -m benchmarks.first_run --out first_run --dry-run           # on the CPU: emulated kernels, tiny tensors

Every step is a process with a time limit. A step that hangs is killed and recorded; if it launches a kernel, it is
tried once more with barriers that trap instead of waiting forever. ``first_run.json`` and ``report.md`` are rewritten
atomically after each step, and each suite writes its results as they come. Nothing that a step needs is imported here,
so that a failing import fails only the step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.first_report import FINE, LEFT_OUT, NOT_DONE, WAITING, report
from benchmarks.measuring.files import write, write_text

ROOT = Path(__file__).parent.parent
BUDGET = 720
"""Seconds for the stages that are :attr:`Stage.first`, with kernels that were compiled elsewhere."""
NOT_FOR_THIS_CARD = 77
TRAPS = {"LIGHTNING_FP8_TRAP": "1"}
"""Makes kernels' barriers trap after some time, so that a hang becomes an error of the driver."""
_RUNNING: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Step:
    """A command and its limit in seconds.

    Attributes:
        name: unique in its stage.
        command: to run.
        limit: seconds.
        variables: additional environment variables.
        traps: whether to try again with :data:`TRAPS` if it hangs.
        unless_hung: skip this step if a step hung whose ``stage/name`` starts with this.
        needs: a file written by another step.
    """

    name: str
    command: Sequence[str]
    limit: int
    variables: Mapping[str, str] = field(default_factory=dict)
    traps: bool = False
    unless_hung: str | None = None
    needs: Path | None = None


class Stage(NamedTuple):
    """Steps that may take ``limit`` seconds together; steps that do not fit are left to the next call.

    ``at_once`` steps run at the same time: more than one where nothing is timed. Stages that are ``first`` fit into
    :data:`BUDGET` together; the report names those that did not run.
    """

    name: str
    limit: int
    steps: Sequence[Step]
    at_once: int = 1
    first: bool = False


# --- Steps ------------------------------------------------------------------------------------------------------------

KERNELS = (
    "amax",
    "quantize",
    "quantize, own scale",
    "quantize ragged rows",
    "quantize rows",
    "quantize 1x128",
    "quantize 128x128",
    "quantize 1x32",
    "quantize experts",
    "quantize experts' rows",
    "quantize by columns' scales",
    "transpose",
    "transpose experts",
    "update_scales",
    "normalize",
    "normalize, transposed",
    "statistics",
    "statistics of long rows",
    "RMSNorm",
    "norm backward",
    "norm backward of long rows",
    "SwiGLU",
    "SwiGLU backward",
    "gated",
    "gated backward",
    "product, 1 warpgroup",
    "product, stored from registers",
    "product, 2 warpgroups",
    "product, 128 × 192",
    "product of rows",
    "product, added",
    "product, 1x128 by 128x128",
    "product, 1x128 by 1x128",
    "product of groups",
    "product of groups, 1x128 by 128x128",
    "product, mma.sync",
    "product of rows, mma.sync",
    "product, 1x128 by 128x128, mma.sync",
    "product, 1x128 by 1x128, mma.sync",
    "attention's cast",
    "attention forward, 64 channels",
    "attention backward, 64 channels",
    "attention forward, 128 channels",
    "attention backward, 128 channels",
    "attention forward, 96 channels",
    "attention backward, 96 channels",
    "attention forward, 256 channels",
    "attention backward, 256 channels",
    "attention over codes",
)
"""The kinds of ``lightning_fp8/proofs/kinds.py``, also run by ``lightning-fp8 doctor --prove``; simple ones come first,
so that the first to hang is the most informative."""
CHANGED = (
    "quantize experts",
    "quantize experts' rows",
    "transpose experts",
    "product, 2 warpgroups",
    "product of groups",
    "product of groups, 1x128 by 128x128",
    "product, 128 × 192",
    "RMSNorm",
    "norm backward",
    "gated backward",
    "attention backward, 128 channels",
    "attention backward, 64 channels",
    "attention backward, 256 channels",
)
"""Kinds that changed since kernels last ran on a GPU: they come first."""
DRY_KERNELS = ("amax", "product, 1 warpgroup", "product, 2 warpgroups")
PRODUCTS, ATTENTION = "kernels/product", "kernels/attention"
SANITIZED = (
    ("amax", "quantize", "quantize 1x128", "normalize"),
    ("product, 2 warpgroups",),
    ("attention forward, 128 channels", "attention backward, 128 channels"),
)
TOOLS = "memcheck", "racecheck", "synccheck"
PROFILED = {
    "cast": "quantize", "cast + transposed + amax": "quantize", "1x128 + transposed": "quantize",
    "fprop": "gemm", "fprop blockwise": "gemm",
    "attention forward": "attention_forward", "attention dQ": "attention_dq", "attention dK and dV": "attention_dkv",
}  # fmt: skip
"""What ncu profiles, and a substring of its kernel's name."""


def stages(out: Path, dry: bool) -> list[Stage]:
    """All stages, with results in ``out``; ``dry``: the same on the CPU, in minutes."""
    dry_run, emulated = (["--dry-run"], ["--emulated"]) if dry else ([], [])
    kernels = [name for name in KERNELS if name in DRY_KERNELS or not dry]
    profiles = {name: kernel for name, kernel in PROFILED.items() if name in ("cast", "fprop") or not dry}
    processors = os.cpu_count() or 1
    at_once = 1 if dry else max(1, min(8, processors // 2))
    few_threads = {} if dry else {"OMP_NUM_THREADS": str(max(1, processors // at_once))}
    workers = "0" if dry else str(max(1, min(8, processors // 3)))

    def suite(name: str, limit: int, **more: Any) -> Step:
        command = python("-m", "benchmarks", "--only", name, "--json", str(out / f"{name}.json"), *dry_run)
        return Step(name, command, limit, **more)

    def sanitized(tool: str, names: Sequence[str], **more: Any) -> Step:
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7"]
        cases = [name for name in names if name in kernels]
        return Step(
            f"{tool}, {names[0]}",
            [*checker, *python("-m", "tests.cuda_kernels.run_case", *emulated, *cases)],
            100,
            few_threads,
            **more,
        )

    def tested(name: str, limit: int, **more: Any) -> Step:
        options = [
            "-n",
            workers,
            "--dist",
            "load",
            "-q",
            "-rf",
            "--maxfail=30",
            "--thorough",
            "-k",
            "not sanitizer",
            "-p",
            "no:cacheprovider",
        ]
        return Step(name, python("-m", "pytest", *options, f"tests/gpu/test_{name}.py"), limit, few_threads, **more)

    def profiled(name: str, kernel: str, **more: Any) -> Step:
        kept = ["--force-overwrite", "--export", str(out / f"ncu-{_file_name(name)}"), "--page", "details"]
        which = ["--kernel-name-base", "mangled", "--kernel-name", f"regex:cuda_kernels.*{kernel}"]
        profiler = ["ncu", "--set", "full", "--clock-control", "none", *kept, *which, "--launch-count", "1"]
        command = [*profiler, *python("-m", "benchmarks.once", name, *dry_run)]
        return Step(name, command, 60, {"LIGHTNING_FP8_GEMM": "numba"}, **more)

    def starts(name: str) -> dict[str, str]:
        """The steps whose hang means that this one would hang too."""
        kinds = {"product": PRODUCTS, "fprop": PRODUCTS, "attention": ATTENTION}
        return next(({"unless_hung": hung} for kind, hung in kinds.items() if name.startswith(kind)), {})

    doctor = python("-m", "lightning_fp8", "doctor", "--seconds", "20", "--json", str(out / "doctor.json"))
    compiler = python("-m", "tests.cuda_kernels.run_case", "--compile", *(kernels if dry else []))
    chooser = python("-m", "benchmarks", "choose", str(out / "products.json"), "--out", str(out / "choices.json"))

    def computed(names: Sequence[str]) -> list[Step]:
        return [
            Step(name, python("-m", "tests.cuda_kernels.run_case", *emulated, name), 60, few_threads, traps=True)
            for name in names
        ]

    changed = [] if dry else [name for name in kernels if name in CHANGED]
    return [
        Stage("changed", 80, computed(changed), at_once, first=True),
        Stage("models", 250, [suite("models", 250)], first=True),
        Stage("graphs", 60, [tested("graphs", 60)], first=True),
        Stage("sizes", 100, [suite("sizes", 100)], first=True),
        Stage("host", 30, [suite("host", 30)], first=True),
        Stage("hardware", 40, [suite("hardware", 40, **starts("attention"))], first=True),
        Stage("kernels", 130, computed([name for name in kernels if name not in changed]), at_once, first=True),
        Stage("tests", 250, [
            tested("casts", 130), tested("products", 130, **starts("products")),
            tested("attention", 130, **starts("attention")),
        ], at_once),
        Stage("ncu", 130, [profiled(name, kernel, **starts(name)) for name, kernel in profiles.items()]),
        Stage("attention", 150, [suite("attention", 150, **starts("attention"))]),
        Stage("products", 240, [suite("products", 240, **starts("products"))]),
        Stage("casts", 170, [suite("casts", 170)]),
        Stage("experts", 200, [suite("experts", 200, **starts("product"))]),
        Stage("choose", 20, [Step("choose", chooser, 20, needs=out / "products.json")]),
        Stage("doctor", 110, [Step("doctor", doctor, 110)]),
        Stage("compile", 150, [Step("compile", compiler, 150)]),
        Stage("sanitizer", 160, [
            sanitized(tool, names, **starts(names[0]))
            for names in SANITIZED for tool in TOOLS[: 1 if dry else None]
            if any(name in kernels for name in names)
        ], at_once),
    ]  # fmt: skip


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


# --- Running ----------------------------------------------------------------------------------------------------------


def run(planned: Sequence[Stage], out: Path, seconds: float, again: bool = False, dry: bool = False) -> dict[str, Any]:
    """Run the steps of ``planned`` that are not done yet, for at most ``seconds``; returns all results so far.

    Raises:
        SystemExit: ``out`` holds results of a dry run and this is not one, or vice versa.
    """
    path, end = out / "first_run.json", time.monotonic() + seconds
    document: dict[str, Any] = {"what": "first run; see docs/benchmarks.md", "dry_run": dry, "steps": {}}
    if path.exists():
        document |= json.loads(path.read_text())
    if document["dry_run"] != dry:
        raise SystemExit(f"{out} holds a {'dry' if document['dry_run'] else 'real'} run; use another --out")
    known = document["steps"]
    for stage in planned:
        for step in stage.steps:
            place = f"{stage.name}/{step.name}"
            if again or known.get(place, {}).get("outcome", WAITING) in NOT_DONE:
                known[place] = _told(WAITING)
    for stage in planned:
        stage_end = min(end, time.monotonic() + stage.limit + 1)
        steps = {f"{stage.name}/{step.name}": step for step in stage.steps}
        places = [place for place in steps if known[place]["outcome"] in NOT_DONE]
        tell = partial(_outcome, known=known, out=out, end=stage_end)
        with _ended_processes(), ThreadPool(stage.at_once) as threads:
            for place, told in zip(places, threads.imap(tell, [(place, steps[place]) for place in places])):
                known[place] = told
                print(f"{place}: {told['outcome']} ({told['seconds']:.0f} s) {told['said']}", flush=True)
                write(document, path)
                write_text(report(document), out / "report.md")
    return document


def _told(outcome: str, said: str = "", seconds: float = 0.0, log: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "seconds": seconds, "said": said, "log": log}


def _outcome(planned: tuple[str, Step], known: Mapping[str, Any], out: Path, end: float) -> dict[str, Any]:
    """Run the step at a place, unless it has to be skipped or does not fit into the time left."""
    place, step = planned
    hung = [other for other, each in known.items() if each["outcome"] == "hung"]
    for other in hung:
        if step.unless_hung and other.startswith(step.unless_hung):
            return _told(LEFT_OUT, f"{other} hung, and would hang this; fix it, then run its stage with --again")
    if step.needs and not step.needs.exists():
        return _told(LEFT_OUT, f"{step.needs.name} does not exist")
    if time.monotonic() + step.limit > end:
        return _told(WAITING, f"{step.limit} s were not left")
    if shutil.which(step.command[0]) is None:
        return _told("missing", f"{step.command[0]} is not on PATH")
    log = out / "logs" / f"{_file_name(place)}.log"
    told = _started(step.command, log, step.limit, step.variables)
    if told["outcome"] == "hung" and step.traps:
        with_traps = _started(step.command, log.with_suffix(".traps.log"), step.limit, {**step.variables, **TRAPS})
        said = f"{told['said']}; with traps: {with_traps['outcome']}, {with_traps['said']} ({with_traps['log']})"
        told |= {"seconds": told["seconds"] + with_traps["seconds"], "said": said}
    return told


def _started(command: Sequence[str], log: Path, limit: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run the command for at most ``limit`` seconds, with its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **variables}
    begin = time.monotonic()
    with log.open("w") as file:
        file.write(f"$ {' '.join(f'{name}={value}' for name, value in variables.items())} {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        _RUNNING.add(process)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
            _RUNNING.discard(process)
    seconds, name = round(time.monotonic() - begin, 1), f"logs/{log.name}"
    if status is None:
        return _told("hung", f"still running after {limit:g} s", seconds, name)
    if status == 0:
        return _told("ok", "", seconds, name)
    died = f"ended by {signal.Signals(-status).name}; " if status < 0 else ""
    outcome = "not for this card" if status == NOT_FOR_THIS_CARD else "failed"
    return _told(outcome, died + _last_word(log.read_text(errors="replace")), seconds, name)


@contextmanager
def _ended_processes() -> Iterator[None]:
    """Ends the processes of other threads if this one is interrupted."""
    try:
        yield
    except BaseException:
        for process in tuple(_RUNNING):
            _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children: first with SIGABRT, for a stack trace, then SIGKILL; a driver call may hang."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def _last_word(text: str) -> str:
    """The last line that names an error, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w*(Error|Exception)\b|CUDA_ERROR\w+|^FAILED|error:", line)]
    return (errors or lines or ["no output"])[-1][:200]


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text)


# --- The command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the step that runs is ended too
    out = args.out.resolve()
    planned = stages(out, args.dry_run)
    names = args.stages.split(",") if args.stages else [stage.name for stage in planned]
    if unknown := set(names) - {stage.name for stage in planned}:
        raise SystemExit(f"unknown stages: {', '.join(unknown)}; stages are {', '.join(s.name for s in planned)}")
    document = run([s for s in planned if s.name in names], out, args.seconds, args.again, args.dry_run)
    print(f"\n{report(document)}\n{out / 'report.md'}")
    return int(any(each["outcome"] not in FINE for each in document["steps"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_run", description="Twelve minutes on a card.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of results and logs; what is in it is not repeated"
    )
    parser.add_argument("--stages", metavar="STAGE,...", help="only these")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"of this call, default {BUDGET}")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
