"""``lightning-fp8 doctor``: versions, torch's GPUs, a test compilation, and a launch of each kind of kernel.

    lightning-fp8 doctor
    lightning-fp8 doctor --compile --json report.json
    lightning-fp8 doctor --prove

With ``--prove``, each kind of kernel is proven again on the GPU (:mod:`lightning_fp8.proofs.report`). Without it, this
process imports neither torch nor a compiler, and whatever may hang or crash runs in a subprocess with a time limit. The
exit status is 1 if something that should work does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Literal

from cuda_kernels.host import toolchain
from cuda_kernels.host.cache_folder import CACHE_VARIABLE, CARRIED_VARIABLE
from cuda_kernels.host.proofs import VARIABLE as PROOF_VARIABLE
from lightning_fp8.doctor.processes import FP8_CAPABILITY, KERNELS, Answer, answer_of, probe
from lightning_fp8.version import __version__

Verdict = Literal["ok", "warn", "fail"]
"""``warn``: works, but not optimally. ``fail``: should work, but does not."""

PACKAGES = ("torch", "lightning", *toolchain.COMPANIONS, *toolchain.TOOLS, "triton")

VARIABLES = (
    "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LIGHTNING_FP8_GEMM",
    "LIGHTNING_FP8_TRAP", "NUMBA_ENABLE_CUDASIM", CACHE_VARIABLE, CARRIED_VARIABLE, PROOF_VARIABLE,
)  # fmt: skip
"""Environment variables that change what runs."""

_KNOWN_ERRORS = {
    "undefined symbol": "unset LD_LIBRARY_PATH if it names libraries of another CUDA",
    "ERROR_OUTDATED_LIBRARY": (
        "install libnvvm in the version of nvJitLink, or an older one; numba -s prints where both are found"
    ),
    "No module named 'numba.cuda.": "install numba-cuda with pip: on PYTHONPATH or with --target its .pth is not read",
    "cannot open shared object file": (
        "install the library that the error names: CUDA's come with torch (pip install --force-reinstall torch), and "
        "others need their folder in LD_LIBRARY_PATH"
    ),
    "driver on your system is too old": "update the driver, or install a torch that is built for an older CUDA",
    "Error 802": "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
    "Error 803": "restart the machine: the driver was updated, and its old kernel module still runs",
}
"""Advice by a substring of the error."""

LONGEST = 86400
"""Upper limit of ``--seconds``."""

_UNKNOWN_ERROR = "Fix the failures above first; otherwise attach the --json file to a bug report."
_HANG = "a kernel or the driver hangs: look at nvidia-smi, and end the process that still uses the GPU"
_AFTER_A_HANG = {
    "driver": "look at the system's log (dmesg), and restart the machine",
    "torch": "look for a slow disk, at nvidia-smi and at the system's log (dmesg)",
    "compile": "compiling takes seconds; on a slow disk or a busy machine try --seconds 300",
    "product, kernel": f"{_HANG}; until then set LIGHTNING_FP8_GEMM=cublaslt",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: the ``value`` found for ``what``, and advice in ``way_out``, a command if possible."""

    what: str
    value: str
    verdict: Verdict = "ok"
    way_out: str = ""


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 doctor``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 doctor",
        description="What runs on this machine, what does not, and how to fix it. Exit status 1: something is broken.",
    )
    parser.add_argument("--compile", action="store_true", help="kernels must compile here, with or without a GPU")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the findings there too")
    parser.add_argument(
        "--prove", action="store_true", help="test every kind of kernel on the GPU and keep the results"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --prove: list the kernels; needs no GPU")
    parser.add_argument("--seconds", type=_seconds, default=60.0, help="for each thing that is started (60)")
    args = parser.parse_args(argv)
    if args.dry_run and not args.prove:
        parser.error("--dry-run is of --prove")
    findings = proofs(args.dry_run) if args.prove else report(args.seconds, args.compile)
    status = int(any(finding.verdict == "fail" for finding in findings))
    if args.json is not None:
        document = {"status": status, "findings": [asdict(finding) for finding in findings]}
        args.json.write_text(json.dumps(document, indent=1))
    raise SystemExit(status)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in an existing folder")
    return path


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= LONGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {LONGEST}; leave it out for 60")


def report(seconds: float, compiling: bool) -> list[Finding]:
    """All findings, each printed when it is found. ``compiling``: see :func:`started`."""
    versions = toolchain.versions(PACKAGES)
    findings = shown(installed(versions))
    print(f"\nStarted one by one, each in a separate process and for at most {seconds:g} s:", flush=True)
    findings += shown(started(versions, seconds, compiling))
    print(f"\n{advice_of(findings)}", flush=True)
    return findings


def proofs(dry_run: bool) -> list[Finding]:
    """Prove each kind of kernel, printing each result; with ``dry_run`` only list the kernels."""
    from lightning_fp8.doctor.probes import device, has_fp8
    from lightning_fp8.proofs.report import listed, proven

    if not dry_run and not has_fp8():
        way_out = "run lightning-fp8 doctor to list the GPUs"
        return shown([Finding("GPU", "no GPU with FP8 tensor cores", "fail", way_out)])
    lines = listed() if dry_run else proven(device())
    findings = shown(Finding(kind, text, "ok" if is_right else "fail") for kind, text, is_right in lines)
    if failed := sum(finding.verdict == "fail" for finding in findings):
        print(f"\n{failed} of {len(findings)} failed: torch's operations replace these kernels, and are slower")
    return findings


def shown(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding when it is found."""
    width, found = shutil.get_terminal_size((120, 24)).columns, []
    for finding in findings:
        found.append(finding)
        print(line_of(finding, width), flush=True)
    return found


def line_of(finding: Finding, width: int = 120) -> str:
    """The finding as text wrapped at ``width`` columns; longer words are not broken."""
    head = f"{'FAIL' if finding.verdict == 'fail' else finding.verdict:<5} {finding.what:<22} "
    return textwrap.fill(
        finding.value, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def advice_of(findings: Sequence[Finding]) -> str:
    """The advice of all findings, failures first."""
    order = sorted(findings, key=lambda finding: finding.verdict != "fail")
    lines = dict.fromkeys(f"do    {finding.way_out}" for finding in order if finding.way_out)
    return "\n".join(lines) or "nothing to do"


def installed(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Versions of packages, checked against the oldest supported ones, and the environment variables that are set."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("lightning-fp8", f"{__version__}, {system}")
    for name in ("torch", "lightning"):
        if name not in versions:
            yield Finding(name, "not installed", "fail", f"pip install {name}")
    oldest = oldest_versions()
    for name, version in versions.items():
        if name in oldest and toolchain.numbers(version) < toolchain.numbers(oldest[name]):
            problem = f"{version}; {oldest[name]} is the oldest supported version"
            yield Finding(name, problem, "fail", f'pip install -U "{name}"')
        else:
            yield Finding(name, version)
    yield from (Finding(name, os.environ[name]) for name in VARIABLES if os.environ.get(name))


def oldest_versions() -> dict[str, str]:
    """The lower bounds of this package's unconditional requirements: ``torch>=2.8`` gives torch 2.8."""
    try:
        requirements = requires("lightning-fp8") or ()
    except PackageNotFoundError:  # a checkout that is not installed
        return {}
    found = (re.fullmatch(r"([\w.-]+)\s*>=\s*([\w.]+)[^;]*", requirement.strip()) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def started(versions: Mapping[str, str], seconds: float, compiling: bool) -> Iterator[Finding]:
    """Findings on the driver, torch and its GPUs, and from a compilation for Hopper and what training starts.

    Each runs in its own process. A failing compilation is a failure if ``compiling``, or if a GPU with FP8 tensor cores
    is present and no prebuilt kernels are configured; otherwise it is a warning.
    """
    driver, has_gpus = _driver(seconds)
    yield driver
    answer = probe("torch", seconds)
    answered = answer.status == 0 and answer.said
    facts = json.loads(answer.said) if answered else {"gpus": [], "cuda": None}
    of_torch = list(_torch(facts, has_gpus)) if answered else [tried("torch", answer, seconds)]
    yield from of_torch
    on_fp8 = any(tuple(capability) >= FP8_CAPABILITY for _, capability, _ in facts["gpus"])
    wanted = compiling or (on_fp8 and not os.environ.get(CARRIED_VARIABLE))
    compilation = list(_compilation(versions, seconds, wanted, facts["cuda"]))
    yield from compilation
    if any(finding.verdict == "fail" for finding in of_torch):
        return
    compiles = "numba-cuda" in versions and all(finding.verdict == "ok" for finding in compilation)
    launches: list[tuple[str, str, dict[str, str]]] = [("cast", "cast", {})]
    if not on_fp8:
        launches.append(("product", "product", {}))
    else:
        launches.append(("product, cuBLASLt", "product", {"LIGHTNING_FP8_GEMM": "cublaslt"}))
        launches.append(("product, MXFP8", "product, MXFP8", {}))
        if compiles:  # `lightning-fp8 kernels build` does not include these kernels
            launches.append(("product, kernel", "product", {"LIGHTNING_FP8_GEMM": "numba"}))
            launches += [(name, name, {}) for name in KERNELS]
    for what, name, variables in launches:
        yield tried(what, probe(name, seconds, **variables), seconds)


def _driver(seconds: float) -> tuple[Finding, bool]:
    """The driver according to ``nvidia-smi``, and whether it lists GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return Finding("driver", "no nvidia-smi"), False
    answer = answer_of(query, seconds)
    text = "; ".join(line.strip() for line in answer.output.splitlines() if line.strip())
    if answer.status == 0:
        return Finding("driver", text), True
    if answer.status is None:
        return tried("driver", answer, seconds), False
    verdict: Verdict = "warn" if "No devices were found" in text else "fail"
    way_out = "restart the machine, as is needed after a driver update; if that does not help, reinstall the driver"
    return Finding("driver", f"nvidia-smi: {text or answer.last_line}", verdict, way_out), False


def _torch(facts: Mapping[str, Any], has_gpus: bool) -> Iterator[Finding]:
    """Findings from :func:`torch_facts`."""
    built = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    yield Finding("torch", f"{facts['version']}, built {built}")
    for index, (name, capability, size) in enumerate(facts["gpus"]):
        value = f"{name}, compute capability {'.'.join(map(str, capability))}, {size / 2**30:.0f} GiB"
        if tuple(capability) >= FP8_CAPABILITY:
            yield Finding(f"GPU {index}", value)
        else:
            value += "; FP8 tensor cores need 8.9: FP8 is supported, but slower than BF16"
            yield Finding(f"GPU {index}", value, "warn", "train on it in BF16")
    if facts["gpus"]:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        yield Finding("GPU", f"hidden by CUDA_VISIBLE_DEVICES={visible!r}", "warn", "unset CUDA_VISIBLE_DEVICES")
    elif has_gpus:
        way_out = _known_advice(facts["problem"]) or "install a torch that is built for a CUDA that the driver supports"
        yield Finding("GPU", f"torch finds none: {facts['problem']}", "fail", way_out)
    else:
        yield Finding("GPU", f"none ({facts['problem']}): FP8 runs in plain torch operations; kernels can be compiled")


def _compilation(versions: Mapping[str, str], seconds: float, wanted: bool, cuda: str | None) -> Iterator[Finding]:
    """Known version conflicts, and a test compilation; ``cuda``: the CUDA version torch was built for."""
    severity: Verdict = "fail" if wanted else "warn"
    install = f'pip install "lightning-fp8[{"cuda12" if cuda and cuda.startswith("12.") else "cuda"}]"'
    if "numba-cuda" not in versions:
        missing = "numba-cuda is not installed: FP8 casts run as plain torch operations, slower"
        yield Finding("compile", missing, *(("fail", install) if wanted else ()))
        return
    for problem, way_out in toolchain.conflicts(versions):
        yield Finding("versions", problem, severity, way_out)
    with tempfile.TemporaryDirectory() as empty:  # a cached kernel would not test the compiler
        answer = probe("compile", seconds, **{CACHE_VARIABLE: empty, CARRIED_VARIABLE: ""})
    simulated = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
    way_out = "unset NUMBA_ENABLE_CUDASIM" if simulated else f"{install}; numba -s prints what numba-cuda finds"
    yield tried("compile", answer, seconds, severity, way_out)


def tried(
    what: str, answer: Answer, seconds: float, severity: Verdict = "fail", way_out: str = _UNKNOWN_ERROR
) -> Finding:
    """The finding from a process that ran for up to ``seconds``; ``way_out``: advice for an unknown error."""
    if answer.status == 0 and answer.said:
        return Finding(what, answer.said)
    if answer.status is None:
        place = f"; it was in {answer.place}" if answer.place else ""
        return Finding(what, f"did not answer within {seconds:g} s{place}", severity, _AFTER_A_HANG.get(what, _HANG))
    return Finding(what, answer.last_line, severity, _known_advice(answer.error) or way_out)


def _known_advice(error: str) -> str:
    return next((advice for words, advice in _KNOWN_ERRORS.items() if words in error), "")
