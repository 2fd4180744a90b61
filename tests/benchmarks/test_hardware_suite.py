"""Suite ``hardware``: its kernels do what they say. None of these tests measures time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.contenders.hardware_kernels import CHAIN, copy_rate_kernel, product_rate_kernel
from benchmarks.measuring import report
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS
from benchmarks.suites import hardware
from cuda_kernels.attention import forward
from cuda_kernels.attention.backward.dkv import attention_dkv_kernel
from cuda_kernels.attention.host import kernels as attention_kernels
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host import compile_cache
from cuda_kernels.host.launch import Box, Launch, executing
from cuda_kernels.host.tensor_maps import map_on
from lightning_fp8.cli.kernels import noted
from tests.cuda_kernels.emulated import Emulator, needs_compilers, ptx_of
from tests.tiers import thorough

CPU = torch.device("cpu")


@needs_compilers
@pytest.mark.parametrize(("n", "from_registers"), [(64, True), (64, False)])
def test_products_are_all_computed(n: int, from_registers: bool) -> None:
    out = torch.zeros(1, 256)
    with executing(Emulator()):
        Launch(product_rate_kernel(n, from_registers), 1, (3,), CPU).run(out)
    assert (out == 3 * CHAIN * n // 4).all()  # a thread has a quarter of a row


@needs_compilers
@pytest.mark.parametrize("add", [False, True])
def test_copies_reach_their_place(add: bool) -> None:
    out = torch.ones(2 * 128, 64)
    with executing(Emulator()):
        Launch(copy_rate_kernel(add), 2, (5,), CPU).run(map_on(CPU, Box(128, 64, swizzle=False))(out))
    assert (out == float(add)).all()


@thorough
def test_warpgroups_without_turns_wait_for_nobody() -> None:
    """Another kernel with another key: neither is taken for the other."""
    spec = AttentionSpec(64, "bfloat16")
    usual = forward.attention_forward_kernel(spec)
    key = compile_cache.source_key(usual, "cubin", "90a")
    assert "bar.arrive" in ptx_of(usual)
    with hardware.without_turns():
        free = attention_kernels.attention_forward_kernel(spec)
        assert compile_cache.source_key(free, "cubin", "90a") != key
        without = ptx_of(free)
    assert "bar.arrive" not in without


def test_each_row_times_the_kernel_of_its_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all of them are planned, as under the timer."""
    started: list[str] = []
    with noted():
        candidates = list(hardware._sums(hardware.TINY, Plan(CPU, dry=True)))
        monkeypatch.setattr(Launch, "run", lambda launch, *addresses: started.append(launch.kernel.name))
        timed = []
        for _, contender in candidates:
            assert contender is not None
            started.clear()
            contender.call()
            timed.append([*started])
    spec = AttentionSpec(128, "bfloat16")
    kernels = [attention_dkv_kernel(spec, flush).name for flush in (128, 1024, 1 << 20)]
    assert len({*kernels}) == 3
    assert [result.by.rpartition(", ")[2] for result, _ in candidates[1:]] == [
        "each 128 apart", "each 1024 apart", "never apart"
    ]  # fmt: skip
    assert [[name for name in names if name in kernels] for names in timed] == [[], *([name] for name in kernels)]


def test_every_question_has_its_row(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with noted() as started:
        main(["--dry-run", "--only", "hardware", "--json", str(path)])
    document = json.loads(path.read_text())
    assert not document["errors"]
    found = {(entry["name"], entry["by"]): entry for entry in document["suites"]["hardware"]}
    for apart in ("each 128 apart", "each 1024 apart", "never apart"):
        assert 0 < found["dV of 40 products above 0", f"{OURS}, {apart}"]["errors"]["dV"] < 0.05
    assert {by for name, by in found if name == "attention_forward"} == {hardware.IN_TURNS, f"{OURS}, without turns"}
    for n in (64, 128, 256):
        assert found[f"wgmma m64n{n}k32", "A in registers"]["over"].keys() == {"A in shared memory"}
    assert found["32 KB from shared memory by TMA", "added"]["bytes"] == 2 * 4 * 32 * 1024  # twice by 4 blocks
    assert {"product_rate", "copy_rate"} <= {kernel.function.__name__ for kernel in started.values()}
    assert "| wgmma m64n64k32 " in report.table(document)
