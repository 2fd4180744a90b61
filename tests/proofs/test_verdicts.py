"""Verdicts: when a kernel may be loaded, what is kept of a proof, and what the process that proves may answer."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels.host import cache_folder, proofs
from cuda_kernels.host.launch import Launch
from cuda_kernels.host.proofs import Card, Refused, Unproven, Verdict, key_of, require
from cuda_kernels.kernel import Kernel, KernelError
from lightning_fp8.ops import plans, proving
from lightning_fp8.ops.proving import NoProof, decoded, encoded
from lightning_fp8.proofs import __main__ as prover
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import WrongResult
from tests.cuda_kernels.emulated import needs_compilers
from tests.host.card import KERNEL
from tests.host.card import Card as FakeDriver
from tests.tiers import thorough

CARD = Card("a card", (9, 0), "580.1, CUDA 13.0")
CODE = b"machine code"
KEY = key_of(CARD, CODE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of verdicts, and nothing known."""
    monkeypatch.setattr(proofs, "cache_folder", lambda: tmp_path)
    monkeypatch.delenv(proofs.VARIABLE, raising=False)
    cache_folder.warn_once.cache_clear()
    proofs._known.clear()
    yield tmp_path / "proofs"
    proofs._known.clear()


def verdict(proven: bool, reason: str = "") -> Verdict:
    return Verdict(KERNEL.name, CARD.name, CARD.driver, proven, reason)


def test_a_verdict_is_of_a_code_on_a_card_with_a_driver() -> None:
    others = [
        key_of(CARD, b"other code"),
        key_of(CARD._replace(name="another card"), CODE),
        key_of(CARD._replace(capability=(9, 1)), CODE),
        key_of(CARD._replace(driver="581.0, CUDA 13.0"), CODE),
    ]
    assert len({KEY, *others}) == 5
    assert key_of(Card(*CARD), bytes(CODE)) == KEY


def test_a_kernel_is_loaded_once_it_is_proven() -> None:
    with pytest.raises(Unproven, match=r"has not been proven on a card \(driver 580\.1, CUDA 13\.0\)") as missing:
        require(KERNEL, CARD, CODE)
    assert missing.value.key == KEY
    proofs.keep(KEY, verdict(True))
    proofs._known.clear()
    require(KERNEL, CARD, CODE)
    with pytest.raises(Unproven):
        require(KERNEL, CARD, b"other code")


def test_a_refused_kernel_says_why_and_how_to_repeat_it() -> None:
    proofs.keep(KEY, verdict(False, "3 of 7 differ"))
    proofs._known.clear()
    with pytest.raises(Refused) as refused:
        require(KERNEL, CARD, CODE)
    assert str(refused.value) == (
        f"{KERNEL.name} is not used on a card (driver 580.1, CUDA 13.0): 3 of 7 differ; repeat the test with "
        "lightning-fp8 doctor --prove"
    )


def test_a_proof_is_withdrawn() -> None:
    proofs.keep(KEY, verdict(True))
    require(KERNEL, CARD, CODE)
    proofs.withdraw(KERNEL.name, "wrong in the first step")
    proofs._known.clear()
    with pytest.raises(Refused, match="wrong in the first step"):
        require(KERNEL, CARD, CODE)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(KEY, "0" * 64),
        lambda text: text.replace("true", '"true"'),
        lambda text: text.replace('"kernel"', '"colonel"'),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_a_damaged_verdict_counts_as_none(change: Any, folder: Path) -> None:
    proofs.keep(KEY, verdict(True))
    proofs._known.clear()
    (path,) = folder.glob("*.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(Unproven):
        require(KERNEL, CARD, CODE)
    proofs.keep(KEY, verdict(True))
    proofs._known.clear()
    require(KERNEL, CARD, CODE)


def test_other_sources_are_another_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what starts kernels, and of the cases that prove them."""
    file = tmp_path / "cases.py"
    file.write_text("1")
    monkeypatch.setattr(proofs, "SOURCES", [tmp_path])
    before = key_of(CARD, CODE)
    proofs._hash_of.cache_clear()
    assert key_of(CARD, CODE) == before
    file.write_text("2")
    proofs._hash_of.cache_clear()
    assert key_of(CARD, CODE) != before
    proofs._hash_of.cache_clear()


def test_the_variable_skips_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proofs.VARIABLE, "0")
    require(KERNEL, CARD, CODE)
    monkeypatch.setenv(proofs.VARIABLE, "always")
    proofs.keep(KEY, verdict(True))
    require(KERNEL, CARD, CODE)
    proofs._known.clear()
    with pytest.raises(Unproven):
        require(KERNEL, CARD, CODE)


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(proofs, "cache_folder", lambda: tmp_path / "file")
    with pytest.warns(
        RuntimeWarning, match="tests of FP8 kernels cannot be kept in .*file/proofs .*LIGHTNING_FP8_CACHE"
    ):
        proofs.keep(KEY, verdict(True))
    with warnings.catch_warnings(), proofs.one_prover():
        warnings.simplefilter("error")
        proofs.keep(key_of(CARD, b"other code"), verdict(True))
    require(KERNEL, CARD, CODE)


def test_a_launch_asks_for_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    monkeypatch.delenv(proofs.VARIABLE)
    kernel = Kernel("a kernel", lambda: None, {}, 32)
    monkeypatch.setattr("cuda_kernels.host.compile_cache.cubin", lambda *_: b".text.name")
    with pytest.raises(Unproven, match=r"a kernel has not been proven on A Card \(driver .*CUDA 13\.1\)") as missing:
        Launch(kernel, 1, (), driver.device)
    proofs.keep(missing.value.key, verdict(True))
    Launch(kernel, 1, (), driver.device)


# --- What the process that proves may answer --------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any], then: str = "sys.stdin.read()") -> None:
    """Prove by a process that says these lines to the first request, and then does what ``then`` says."""
    text = "".join(f"{proving.MARK}{json.dumps(line)}\n" for line in lines)
    code = f"import os, sys, time\nsys.stdin.readline()\nprint({text!r}, end='', flush=True)\n{then}"
    monkeypatch.setattr(proving, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(proving, "SECONDS", dict.fromkeys(proving.SECONDS, 20.0) | {"starting": 1.0})
    proving._prover.end()
    proving._unable.clear()


LOADING = {"what": "loading", "kernel": KERNEL.name, "key": KEY}
OTHER = {"what": "loading", "kernel": "another", "key": key_of(CARD, b"other code")}
STARTING = {"what": "starting", "kernel": KERNEL.name, "key": KEY}
STARTING_OTHER = STARTING | {"kernel": "another", "key": OTHER["key"]}
FAILED = {"what": "failed", "problem": "so it is", "wrong": False, "passing": False, "goes_on": False}


def prove() -> None:
    try:
        proving.prove("quantize", torch.device("cpu"), (), Unproven(KERNEL, CARD, KEY))
    finally:
        proving._prover.end()


def known() -> dict[str, tuple[bool, str]]:
    return {each.kernel: (each.proven, each.reason) for each in proofs._known.values()}


def test_all_kernels_of_a_plan_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, LOADING, OTHER, STARTING_OTHER, STARTING, {"what": "proven"})
    prove()
    assert known() == {KERNEL.name: (True, ""), "another": (True, "")}


def test_wrong_results_refuse_all_that_may_have_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs.keep(OTHER["key"], Verdict("another", "", "", True))
    third = {"what": "loading", "kernel": "third", "key": key_of(CARD, b"third code")}
    third_starts = STARTING | {"kernel": "third", "key": third["key"]}
    answering(monkeypatch, OTHER, LOADING, third, STARTING_OTHER, STARTING, third_starts, FAILED | {"wrong": True})
    with pytest.raises(Refused, match="so it is"):
        prove()
    assert known() == {"another": (True, ""), KERNEL.name: (False, "so it is"), "third": (False, "so it is")}


def test_an_error_refuses_the_kernel_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, OTHER, STARTING_OTHER, LOADING, STARTING, FAILED)
    with pytest.raises(Refused, match=r"^amax\(.* so it is"):
        prove()
    assert known() == {KERNEL.name: (False, "so it is")}


def test_a_kernel_that_was_refused_before_refuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs.keep(OTHER["key"], Verdict("another", "", "", False, "it hung"))
    answering(monkeypatch, LOADING, OTHER, FAILED)
    with pytest.raises(Refused, match="another is not used .* it hung"):
        prove()
    assert known() == {"another": (False, "it hung")}


@pytest.mark.parametrize(
    ("lines", "then", "reason"),
    [
        ((LOADING, STARTING), "time.sleep(60)", "it was still running after 1 s"),
        ((LOADING, STARTING), "os.kill(os.getpid(), 11)", "its process ended with SIGSEGV"),
    ],
)
def test_a_kernel_that_ends_or_stops_its_process(
    lines: Any, then: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, *lines, then=then)
    with pytest.raises(Refused, match=reason):
        prove()
    ((proven, kept),) = known().values()
    assert not proven
    assert kept.startswith(reason)


@pytest.mark.parametrize(
    ("lines", "then"),
    [
        ((LOADING, STARTING, FAILED | {"passing": True}), "sys.stdin.read()"),
        ((), "sys.exit('no CUDA')"),
        ((LOADING,), "sys.exit('a compiler crashed')"),
        ((LOADING, STARTING), "sys.exit('no more')"),
        ((LOADING, STARTING), "os.kill(os.getpid(), 15)"),
        ((LOADING, STARTING), "os.kill(os.getpid(), 9)"),
        ((OTHER, {"what": "proven"}), "sys.stdin.read()"),
    ],
)
def test_what_is_not_a_kernels_fault_is_not_kept(lines: Any, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, *lines, then=then)
    with pytest.raises(NoProof, match="has not been proven"):
        prove()
    assert KERNEL.name not in known()


def test_without_a_process_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "COMMAND", ("/no/such/program",))
    proving._prover.end()
    proving._unable.clear()
    with pytest.raises(NoProof, match="no process can be started for it .*LIGHTNING_FP8_PROVE=0"):
        prove()


def test_wrong_results_of_proven_kernels_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them computes them; a proof in the same process does not overwrite that."""
    proofs.keep(OTHER["key"], Verdict("another", "", "", True))
    answering(monkeypatch, OTHER, STARTING_OTHER, FAILED | {"wrong": True})
    assert proving.prove_anew("quantize", torch.device("cpu"), (), CARD)[0] == "so it is"
    assert known() == {"another": (False, "so it is")}
    answering(monkeypatch, OTHER, STARTING_OTHER, {"what": "proven"})
    assert not proving.prove_anew("quantize", torch.device("cpu"), (), CARD)[0]
    assert known() == {"another": (False, "so it is")}
    proving._prover.end()


def test_a_kernel_that_no_case_starts_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, LOADING, OTHER, STARTING_OTHER, {"what": "proven"})
    with pytest.raises(NoProof, match="no test launches it"):
        prove()
    assert known() == {"another": (True, "")}


def test_a_process_is_ended_when_nothing_more_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "IDLE", 0.1)
    answering(monkeypatch, LOADING, STARTING, {"what": "proven"})
    proving.prove("quantize", torch.device("cpu"), (), Unproven(KERNEL, CARD, KEY))
    process = proving._prover._process
    assert process is not None
    assert process.wait(20) != 0
    proofs._known.clear()
    answering(monkeypatch, LOADING, STARTING, FAILED | {"wrong": True})  # the next plan starts another one
    assert proving.prove_anew("quantize", torch.device("cpu"), (), CARD)[0] == "so it is"
    proving._prover.end()


def test_what_no_process_can_prove_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, then="sys.exit('no CUDA')")
    with pytest.raises(NoProof, match="no CUDA"):
        prove()
    monkeypatch.setattr(proving, "COMMAND", ("/no/such/program",))
    with pytest.raises(NoProof, match="no CUDA"):
        prove()
    proving._unable.clear()


def test_a_plan_of_several_kernels_asks_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second kernel of a plan may be unproven though another process has proven the first meanwhile."""
    proofs.keep(KEY, verdict(True))
    answering(monkeypatch, LOADING, OTHER, STARTING, STARTING_OTHER, {"what": "proven"})
    asked = []

    def build() -> Any:
        for code in (CODE, b"other code"):
            asked.append(code)
            require(KERNEL, CARD, code)
        return len

    proofs._known.clear()
    assert plans.proven("quantize", build, torch.device("cpu"), ()) is len
    assert asked == [CODE, b"other code", CODE, b"other code"]
    proving._prover.end()


def test_a_plan_whose_proof_fails_runs_as_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, LOADING, STARTING, FAILED)

    @plans.planned(lambda x: -x, name="quantize")
    def plan(device: torch.device, size: int) -> Any:
        require(KERNEL, CARD, CODE)
        return lambda x: x * size

    plans.clear_plan_cache()
    with pytest.warns(RuntimeWarning, match=r"does not run on cpu: amax.* is not used on a card .*: so it is"):
        assert plan(torch.device("cpu"), False, 3)(5) == -5
    plans.clear_plan_cache()
    proving._prover.end()


# --- What that process does -------------------------------------------------------------------------------------------


IN = "in its case 'one':"


@pytest.mark.parametrize(
    ("error", "said", "goes_on"),
    [
        (WrongResult("3 differ"), {"wrong": True, "passing": False, "problem": f"wrong results {IN} 3 differ"}, True),
        (KernelError("got 701"), {"wrong": False, "passing": False, "problem": f"KernelError {IN} got 701"}, False),
        (torch.OutOfMemoryError("CUDA out of memory"), {"wrong": False, "passing": True}, False),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), {"passing": True}, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), {"passing": False}, False),
        (MemoryError(), {"passing": True}, False),
        (OSError(28, "No space left on device"), {"passing": True}, False),
        (TypeError("a defect of the case"), {"passing": True}, False),
    ],
)  # fmt: skip
def test_an_answer(error: Exception, said: dict[str, Any], goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> None:
        raise error

    monkeypatch.setattr(prover, "cases_of", lambda plan, key: [Case("one", fails)])
    messages: list[dict[str, Any]] = []
    request = {"plan": "quantize", "device": "cpu", "key": []}
    assert prover.answer(request, lambda what, **more: messages.append({"what": what, **more})) is goes_on
    assert messages[0] == {"what": "case", "case": "one"}
    assert messages[1] == messages[1] | {"what": "failed", "goes_on": goes_on} | said


def test_keys_travel_as_text() -> None:
    key = (torch.bfloat16, torch.Size((3, 4)), (4, 1), 0), ("a", None, True, 0.1, 1e-38), ()
    again = decoded(json.loads(json.dumps(encoded(key))))
    assert again == ((torch.bfloat16, (3, 4), (4, 1), 0), ("a", None, True, 0.1, 1e-38), ())
    with pytest.raises(TypeError, match="a plan's key contains"):
        encoded((object(),))


RANK = """
import sys, torch
from pathlib import Path
from tests.proofs.emulated_card import emulated_card
from lightning_fp8.ops.cast import observe_op
from lightning_fp8.proofs.comparing import kernels_of
with emulated_card("none", Path(sys.argv[1])) as emulator:
    amax = torch.zeros(())
    kernels_of(observe_op)(torch.full((3, 8), -2.5), amax)
    assert amax == 2.5 and emulator.launched
"""


@thorough
@needs_compilers
def test_of_several_ranks_one_proves(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], cwd=Path(__file__).parents[2]) for _ in "ab"]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1
