"""Products that no kernel multiplies: what multiplies instead, and what is said."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from cuda_kernels.host import gemm_selection, launch
from lightning_fp8.ops.core import dispatch
from lightning_fp8.ops.gemm import cuda as gemm
from lightning_fp8.ops.gemm.problem import aligned_operand
from lightning_fp8.scaled import Layout
from tests.cuda_kernels.cases.gemm_cases import numbers, operand
from tests.cuda_kernels.cases.kernel_cases import E4M3
from tests.cuda_kernels.emulated import Emulator, needs_compilers

pytestmark = [needs_compilers, pytest.mark.usefixtures("emulator")]


def test_running_out_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the caller's to know, and the next call may have enough."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    dispatch.clear_plan_cache()
    a = operand(torch.randint(-3, 4, (32, 64)).float(), E4M3, "tensor", True)

    def out_of_memory(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    operands = a.data, a.scale_inv, a.data, a.scale_inv, "tensor tensor bfloat16"
    with monkeypatch.context() as full:
        full.setattr(torch, "_scaled_mm", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            gemm.scaled_mm(*operands)
    right = torch.ones(32, 32, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: right)
    assert gemm.scaled_mm(*operands) is right
    dispatch.clear_plan_cache()


def test_what_no_kernel_multiplies(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pairs of layouts are computed exactly; so is what torch._scaled_mm refuses, with one warning."""
    x = torch.randint(-3, 4, (32, 64)).float()
    a, b = operand(x, E4M3, "row", True), operand(x, E4M3, "tensor", True)
    right = (a.dequantize() @ b.dequantize().t()).bfloat16()
    mixed = gemm.scaled_mm(a.data, a.scale_inv, b.data, b.scale_inv, "row tensor bfloat16")
    assert torch.equal(mixed, right)

    def refuses(*args: object, **named: object) -> None:
        raise RuntimeError("not on this card")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    dispatch.clear_plan_cache()
    data, scale = aligned_operand((b.data, b.scale_inv), Layout.TENSOR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(gemm.scaled_mm(data, scale, data, scale, "tensor tensor bfloat16"), right)
    assert [str(each.message).split(":")[0] for each in caught] == [
        "torch._scaled_mm refuses (32, 64) x (64, 32) on cpu"
    ]
    assert not emulator.launched
    dispatch.clear_plan_cache()


@pytest.mark.parametrize("backend", ["numba", "cublaslt"])
def test_a_bias_with_gaps(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever multiplies gets it without: torch._scaled_mm takes no other."""

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, **rest: Any) -> torch.Tensor:
        assert bias.is_contiguous()
        return (a.float() @ b.float() * rest["scale_a"] * rest["scale_b"] + bias).to(rest["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, backend)
    dispatch.clear_plan_cache()
    a, b = (operand(numbers(rows, 64, rows, True), E4M3, "tensor", True) for rows in (16, 32))
    bias = torch.arange(64).bfloat16()[::2]
    placed = [part for each in (a, b) for part in aligned_operand((each.data, each.scale_inv), each.layout)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = gemm.scaled_mm(*placed, "tensor tensor bfloat16", bias)
    dispatch.clear_plan_cache()
    assert torch.equal(actual, (a.dequantize() @ b.dequantize().t() + bias).bfloat16())


def test_without_kernels_a_library_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch._scaled_mm takes it gets, and the rest is exact; one warning for all."""
    monkeypatch.delitem(launch.EXECUTORS, "cpu")
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "numba")

    def unknown(device: torch.device) -> str:
        raise launch.NoKernels(f"FP8 kernels do not run on {device}")

    monkeypatch.setattr(launch, "architecture_of", unknown)
    taken: list[torch.Size] = []

    def noted(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **rest: Any
    ) -> torch.Tensor:
        taken.append(a.shape)
        return (a.float() @ b.float() * scale_a * scale_b).to(rest["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    dispatch.clear_plan_cache()
    x = torch.randint(-3, 4, (32, 64)).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layouts, columns in ((("tensor", "tensor"), 64), (("1x128", "128x128"), 64), (("tensor", "tensor"), 50)):
            a, b = (operand(x[:, :columns], E4M3, layout, True) for layout in layouts)
            right = (a.dequantize() @ b.dequantize().t()).bfloat16()
            placed = [part for each in (a, b) for part in aligned_operand((each.data, each.scale_inv), each.layout)]
            torch.testing.assert_close(gemm.scaled_mm(*placed, " ".join((*layouts, "bfloat16"))), right)
    dispatch.clear_plan_cache()
    assert ["FP8 kernels do not run on cpu" in str(each.message) for each in caught] == [True]
    assert taken == [(32, 64)]


@pytest.mark.parametrize("layouts", ["1x128 128x128", "1x32 1x32"])
def test_what_no_kernel_multiplies_is_said_once(
    layouts: str, monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    """On a device that runs kernels: Blackwell of the data centre has none for GEMMs, and nobody one for MXFP8."""
    monkeypatch.setattr(launch, "architecture_of", lambda device: "100a")
    dispatch.clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for columns in (64, 128):
            x = torch.randint(-3, 4, (32, columns)).float()
            a, b = (operand(x, E4M3, layout, True) for layout in layouts.split())
            placed = [part for each in (a, b) for part in aligned_operand((each.data, each.scale_inv), each.layout)]
            actual = gemm.scaled_mm(*placed, f"{layouts} bfloat16")
            assert torch.equal(actual, (a.dequantize() @ b.dequantize().t()).bfloat16())
    dispatch.clear_plan_cache()
    (said,) = (str(each.message) for each in caught)
    assert re.search("No FP8 GEMM .* plain torch does, slower.*recipe='tensorwise'", said)
    assert not emulator.launched


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int], emulator: Emulator) -> None:
    m, n, k = shape
    op, one = gemm.scaled_mm, torch.tensor(1.0)
    a, b = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3)
    assert torch.equal(op(a, one, b, one, "tensor tensor float32", torch.ones(n)), torch.ones(m, n))
    assert not emulator.launched
