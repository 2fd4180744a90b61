"""Every kernel compiled for every architecture: registers, spills, the assembler's advice, and the instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from cuda_kernels import launch
from cuda_kernels.cache import cached
from cuda_kernels.launch import Kernel
from tests import fused_cases, gemm_cases, kernel_cases
from tests.emulated import builders, kernels_of, ltoir_of

REGISTERS = 65536
"""32-bit registers of a multiprocessor."""
SHARED_BYTES = {"90a": 227 * 1024, "89": 99 * 1024, "120": 99 * 1024}
"""The most a block may have."""

CASES = [*kernel_cases.CASES, *fused_cases.CASES, *gemm_cases.CASES]
KERNELS = {kernel.name: kernel for case in CASES for kernel in kernels_of(case.run)}
PRODUCTS = [kernel for kernel in KERNELS.values() if "gemm" in kernel.name]


def compiled(kernel: Kernel, arch: str) -> tuple[str, bytes]:
    """The assembler's report and the machine code; kept on disk between runs."""

    def build() -> bytes:
        code, report = launch.link(ltoir_of(kernel, arch), arch, "cubin")
        return report.encode() + b"\0" + code

    report, _, code = cached(kernel.key("report", arch), build).partition(b"\0")
    return report.decode(), code


def disassembler() -> Path:
    (path,) = (file for file in files("nvidia-cuda-nvdisasm") or () if file.name == "nvdisasm")
    return Path(str(path.locate()))


def instructions(code: bytes) -> Counter[str]:
    """How often each machine instruction appears."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", text))


def starting_with(found: Iterable[str], *prefixes: str) -> list[str]:
    return sorted(name for name in found if name.startswith(prefixes))


def variants() -> Iterator[Any]:
    """Every variant for Hopper, if it is for it, and two of each kernel for the other architectures."""
    seen: Counter[str] = Counter()
    for kernel in KERNELS.values():
        name = kernel.function.__name__
        for arch in kernel.architectures if seen[name] < 2 else kernel.architectures[:1]:
            yield pytest.param(kernel, arch, id=f"{kernel.name}-{arch}")
        seen[name] += 1


@pytest.mark.parametrize(("kernel", "arch"), variants())
def test_kernel(kernel: Kernel, arch: str) -> None:
    report, code = compiled(kernel, arch)
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    assert registers * kernel.threads * kernel.blocks_side_by_side(arch) <= REGISTERS
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report) == [
        ("0",) * 3
    ]
    assert not re.findall(r"^.*(?:warning|\(C\d+\)).*$", report, re.MULTILINE)
    assert kernel.shared_bytes <= min(SHARED_BYTES[arch] for arch in kernel.architectures)

    found = instructions(code)
    assert sum(found.values()) > 50
    assert not starting_with(found, "LDL", "STL"), "local memory"
    assert not starting_with(found, "DADD", "DMUL", "DFMA", "DSETP", "F2F.F64"), "float64 arithmetic"
    casts = kernel.function.__name__.startswith(("quantize", "normalize", "cast"))
    assert bool(starting_with(found, "F2FP.SATFINITE.E4M3", "F2FP.SATFINITE.E5M2")) == casts
    if "aligned=True" in kernel.name:
        assert starting_with(found, "LDG.E.NA.64", "LDG.E.NA.128"), f"no wide loads: {starting_with(found, 'LDG')}"
    if "columnwise=True" in kernel.name:
        assert starting_with(found, "STG.E.128"), "columns leave 16 bytes at a time"
        assert starting_with(found, "LDS.128")
        assert starting_with(found, "STS.128")


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda kernel: kernel.name)
def test_products_use_tensor_cores(kernel: Kernel) -> None:
    hopper = kernel.architectures == ("90a",)
    for arch in kernel.architectures:
        found = instructions(compiled(kernel, arch)[1])
        wanted = ("QGMMA", "UTMALDG", "USETMAXREG", "SYNCS") if hopper else ("QMMA", "LDSM", "LDGSTS")
        assert all(starting_with(found, name) for name in wanted)
        stored = ("UTMAREDG" if "accumulate" in kernel.name else "UTMASTG") if "staged" in kernel.name else "STG"
        assert starting_with(found, stored)


def test_every_kernel_is_compiled() -> None:
    assert {kernel.function.__name__ for kernel in KERNELS.values()} == builders()
