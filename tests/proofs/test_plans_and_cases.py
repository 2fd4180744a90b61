"""The cases of a plan start the kernels that the plan starts, of all plans that the tests of kernels make."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cuda_kernels.host import launch, proofs
from cuda_kernels.host.gemm_selection import CHOICE_VARIABLE
from cuda_kernels.host.proofs import Card
from cuda_kernels.kernel import Kernel
from lightning_fp8.attention.ops import failing_kernel
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import gemm_cuda, plans
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import GemmOperand
from lightning_fp8.ops.proving import decoded, encoded
from lightning_fp8.proofs.cases import Case, cases_of
from tests.cuda_kernels.cases import attention_op_cases, fused_cases, kernel_cases
from tests.cuda_kernels.cases.gemm_cases import PAIRS
from tests.cuda_kernels.cases.kernel_cases import E4M3, check_quantize
from tests.proofs.emulated_card import only_proven

Plan = tuple[str, tuple[Any, ...]]


class Noted:
    """The kernels that each plan loads."""

    def __init__(self) -> None:
        self.plans: dict[Plan, set[str]] = {}
        self.loaded: list[str] = []

    def code(self, kernel: Kernel) -> tuple[Card, bytes]:
        self.loaded.append(kernel.name)
        return Card("", (9, 0), ""), b""

    def proven(
        self, name: str, build: Callable[[], Any], device: torch.device, key: Sequence[Hashable]
    ) -> Callable[..., Any]:
        self.loaded.clear()
        built: Callable[..., Any] = build()
        if self.loaded:
            self.plans.setdefault((name, tuple(key)), set()).update(self.loaded)
        return built


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    found = Noted()
    monkeypatch.setenv(proofs.VARIABLE, "0")
    plans.clear_plan_cache()
    with (
        patch.object(plans, "proven", found.proven),
        patch.object(gemm_cuda, "proven", found.proven),
        only_proven(found.code),
        patch.dict(launch.EXECUTORS, cpu=lambda *launched: None),
    ):
        yield found
    plans.clear_plan_cache()


CASES = [*kernel_cases.CASES, *fused_cases.CASES, *attention_op_cases.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_of_a_plan_start_its_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted(monkeypatch) as found, suppress(AssertionError):
        case.run("cpu")
    assert found.plans
    for (name, key), loaded in found.plans.items():
        assert started(name, key, monkeypatch) >= loaded, (name, key)


@pytest.mark.parametrize("columns", [203, 204, 208, 216])
@pytest.mark.parametrize("columnwise", [True, False])
def test_padded_rows(columns: int, columnwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin at vectors and end within one."""
    x = torch.ones(131, 224, dtype=torch.bfloat16)[:, :columns]
    with noted(monkeypatch) as found, suppress(AssertionError):
        check_quantize(x, E4M3, Layout.TENSOR, "cpu", columnwise=columnwise)
    ((name, key),) = found.plans
    (loaded,) = found.plans.values()
    assert started(name, key, monkeypatch) >= loaded


def started(name: str, key: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of the first case of a plan, whose key came as text."""
    with noted(monkeypatch) as found, suppress(AssertionError):
        cases_of(name, decoded(encoded(key)))[0].run("cpu")
    return set().union(*found.plans.values(), found.loaded)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8192, 4096, 4096), (300, 264, 700), (133, 131, 77), (4096, 50257, 1024), (1, 1, 1)])
@pytest.mark.parametrize("scaling", PAIRS)
def test_cases_of_a_product_start_its_kernel(
    scaling: str, shape: tuple[int, int, int], out: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile that is chosen for a plan is its cases' tile, though their sizes would choose another."""
    monkeypatch.setenv(CHOICE_VARIABLE, "numba")
    m, n, k = shape
    layout_a, layout_b = PAIRS[scaling]
    a, b = (GemmOperand.canonical(layout, E4M3, rows, k) for layout, rows in ((layout_a, m), (layout_b, n)))
    keys = [(*each.data[:4], *each.scale_inv[2:4]) for each in (a, b)]
    bias, added = (out, torch.Size((n,)), (1,), 0), (out, torch.Size((m, n)), (n, 1), 0)
    for epilogue in ((None, None), (bias, None), (None, added)):
        if epilogue[1] and out != torch.float32:
            continue
        with noted(monkeypatch) as found:
            gemm_cuda._plan(torch.device("cpu"), False, *keys, Gemm(layout_a, layout_b, out).flat, *epilogue)
        ((name, key),) = found.plans
        (loaded,) = found.plans.values()
        assert len(loaded) == 1
        assert started(name, key, monkeypatch) >= loaded, key


@pytest.mark.parametrize("center_keys", [True, False])
@pytest.mark.parametrize("of_codes", [True, False])
def test_what_attention_asks_for_is_proven(center_keys: bool, of_codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first call attention plans both passes; their cases start these kernels."""
    with noted(monkeypatch) as found:
        assert not failing_kernel(torch.device("cpu"), torch.bfloat16, 128, center_keys, of_codes)
    assert {name for name, _ in found.plans} >= {"attention_forward", "attention_backward"}
    for (name, key), loaded in found.plans.items():
        assert started(name, key, monkeypatch) >= loaded, (name, key)
