"""GEMMs by ``torch._scaled_mm``, made to fit what it asks, against float64; what it asks is ``scaled_mm_stand_in``."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import Library
from cuda_kernels.kernel import KernelError
from lightning_fp8.numerics.scaled import Layout, ScaledTensor
from lightning_fp8.ops import gemm_cuda, plans, torch_scaled_mm
from lightning_fp8.ops.gemm import Gemm, reference_gemm
from lightning_fp8.ops.gemm_cuda import GemmOperand, Multiply, bind_gemm, build_gemm
from lightning_fp8.ops.memory import TensorKey, operand_key, tensor_key
from lightning_fp8.proofs.drawing import numbers
from lightning_fp8.proofs.products import aligned, operand
from tests.cuda_kernels.cases.gemm_cases import PAIRS
from tests.ops.scaled_mm_stand_in import BF16, E4M3, E5M2, FP16, FP32, stand_in
from tests.tiers import every_pair

CPU = torch.device("cpu")


def library_gemm(a: tuple, b: tuple, gemm: Gemm, bias: torch.Tensor | None) -> Multiply:
    key_a = GemmOperand.from_key(gemm.layout_a, operand_key(*a), CPU)
    key_b = GemmOperand.from_key(gemm.layout_b, operand_key(*b), CPU)
    bias_key = None if bias is None else TensorKey(bias.dtype, bias.shape, (1,), 0, CPU)
    return build_gemm(bind_gemm(CPU, key_a, key_b, gemm, bias_key), Library.CUBLASLT)


@pytest.fixture
def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_cuda, "multiplies_mx_blocks", lambda device: True)


def planned(a: ScaledTensor, b: ScaledTensor, gemm: Gemm, bias: torch.Tensor | None) -> Multiply:
    keys = operand_key(*aligned(a)), operand_key(*aligned(b)), gemm.flat
    return gemm_cuda._plan_gemm(CPU, *keys, None if bias is None else tensor_key(bias), None)


@every_pair
@pytest.mark.parametrize("scaling", PAIRS)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("bias_dtype", [None, BF16, FP16, FP32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["43x43", "52x43", "43x52"])
@pytest.mark.parametrize(
    "sizes", [(16, 16, 16), (1, 48, 100), (30, 257, 384), (132, 16, 1024), (32, 50, 512), (30, 144, 24)]
)
def test_every_gemm_that_it_is_chosen_for(
    scaling: str,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    formats: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call is refused; results are the exact ones, rounded once."""
    (m, n, k), layouts = sizes, PAIRS[scaling]
    if layouts[0].scales_along_k and formats != (E4M3, E4M3):
        formats = E4M3, E4M3
    a, b = (
        operand(numbers(rows, k, seed, True), dtype, layout, True)
        for rows, seed, dtype, layout in zip((m, n), (0, 1), formats, layouts)
    )
    bias = None if bias_dtype is None else numbers(1, n, 2, True)[0].to(bias_dtype)
    start = numbers(m, n, 3, True)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    operands = *aligned(a), *aligned(b), Gemm(*layouts, out_dtype, fast_accum=bias is not None)
    run = library_gemm(operands[:2], operands[2:4], operands[4], bias)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    exact = exact if bias is None else exact + bias.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = run(*operands, bias, None)
        total = run(*operands, bias, start.clone())
    assert actual.dtype == out_dtype
    assert actual.is_contiguous()
    assert torch.equal(actual, exact.to(out_dtype))
    assert torch.equal(total, start + actual)


def test_a_bias_is_rounded_as_autocast_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    x, w = numbers(32, 64, 0, True), numbers(48, 64, 1, True)
    bias = 1 + torch.arange(48) * 2.0**-10
    a, b = (operand(each, E4M3, Layout.TENSOR, True) for each in (x, w))
    operands = *aligned(a), *aligned(b), Gemm(Layout.TENSOR, Layout.TENSOR, BF16, True)
    actual = library_gemm(operands[:2], operands[2:4], operands[4], bias)(*operands, bias, None)
    with torch.autocast("cpu", torch.bfloat16):
        right = F.linear(a.dequantize(), b.dequantize(), bias)
    assert torch.equal(actual, right)
    assert not torch.equal(actual, (a.dequantize() @ b.dequantize().t() + bias).bfloat16())


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_the_next_way_serves_after_a_refusal(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal is said once: row scales are applied afterwards, then the product is BF16's."""
    layouts, calls = PAIRS[scaling], []
    plans.clear_plan_cache()

    def refuses(*args: object, **named: torch.Tensor) -> None:
        calls.append(named["scale_a"].numel())
        raise RuntimeError("not here")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    monkeypatch.setattr(launch, "architecture_of", lambda device: "100a")
    a, b = (operand(numbers(rows, 256, rows, True), E4M3, each, True) for rows, each in zip((32, 48), layouts))
    operands = *aligned(a), *aligned(b), Gemm(*layouts, BF16, True)
    run = library_gemm(operands[:2], operands[2:4], operands[4], None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [run(*operands, None, None) for _ in range(2)]
    right = (a.dequantize().double() @ b.dequantize().double().t()).to(BF16)
    assert all(torch.equal(each, right) for each in results)
    assert calls == ([32, 1] if scaling == "row" else [128])  # K is padded to 512
    said = [str(each.message).partition(": ")[2] for each in caught]
    of_all = {"block": "float32 instead, which is", "row": "BF16 instead, which is exact but"}
    in_torch = f"not here. The GEMM runs in {of_all[scaling]} slower."
    scaled = "not here. Its float32 result is scaled afterwards instead, which is slower."
    assert said == [scaled] * (scaling == "row") + [in_torch]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_kernel_multiplies_refused_blocks(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference would multiply them in float32. No kernel is made before: most never refuse."""
    made: list[str] = []

    def kernel(bound: gemm_cuda.BoundGemm, config: GemmConfig) -> Multiply:
        made.append(type(config).__name__)
        if not compiles:
            raise KernelError("no compiler")
        return lambda *args: torch.full((32, 48), 7, dtype=BF16)

    def refuses(*args: object, **named: object) -> None:
        assert not made
        raise RuntimeError("not here")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    monkeypatch.setattr(launch, "architecture_of", lambda device: "90a")
    monkeypatch.setattr(gemm_cuda, "_kernel", kernel)
    plans.clear_plan_cache()
    a, b = (operand(numbers(rows, 256, rows, True), E4M3, each, True) for rows, each in zip((32, 48), PAIRS["block"]))
    operands = *aligned(a), *aligned(b), Gemm(*PAIRS["block"], BF16, True)
    run = library_gemm(operands[:2], operands[2:4], operands[4], None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [run(*operands, None, None) for _ in range(2)]
    exact = (a.dequantize().double() @ b.dequantize().double().t()).to(BF16)
    right = torch.full_like(exact, 7) if compiles else exact
    assert all(torch.equal(each, right) for each in results)
    assert made == ["GemmConfig"]
    said = [str(each.message) for each in caught]
    assert "not here. A kernel of this package is used instead." in said[0]
    assert ["no compiler" in each for each in said[1:]] == [True] * (not compiles)


@every_pair
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("bias_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["43x43", "52x43", "43x52"])
@pytest.mark.parametrize(
    "sizes", [(1, 16, 32), (65, 112, 96), (197, 272, 240), (130, 257, 100), (31, 48, 1000), (128, 128, 64)]
)
def test_mx_blocks_on_blackwell(
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    formats: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int],
    on_blackwell: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call is refused; results are the exact ones, rounded once. Scales differ from block to block."""
    m, n, k = sizes
    a, b = (
        operand(numbers(rows, k, seed, True) * 2.0 ** (torch.arange(k) // 32 % 5), dtype, Layout.MX_1X32, True)
        for rows, seed, dtype in zip((m, n), (0, 1), formats)
    )
    assert k <= 32 or len(a.scale_inv.view(torch.uint8).unique()) > 1
    bias = None if bias_dtype is None else numbers(1, n, 2, True)[0].to(bias_dtype)
    start = numbers(m, n, 3, True)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    gemm = Gemm(a.layout, b.layout, out_dtype)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    exact = exact if bias is None else exact + bias.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = planned(a, b, gemm, bias)(*aligned(a), *aligned(b), gemm, bias, None)
        total = planned(a, b, gemm, bias)(*aligned(a), *aligned(b), gemm, bias, start.clone())
    assert actual.dtype == out_dtype
    assert actual.is_contiguous()
    assert torch.equal(actual, exact.to(out_dtype))
    assert torch.equal(total, start + actual)


def test_mx_blocks_after_a_refusal(on_blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning is issued for all sizes."""
    calls: list[torch.dtype] = []

    def refuses(*args: object, **named: torch.Tensor) -> None:
        calls.append(named["scale_a"].dtype)
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling cublasLtMatmul")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    plans.clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (32, 64):
            a, b = (operand(numbers(each, 96, each, True), E4M3, Layout.MX_1X32, True) for each in (rows, 48))
            gemm = Gemm(a.layout, b.layout, BF16)
            run = planned(a, b, gemm, None)
            results = [run(*aligned(a), *aligned(b), gemm, None, None) for _ in range(2)]
            exact = (a.dequantize().double() @ b.dequantize().double().t()).to(BF16)
            assert all(torch.equal(each, exact) for each in results)
    (said,) = (str(each.message) for each in caught)
    assert said.startswith(
        "torch._scaled_mm refuses (32, 96) x (96, 48) on cpu: CUDA error: CUBLAS_STATUS_ARCH_MISMATCH"
    )
    assert said.endswith("The GEMM runs in BF16 instead, which is exact but slower.")
    assert calls == [torch.float8_e8m0fnu] * 2


def test_mx_blocks_that_are_not_aligned_are_copied(on_blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def aligned_only(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        assert a.stride(0) % 16 == b.stride(1) % 16 == 0
        return stand_in(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", aligned_only)
    a, b = (operand(numbers(rows, 96, rows, True), E4M3, Layout.MX_1X32, True) for rows in (32, 48))
    memory = torch.zeros(32 * 96 + 1, dtype=torch.uint8)
    shifted = memory[1:].view(32, 96).view(E4M3)
    shifted.view(torch.uint8).copy_(a.data.view(torch.uint8))
    gemm = Gemm(a.layout, b.layout, BF16)
    monkeypatch.setattr(gemm_cuda, "gemm_on_cuda", planned(a, b, gemm, None))
    keys = operand_key(shifted, a.scale_inv), operand_key(*aligned(b)), gemm.flat
    run = gemm_cuda._plan_gemm(CPU, *keys, None, None)
    actual = run(shifted, a.scale_inv, *aligned(b), gemm, None, None)
    assert torch.equal(actual, (a.dequantize().double() @ b.dequantize().double().t()).to(BF16))


@pytest.mark.parametrize("backend", ["numba", "nonsense"])
def test_mx_blocks_without_the_library(backend: str, on_blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable with which training continues if ``torch._scaled_mm`` gives wrong numbers."""
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, backend)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    plans.clear_plan_cache()
    a, b = (operand(numbers(rows, 96, rows, True), E4M3, Layout.MX_1X32, True) for rows in (32, 48))
    if backend == "numba":
        with pytest.warns(match="plain torch is used instead"):
            run = planned(a, b, Gemm(a.layout, b.layout, BF16), None)
        assert run is reference_gemm
    else:
        with pytest.raises(ValueError, match="LIGHTNING_FP8_GEMM='nonsense' is neither numba nor cublaslt"):
            planned(a, b, Gemm(a.layout, b.layout, BF16), None)


@pytest.mark.parametrize("rows", [1, 128, 300])
@pytest.mark.parametrize("columns", [1, 4, 9])
def test_the_order_of_e8m0_scales_is_that_of_torchao(rows: int, columns: int) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.utils")
    codes = torch.randint(0, 255, (columns, rows), dtype=torch.uint8).t()
    actual = torch_scaled_mm.in_tiles(codes.view(torch.float8_e8m0fnu))
    assert torch.equal(actual.view(torch.uint8), mx.to_blocked(codes.contiguous()))


@pytest.mark.parametrize(
    ("device", "capability", "cuda", "blocks", "mx_blocks"),
    [
        ("cuda:0", (9, 0), "12.9", True, False),
        ("cuda:0", (9, 0), "13.0", True, False),
        ("cuda:0", (9, 0), "12.8", False, False),
        ("cuda:0", (8, 9), "12.9", False, False),
        ("cuda:0", (10, 0), "13.0", False, True),
        ("cuda:0", (10, 3), "12.8", False, True),
        ("cuda:0", (12, 0), "13.0", False, True),
        ("cuda:0", (10, 0), "12.6", False, False),
        ("cpu", (9, 0), "12.9", False, False),
        ("cpu", (10, 0), "13.0", False, False),
    ],
)
def test_who_multiplies_blocks(
    device: str,
    capability: tuple[int, int],
    cuda: str,
    blocks: bool,
    mx_blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert torch_scaled_mm.multiplies_blocks(torch.device(device)) is blocks
    assert torch_scaled_mm.multiplies_mx_blocks(torch.device(device)) is mx_blocks
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0+cu129"))
    assert not torch_scaled_mm.multiplies_blocks(torch.device(device))


def test_the_stand_in_refuses() -> None:
    """What the tests rest on: without padding, rounding and scaling afterwards these GEMMs would be refused."""
    one = torch.tensor(1.0)
    for (m, n, k), out_dtype, bias_dtype in product(
        [(16, 16, 16), (16, 16, 24), (16, 24, 16)], [BF16, FP32], [None, FP32]
    ):
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3).t()
        bias = None if bias_dtype is None else torch.zeros(n)
        if n % 16 == k % 16 == 0 and bias is None:
            assert stand_in(a, b, one, one, None, out_dtype).shape == (m, n)
        else:
            with pytest.raises(RuntimeError):
                stand_in(a, b, one, one, bias, out_dtype)
    a, b = torch.ones(8, 384).to(E4M3), torch.ones(256, 384).to(E4M3).t()
    scale_a, scale_b = torch.ones(3, 8).t(), torch.tensor([[1.0, 2, 4], [8, 16, 32]])
    padded = F.pad(scale_b, (0, 1))
    with pytest.raises(RuntimeError, match="fast accum"):
        stand_in(a, b, scale_a, scale_b.t(), use_fast_accum=True)
    a4, b4 = (F.pad(each.view(torch.uint8), (0, 128)).view(E4M3) for each in (a, b.t()))
    right = stand_in(a4, b4.t(), F.pad(scale_a.t(), (0, 0, 0, 1)).t(), padded.t())
    assert right[0, 0] == 128 * 7
    assert right[0, 128] == 128 * 56
