"""``lightning-fp8 doctor``: versions, torch's GPUs, a test compilation, and a launch of each kind of kernel.

    lightning-fp8 doctor
    lightning-fp8 doctor --compile --json report.json
    lightning-fp8 doctor --prove

With ``--prove``, each kind of kernel is proven again on the GPU (:mod:`lightning_fp8.proofs.report`).

This process imports neither torch nor a compiler. Whatever may hang or crash runs in a subprocess with a time limit:
``python -m lightning_fp8.doctor PROBE SECONDS``. The exit status is 1 if something that should work does not.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cuda_kernels.host import toolchain
from cuda_kernels.host.cache_folder import CACHE_VARIABLE, CARRIED_VARIABLE
from cuda_kernels.host.proofs import VARIABLE as PROOF_VARIABLE
from lightning_fp8.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lightning_fp8.scaled import ScaledTensor

Verdict = Literal["ok", "warn", "fail"]
"""``warn``: works, but not optimally. ``fail``: should work, but does not."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada)."""

SCALE = 2.0**5
"""Scale of test casts: exact in every format, and large enough to saturate some values."""

PACKAGES = ("torch", "lightning", *toolchain.COMPANIONS, *toolchain.TOOLS, "triton")

VARIABLES = (
    "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LIGHTNING_FP8_GEMM",
    "NUMBA_ENABLE_CUDASIM", CACHE_VARIABLE, CARRIED_VARIABLE, PROOF_VARIABLE,
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

_MARK = "lightning-fp8 doctor says: "
"""Prefix of a probe's result. Other code in the process, such as ``sitecustomize``, may print other lines."""

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


@dataclass(frozen=True)
class Answer:
    """The outcome of a process. ``status`` is negative for a signal, and None if the time limit was exceeded."""

    status: int | None
    output: str = ""
    error: str = ""

    @property
    def said(self) -> str:
        """The result that a probe printed; empty if it printed none."""
        return _marked(self.output)

    @property
    def last_line(self) -> str:
        """Why the process ended: the probe's own error line, or the last line of its error output."""
        lines = [line.strip() for line in (_marked(self.error) or self.error).splitlines() if line.strip()]
        if self.status is not None and self.status < 0:
            with suppress(ValueError):
                return f"ended by {signal.Signals(-self.status).name}" + (f": {lines[-1]}" if lines else "")
        return lines[-1] if lines else f"exit status {self.status}, without a message"

    @property
    def place(self) -> str:
        """Source line of the innermost Python function if the process dumped its stack; else empty."""
        found = re.search(r'most recent call first\):\s+File "([^"]+)", line (\d+) in (\S+)', self.error)
        return f"{Path(found[1]).name}:{found[2]}, {found[3]}" if found else ""


def _marked(text: str) -> str:
    return next(iter(re.findall(f"^{_MARK}(.*)$", text, re.MULTILINE)), "")


def main(argv: Sequence[str]) -> None:
    """``lightning-fp8 doctor``."""
    parser = argparse.ArgumentParser(
        prog="lightning-fp8 doctor",
        description="What runs on this machine, what does not, and the way out. Exit status 1: something is broken.",
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
    width = shutil.get_terminal_size((120, 24)).columns
    findings = []
    versions = toolchain.versions(PACKAGES)
    header = f"\nStarted one by one, each in a process of its own and for at most {seconds:g} s:"
    for title, group in (("", installed(versions)), (header, started(versions, seconds, compiling))):
        if title:
            print(title, flush=True)
        for finding in group:
            findings.append(finding)
            print(line_of(finding, width), flush=True)
    print(f"\n{advice_of(findings)}", flush=True)
    return findings


def proofs(dry_run: bool) -> list[Finding]:
    """Prove each kind of kernel, printing each result; with ``dry_run`` only list the kernels.

    The value of the last finding is the keys of the proven kernels, as ``cuda_kernels/host/proven.txt`` lists them.
    """
    from lightning_fp8.proofs.report import listed, proven

    on = device()
    if not dry_run and not _has_fp8(on):
        finding = Finding("GPU", "no GPU with FP8 tensor cores", "fail", "run lightning-fp8 doctor to list the GPUs")
        print(line_of(finding))
        return [finding]
    width = shutil.get_terminal_size((120, 24)).columns
    findings: list[Finding] = []
    keys: list[str] = []
    for line in listed() if dry_run else proven(on):
        findings.append(Finding(line.kind, line.text, "fail" if line.problem else "ok"))
        keys += line.keys
        print(line_of(findings[-1], width), flush=True)
    if failed := sum(finding.verdict == "fail" for finding in findings):
        print(f"\n{failed} of {len(findings)} failed: torch's operations replace these kernels, and are slower")
    return [*findings, Finding("keys", " ".join(dict.fromkeys(keys)))] if keys else findings


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
    """Findings on the driver, torch and its GPUs, and from a compilation for Hopper, a cast, products and attention.

    Each runs in its own process. A failing compilation is a failure if ``compiling``, or if a GPU with FP8 tensor cores
    is present and no prebuilt kernels are configured; otherwise it is a warning.
    """

    def launch(what: str, name: str, **variables: str) -> Finding:
        return tried(what, probe(name, seconds, **variables), seconds)

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
    yield launch("cast", "cast")
    if not on_fp8:
        for what in ("product", *KERNELS):
            yield launch(what, what)
        return
    yield launch("product, cuBLASLt", "product", LIGHTNING_FP8_GEMM="cublaslt")
    # These compile kernels: `lightning-fp8 kernels build` does not include the doctor's.
    if "numba-cuda" in versions and all(finding.verdict == "ok" for finding in compilation):
        yield launch("product, kernel", "product", LIGHTNING_FP8_GEMM="numba")
        for what in KERNELS:
            yield launch(what, what)


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
    for problem, way_out in toolchain.known_conflicts(versions):
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


def probe(name: str, seconds: float, **variables: str) -> Answer:
    """Run one of :data:`PROBES` in a subprocess, with additional environment ``variables``."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    # Probes compare results themselves, so kernels are not proven in these processes.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", PROOF_VARIABLE: "0", **variables}
    return answer_of([sys.executable, "-m", "lightning_fp8.doctor", name, str(seconds)], seconds, environment)


def answer_of(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run ``command`` for at most ``seconds``.

    It is killed after that, but waited for only 1 s more: even SIGKILL does not end a process that hangs in a driver.
    Output goes to files, since a pipe stays open as long as any child process lives.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=environment, start_new_session=True
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:  # also on KeyboardInterrupt
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
        for file in (output, error):
            file.seek(0)
        return Answer(status, *(file.read().decode(errors="replace") for file in (output, error)))


# The functions below run in subprocesses, which import torch.

OPERANDS = (320, 200), (256, 512), (384, 512)
"""Shapes of the tensors to cast: one for :func:`cast`, and the two operands of :func:`product`."""


def torch_facts() -> str:
    """JSON: torch's version, its CUDA version (null without CUDA), the GPUs, and torch's error if there are none."""
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "problem": ""}
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append((gpu.name, (gpu.major, gpu.minor), gpu.total_memory))
    except Exception as error:  # the type varies; a build without CUDA raises AssertionError
        facts["problem"] = str(error).strip().splitlines()[0]
    return json.dumps(facts)


def compilation() -> str:
    """Compile one kernel for Hopper without torch; the caller passes an empty cache."""
    from cuda_kernels.casts.amax import amax_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host import compile_cache

    kernel = amax_kernel(tensor_loader("bfloat16", True), True)
    return f"{kernel.name} for sm_90a: {len(compile_cache.cubin(kernel, '90a')):,} bytes of machine code"


def cast() -> str:
    """Test a cast and its transposed copy against torch's cast on the CPU.

    Raises:
        ArithmeticError: If a value differs.
    """
    from lightning_fp8.formats import E4M3

    x = values(*OPERANDS[0])
    codes, transposed = quantized(x.to(device()))
    nearest = (x.float() * SCALE).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).float()
    for what, found, wanted in (("", codes, nearest), ("transposed ", transposed, nearest.t())):
        wrong = int((wanted != found.data.cpu().float()).sum())
        if wrong:
            raise ArithmeticError(f"{wrong} of {wanted.numel()} {what}values are not the nearest of {E4M3.name}")
    return f"{list(x.shape)} in bfloat16 to E4M3 and its transpose, all {2 * x.numel():,} values right, on {_name()}"


def product() -> str:
    """Test a product of FP8 operands against float64.

    Hopper's tensor cores accumulate with about 14 bits (DeepSeek-V3, arXiv:2412.19437); a wrong tile has larger errors.

    Raises:
        ArithmeticError: If an error exceeds that of rounding to bfloat16 and of an accumulator of 11 bits.
    """
    return _product_of(*(quantized(values(*shape).to(device()))[0] for shape in OPERANDS[1:]))


def _product_of(a: ScaledTensor, b: ScaledTensor) -> str:
    from lightning_fp8 import ops

    left, right = (operand.dequantize().cpu().double() for operand in (a, b))
    wanted = left @ right.t()
    allowed = wanted.abs() * 2**-8 + (left.abs() @ right.abs().t()) * 2**-10
    off = ((ops.scaled_mm(a, b).cpu().double() - wanted).abs() / allowed).max().item()
    if not off <= 1:  # also where it is NaN
        raise ArithmeticError(f"an error is {off:.3g} times as large as rounding explains, compared with float64")
    return f"{list(a.data.shape)} x {list(b.data.shape)}ᵀ in E4M3 equals float64 within rounding, on {_name()}"


def block_product() -> str:
    """Test a blockwise product, 1 × 128 blocks by 128 × 128 blocks, against float64.

    Raises:
        ArithmeticError: If an error exceeds the bound of :func:`product`.
    """
    from lightning_fp8 import ops
    from lightning_fp8.formats import E4M3
    from lightning_fp8.scaled import Cast, Layout

    a, b = (
        ops.quantize(values(*shape).to(device()), Cast(E4M3, layout)).rowwise
        for shape, layout in zip(OPERANDS[1:], (Layout.BLOCK_1X128, Layout.BLOCK_128X128))
    )
    assert a is not None
    assert b is not None
    return _product_of(a, b)


def scales() -> str:
    """Test the update of delayed scales against its formula.

    Raises:
        ArithmeticError: If a scale, or an amax in the history, differs.
    """
    import torch

    from lightning_fp8 import ops
    from lightning_fp8.formats import E4M3

    tensors, length = 70, 16
    largest = torch.full((tensors,), E4M3.max)
    generator = torch.Generator().manual_seed(0)
    amax, history = (torch.rand(*shape, generator=generator) + 0.1 for shape in ((tensors,), (length, tensors)))
    history[0] = 0.0  # the next amax is stored here
    found, scale = history.to(device(), copy=True), torch.ones(tensors).to(device())
    ops.update_scales(amax.to(device(), copy=True), found, scale, largest.to(device()), 0.0, "max")
    wanted = torch.cat([history[:1], history[2:], amax[None]])
    wrong_scales = scale.cpu() != largest / torch.maximum(amax, history.amax(0))
    wrong = int(wrong_scales.sum()) + int((found.cpu() != wanted).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {tensors} scales and {history.numel()} amaxes are wrong")
    return f"{tensors} scales of histories of {length} steps, all right, on {_name()}"


def norm() -> str:
    """Test LayerNorm's cast and its gradients against torch's layer_norm in float64.

    Raises:
        ArithmeticError: If a row or a gradient has a larger error than FP8 (output) or bfloat16 (gradients) explains.
    """
    import torch
    import torch.nn.functional as F

    from lightning_fp8 import ops
    from lightning_fp8.formats import E4M3
    from lightning_fp8.scaled import Cast, Layout

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(200, 1024, generator=generator).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(1024, generator=generator).bfloat16() for _ in range(2))
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    wanted = F.layer_norm(exact[0], (1024,), exact[1], exact[2], 1e-5)
    wanted.backward(dy.double())
    x, weight, bias, dy = (each.to(device()) for each in (x, weight, bias, dy))
    made = ops.norm_quantize(x, weight, bias, Cast(E4M3, Layout.TENSOR), eps=1e-5)
    assert made.operands.rowwise is not None
    _require_close("y", made.operands.rowwise.dequantize(), wanted.detach(), 0.05)
    found = ops.norm_backward(dy, x, weight, made.statistics, bias_gradient=True)
    for name, gradient, of in zip(("x", "weight", "bias"), found, exact):
        assert gradient is not None
        assert of.grad is not None
        _require_close(f"the gradient of {name}", gradient, of.grad, 0.01)
    return f"LayerNorm of {list(x.shape)} and its gradients equal float64 within rounding, on {_name()}"


def attention() -> str:
    """Test causal attention and its gradients against float64.

    Raises:
        ArithmeticError: If a result has a larger error than FP8 explains.
    """
    import torch

    from lightning_fp8.attention.function import fp8_attention
    from lightning_fp8.attention.ops import Band, missing_kernel

    generator = torch.Generator().manual_seed(0)
    *qkv, do = (torch.randn(1, 256, 2, 128, generator=generator).bfloat16() for _ in range(4))
    exact = [x.double().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in exact)
    scores = (q @ k.mT / 128**0.5).masked_fill(torch.ones(256, 256, dtype=torch.bool).triu(1), -torch.inf)
    wanted = (scores.softmax(-1) @ v).transpose(1, 2)
    wanted.backward(do.double())
    on_device = [x.to(device()).requires_grad_() for x in qkv]
    if reason := missing_kernel(device(), qkv[0].shape[-1]):
        return f"runs in high precision: {reason}"
    o = fp8_attention(*on_device, band=Band(right=0))
    o.backward(do.to(device()))
    _require_close("o", o.detach(), wanted.detach(), 0.2, rows=1)
    for name, found, of in zip("qkv", on_device, exact):
        assert found.grad is not None
        assert of.grad is not None
        _require_close(f"the gradient of {name}", found.grad, of.grad, 0.15)
    return f"{list(o.shape)} and its gradients equal float64 within FP8's rounding, on {_name()}"


def _require_close(what: str, found: Tensor, wanted: Tensor, allowed: float, rows: int = 32) -> None:
    """Compare relative errors of groups of ``rows`` rows.

    Raises:
        ArithmeticError: If a group's error exceeds ``allowed``, or a value is NaN.
    """
    found, wanted = (x.cpu().double().reshape(-1, x.shape[-1]) for x in (found, wanted))
    pairs = zip(found.split(rows), wanted.split(rows))
    off = max(((one - other).norm() / other.norm()).nan_to_num(nan=math.inf).item() for one, other in pairs)
    if not off <= allowed:
        raise ArithmeticError(
            f"{what} differs from float64 by up to {off:.1%}, but rounding explains only {allowed:.0%}"
        )


def quantized(x: Tensor) -> tuple[ScaledTensor, ScaledTensor]:
    """The cast tested by :func:`cast` and :func:`product`: ``x [R, K]`` in E4M3, and its transpose."""
    from lightning_fp8 import ops
    from lightning_fp8.formats import E4M3
    from lightning_fp8.scaled import Cast, Layout

    both = ops.quantize(x, Cast(E4M3, Layout.TENSOR), scale=x.new_tensor(SCALE).float(), columnwise=True)
    assert both.rowwise is not None
    assert both.columnwise is not None
    return both.rowwise, both.columnwise


def values(rows: int, columns: int) -> Tensor:
    """Bfloat16 ``[rows, columns]`` of both signs; cast with :data:`SCALE`, they range from subnormal to saturated."""
    import torch

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (x * torch.logspace(-3, 1, columns)).bfloat16()


def device() -> torch.device:
    """The first GPU with FP8 tensor cores, or else the first one, or the CPU."""
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    index = next((gpu for gpu in gpus if torch.cuda.get_device_capability(gpu) >= FP8_CAPABILITY), 0)
    return torch.device("cuda", index) if gpus else torch.device("cpu")


def _has_fp8(where: torch.device) -> bool:
    import torch

    return where.type == "cuda" and torch.cuda.get_device_capability(where) >= FP8_CAPABILITY


def _name() -> str:
    import torch

    return torch.cuda.get_device_name(device()) if device().type == "cuda" else "the CPU"


def refuse_fallbacks() -> None:
    """Turn the warnings that a slower fallback runs on a GPU with FP8 tensor cores into errors."""
    if _has_fp8(device()):
        fallbacks = r"(An )?FP8 kernels? (do|does) not run|torch\._scaled_mm refuses"
        warnings.filterwarnings("error", fallbacks, RuntimeWarning)


KERNELS = {"product of blocks": block_product, "scales": scales, "norm": norm, "attention": attention}
"""Probes of kernels other than casts and plain products."""
PROBES = {"torch": torch_facts, "compile": compilation, "cast": cast, "product": product, **KERNELS}
"""Each returns a line that describes what ran, or raises the reason it failed."""


def run_probe(name: str, seconds: str) -> None:
    """Print the probe's result, or exit with its error. The stack is dumped shortly before the time limit."""
    faulthandler.dump_traceback_later(0.9 * float(seconds))
    try:
        if name not in ("torch", "compile"):
            refuse_fallbacks()
        print(f"\n{_MARK}{PROBES[name]()}")
    except Exception as error:
        raise SystemExit(f"\n{_MARK}{type(error).__name__}: {' '.join(str(error).split())}") from None
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run_probe(*sys.argv[1:])
