"""Check and time what this machine supports, and show results.

    python -m benchmarks --json out.json                     # every suite that this machine can run
    python -m benchmarks --only host,training --json out.json
    python -m benchmarks emulation --json out.json           # that suite only: the cost of FP8 on the CPU
    python -m benchmarks --only products --libraries         # without our kernels
    python -m benchmarks --dry-run --json out.json           # runs all code on the CPU; the numbers are meaningless
    python -m benchmarks table out.json --readme README.md
    python -m benchmarks table out.json --csv                # all rows, into out.csv beside it
    python -m benchmarks plot out.json
    python -m benchmarks charts *.json --out docs --name h200
    python -m benchmarks choose out.json                     # ship the fastest plans for its GPU

The first minutes on a GPU: ``python -m benchmarks.first_run --out DIR``.

The exit status is 1 if a result differed from the reference or a suite failed; the JSON is written in any case.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks import choice
from benchmarks.measuring import charts, machine, report
from benchmarks.measuring.files import write
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS
from benchmarks.measuring.sheet import sheet
from benchmarks.measuring.summary import summary
from cuda_kernels.kernel import ARCHITECTURES

SUITES = (
    "casts",
    "products",
    "experts",
    "attention",
    "hardware",
    "models",
    "sizes",
    "host",
    "training",
    "emulation",
    "monitor",
)

OTHER_COMMANDS = {
    "computed, not measured: time of experts": "benchmarks.experts_time",
    "errors of FP8 attention": "benchmarks.attention_numerics",
    "errors of one scale for all experts": "benchmarks.scale_of_experts",
    "first run": "benchmarks.first_run",
    "losses of a small Llama": "benchmarks.parity",
    "modelled time of a training step": "benchmarks.budget",
    "sensitivity of layers": "benchmarks.sensitivity",
}
"""Modules that write other formats, by the start of the files' ``what``."""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.command == "plot":
        report.plot([_read(path) for path in args.results], args.out)
    elif args.command == "charts":
        for path in charts.draw([_read(path) for path in args.results], args.out, args.name):
            print(path)
    elif args.command == "emulation":
        return _run(["emulation"], args.dry_run, args.libraries, args.json)
    elif args.command == "kernels":
        from benchmarks import carried

        return carried.write(args.arch, args.out)
    elif args.command == "choose":
        try:
            print(choice.ship(_read(args.results), args.out))
        except ValueError as error:
            raise SystemExit(f"{args.results}: {error}") from error
    elif args.command == "table":
        documents = [_read(path) for path in args.results]
        if args.csv:
            for path, document in zip(args.results, documents):
                path.with_suffix(".csv").write_text(sheet(document))
        elif args.readme:
            args.readme.write_text(report.insert(args.readme.read_text(), summary(documents)))
        else:
            print("\n\n".join(map(report.table, documents)))
    else:
        return _run(args.only, args.dry_run, args.libraries, args.json)
    return 0


def _run(only: list[str] | None, dry: bool, libraries: bool, path: Path | None) -> int:
    on_card = torch.cuda.is_available() and not dry
    device = torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")
    plan = Plan(device, dry, kernels=not libraries)
    document: dict[str, Any] = {
        "what": "lightning_fp8: ops, host time and training steps; see docs/benchmarks.md",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**machine.describe(), "clocks": {"before": machine.clocks()}},
        "commit": machine.commit(),
        "arguments": {"only": only, "dry_run": dry, "libraries": libraries},
        "suites": {},
        "errors": {},
    }
    failed = False
    for name in only or SUITES:
        try:
            suite = importlib.import_module(f"benchmarks.suites.{name}")
            reason = suite.unavailable(plan)
            if reason and only:
                raise RuntimeError(f"suite {name} {reason}")
            if reason:
                plan.say(f"{name}: left out, {reason}")
                continue
            results = document["suites"][name] = []
            for result in suite.run(plan):
                results.append(result.as_json())
                failed |= result.by == OURS and result.correct is False
                _save(document, path)
        except Exception:
            document["errors"][name] = traceback.format_exc()
            plan.say(document["errors"][name])
            failed = True
        document["machine"]["clocks"][name] = machine.clocks()
        _save(document, path)
    print(report.table(document))
    return int(failed)


def _save(document: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write(document, path)


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    for what, module in OTHER_COMMANDS.items():
        if document.get("what", "").startswith(what):
            raise SystemExit(
                f"{path} was written by python -m {module}; this command reads files of python -m benchmarks --json"
            )
    if "suites" not in document:
        raise SystemExit(f"{path} was not written by this version of python -m benchmarks")
    return document


def _suites(names: str) -> list[str]:
    chosen = names.split(",")
    for name in chosen:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SUITES)}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Check and time lightning_fp8.")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each of them")
    parser.add_argument("--only", type=_suites, metavar="SUITE,...", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="walk every line on the CPU with tiny tensors")
    parser.add_argument("--libraries", action="store_true", help="time only libraries' products and attention")
    commands = parser.add_subparsers(dest="command", title="measure one thing, or show results instead")
    emulation = commands.add_parser("emulation", help="time training steps of FP8 on the CPU beside BF16's")
    emulation.add_argument("--json", type=Path, default=argparse.SUPPRESS, help="write the results to this file")
    table = commands.add_parser("table", help="print results as Markdown")
    table.add_argument("results", type=Path, nargs="+")
    table.add_argument("--readme", type=Path, help="write a summary between this file's markers instead")
    table.add_argument("--csv", action="store_true", help="write all rows of each file to a .csv beside it instead")
    choose = commands.add_parser("choose", help="write the products' fastest plans to the package's folder")
    choose.add_argument("results", type=Path)
    choose.add_argument("--out", type=Path, help="another file")
    built = commands.add_parser("kernels", help="compile the kernels that run on a GPU on a machine without one")
    built.add_argument("--arch", choices=ARCHITECTURES, default="90a", help="of the GPU: sm_90a is Hopper's")
    built.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the kernels; keeps existing files")
    plot = commands.add_parser("plot", help="draw the casts' share of copy bandwidth")
    plot.add_argument("results", type=Path, nargs="+")
    plot.add_argument("--out", type=Path, default=Path("docs/benchmarks_casts.png"))
    drawn = commands.add_parser("charts", help="draw a GPU's training steps, products and attention")
    drawn.add_argument("results", type=Path, nargs="+")
    drawn.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="for the pictures")
    drawn.add_argument("--name", default="gpu", help="starts the pictures' names")
    return parser


if __name__ == "__main__":
    sys.exit(main())
