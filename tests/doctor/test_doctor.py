"""``lightning-fp8 doctor``: broken machines as a table, what hangs, and the order in which things are said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_fp8.doctor import command
from lightning_fp8.doctor.findings import Finding, Verdict, advice_of, line_of
from lightning_fp8.doctor.machine import Cache, Card, Driver, Machine, Torch
from lightning_fp8.doctor.processes import Answer, answer_of

ROOT = Path(__file__).parents[2]

VERSIONS = {
    "lightning": "2.6.6", "numpy": "2.4.6", "cuda-bindings": "13.0.3", "cuda-pathfinder": "1.9.0",
    "numba-cuda": "0.30.4", "numba": "0.68.1", "llvmlite": "0.50.0", "cuda-core": "1.2.2", "nvidia-nvvm": "13.0.88",
    "nvidia-nvjitlink": "13.0.88",
}  # fmt: skip
COMPILERS = {
    "libnvvm": {"path": "/w/libnvvm.so.4", "via": "site-packages", "version": "13.0.88"},
    "libnvJitLink": {"path": "/w/libnvJitLink.so.13", "via": "site-packages", "version": "13.0"},
    "libnvrtc": {"path": "/w/libnvrtc.so.13", "via": "site-packages", "version": "13.0"},
    "libdevice": {"path": "/w/libdevice.10.bc", "via": "site-packages"},
}
H200_CARD = Card("NVIDIA H200", (9, 0), 141 << 30)
H200_DRIVER = Driver("580.159.03", (13, 0), (H200_CARD,), devices=True)
OLD_DRIVER = replace(H200_DRIVER, version="570.1", cuda_version=(12, 8))


def machine(
    versions: Mapping[str, str | None] | None = None,
    torch_build: Torch | None = Torch("2.11.0+cu130", "13.0"),  # noqa: B008
    driver: Driver = H200_DRIVER,
    compilers: Mapping[str, Mapping[str, str]] | None = None,
    cache: Cache = Cache("/cache", 12, 34567),  # noqa: B008
    answers: Mapping[str, Answer] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Machine:
    """A healthy H200, but for what is said; a version of None is a package that is not installed."""
    installed = {name: version for name, version in {**VERSIONS, **(versions or {})}.items() if version}
    return Machine(
        "0.1.0, Python 3.12.3, Linux x86_64",
        variables or {},
        lambda: {"torch": "2.8", "lightning": "2.5"},
        lambda: installed,
        lambda: torch_build,
        lambda: driver,
        lambda: {**COMPILERS, **(compilers or {})},
        lambda: cache,
        probe=lambda name, variables: {**dict.fromkeys(PROBES, Answer(0, "fine")), **(answers or {})}[name],
    )


def failing(probe: str, stderr: str) -> Machine:
    """A healthy H200 on which a process of the doctor's fails."""
    return machine(answers={probe: Answer(1, "", stderr)})


PROBES = ("torch", "cast", "product", "compile")

NO_CARD = Driver(problem="no libcuda.so.1")
CPU_TORCH = Torch("2.13.0+cpu", None)
OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL

BROKEN: dict[str, tuple[Machine, str, Verdict, str, str]] = {
    # machine, what is found, how bad, a part of what is said, a part of the way out
    "no torch": (machine(torch_build=None), "torch", FAIL, "not installed", "pip install torch"),
    "old torch": (machine(torch_build=Torch("2.7.1+cu126", "12.6")), "torch", FAIL, "2.8 is the oldest", "-U"),
    "no lightning": (machine({"lightning": None}), "lightning", FAIL, "not installed", "pip install lightning"),
    "old lightning": (machine({"lightning": "2.4.0"}), "lightning", FAIL, "2.5 is the oldest", "-U"),
    "pytorch_lightning": (
        machine({"lightning": None, "pytorch-lightning": "2.6.0"}), "lightning", FAIL, "refuses our plugins",
        "pip install lightning",
    ),
    "CPU torch on a card": (
        machine(torch_build=CPU_TORCH), "torch and driver", FAIL, "built without CUDA", "built for CUDA"
    ),
    "torch newer than the driver": (
        machine(driver=OLD_DRIVER, versions={"cuda-bindings": "12.9.1", "nvidia-nvjitlink": None, "nvidia-nvvm": None}),
        "torch and driver", FAIL, "torch is built for CUDA 13.0, and the driver supports CUDA up to 12.8",
        "built for CUDA 12",
    ),
    "kernels newer than the driver": (
        machine(driver=OLD_DRIVER, torch_build=Torch("2.11.0+cu128", "12.8")), "versions", FAIL,
        "libraries of CUDA 13, and the driver supports 12.8", "lightning-fp8[cuda12]",
    ),
    "Ampere": (
        machine(driver=replace(H200_DRIVER, cards=(Card("NVIDIA A100", (8, 0), 80 << 30),))), "card 0", WARN,
        "compute capability 8.0, 80 GiB; FP8's tensor cores begin with 8.9", "BF16",
    ),
    "no numba-cuda": (
        machine({"numba-cuda": None}), "numba-cuda", FAIL, "slower", 'pip install "lightning-fp8[cuda]"',
    ),
    "no numba-cuda, CUDA 12": (
        machine({"numba-cuda": None, "cuda-bindings": "12.9.1", "nvidia-nvjitlink": None}, Torch("2.8.0", "12.8"),
                OLD_DRIVER),
        "numba-cuda", FAIL, "slower", 'pip install "lightning-fp8[cuda12]"',
    ),
    "numba older than numpy": (
        machine({"numba": "0.66.0", "numpy": "2.5.2"}), "versions", FAIL,
        "numba 0.66.0 refuses to be imported with numpy 2.5.2", 'pip install "numba>=0.67"',
    ),
    "nvvm newer than nvJitLink": (
        machine({"nvidia-nvvm": "13.5.37"}, compilers={"libnvvm": COMPILERS["libnvvm"] | {"version": "13.5.37"}}),
        "versions", FAIL, "ERROR_OUTDATED_LIBRARY", 'pip install "cuda-toolkit[nvvm]==13.0.*"',
    ),
    "a toolkit's nvvm newer than nvJitLink": (
        machine({"nvidia-nvvm": None}, compilers={"libnvvm": {"path": "/c/libnvvm.so", "via": "CUDA_PATH",
                                                              "version": "13.1.80"}}),
        "compilers", FAIL, "libnvvm (13.1.80 at /c/libnvvm.so) is newer", 'pip install "cuda-toolkit[nvvm]==13.0.*"',
    ),
    "no libnvvm": (
        machine({"nvidia-nvvm": None}, compilers={"libnvvm": {"problem": "Failure finding libnvvm.so"}}), "libnvvm",
        FAIL, "not found: Failure finding libnvvm.so", "CUDA_HOME",
    ),
    "two toolkits": (
        machine(variables={"CUDA_HOME": "/usr", "CUDA_PATH": "/tmp"}), "CUDA_HOME", WARN, "/usr, and CUDA_PATH=/tmp",
        "to one folder",
    ),
    "a wrong CUDA_HOME": (
        machine(variables={"CUDA_HOME": "/nowhere"}), "CUDA_HOME", WARN, "/nowhere is no folder", "unset CUDA_HOME",
    ),
    "a simulator": (
        machine(variables={"NUMBA_ENABLE_CUDASIM": "1"}), "NUMBA_ENABLE_CUDASIM", FAIL, "compiles no kernel", "unset",
    ),
    "waiting launches": (
        machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}), "CUDA_LAUNCH_BLOCKING", WARN, "slow", "unset",
    ),
    "a wrong backend": (
        machine(variables={"LIGHTNING_FP8_GEMM": "cublas"}), "LIGHTNING_FP8_GEMM", FAIL, "'cublas' is neither", "unset",
    ),
    "hidden cards": (
        machine(driver=replace(H200_DRIVER, cards=()), variables={"CUDA_VISIBLE_DEVICES": ""}), "card", WARN, "hidden",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a container without its cards": (
        machine(driver=Driver(problem="no libcuda.so.1", devices=True)), "card", FAIL, "CUDA none (no libcuda.so.1)",
        "--gpus all",
    ),
    "a driver that hangs": (
        machine(driver=Driver(problem="did not answer within 20 s", hangs=True)), "card", FAIL, "did not answer",
        "nvidia-smi",
    ),
    "no fabric manager": (
        machine(driver=Driver("580.1", (13, 0), (), "CUDA_ERROR_SYSTEM_NOT_READY", 802, devices=True)), "card", FAIL,
        "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager",
    ),
    "a driver just updated": (
        machine(driver=Driver(None, None, (), "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 803, devices=True)), "card", FAIL,
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart",
    ),
    "a read-only cache": (
        machine(cache=Cache("/cache", 3, 99, "Read-only file system")), "compiled kernels", WARN,
        "3 in /cache, 99 bytes; nothing can be written there (Read-only file system)", "LIGHTNING_FP8_CACHE",
    ),
    "torch does not import": (
        failing("torch", "ImportError: a.so: undefined symbol: __nvJitLinkComplete_12_4\n"),
        "torch", FAIL, "undefined symbol", "unset LD_LIBRARY_PATH",
    ),
    "a nvJitLink that torch brought along": (
        failing("cast", "Error: ERROR_OUTDATED_LIBRARY (loaded: /c/libnvvm.so.4)\n"),
        "cast", FAIL, "(loaded: /c/libnvvm.so.4)", "install libnvvm in the version of the nvJitLink",
    ),
    "numba-cuda on PYTHONPATH": (
        failing("cast", "RuntimeWarning: ... No module named 'numba.cuda.cgutils'\n"),
        "cast", FAIL, "numba.cuda.cgutils", "its .pth is not read",
    ),
    "a cast that is wrong": (
        failing("cast", "Traceback\nArithmeticError: 3 of 9 values are not the nearest\n"),
        "cast", FAIL, "ArithmeticError: 3 of 9", "--json",
    ),
    "a cast that crashes": (
        machine(answers={"cast": Answer(-11, "", "")}), "cast", FAIL, "ended by SIGSEGV", "--json",
    ),
}  # fmt: skip


def findings_of(of: Machine, compiling: bool = False) -> list[Finding]:
    return [*command.looked_at(of, compiling), *command.started(of, 60, compiling)]


def test_a_healthy_machine_has_nothing_to_do() -> None:
    found = findings_of(machine(), compiling=True)
    assert {finding.verdict for finding in found} == {OK}
    assert advice_of(found) == "nothing to do"
    said = {finding.what: finding.value for finding in found}
    assert said["torch"] == "fine"  # the last word: what became of importing it
    assert said["driver"] == "580.159.03, for CUDA up to 13.0"
    assert said["card 0"] == "NVIDIA H200, compute capability 9.0, 141 GiB"
    assert said["libnvJitLink"] == "13.0 /w/libnvJitLink.so.13 (site-packages)"
    assert said["compiled kernels"] == "12 in /cache, 34,567 bytes"
    assert {"cast", "product, cuBLASLt", "product, kernel", "compile"} <= said.keys()


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found_with_a_way_out(case: str) -> None:
    of, what, verdict, value, way_out = BROKEN[case]
    wrong = [finding for finding in findings_of(of) if finding.verdict is not OK]
    assert [finding.what for finding in wrong] == [what]
    assert (wrong[0].verdict, value in wrong[0].value, way_out in wrong[0].way_out) == (verdict, True, True), wrong[0]
    assert advice_of(wrong) == f"do    {wrong[0].way_out}"


@pytest.mark.parametrize("case", ["no numba-cuda", "numba older than numpy", "nvvm newer than nvJitLink", "no libnvvm"])
def test_without_a_card_nothing_of_the_kernels_fails_unless_they_are_wanted(case: str) -> None:
    of = replace(BROKEN[case][0], driver=lambda: NO_CARD, torch_build=lambda: CPU_TORCH)
    assert FAIL not in {finding.verdict for finding in findings_of(of)}
    assert [finding.what for finding in findings_of(of, compiling=True) if finding.verdict is FAIL] == [BROKEN[case][1]]


def test_with_carried_kernels_no_compiler_is_needed() -> None:
    broken = BROKEN["numba older than numpy"][0]
    found = findings_of(replace(broken, carried=lambda: Cache("/carried", 3, 99)))
    assert [finding.what for finding in found if finding.verdict is not OK] == ["versions"]
    assert FAIL not in {finding.verdict for finding in found}
    assert "3 in /carried, 99 bytes" in [finding.value for finding in found if finding.what == "carried kernels"]
    found = findings_of(replace(broken, carried=lambda: Cache("/empty")))
    verdicts = {finding.what: finding.verdict for finding in found}
    assert (verdicts["carried kernels"], verdicts["versions"]) == (WARN, FAIL)


def test_a_machine_without_a_card_is_healthy() -> None:
    of = machine({name: None for name in VERSIONS if name not in ("lightning", "numpy")}, CPU_TORCH, NO_CARD)
    found = findings_of(of)
    assert {finding.verdict for finding in found} == {OK}
    assert "the reference runs here" in next(finding.value for finding in found if finding.what == "card")
    assert [finding.what for finding in found][-3:] == ["torch", "cast", "product"]


def test_each_product_is_asked_of_what_shall_compute_it() -> None:
    asked: list[tuple[str, Mapping[str, str]]] = []
    of = replace(machine(), probe=lambda name, variables: (asked.append((name, dict(variables))), Answer(0))[1])
    list(command.started(of, 60, compiling=True))
    *first, (name, variables) = asked
    assert first == [
        ("torch", {}), ("cast", {}), ("product", {"LIGHTNING_FP8_GEMM": "cublaslt"}),
        ("product", {"LIGHTNING_FP8_GEMM": "numba"}),
    ]  # fmt: skip
    assert (name, variables.keys()) == ("compile", {"LIGHTNING_FP8_CACHE", "LIGHTNING_FP8_KERNELS"})
    assert variables["LIGHTNING_FP8_KERNELS"] == "", "what was compiled elsewhere proves no compiler"


def test_a_torch_that_sees_no_card_proves_nothing_of_the_card() -> None:
    """On the processor a product would be right, whatever it is called."""
    blind = {"torch": Answer(0, "sees no card\n")}
    (found,) = command.started(machine(answers=blind), 60, compiling=False)
    assert (found.what, found.verdict, found.value) == ("torch", FAIL, "sees no card, and the driver has 1")
    assert "built for a CUDA that the driver supports" in found.way_out
    found, *others = command.started(machine(answers=blind, driver=NO_CARD), 60, compiling=False)
    assert (found.verdict, len(others)) == (OK, 2)


def test_without_torch_nothing_else_is_started() -> None:
    found = list(command.started(failing("torch", "ImportError: no"), 60, compiling=True))
    assert [finding.what for finding in found] == ["torch"]


def test_a_hang_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def probe(name: str, variables: Mapping[str, str]) -> Answer:
        hangs = variables.get("LIGHTNING_FP8_GEMM") == "numba"
        return answer_of(["sleep", "30"], 0.5) if hangs else Answer(0, "fine")

    found = command.report(replace(machine(), probe=probe), 0.5, compiling=True)
    (hung,) = [finding for finding in found if finding.verdict is FAIL]
    assert (hung.what, hung.value) == ("product, kernel", "did not answer within 0.5 s")
    assert "LIGHTNING_FP8_GEMM=cublaslt" in hung.way_out
    printed = capsys.readouterr().out
    assert "FAIL  product, kernel        did not answer within 0.5 s" in printed
    assert "ok    compile                fine" in printed, "what comes after a hang is still started"


def test_what_is_known_is_said_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver may hang for as long as it is waited for, and torch takes seconds: versions are out before."""
    said: dict[str, str] = {}
    of = machine()

    def driver() -> Driver:
        said.setdefault("driver", capsys.readouterr().out)
        return H200_DRIVER

    def probe(name: str, variables: Mapping[str, str]) -> Answer:
        said.setdefault(name, capsys.readouterr().out)
        return Answer(0, "fine")

    command.report(replace(of, driver=driver, probe=probe), 60, compiling=False)
    assert all(f" {name} " in said["driver"] for name in (*VERSIONS, "torch"))
    assert all(f" {name} " in said["torch"] for name in ("driver", *COMPILERS, "compiled kernels"))
    assert " fine" not in said["torch"]


def test_lines_are_as_wide_as_the_terminal() -> None:
    line = line_of(Finding("a", "word " * 40, WARN), 60)
    assert max(map(len, line.splitlines())) <= 60
    assert line.startswith("warn  a   ")
    assert all(rest.startswith(" " * 29) for rest in line.splitlines()[1:])


def test_the_worst_is_to_be_done_first_and_once() -> None:
    found = [Finding("a", "", WARN, "later"), Finding("b", "", FAIL, "now"), Finding("c", "", FAIL, "now")]
    assert advice_of(found) == "do    now\ndo    later"


@pytest.mark.parametrize(
    ("of", "status"), [(machine(), 0), (BROKEN["a wrong CUDA_HOME"][0], 0), (BROKEN["no torch"][0], 1)]
)
def test_json_and_exit_status(of: Machine, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "this_machine", lambda seconds: of)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--json", str(tmp_path / "report.json")])
    assert stopped.value.code == status
    told: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert told["status"] == status
    assert [Finding(**{**each, "verdict": Verdict(each["verdict"])}) for each in told["findings"]] == findings_of(of)


REPORT = """
import sys
from lightning_fp8.cli import main as cli
try:
    cli.main(["doctor", "--seconds", "300"])
except SystemExit as stopped:
    heavy = {"torch", "lightning", "numpy", "numba", "llvmlite", "cuda"} & sys.modules.keys()
    print("status", stopped.code, "imported", sorted(heavy))
"""


def run_python(arguments: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)


def test_the_report_of_this_machine_imports_nothing_itself() -> None:
    done = run_python(["-c", REPORT])
    assert done.stdout.splitlines()[-1] == "status 0 imported []", done.stdout + done.stderr
    assert done.stderr == ""
    assert "[320, 200] in bfloat16 to E4M3 and its transpose, all 128,000 values right" in done.stdout
    assert "equals float64 within rounding" in done.stdout
