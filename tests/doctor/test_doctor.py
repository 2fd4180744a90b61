"""``lightning-fp8 doctor``: healthy and broken machines as a table, what hangs, and what each probe checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

from cuda_kernels.host.cache_folder import CARRIED_VARIABLE
from cuda_kernels.host.proofs import VARIABLE
from lightning_fp8 import ops
from lightning_fp8.doctor import probes, processes, report, run
from lightning_fp8.doctor.processes import Answer, answer_of
from lightning_fp8.doctor.report import Finding, advice_of, line_of
from lightning_fp8.ops import plans
from lightning_fp8.proofs.comparing import WrongResult
from lightning_fp8.proofs.kinds import KINDS, kernels_of_kind, kinds_for
from tests.cuda_kernels.emulated import needs_compilers
from tests.proofs.emulated_card import CARD, emulated_card
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]

VERSIONS = {
    "torch": "2.11.0", "lightning": "2.6.6", "numpy": "2.4.6", "cuda-bindings": "13.0.3", "cuda-pathfinder": "1.9.0",
    "numba-cuda": "0.30.4", "numba": "0.68.1", "llvmlite": "0.50.0", "cuda-core": "1.2.2", "nvidia-nvvm": "13.0.88",
    "nvidia-nvjitlink": "13.0.88",
}  # fmt: skip
H200 = ("NVIDIA H200", (9, 0), 141 << 30)
A100 = ("NVIDIA A100", (8, 0), 80 << 30)
NO_CUDA = "Torch not compiled with CUDA enabled"


class Machine(NamedTuple):
    """A healthy H200, but for what is given; a version of None is a package that is not installed."""

    versions: Mapping[str, str | None] = {}
    gpus: Sequence[tuple[str, tuple[int, int], int]] = (H200,)
    cuda: str | None = "13.0"
    problem: str = ""
    smi: Answer | None = Answer(0, "NVIDIA H200, 580.159.03, 143771 MiB\n")
    answers: Mapping[str, Answer] = {}
    variables: Mapping[str, str] = {}

    def answer(self, name: str) -> Answer:
        facts = {"version": "2.11.0+cu130", "cuda": self.cuda, "gpus": self.gpus, "problem": self.problem}
        said = json.dumps(facts) if name == "torch" else "fine"
        healthy = Answer(0, f"a warning\nlightning-fp8 doctor says: {said}\ngood bye\n")
        return self.answers.get(name, healthy)


KERNELS = ["product of blocks", "scales", "norm", "attention"]

CPU = Machine(gpus=(), cuda=None, problem=NO_CUDA, smi=None)


@pytest.fixture
def findings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The findings on a simulated machine; ``asked`` is each probe with its variables."""
    asked: list[tuple[str, dict[str, str]]] = []

    def simulate(machine: Machine) -> None:
        for name in report.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in machine.variables.items():
            monkeypatch.setenv(name, value)
        installed = {name: version for name, version in {**VERSIONS, **machine.versions}.items() if version}
        monkeypatch.setattr(report.toolchain, "versions", lambda names: installed)
        monkeypatch.setattr(report, "oldest_versions", lambda: {"torch": "2.8", "lightning": "2.5"})
        monkeypatch.setattr(report.shutil, "which", lambda name: machine.smi and f"/usr/bin/{name}")
        monkeypatch.setattr(report, "answer_of", lambda command, seconds, environment=None: machine.smi)

        def probe(name: str, seconds: float, **variables: str) -> Answer:
            asked.append((name, variables))
            return machine.answer(name)

        monkeypatch.setattr(report, "probe", probe)

    def find(machine: Machine, compiling: bool = False) -> list[Finding]:
        simulate(machine)
        return report.report(60, compiling)

    find.asked = asked  # type: ignore[attr-defined]
    find.simulate = simulate  # type: ignore[attr-defined]
    return find


def failing(probe: str, stderr: str, status: int = 1, **others: Any) -> Machine:
    """A healthy H200 on which a process of the doctor's fails."""
    return Machine(answers={probe: Answer(status, "", stderr)}, **others)


BROKEN: dict[str, tuple[Machine, str, str, str, str]] = {
    # machine, what is found, how bad, a part of the value, a part of the advice
    "no torch": (
        failing("torch", "No module named 'torch'", versions={"torch": None}), "torch", "fail", "not installed",
        "pip install torch",
    ),
    "old torch": (Machine({"torch": "2.7.1"}), "torch", "fail", "2.8 is the oldest", 'pip install -U "torch"'),
    "no lightning": (Machine({"lightning": None}), "lightning", "fail", "not installed", "pip install lightning"),
    "old lightning": (Machine({"lightning": "2.4.0"}), "lightning", "fail", "2.5 is the oldest", "-U"),
    "CPU torch on a GPU": (
        Machine(gpus=(), cuda=None, problem=NO_CUDA), "GPU", "fail", f"torch finds none: {NO_CUDA}", "built for a CUDA",
    ),
    "torch newer than the driver": (
        Machine(gpus=(), problem="The NVIDIA driver on your system is too old (found version 12080)."), "GPU", "fail",
        "found version 12080", "update the driver, or install a torch",
    ),
    "no fabric manager": (
        Machine(gpus=(), problem="Unexpected error. Error 802: system not yet initialized"), "GPU", "fail", "802",
        "systemctl start nvidia-fabricmanager",
    ),
    "Ampere": (Machine(gpus=(A100,)), "GPU 0", "warn", "compute capability 8.0, 80 GiB; FP8 tensor cores", "BF16"),
    "hidden GPUs": (
        Machine(gpus=(), problem="No CUDA GPUs are available", variables={"CUDA_VISIBLE_DEVICES": "-1"}), "GPU", "warn",
        "hidden by CUDA_VISIBLE_DEVICES='-1'", "unset CUDA_VISIBLE_DEVICES",
    ),
    "a driver just updated": (
        Machine(gpus=(), problem="No CUDA GPUs", smi=Answer(18, "Driver/library version mismatch\nNVML 575.51\n")),
        "driver", "fail", "nvidia-smi: Driver/library version mismatch; NVML 575.51", "restart the machine",
    ),
    "a driver without a GPU": (
        Machine(gpus=(), problem="No CUDA GPUs", smi=Answer(6, "No devices were found\n")), "driver", "warn",
        "No devices were found", "restart",
    ),
    "a driver that hangs": (
        Machine(gpus=(), problem="No CUDA GPUs", smi=Answer(None)), "driver", "fail", "did not answer within 60 s",
        "restart",
    ),
    "no numba-cuda": (
        Machine({"numba-cuda": None}), "compile", "fail", "slower", 'pip install "lightning-fp8[cuda]"',
    ),
    "no numba-cuda, CUDA 12": (
        Machine({"numba-cuda": None}, cuda="12.8"), "compile", "fail", "slower", 'pip install "lightning-fp8[cuda12]"',
    ),
    "numba older than numpy": (
        Machine({"numba": "0.66.0", "numpy": "2.5.2"}), "versions", "fail",
        "numba 0.66.0 refuses to be imported with numpy 2.5.2", 'pip install "numba>=0.67"',
    ),
    "nvvm newer than nvJitLink": (
        Machine({"nvidia-nvvm": "13.5.37"}), "versions", "fail", "ERROR_OUTDATED_LIBRARY",
        'pip install "cuda-toolkit[nvvm]==13.0.*"',
    ),
    "no libnvvm": (
        failing("compile", "KernelError: no libnvvm.so\n"), "compile", "fail", "no libnvvm.so",
        'pip install "lightning-fp8[cuda]"; numba -s',
    ),
    "a toolkit's nvvm": (
        failing("compile", "Error: ERROR_OUTDATED_LIBRARY\n"), "compile", "fail", "OUTDATED", "install libnvvm in the",
    ),
    "a simulator": (
        failing("compile", "TypeError: 'NoneType' object\n", variables={"NUMBA_ENABLE_CUDASIM": "1"}), "compile",
        "fail", "TypeError", "unset NUMBA_ENABLE_CUDASIM",
    ),
    "a slow compiler": (
        Machine(answers={"compile": Answer(None)}), "compile", "fail", "did not answer within 60 s", "--seconds 300",
    ),
    "torch does not import": (
        failing("torch", "Traceback\nImportError: a.so: undefined symbol: __nvJitLinkComplete_12_4\n", gpus=()),
        "torch", "fail", "undefined symbol", "unset LD_LIBRARY_PATH",
    ),
    "torch does not find a library": (
        failing("torch", "ImportError: libcudart.so.12: cannot open shared object file: No such file\n", gpus=()),
        "torch", "fail", "libcudart.so.12", "pip install --force-reinstall torch",
    ),
    "torch ends without an answer": (
        Machine(answers={"torch": Answer(0, "good bye\n")}), "torch", "fail", "exit status 0, without a message",
        "bug report",
    ),
    "torch hangs": (
        Machine(answers={"torch": Answer(None, "", "(most recent call first):\n  File \"/t/a.py\", line 3 in load\n")}),
        "torch", "fail", "did not answer within 60 s; it was in a.py:3, load", "nvidia-smi",
    ),
    "numba-cuda on PYTHONPATH": (
        failing("cast", "RuntimeWarning: ... No module named 'numba.cuda.cgutils'\n"), "cast", "fail",
        "numba.cuda.cgutils", "its .pth is not read",
    ),
    "a cast that is wrong": (
        failing("cast", "Traceback\nWrongResult: codes: 3 of 9 differ\n"), "cast", "fail", "WrongResult: codes: 3 of 9",
        "Fix the failures above first; otherwise attach the --json file to a bug report.",
    ),
    "a cast that crashes": (failing("cast", "", -11), "cast", "fail", "ended by SIGSEGV", "bug report"),
    "attention that hangs": (
        Machine(answers={"attention": Answer(None)}), "attention", "fail", "did not answer", "end the process",
    ),
}  # fmt: skip


def test_a_healthy_machine_has_nothing_to_do(findings_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings_of(Machine(), compiling=True)
    assert {finding.verdict for finding in found} == {"ok"}
    assert capsys.readouterr().out.endswith("\n\nnothing to do\n")
    values = {finding.what: finding.value for finding in found}
    assert values["torch"] == "2.11.0+cu130, built for CUDA 13.0"  # the last one: as torch says it
    assert values["driver"] == "NVIDIA H200, 580.159.03, 143771 MiB"
    assert values["GPU 0"] == "NVIDIA H200, compute capability 9.0, 141 GiB"
    assert set(VERSIONS) < values.keys()
    launches = ["compile", "cast", "product, cuBLASLt", "product, MXFP8", "product, kernel", *KERNELS]
    assert [finding.what for finding in found][-len(launches) :] == launches


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found_with_advice(case: str, findings_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine, what, verdict, value, advice = BROKEN[case]
    wrong = [finding for finding in findings_of(machine) if finding.verdict != "ok"]
    if case == "no torch":  # and its process fails
        wrong = wrong[:1]
    assert [finding.what for finding in wrong] == [what]
    assert (wrong[0].verdict, value in wrong[0].value, advice in wrong[0].way_out) == (verdict, True, True), wrong[0]
    assert f"do    {wrong[0].way_out}" in capsys.readouterr().out.splitlines()


COMPILERS = ["no numba-cuda", "numba older than numpy", "nvvm newer than nvJitLink", "no libnvvm"]


@pytest.mark.parametrize("case", COMPILERS)
def test_compilers_fail_where_kernels_are_wanted(case: str, findings_of: Any) -> None:
    machine, what, *_ = BROKEN[case]

    def failures(machine: Machine, compiling: bool = False) -> list[str]:
        return [finding.what for finding in findings_of(machine, compiling) if finding.verdict == "fail"]

    without_gpu = machine._replace(gpus=(), cuda=None, problem=NO_CUDA, smi=None)
    assert failures(without_gpu) == []
    assert failures(without_gpu, compiling=True) == [what]
    carried = machine._replace(variables={CARRIED_VARIABLE: "/carried"})
    assert failures(carried) == []
    assert failures(carried._replace(variables={CARRIED_VARIABLE: ""})) == [what]


def test_what_needs_a_compiler_is_started_where_one_works(findings_of: Any) -> None:
    machine = BROKEN["no libnvvm"][0]
    launches = [name for name, _ in (findings_of(machine), findings_of.asked)[1]]
    assert launches == ["torch", "compile", "cast", "product", "product, MXFP8"]  # cuBLASLt's


def test_a_machine_without_a_gpu_is_healthy(findings_of: Any) -> None:
    versions = {name: None for name in VERSIONS if name not in ("torch", "lightning", "numpy")}
    found = findings_of(CPU._replace(versions=versions))
    assert {finding.verdict for finding in found} == {"ok"}
    values = {finding.what: finding.value for finding in found}
    assert values["GPU"].startswith(f"none ({NO_CUDA})")
    assert "numba-cuda is not installed" in values["compile"]
    assert [finding.what for finding in found][-2:] == ["cast", "product"]


def test_each_launch_has_its_environment(findings_of: Any) -> None:
    findings_of(Machine(variables={CARRIED_VARIABLE: "/carried"}))
    compiled = findings_of.asked.pop(1)
    assert findings_of.asked == [
        ("torch", {}), ("cast", {}), ("product", {"LIGHTNING_FP8_GEMM": "cublaslt"}),
        ("product, MXFP8", {}), ("product", {"LIGHTNING_FP8_GEMM": "numba"}), *((name, {}) for name in KERNELS),
    ]  # fmt: skip
    assert (compiled[0], compiled[1].keys()) == ("compile", {"LIGHTNING_FP8_CACHE", "LIGHTNING_FP8_KERNELS"})
    assert compiled[1]["LIGHTNING_FP8_KERNELS"] == "", "what was compiled elsewhere proves no compiler"


@pytest.mark.parametrize("case", ["torch does not import", "torch hangs", "CPU torch on a GPU"])
def test_where_torch_fails_only_a_compilation_is_started(case: str, findings_of: Any) -> None:
    """On the CPU a product would be right, whatever it is called."""
    findings_of(BROKEN[case][0])
    assert [name for name, _ in findings_of.asked] == ["torch", "compile"]


def test_a_hang_and_a_crash_are_reported_and_the_rest_goes_on(
    findings_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings_of.simulate(Machine())

    def probe(name: str, seconds: float, **variables: str) -> Answer:
        if variables.get("LIGHTNING_FP8_GEMM") == "numba":
            return answer_of(["sleep", "30"], seconds)
        if name == "cast":
            return answer_of([sys.executable, "-c", "import os; os.abort()"], 30)
        return Machine().answer(name)

    monkeypatch.setattr(report, "probe", probe)
    found = report.report(0.5, compiling=True)
    cast, hung = (finding for finding in found if finding.verdict == "fail")
    assert (cast.what, cast.value) == ("cast", "ended by SIGABRT")
    assert (hung.what, hung.value) == ("product, kernel", "did not answer within 0.5 s")
    assert "LIGHTNING_FP8_GEMM=cublaslt" in hung.way_out
    printed = capsys.readouterr().out
    assert "FAIL  product, kernel        did not answer within 0.5 s" in printed
    assert "ok    attention              fine" in printed, "what comes after a hang is still started"


def test_versions_and_variables_are_printed_before_anything_starts(
    findings_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver may hang for as long as it is waited for, and torch takes seconds."""
    before: list[str] = []
    findings_of.simulate(Machine(variables={"CUDA_HOME": "/opt/cuda"}))

    def answer_of(*arguments: Any) -> Answer:
        before.append(capsys.readouterr().out)
        return Answer(0, "lightning-fp8 doctor says: fine")

    monkeypatch.setattr(report, "answer_of", answer_of)
    report.report(60, compiling=False)
    assert all(f" {name} " in before[0] for name in VERSIONS)
    assert "ok    CUDA_HOME              /opt/cuda" in before[0]
    assert "Python" in before[0]
    assert "driver" not in before[0]


def test_lines_are_as_wide_as_the_terminal() -> None:
    line = line_of(Finding("a", "word " * 40, "warn"), 60)
    assert max(map(len, line.splitlines())) <= 60
    assert line.startswith("warn  a   ")
    assert all(rest.startswith(" " * 29) for rest in line.splitlines()[1:])


def test_the_worst_is_to_be_done_first_and_once() -> None:
    found = [Finding("a", "", "warn", "later"), Finding("b", "", "fail", "now"), Finding("c", "", "fail", "now")]
    assert advice_of(found) == "do    now\ndo    later"


@pytest.mark.parametrize(("machine", "status"), [(Machine(), 0), (BROKEN["Ampere"][0], 0), (BROKEN["old torch"][0], 1)])
def test_json_and_exit_status(machine: Machine, status: int, findings_of: Any, tmp_path: Path) -> None:
    expected = findings_of(machine)
    with pytest.raises(SystemExit) as stopped:
        report.main(["--json", str(tmp_path / "report.json")])
    assert stopped.value.code == status
    document: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert document["status"] == status
    assert [Finding(**each) for each in document["findings"]] == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(
            ("--seconds", each, "is not a number above 0 and up to 86400")
            for each in ("0", "-1", "nan", "inf", "1e9", "a")
        ),
        *(("--json", each, "cannot be written") for each in ("/nonexistent/x.json", "/", "/dev/null/x.json")),
    ],
)
def test_arguments_are_refused_before_anything_starts(
    option: str, value: str, message: str, findings_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    findings_of.simulate(Machine())
    with pytest.raises(SystemExit) as stopped:
        report.main([f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: '{value}' {message}" in capsys.readouterr().err
    assert not findings_of.asked


# --- Processes --------------------------------------------------------------------------------------------------------

REPORT = """
import sys
from lightning_fp8.cli import main as cli
try:
    cli.main(["doctor", "--seconds", "300"])
except SystemExit as stopped:
    heavy = {"torch", "lightning", "numpy", "numba", "llvmlite", "cuda"} & sys.modules.keys()
    print("status", stopped.code, "imported", sorted(heavy))
"""


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)


@thorough
def test_the_report_of_this_machine_imports_nothing_itself() -> None:
    done = run_python("-c", REPORT)
    assert done.stdout.splitlines()[-1] == "status 0 imported []", done.stdout + done.stderr
    assert done.stderr == ""
    assert f"{torch.__version__}, built " in done.stdout
    assert "[320, 200] in bfloat16 to E4M3 and its transpose, all 128,000 values right" in done.stdout
    assert "in E4M3 equals float64 within rounding" in done.stdout


@pytest.mark.parametrize(
    ("breaking", "value"),
    [
        ("raise ImportError('libtorch.so: undefined symbol: x')", "ImportError: libtorch.so: undefined symbol: x"),
        pytest.param("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV", marks=thorough),
        pytest.param("import time; time.sleep(60)", "did not answer within 3 s", marks=thorough),
    ],
)
def test_the_report_where_torch_is_broken(breaking: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(breaking)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-m", "lightning_fp8", "doctor", "--seconds", "3", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert f"FAIL  torch                  {value}" in done.stdout
    assert "cast  " not in done.stdout


NOISE = """
import atexit, sys
print("hi", end="")
for file in (sys.stdout, sys.stderr):
    atexit.register(print, "bye", file=file)
"""


@thorough
def test_other_lines_of_a_process_are_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "lightning_fp8.doctor.run"]
    environment = {**os.environ, "PYTHONPATH": path}
    answer = answer_of([*command, "torch", "300"], 300, environment)
    assert answer.output.endswith("bye\n")
    assert Version(json.loads(answer.said)["version"]) == Version(torch.__version__)
    (tmp_path / "torch.py").write_text("raise ImportError('why')")
    answer = answer_of([*command, "torch", "300"], 300, environment)
    assert answer.error.endswith("bye\n")
    assert (answer.said, answer.last_line) == ("", "ImportError: why")


def test_a_hang_has_a_place() -> None:
    program = "import faulthandler\ndef waits():\n faulthandler.dump_traceback()\nwaits()"
    assert answer_of([sys.executable, "-c", program], 60).place == "<string>:3, waits"
    assert Answer(None, "", "waiting\n").place == ""


def test_children_of_what_hangs_are_ended_too() -> None:
    answer = answer_of(["sh", "-c", "sleep 100 & echo $!; wait"], 1.5)
    assert answer.status is None
    child = int(answer.output)
    for _ in range(50):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        break
    else:
        os.kill(child, 9)
        pytest.fail("a child lives on")


@pytest.mark.parametrize(
    ("program", "last_line"),
    [
        ("import sys; print('a'); sys.exit('why')", "why"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import sys; sys.exit(3)", "exit status 3, without a message"),
        ("raise ValueError('no\\nway')", "way"),
    ],
)
def test_a_process_that_fails_says_why(program: str, last_line: str) -> None:
    answer = answer_of([sys.executable, "-c", program], 60)
    assert answer.status
    assert answer.last_line == last_line


def test_lower_bounds_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        "torch>=2.8",
        "lightning>=2.5",
        "numpy",
        'jsonargparse[signatures]>=4.39; extra == "cli"',
        "a >= 1.2, <3",
    ]
    monkeypatch.setattr(report, "requires", {"lightning-fp8": required}.get)
    assert report.oldest_versions() == {"torch": "2.8", "lightning": "2.5", "a": "1.2"}


PROBING = """
import time
from lightning_fp8.doctor import run

def waits():
    time.sleep(2)
    raise ValueError("of no\\nuse")

run.torch_facts = waits
run.main("torch", "0.5")
"""


def test_a_probe_says_where_it_hangs_and_why_it_fails() -> None:
    answer = answer_of([sys.executable, "-c", PROBING], 300)
    assert answer.status == 1
    assert answer.place == "<string>:6, waits"
    assert answer.last_line == "ValueError: of no use"


# --- Probes -----------------------------------------------------------------------------------------------------------


def test_torch_facts_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    both = [
        SimpleNamespace(name=name, major=major, minor=minor, total_memory=size)
        for name, (major, minor), size in (H200, A100)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", both.__getitem__)
    assert json.loads(run.torch_facts()) == {
        "version": torch.__version__, "cuda": torch.version.cuda, "problem": "",
        "gpus": [["NVIDIA H200", [9, 0], 141 << 30], ["NVIDIA A100", [8, 0], 80 << 30]],
    }  # fmt: skip


def test_why_there_is_no_gpu_is_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.cuda, "init", init)
    facts = json.loads(run.torch_facts())
    assert (facts["gpus"], facts["problem"]) == ([], "Found no NVIDIA driver on your system.")


@pytest.mark.parametrize("where", [0, 1])
def test_one_wrong_value_of_a_cast_is_seen(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = probes.quantized

    def wrong(x: torch.Tensor) -> Any:
        results = [replace(operand, data=operand.data.clone()) for operand in right(x)]  # they may share memory
        results[where].data.view(torch.uint8)[-1, -1] ^= 1
        return results

    assert "all 128,000 values right" in probes.cast()
    monkeypatch.setattr(probes, "quantized", wrong)
    with pytest.raises(WrongResult, match="^transposed codes: 1 of 64000" if where else "^codes: 1 of 64000"):
        probes.cast()


@pytest.mark.parametrize(
    "wrong", [lambda y: y.index_fill_(0, torch.tensor(3), 1.0), lambda y: y * torch.nan, lambda y: y.roll(1, 0)]
)
def test_one_wrong_row_of_a_product_is_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.scaled_mm
    assert "equals float64 within rounding" in probes.PROBES["product"]()
    monkeypatch.setattr(ops, "scaled_mm", lambda a, b: wrong(right(a, b)))
    with pytest.raises(WrongResult, match="the product: .* rows have larger errors than rounding explains"):
        probes.PROBES["product"]()


@pytest.mark.parametrize(("planted", "problem"), [("none", ""), ("wrong numbers", "data: .* differ")])
@needs_compilers
def test_kernels_are_compared_with_their_specification(
    planted: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(probes, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr("cuda_kernels.host.launch.architecture_of", lambda device: "90a")
    with emulated_card(planted, tmp_path), pytest.raises(WrongResult, match=problem) if problem else nullcontext():
        said = probes.kernels("quantize ragged rows", "product, mma.sync")
        assert re.fullmatch(r"right: (amax\(.*\), )?quantize_tensor\(.*\), on the CPU", said)  # no mma.sync on Hopper


def test_every_kind_that_is_started_exists() -> None:
    for kinds in processes.KERNELS.values():
        assert kinds_for("90a").keys() & kinds


def test_a_gpu_without_a_kernel_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda_kernels.host.launch.architecture_of", lambda device: "100")
    assert probes.PROBES["attention"]() == "torch computes it: this package has no kernel for this GPU"


@pytest.mark.parametrize(
    ("capabilities", "taken"), [([], "cpu"), ([(8, 0)], "cuda:0"), ([(8, 0), (9, 0), (9, 0)], "cuda:1")]
)
def test_the_first_gpu_for_fp8_is_tried(
    capabilities: list[tuple[int, int]], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert probes.device() == torch.device(taken)


def test_a_slow_fallback_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs instead of kernels warns; a launch on a GPU with FP8 tensor cores must not pass on it."""
    from cuda_kernels.host.launch import KernelError

    @plans.planned(lambda x: x)
    def plan(device: torch.device) -> Any:
        raise KernelError("no such kernel")

    monkeypatch.setattr(probes, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(probes.PROBES, "cast", lambda: plan(torch.device("cpu"), False)(0))
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="no such kernel"):
        probes.run("cast")
    plans.clear_plan_cache()


# --- Proofs -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_lists_the_kernels_of_every_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as status:
        report.main(["--prove", "--dry-run", "--json", str(tmp_path / "report.json")])
    assert status.value.code == 0
    found = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert [each["what"] for each in found] == list(KINDS)
    for each in found:
        assert {kernel.name for kernel in kernels_of_kind(KINDS[each["what"]])} == set(
            re.split(r", (?=[a-z_]+\()", each["value"])
        )
    assert "attention_forward(d=128" in capsys.readouterr().out


def test_proofs_need_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        report.main(["--prove"])
    assert status.value.code == 1
    assert "no GPU with FP8 tensor cores" in capsys.readouterr().out
    with pytest.raises(SystemExit) as status:
        report.main(["--dry-run"])
    assert status.value.code == 2


@pytest.fixture
def proven_on_an_emulated_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """All that ``--prove`` asks of a card, where kernels are emulated and casts of gradients are wrong; few kinds."""
    monkeypatch.setattr(probes, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(probes, "has_fp8", lambda: True)
    monkeypatch.setattr("cuda_kernels.host.launch.card", lambda index: CARD)
    few = {name: KINDS[name] for name in ("amax", "quantize", "quantize ragged rows", "transpose")}
    monkeypatch.setattr("lightning_fp8.proofs.report.kinds_for", lambda architecture: few)
    monkeypatch.setenv(VARIABLE, "")
    with emulated_card("wrong numbers", tmp_path):
        yield tmp_path / "proofs"


@thorough
@needs_compilers
def test_proofs_of_all_kinds(
    proven_on_an_emulated_card: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        report.main(["--prove", "--json", str(tmp_path / "report.json")])
    assert status.value.code == 1
    found = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert [each["verdict"] for each in found] == ["ok", "ok", "fail", "ok"]
    assert "wrong results in its case 'small'" in found[2]["value"]
    kept = [json.loads(path.read_text()) for path in proven_on_an_emulated_card.glob("*.json")]
    assert any(verdict["proven"] for verdict in kept)
    assert [verdict["kernel"] for verdict in kept if not verdict["proven"]] == [
        "quantize_tensor(bfloat16, vector=1, e5m2, rowwise=True, columnwise=True, observe=False)"
    ]
    assert "1 of 4 failed" in capsys.readouterr().out
