"""Every kernel compiled for every architecture: registers, spills, the assembler's advice, and the instructions."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.gemm.wgmma import _PRODUCERS_REGISTERS, _REGISTERS
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.cases.all_cases import CASES, cost, kernels_of_case, launched
from tests.cuda_kernels.emulated import builders, compiled
from tests.machine_code import sass
from tests.machine_code.compiled import code_of
from tests.machine_code.cubin import ATTRIBUTES, entry_of
from tests.tiers import cover, thorough

REGISTERS = 65536
"""32-bit registers of a multiprocessor."""
SHARED_BYTES = {"90a": 227 * 1024, "89": 99 * 1024, "100": 227 * 1024, "120": 99 * 1024}
"""The most a block may have."""

KERNELS = {kernel.name: kernel for case in CASES for kernel in kernels_of_case(case)}
COMPILERS = os.environ.get("LIGHTNING_FP8_COMPILERS", "")
"""A folder with a ``pip install --target`` of libnvvm and nvJitLink for each version; .ci/run makes it."""
ROOT = Path(__file__).parents[2]

SPILLED_BYTES = {
    "row_amax(gradient of glu bfloat16, bfloat16, aligned=False, by_row=True, by_column=False)": 16,
    "mma_attention_dq(d=256 bfloat16)": 24,
    "mma_attention_dq(d=256 float32)": 24,
}
"""Kernels that do not fit into registers, and the bytes of their stacks.

The first loads three tensors, whose rows begin anywhere, by single elements. The second has 128 registers of dQ and dS;
what spills is written before the loop over the keys, and read there once for a tile of 128, or behind it.
"""

PRODUCTS = [kernel for kernel in KERNELS.values() if "gemm" in kernel.name]


def starting_with(found: Iterable[str], *prefixes: str) -> list[str]:
    return sorted(name for name in found if name.startswith(prefixes))


def variants() -> Iterator[tuple[Kernel, str]]:
    """Every variant for its first architecture, and for each other one a variant of each kernel, in turn."""
    count = Counter(kernel.function.__name__ for kernel in KERNELS.values())
    seen: Counter[str] = Counter()
    for kernel in KERNELS.values():
        name, (first, *others) = kernel.function.__name__, kernel.architectures
        place = seen[name]
        seen[name] += 1
        turn = others[place:] if seen[name] == count[name] else others[place : place + 1]
        for arch in (first, *turn):
            yield kernel, arch


def kinds_of_code(kernel: Kernel) -> set[str]:
    """The folder of its source; of a product its kind, too."""
    name = kernel.function.__name__
    return {kernel.function.__module__.rpartition(".")[0], *([name] if kernel in PRODUCTS else [])}


def tiered_variants() -> list[Any]:
    """By default, of the kernels that it emulates, one of each folder, each kind of product, each architecture; those
    of its first architecture, which the emulator runs, are compiled."""
    found = [*variants()]
    chosen = cover(
        [{arch, *kinds_of_code(kernel)} if kernel.name in launched() else set() for kernel, arch in found],
        [0.2 if arch == kernel.architectures[0] else cost(kernel) for kernel, arch in found],
    )
    return [
        pytest.param(kernel, arch, id=f"{kernel.name}-{arch}", marks=() if index in chosen else thorough)
        for index, (kernel, arch) in enumerate(found)
    ]


VARIANTS = tiered_variants()


@pytest.mark.parametrize(("kernel", "arch"), VARIANTS)
def test_kernel(kernel: Kernel, arch: str) -> None:
    report, binary = compiled(kernel, arch)
    code = sass.parsed(sass.disassembled(binary))
    check_resources(kernel, arch, report)
    check_what_a_launch_assumes(kernel, report, binary)
    check_instructions(kernel, Counter(each.name for each in code))
    assert code[-1].opcode in ("BRA", "NOP"), "the whole listing was read"
    assert not sass.gpu_wide_barriers(code), "no loop waits for the whole card"
    if kernel in PRODUCTS:
        check_product(kernel, code)


@thorough
@pytest.mark.skipif(not COMPILERS, reason="LIGHTNING_FP8_COMPILERS names no folder of compilers")
@pytest.mark.parametrize("version", ["12.8.93", "13.0.88"])  # of torch 2.8 and of torch 2.11
def test_attention_for_hopper_does_not_spill_with_older_compilers(version: str) -> None:
    """torch requires one version of nvJitLink, and each version assigns registers in its own way."""
    folder = Path(COMPILERS, version).resolve()
    command = [sys.executable, "-m", "tests.machine_code.older_compilers", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found["libraries"]) == 2
    assert all(library.startswith(str(folder)) for library in found["libraries"])
    assert len(found["reports"]) == 5
    for kernel, report in found["reports"].items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, kernel
        assert not re.findall(r"[1-9]\d* bytes stack frame", report), kernel
        assert not re.findall(r"^.*(?:warning|\(C\d+\)).*$", report, re.MULTILINE), kernel


def check_resources(kernel: Kernel, arch: str, report: str) -> None:
    """Registers, spills and the assembler's advice."""
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    assert registers * kernel.threads * kernel.min_blocks_on(arch) <= REGISTERS
    spilled = SPILLED_BYTES.get(kernel.name, 0)
    (found,) = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    stack, *spills = map(int, found)
    assert stack == spilled
    assert max(spills) <= spilled
    assert not re.findall(r"^.*(?:warning|\(C\d+\)).*$", report, re.MULTILINE)
    assert kernel.shared_bytes <= min(SHARED_BYTES[arch] for arch in kernel.architectures)


def check_instructions(kernel: Kernel, found: Counter[str]) -> None:
    """What is there, and what is not; ``found`` has how often."""
    assert sum(found.values()) > 50
    assert kernel.name in SPILLED_BYTES or not starting_with(found, "LDL", "STL"), "local memory"
    assert not starting_with(found, "DADD", "DMUL", "DFMA", "DSETP", "F2F.F64"), "float64 arithmetic"
    name = kernel.function.__name__
    casts = name.startswith(("quantize", "normalize", "cast", "attention", "mma_attention"))
    assert bool(starting_with(found, "F2FP.SATFINITE.E4M3", "F2FP.SATFINITE.E5M2")) == casts
    if re.search("aligned=True|vector=[48]", kernel.name) and name != "transpose":  # a warp's 4 bytes each are a line
        assert starting_with(found, "LDG.E.NA.64", "LDG.E.NA.128"), f"no wide loads: {starting_with(found, 'LDG')}"
    if name.startswith(("quantize", "amax")) and re.search("float32.*vector=1", kernel.name):
        assert "LDG.E.NA.CONSTANT" not in found, "four loads of a thread share sectors, which L1 has to keep"
    if "vector=8" in kernel.name:
        assert not starting_with(found, "LDG.E.NA.64"), "rows alone are read 16 bytes at a time"
        assert "rowwise=True" not in kernel.name or starting_with(found, "STG.E.64")
    if "columnwise=True" in kernel.name or name == "transpose":
        assert starting_with(found, "STG.E.128"), "columns leave 16 bytes at a time"
        assert starting_with(found, "LDS.128")
        assert starting_with(found, "STS.128")


def check_what_a_launch_assumes(kernel: Kernel, report: str, binary: bytes) -> None:
    """Parameters, threads, registers and stack, as the driver reads them from the cubin."""
    entry = entry_of(binary)
    sizes = [struct.calcsize("@" + each) for each in kernel.struct_codes]
    assert [size for _, size in entry.parameters] == sizes
    last, size = entry.parameters[-1]
    assert last + size == entry.parameter_bytes
    places = [offset - entry.parameters[0][0] for offset, _ in entry.parameters]
    assert places == [
        struct.calcsize("@" + "".join(kernel.struct_codes[: i + 1])) - size for i, size in enumerate(sizes)
    ]
    assert (entry.threads, entry.stack_bytes) == (kernel.threads, SPILLED_BYTES.get(kernel.name, 0))
    assert entry.registers == int(re.findall(r"Used (\d+) registers", report)[0])
    if kernel.architectures == ("90a",):  # what setmaxnreg gives away and takes comes out of the same pool
        warpgroups = kernel.threads // 128
        assert _PRODUCERS_REGISTERS + (warpgroups - 1) * _REGISTERS <= warpgroups * entry.registers


def check_product(kernel: Kernel, code: sass.Code) -> None:
    """Tensor cores multiply, and do not wait."""
    found = Counter(each.name for each in code)
    hopper = kernel.architectures == ("90a",)
    wanted = ("QGMMA", "UTMALDG", "USETMAXREG", "SYNCS") if hopper else ("QMMA", "LDSM", "LDGSTS")
    assert all(starting_with(found, name) for name in wanted)
    stored = ("UTMAREDG" if "accumulate" in kernel.name else "UTMASTG") if "smem_epilogue" in kernel.name else "STG"
    assert starting_with(found, stored)
    assert len(sass.steps(code)) == 1
    assert not [*sass.faults_of_steps(code)]


def test_attributes_of_machine_code_have_these_numbers() -> None:
    """By NVIDIA's disassembler, which names them in the order in which they lie in the file."""
    listing = sass.disassembled(compiled(PRODUCTS[0], "90a")[1], "-hex")
    named = re.findall(r"nvinfo : (EIATTR_\w+)\n.*?\.byte\s+0x[0-9a-f]+, (0x[0-9a-f]+)", listing, re.DOTALL)
    assert ATTRIBUTES.items() <= {name: int(number, 16) for name, number in named}.items()


@pytest.mark.parametrize(("kernel", "arch"), [each for each in VARIANTS if "mma_attention" in str(each.id)])
def test_attention_without_wgmma(kernel: Kernel, arch: str) -> None:
    """Products are FP8's, operands come by asynchronous copies, and nothing is shuffled but maxima of rows."""
    code = code_of(kernel, arch)
    found = Counter(code[index].opcode for step in sass.steps(code) for index in step)
    assert {"QMMA", "LDSM", "LDGSTS"} <= set(found)
    assert not {"HMMA", "PRMT", "STS"} & set(found), "FP8 is not turned into FP16, and P stays where it is"
    both = "both" in kernel.name
    assert found["SHFL"] == (8 if both else 4), (
        "largest of both rows over four lanes; of P and dS where both are summed"
    )
    assert found["CALL"] <= (arch == "89"), "Ada's assembler adds a way for warps whose threads have parted"


@thorough
def test_attention_gives_the_turn_before_its_exponentials() -> None:
    """Of 64 channels the assembler leaves the order in which a tile of 64 by 128 is written: its turn, the scores' two
    products, their maxima over four lanes, the other warpgroup's turn, and the products with V. Of 64 exponentials of
    each thread and two factors it moves some up."""
    kernel = attention_forward_kernel(AttentionSpec(64, "bfloat16"))
    code = code_of(kernel)
    (step,) = sass.steps(code)
    named = [code[index].name for index in sorted(step)]
    products, shuffles, exponentials, barriers = (
        [place for place, name in enumerate(named) if name.startswith(opcode)]
        for opcode in ("QGMMA", "SHFL", "MUFU.EX2", "BAR.")
    )
    assert [named[place].split(".")[1] for place in barriers] == ["SYNC", "ARV"]
    assert len(products) == 6
    assert barriers[0] < products[0] < products[1] < shuffles[-1] < barriers[1] < products[2]
    assert sum(place > barriers[1] for place in exponentials) >= 48


def test_every_kernel_is_compiled() -> None:
    assert {kernel.function.__name__ for kernel in KERNELS.values()} == builders()
