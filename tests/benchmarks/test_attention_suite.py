"""Suite ``attention``: what it compares, counts and records. None of these tests measures time."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import carried
from benchmarks.__main__ import main
from benchmarks.contenders import attention_contenders, attention_problems
from benchmarks.contenders.attention_launches import Launches
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD, Exam, Problem, exact, inputs
from benchmarks.measuring import report
from benchmarks.measuring.record import OURS
from benchmarks.suites import attention
from benchmarks.suites.layer_host import a_card
from cuda_kernels.host.launch import Launch
from lightning_fp8.cli.kernels import noted
from lightning_fp8.ops import plans

CPU = torch.device("cpu")
SMALL = Problem(2, 150, 4, 64, sharing=2, causal=True)


def run(path: Path) -> list[dict[str, Any]]:
    main(["--dry-run", "--only", "attention", "--json", str(path)])
    document = json.loads(path.read_text())
    assert not document["errors"]
    entries: list[dict[str, Any]] = document["suites"]["attention"]
    return entries


def tensors_of(kept: Iterable[Any]) -> Iterator[Tensor]:
    for each in kept:
        if isinstance(each, Tensor):
            yield each
        elif each is not None:
            yield from tensors_of(each)


@pytest.fixture
def one_problem(monkeypatch: pytest.MonkeyPatch) -> Problem:
    problem = Problem(1, 40, 2, 64, causal=True, target=attention.TARGETS)
    monkeypatch.setattr(attention, "TINY", (problem,))
    return problem


# --- What is measured -------------------------------------------------------------------------------------------------


def test_every_length_mask_width_and_sharing_is_there() -> None:
    asked = {(each.length, each.causal, each.head_dim, each.sharing) for each in attention.FULL}
    assert len(asked) == len(attention.FULL)
    for length in (2048, 4096, 8192, 16_384, 32_768):
        for causal in (False, True):
            assert {(length, causal, head_dim, 1) for head_dim in (64, 128, 256)} <= asked
            assert (length, causal, 128, 4) in asked
    assert {each.batch * each.length for each in attention.FULL} == {32_768}
    of_targets = [each for each in attention.FULL if each.target]
    assert {(each.length, each.head_dim, each.sharing) for each in of_targets} == {(16_384, 128, 1)}
    for each in of_targets:
        assert each.target == {FORWARD: {"over cuDNN (BF16)": 1.6}, BACKWARD: {"over cuDNN (BF16)": 1.25}}


def test_flops_are_flash_attentions() -> None:
    """By its benchmark: 4 B H L² D forward, half of it if causal, 2.5 times as much backward."""
    problem = Problem(batch=2, length=16_384, heads=16, head_dim=128, causal=True)
    assert problem.flops(attention.COUNTED[FORWARD]) == 4 * 2 * 16 * 16_384**2 * 128 // 2
    assert problem.flops(attention.COUNTED[BACKWARD]) == 10 * 2 * 16 * 16_384**2 * 128 // 2


# --- What it is compared with -----------------------------------------------------------------------------------------


def test_float64_is_attention_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_problems, "ROWS", 64)  # the last of three parts is ragged
    given = inputs(SMALL, CPU)
    heads = given._replace(**{name: x[-1, :, -2:].transpose(0, 1) for name, x in (("q", given.q), ("do", given.do))})
    heads = heads._replace(**{name: x[-1, :, -1:].transpose(0, 1) for name, x in (("k", given.k), ("v", given.v))})
    q, k, v = (x.double().requires_grad_() for x in heads[:3])
    o = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
    gradients = torch.autograd.grad(o, (q, k, v), heads.do.double())
    right = dict(zip(("O", "dQ", "dK", "dV"), (o.detach(), *gradients)))
    for name, x in exact(heads, causal=True).items():
        torch.testing.assert_close(x, right[name])


def test_what_is_wrong_in_the_last_head_or_not_finite_anywhere_is_seen() -> None:
    given = inputs(SMALL, CPU)
    exam = Exam(SMALL, given)
    q, k, v = (x.transpose(1, 2).double() for x in given[:3])
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert exam.passes(FORWARD, (o,), fp8=False)
    assert exam.errors(FORWARD, (o,))["O"] < 1e-12
    assert exam.passes(FORWARD, (o.bfloat16(),), fp8=False)
    late = o.clone()
    late[-1, :, -2] = o[-1, :, -2].roll(1, 0)  # of the first head of two
    assert not exam.passes(FORWARD, (late,), fp8=True)
    hole = o.clone()
    hole[0, 3, 0, 5] = torch.nan
    assert not exam.passes(FORWARD, (hole,), fp8=True)
    not_causal = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    assert not exam.passes(FORWARD, (not_causal,), fp8=True)


# --- What is recorded -------------------------------------------------------------------------------------------------


def test_who_computes_what_and_how_well(tmp_path: Path, one_problem: Problem) -> None:
    entries = {(entry["name"], entry["by"]): entry for entry in run(tmp_path / "out.json")}
    for passing, names in (("forward, causal", ["O"]), ("backward, causal", ["dQ", "dK", "dV"])):
        ours, flash = entries[passing, OURS], entries[passing, "flash (BF16)"]
        assert ours["shape"] == [1, 40, 2, 64]
        assert ours["correct"] is flash["correct"] is True
        assert list(ours["errors"]) == list(flash["errors"]) == names
        assert all(0.01 < error < 0.1 for error in ours["errors"].values())
        assert all(error < 0.01 for error in flash["errors"].values())
        assert ours["over"].keys() == {"flash (BF16)"}
        for refused in ("cuDNN (BF16)", "efficient (BF16)"):
            assert entries[passing, refused]["note"].startswith("refused: ")
            assert entries[passing, refused]["milliseconds"] is None
        if "flash_attn_interface" not in sys.modules:
            assert entries[passing, "FlashAttention-3 (BF16)"]["note"].startswith("absent: ")
    assert "| error, % |" in report.table(json.loads((tmp_path / "out.json").read_text()))


def test_the_specification_is_never_timed_for_a_kernel(
    tmp_path: Path, one_problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card without a kernel an op warns, once, and computes by the specification."""
    forward, calls = attention_contenders.attention_forward, []

    def falls_back(*args: Any) -> Any:
        warnings.warn("An FP8 kernel does not run on cuda:0: none for these heads.", RuntimeWarning, stacklevel=2)
        calls.append(args)
        return forward(*args)

    monkeypatch.setattr(attention_contenders, "attention_forward", falls_back)
    entries = [entry for entry in run(tmp_path / "out.json") if entry["by"] == OURS]
    assert not calls
    assert [entry["name"] for entry in entries] == ["forward, causal", "backward, causal"]
    for entry in entries:
        assert entry["note"].startswith("no kernel: An FP8 kernel does not run on cuda:0: none for these heads.")
        assert entry["milliseconds"] is None
        assert entry["correct"] is False  # it has targets
    monkeypatch.setattr(attention, "TINY", (Problem(1, 40, 2, 64),))
    assert {entry["correct"] for entry in run(tmp_path / "out.json") if entry["by"] == OURS} == {None}


def test_a_wrong_gradient_fails_the_run(tmp_path: Path, one_problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = attention_contenders.attention_backward

    def without_one_tile(*args: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = backward(*args)
        dk[:, :16] = 0
        return dq, dk, dv

    monkeypatch.setattr(attention_contenders, "attention_backward", without_one_tile)
    assert main(["--dry-run", "--only", "attention", "--json", str(tmp_path / "out.json")]) == 1
    entries = json.loads((tmp_path / "out.json").read_text())["suites"]["attention"]
    assert [entry["name"] for entry in entries if entry["correct"] is False] == ["backward, causal"]


def test_flash_attention_3_is_timed_where_it_is_installed(
    tmp_path: Path, one_problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        heads = (x.to(torch.bfloat16).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)  # type: ignore[misc]

    library = ModuleType("flash_attn_interface")
    library.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    entries = {(entry["name"], entry["by"]): entry for entry in run(tmp_path / "out.json")}
    for passing in ("forward, causal", "backward, causal"):
        entry = entries[passing, "FlashAttention-3 (BF16)"]
        assert entry["correct"] is True
        assert entry["milliseconds"]["median"] > 0
    codes = entries["forward, causal", "FlashAttention-3 (FP8, no casts)"]
    assert codes["correct"] is None
    assert 0.01 < codes["errors"]["O"] < 0.1
    assert entries["backward, causal", "FlashAttention-3 (FP8, no casts)"]["note"].startswith("refused: ")


def test_libraries_alone_start_no_kernel_of_ours(tmp_path: Path, one_problem: Problem) -> None:
    path = tmp_path / "out.json"
    assert main(["--dry-run", "--only", "attention", "--libraries", "--json", str(path)]) == 0
    entries = json.loads(path.read_text())["suites"]["attention"]
    assert entries
    assert not any(entry["by"].startswith(OURS) for entry in entries)


# --- Kernels alone ----------------------------------------------------------------------------------------------------


def test_what_the_ops_start_is_started_again_on_memory_that_is_kept() -> None:
    """A launch gets addresses: each lies in a tensor that is held, also after the ops' plans are gone."""
    problem = Problem(1, 150, 4, 64, sharing=2, causal=True)
    with a_card():
        launches = Launches(problem, inputs(problem, CPU))
        plans.clear_plan_cache()
        gc.collect()
        held = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors_of(launches._kept)]
        for each in (*launches.started[FORWARD], *launches.started[BACKWARD]):
            addresses = [at for at in each.addresses if isinstance(at, int) and at]
            assert addresses
            assert all(any(first <= at < end for first, end in held) for at in addresses), each.kernel
        names = [[each.kernel for each in launches.started[passing]] for passing in (FORWARD, BACKWARD)]
        assert names[0][-1] == "attention_forward"
        assert names[1][-3:] == ["quantize_gradients", "attention_dq", "attention_dkv"]
        assert {"quantize_heads", "sum_heads", "mean_heads"} <= {*names[0]}
        again: list[str] = []
        with patch.object(Launch, "run", lambda launch, *addresses: again.append(launch.kernel.function.__name__)):
            launches.products(BACKWARD)()
            assert again == ["attention_dq", "attention_dkv"]
            again.clear()
            launches.by_kernel()["quantize_heads"]()
        assert again == [name for passing in names for name in passing if name == "quantize_heads"]


@pytest.mark.usefixtures("one_problem")
def test_kernels_alone_are_timed_beside_the_ops(tmp_path: Path) -> None:
    with noted():
        entries = {(entry["name"], entry["by"]): entry for entry in run(tmp_path / "out.json")}
    for passing in ("forward, causal", "backward, causal"):
        assert entries[passing, "lightning_fp8, kernels alone"]["milliseconds"]
    flops = 2 * 40**2 * 64 * 2 // 2
    for kernel, products in (("attention_forward", 2), ("attention_dq", 3), ("attention_dkv", 4)):
        entry = entries[f"{kernel}, causal", OURS]
        counted = entry["teraflops"] * entry["milliseconds"]["median"] * 1e9
        assert counted == pytest.approx(flops * products, rel=2e-3)
    assert entries["quantize_heads, causal", OURS]["teraflops"] is None


def test_kernels_of_the_suite_are_carried() -> None:
    names = {kernel.name.split(",")[0] for kernel in carried._attention()}
    assert {f"attention_forward(d={head_dim} bfloat16" for head_dim in (64, 128, 256)} <= names
    for head_dim in (64, 128):
        assert {f"attention_{kernel}(d={head_dim} bfloat16" for kernel in ("dq", "dkv")} <= names
        assert f"quantize_gradients(d={head_dim}" in names
    of_hardware = [kernel.name for kernel in carried._hardware()]
    for word in ("flush=128)", "flush=1048576)", "product_rate(n=64, A in registers)", "copy_rate(add=True)"):
        assert any(word in name for name in of_hardware), word
