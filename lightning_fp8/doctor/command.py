"""``lightning-fp8 doctor``: what runs on this machine, what does not, and the way out.

    lightning-fp8 doctor
    lightning-fp8 doctor --compile --json report.json

Exit status 1 says that something does not work that should.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_fp8.doctor import checks
from lightning_fp8.doctor.findings import Finding, Verdict, advice_of, line_of
from lightning_fp8.doctor.machine import Machine, this_machine


def looked_at(machine: Machine, compiling: bool) -> Iterator[Finding]:
    """The findings of the first second, without torch. ``compiling``: kernels are wanted, card or not."""
    yield Finding("lightning-fp8", machine.system)
    versions = machine.versions()
    torch_build = machine.torch_build()
    yield from checks.packages(versions, machine.requirements(), torch_build)
    driver = machine.driver()
    carried = machine.carried()
    wanted = compiling or (checks.runs_kernels(driver) and not (carried and carried.kernels))
    yield from checks.cards(driver, torch_build, machine.variables)
    yield from checks.kernel_packages(versions, driver, wanted)
    yield from checks.compilers(machine.compilers(), versions, driver, wanted)
    yield from checks.environment(machine.variables, wanted)
    yield checks.kernels(machine.cache())
    if carried is not None:
        yield checks.carried_kernels(carried)


def started(machine: Machine, seconds: float, compiling: bool) -> Iterator[Finding]:
    """The findings about torch, a cast, a GEMM and, if ``compiling``, a kernel for Hopper, each in its process."""

    def probed(what: str, probe: str, **variables: str) -> Finding:
        return checks.probed(what, machine.probe(probe, variables), seconds)

    yield (finding := checks.seen_by_torch(probed("torch", "torch"), machine.driver()))
    if finding.verdict is Verdict.FAIL:
        return
    yield probed("cast", "cast")
    if checks.runs_kernels(machine.driver()):
        yield probed("product, cuBLASLt", "product", LIGHTNING_FP8_GEMM="cublaslt")
        yield probed("product, kernel", "product", LIGHTNING_FP8_GEMM="numba")
    else:
        yield probed("product", "product")
    if compiling:
        with tempfile.TemporaryDirectory() as empty:
            yield probed("compile", "compile", LIGHTNING_FP8_CACHE=empty, LIGHTNING_FP8_KERNELS="")


def report(machine: Machine, seconds: float, compiling: bool) -> list[Finding]:
    """All findings, each printed as soon as it is known."""
    width = shutil.get_terminal_size((120, 24)).columns
    findings = []
    for finding in looked_at(machine, compiling):
        findings.append(finding)
        print(line_of(finding, width), flush=True)
    print(f"\nStarted one by one, each in a process of its own and for at most {seconds:g} s:", flush=True)
    for finding in started(machine, seconds, compiling):
        findings.append(finding)
        print(line_of(finding, width), flush=True)
    print(f"\n{advice_of(findings)}", flush=True)
    return findings


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 doctor``."""
    args = _parser().parse_args(argv)
    findings = report(this_machine(args.seconds), args.seconds, args.compile)
    status = int(any(finding.verdict is Verdict.FAIL for finding in findings))
    if args.json is not None:
        args.json.write_text(
            json.dumps({"status": status, "findings": [asdict(finding) for finding in findings]}, indent=1)
        )
    raise SystemExit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 doctor",
        description="What runs on this machine, what does not, and the way out. Exit status 1: something is broken.",
    )
    parser.add_argument("--compile", action="store_true", help="also compile one kernel for sm_90a, card or not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    parser.add_argument("--seconds", type=float, default=60, help="for each thing that is started (60)")
    return parser
