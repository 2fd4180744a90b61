"""The cases that prove kernels, on emulated ones: what a card runs before it trusts them."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

import lightning_fp8.ops.plans
from cuda_kernels.host.launch import executing
from cuda_kernels.kernel import ARCHITECTURES, Kernel
from lightning_fp8.proofs.cases import CASES as PLANS
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import WrongResult
from lightning_fp8.proofs.kinds import KINDS, kernels_of_kind, kinds_for
from tests.cuda_kernels.cases import proof_cases
from tests.cuda_kernels.emulated import Emulator, builders, kernels_of, needs_compilers, ptx_of
from tests.ptx_on_cpu import EmulatorError
from tests.tiers import thorough

ROOT = Path(lightning_fp8.__file__).parent


def test_there_is_a_kind_of_every_kernel() -> None:
    started = {kernel.function.__name__ for case in proof_cases.FIRST for kernel in kernels_of(case.run)}
    emulated_without_wgmma = {name for name in builders() if name.startswith("mma_attention")}
    assert started == builders() - emulated_without_wgmma


def test_every_architecture_has_kinds() -> None:
    assert {architecture: bool(kinds_for(architecture)) for architecture in ARCHITECTURES} == dict.fromkeys(
        ARCHITECTURES, True
    )
    assert "attention forward, 64 channels" in kinds_for("89")
    assert "attention forward, 64 channels" not in kinds_for("100")
    assert "product, mma.sync" not in kinds_for("90a")


def test_every_plan_has_cases() -> None:
    """All planners name their cases, and no case is of a plan that is none."""
    named = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("planned", "planned_cast"):
                names = [word.value for word in node.keywords if word.arg == "name"]
                (name,) = names or node.args[:1]
                named |= {name.value if isinstance(name, ast.Constant) else ast.unparse(name)}
    assert named == (PLANS.keys() - {"gemm"}) | {"name", "PLAN"}
    assert {kind.plan for kind in KINDS.values()} == PLANS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_all_cases_of_a_kind_start_the_same_kernels(name: str) -> None:
    """What one size proves holds for others only if these start the same machine code."""
    kind = KINDS[name]
    started = {kernel.name for kernel in kernels_of_kind(kind)}
    assert started
    for case in kind.cases():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = {kernel.name for kernel in kernels_of(lambda device: proof_cases.run(kind, case, device))}  # noqa: B023
        assert found == started, case.name


FEW = ("amax", "transpose")
"""In the default run, which starts these kernels elsewhere, too; the others are compiled for their cases alone."""


@needs_compilers
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    "case",
    [
        case if case.name in [f"{name}: small" for name in FEW] else pytest.param(case, marks=thorough)
        for case in proof_cases.CASES
    ],
    ids=lambda case: case.name,
)
def test_emulated_kernels_are_right(case: Case, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda_kernels.host.launch.multiprocessors", lambda device: 2)
    emulator.races = False
    case.run("cpu")
    assert emulator.launched


ARRIVE = re.compile(r"^\s*(?:@%p\d+ )?mbarrier\.arrive[^;]*;", re.MULTILINE)


@thorough
@needs_compilers
@pytest.mark.parametrize(
    "name",
    [
        "product, 1 warpgroup",
        "product of rows",
        "attention forward, 64 channels",
        "attention backward, 64 channels",
    ],
)
def test_a_dropped_arrive_is_found(name: str) -> None:
    """In each kernel that has barriers: the first arrive of its code is left out, and a wait for it never ends."""
    kind = KINDS[name]
    broken = {kernel.name: kernel for kernel in kernels_of_kind(kind) if ARRIVE.search(ptx_of(kernel))}
    assert broken
    for kernel_name in broken:
        emulator = Emulator(
            rewrite=lambda kernel, ptx: ARRIVE.sub("", ptx, count=1) if kernel.name == kernel_name else ptx  # noqa: B023
        )
        with pytest.raises((EmulatorError, WrongResult)), executing(emulator):
            proof_cases.ALL[name].run("cpu")


def without_loops(ptx: str) -> str:
    """Branches back to a label are left out: what a loop does is done once."""
    lines, labels = [], set()
    for line in ptx.splitlines():
        labels |= {*re.findall(r"^(\$L\w+):", line)}
        target = re.search(r"@%p\d+ bra\s+(\$L\w+);", line)
        lines += [] if target and target[1] in labels else [line]
    assert len(lines) < len(ptx.splitlines())
    return "\n".join(lines)


def without_releases(ptx: str) -> str:
    """Arrivals at barriers that announce no copy are left out: no stage of a ring is released."""
    return re.sub(r"^\s*(?:@%p\d+ )?mbarrier\.arrive\.shared[^;]*;", "", ptx, flags=re.MULTILINE)


BACKWARD = "attention backward, 64 channels"
SLIPS = {
    "the first tile of a block alone": ("amax", "amax", without_loops, "waves"),
    "sums in global memory are replaced": (
        BACKWARD,
        "attention_dkv",
        lambda ptx: ptx.replace("red.global.add.f32", "st.global.f32"),
        "many queries",
    ),
    "the first sums are added to what memory holds": (
        BACKWARD,
        "attention_dkv",
        lambda ptx: ptx.replace("st.global.f32", "red.global.add.f32"),
        "many queries",
    ),
    "a row of zeros has a scale of inf": (
        BACKWARD,
        "attention_dkv",
        lambda ptx: re.sub(r"min\.NaN\.f32 (\S+), (\S+), \S+;", r"mov.f32 \1, \2;", ptx),
        "causal",
    ),
    "dQ releases no stage": (BACKWARD, "attention_dq", without_releases, "many keys"),
    "forward releases no stage": ("attention forward, 64 channels", "attention_forward", without_releases, "many keys"),
    "forward of 128 channels releases no stage": (
        "attention forward, 128 channels",
        "attention_forward",
        without_releases,
        "many keys",
    ),
}
"""What only one of a kind's cases finds: the kind, a change of one of its kernels, and the case."""


@needs_compilers
@pytest.mark.parametrize(
    "slip", [slip if SLIPS[slip][0] == "amax" else pytest.param(slip, marks=thorough) for slip in SLIPS]
)
def test_a_slip_that_needs_large_tensors_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changed, change, finding = SLIPS[slip]
    monkeypatch.setattr("cuda_kernels.host.launch.multiprocessors", lambda device: 2)
    rewritten: dict[str, bool] = {}
    assert finding in {case.name for case in KINDS[name].cases()}

    def rewrite(kernel: Kernel, ptx: str) -> str:
        new = change(ptx) if changed in kernel.name else ptx
        rewritten[kernel.name] = new != ptx
        return new

    for case in KINDS[name].cases():
        with executing(Emulator(rewrite=rewrite, races=False)):
            if case.name == finding:
                with pytest.raises((EmulatorError, WrongResult)):
                    proof_cases.run(KINDS[name], case, "cpu")
            elif case.name in ("small", "ragged"):
                proof_cases.run(KINDS[name], case, "cpu")
    assert any(rewritten.values())


def test_what_memory_holds_does_not_pass() -> None:
    """Of every kind: kernels that compute nothing leave what memory holds, which no comparison takes."""
    for case in proof_cases.FIRST:
        started = kernels_of(case.run)
        assert started, case.name
        with pytest.raises(WrongResult), executing(lambda *launched: None):
            case.run("cpu")
