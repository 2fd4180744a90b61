"""Products that no kernel multiplies: what multiplies instead, and what is said."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from cuda_kernels.host import gemm_selection, launch
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.proofs.drawing import numbers
from lightning_fp8.proofs.products import aligned, operand
from tests.cuda_kernels.cases.gemm_cases import scaled_mm
from tests.cuda_kernels.cases.kernel_cases import E4M3
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import thorough

pytestmark = [needs_compilers, pytest.mark.usefixtures("emulator")]

TENSORS = Gemm(Layout.TENSOR, Layout.TENSOR, torch.bfloat16)
BLOCKS = Layout.BLOCK_1X128, Layout.BLOCK_128X128


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul(...)`"),
        torch.AcceleratorError("misaligned address"),
    ],
    ids=["memory", "device", "cuBLAS", "an earlier kernel"],
)
def test_a_call_that_fails_is_no_refusal(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the caller's to know, and the next call may succeed."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    plans.clear_plan_cache()
    a = operand(torch.randint(-3, 4, (32, 64)).float(), E4M3, Layout.TENSOR, True)

    def fails(*args: object, **named: object) -> None:
        raise error

    operands = a.data, a.scale_inv, a.data, a.scale_inv, TENSORS
    with monkeypatch.context() as failing:
        failing.setattr(torch, "_scaled_mm", fails)
        with pytest.raises(type(error), match=re.escape(str(error))):
            scaled_mm(*operands)
    right = torch.ones(32, 32, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: right)
    assert scaled_mm(*operands) is right
    plans.clear_plan_cache()


@pytest.mark.parametrize("status", ["CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_full_card_is_tried_once_more(status: str, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory that torch keeps; a second failure is the caller's, and the next call is as the first one."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    plans.clear_plan_cache()
    events: list[str] = []
    right = torch.ones(32, 32, dtype=torch.bfloat16)

    def full(*args: object, **named: object) -> torch.Tensor:
        events.append("call")
        if events.count("call") <= failures:
            raise RuntimeError(f"CUDA error: {status} when calling `cublasCreate(handle)`")
        return right

    monkeypatch.setattr(torch, "_scaled_mm", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    a = operand(torch.randint(-3, 4, (32, 64)).float(), E4M3, Layout.TENSOR, True)
    operands = a.data, a.scale_inv, a.data, a.scale_inv, TENSORS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if failures == 2:
            with pytest.raises(RuntimeError, match=status):
                scaled_mm(*operands)
        assert scaled_mm(*operands) is right
    assert events == ["call", "empty", "call"] + ["call"] * (failures - 1)
    plans.clear_plan_cache()


@pytest.mark.parametrize(
    "message",
    [
        "not on this card",
        *(f"CUDA error: CUBLAS_STATUS_{each} when calling" for each in ("NOT_SUPPORTED", "INVALID_VALUE")),
    ],
)
def test_what_no_kernel_multiplies(message: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pairs of layouts are computed exactly; so is what torch._scaled_mm refuses, with one warning."""
    x = torch.randint(-3, 4, (32, 64)).float()
    a, b = operand(x, E4M3, Layout.ROW, True), operand(x, E4M3, Layout.TENSOR, True)
    right = (a.dequantize() @ b.dequantize().t()).bfloat16()
    mixed = scaled_mm(a.data, a.scale_inv, b.data, b.scale_inv, Gemm(a.layout, b.layout, torch.bfloat16))
    assert torch.equal(mixed, right)

    def refuses(*args: object, **named: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    plans.clear_plan_cache()
    data, scale = aligned(b)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(scaled_mm(data, scale, data, scale, TENSORS), right)
    assert [str(each.message).split(":")[0] for each in caught] == [
        "torch._scaled_mm refuses (32, 64) x (64, 32) on cpu"
    ]
    assert not emulator.launched
    plans.clear_plan_cache()


@pytest.mark.parametrize("backend", [pytest.param("numba", marks=thorough), "cublaslt"])
def test_a_bias_with_gaps(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever multiplies gets it without: torch._scaled_mm takes no other."""

    def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, **rest: Any) -> torch.Tensor:
        assert bias.is_contiguous()
        return (a.float() @ b.float() * rest["scale_a"] * rest["scale_b"] + bias).to(rest["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, backend)
    plans.clear_plan_cache()
    a, b = (operand(numbers(rows, 64, rows, True), E4M3, Layout.TENSOR, True) for rows in (16, 32))
    bias = torch.arange(64).bfloat16()[::2]
    placed = *aligned(a), *aligned(b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = scaled_mm(*placed, TENSORS, bias)
    plans.clear_plan_cache()
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
    plans.clear_plan_cache()
    x = torch.randint(-3, 4, (32, 64)).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = Layout.TENSOR, Layout.TENSOR
        for layouts, columns in ((tensors, 64), (BLOCKS, 64), (tensors, 50)):
            a, b = (operand(x[:, :columns], E4M3, layout, True) for layout in layouts)
            right = (a.dequantize() @ b.dequantize().t()).bfloat16()
            gemm = Gemm(*layouts, torch.bfloat16)
            torch.testing.assert_close(scaled_mm(*aligned(a), *aligned(b), gemm), right)
    plans.clear_plan_cache()
    assert ["FP8 kernels do not run on cpu" in str(each.message) for each in caught] == [True]
    assert taken == [(32, 64), (32, 64)]  # 50 columns are padded


@pytest.mark.parametrize("layouts", [BLOCKS, (Layout.MX_1X32, Layout.MX_1X32)], ids=["1x128 128x128", "1x32 1x32"])
def test_what_no_kernel_multiplies_is_said_once(
    layouts: tuple[Layout, Layout], monkeypatch: pytest.MonkeyPatch, emulator: Emulator
) -> None:
    """On a device that runs kernels: Blackwell of the data centre has none for GEMMs, and nobody one for MXFP8."""
    monkeypatch.setattr(launch, "architecture_of", lambda device: "100a")
    plans.clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for columns in (64, 128):
            x = torch.randint(-3, 4, (32, columns)).float()
            a, b = (operand(x, E4M3, layout, True) for layout in layouts)
            actual = scaled_mm(*aligned(a), *aligned(b), Gemm(*layouts, torch.bfloat16))
            assert torch.equal(actual, (a.dequantize() @ b.dequantize().t()).bfloat16())
    plans.clear_plan_cache()
    (said,) = (str(each.message) for each in caught)
    assert re.search("No FP8 GEMM .* plain torch is used instead.*recipe='tensorwise'", said)
    assert not emulator.launched


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int], emulator: Emulator) -> None:
    m, n, k = shape
    one, gemm = torch.tensor(1.0), Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32)
    a, b = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3)
    assert torch.equal(scaled_mm(a, one, b, one, gemm, torch.ones(n)), torch.ones(m, n))
    assert not emulator.launched
