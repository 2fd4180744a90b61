"""The cast kernels on hardware: the emulated cases, larger tensors, streams, graphs, and the sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import quantize_columns_op, quantize_op, reference_quantize
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import assert_same, reference_of
from lightning_fp8.proofs.drawing import sample
from tests.cuda_kernels.cases import fused_cases
from tests.cuda_kernels.cases.kernel_cases import (
    BF16,
    CASES,
    FP16,
    FP32,
    RESULTS,
    check_quantize,
    check_quantize_with_scale,
)
from tests.cuda_kernels.test_cast_kernels import SCALES, every_bf16
from tests.gpu.graphs import captured

ops = torch.ops.lightning_fp8
reference = reference_of(quantize_op)
ROWS, BOTH = ({layout: Cast(E4M3, layout, columnwise=columnwise) for layout in Layout} for columnwise in (False, True))
"""Casts to x alone, and to x and xᵀ."""
LAYOUTS = pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Makes synchronization with the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [*CASES, *fused_cases.CASES], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.run("cuda")


@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
@pytest.mark.parametrize("scale", SCALES)
def test_every_bfloat16(scale: float, float8: Float8) -> None:
    check_quantize_with_scale(every_bf16(), float8.dtype, scale, "cuda", amax=0.0)


@LAYOUTS
def test_every_bfloat16_scaled_from_itself(layout: Layout) -> None:
    values = every_bf16()
    check_quantize(values, E4M3.dtype, layout, "cuda")
    check_quantize(torch.where(values.isfinite(), values, torch.ones_like(values)), E5M2.dtype, layout, "cuda")


@LAYOUTS
@pytest.mark.parametrize("shape", [(8192, 8192), (4096, 14336), (131_072, 17), (33, 100_001), (1, 1)])
def test_shapes(layout: Layout, shape: tuple[int, int]) -> None:
    check_quantize(sample(*shape, BF16), E4M3.dtype, layout, "cuda")


@LAYOUTS
@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_casts_without_kernels_are_compiled_to_the_same_bits(
    layout: Layout, float8: Float8, dtype: torch.dtype
) -> None:
    """Casts that no kernel supports run in Triton: the first call compiles, and later calls do not synchronize."""
    x, cast = sample(260, 1040, dtype), Cast(float8, layout, columnwise=True)
    on_card = x.cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # raised if torch.compile fails
        reference_quantize(on_card, cast, None, None)
        with nothing_waits():
            actual = reference_quantize(on_card, cast, None, None)
    for name, a, b in zip(RESULTS, actual, reference(x, cast)):
        assert_same(a, b, name)


@LAYOUTS
def test_more_than_2_31_elements(layout: Layout) -> None:
    x = torch.randn(36_000, 64_000, device="cuda", dtype=BF16)
    assert x.numel() > 2**31
    x[-1, -1] = 300.0  # the largest by far, at the very end
    data, scale_inv, data_t, _ = ops.quantize(x, *BOTH[layout].flat)
    rows = slice(35_968, 36_000)
    last = x[rows].cpu()
    if layout is Layout.TENSOR:
        assert scale_inv.item() == pytest.approx(300.0 / 448.0, rel=1e-6)
        expected = reference(last, ROWS[layout], torch.tensor(1.0) / scale_inv.cpu())
        assert (data[rows].cpu().float() - expected[0].float()).abs().max() <= 32  # 1 / scale_inv may round the scale
    elif layout is not Layout.BLOCK_128X128:
        expected = reference(last, ROWS[layout])
        assert_same(data[rows], expected[0], "data")
        assert_same(scale_inv[rows], expected[1], "scale_inv")
    if layout.transposes:
        assert torch.equal(data_t[:, rows].view(torch.uint8).t(), data[rows].view(torch.uint8))


@pytest.mark.parametrize("shape", [(8192, 8192), (4096, 14336), (131_072, 17), (36_000, 64_000), (33, 100_001)])
def test_transpose(shape: tuple[int, int]) -> None:
    codes = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    for each in (codes, codes.t()):
        assert torch.equal(ops.transpose(each.view(E4M3.dtype)).view(torch.uint8), each.t())


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 8192), (36_000, 64_000), (33, 100_001)])
def test_columns_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, scale = torch.randn(shape, device="cuda", dtype=dtype), torch.rand(shape[1], device="cuda") * 1000
    codes = ops.quantize_columns(x, scale, E4M3.dtype)
    for rows in (slice(0, 33), slice(-33, None)):
        expected = reference_of(quantize_columns_op)(x[rows].cpu(), scale.cpu(), E4M3.dtype)
        assert_same(codes[rows], expected, "codes")


def test_nothing_waits_for_the_device() -> None:
    x, scale, amax = (
        torch.randn(300, 300, device="cuda", dtype=BF16),
        torch.ones((), device="cuda"),
        torch.zeros((), device="cuda"),
    )
    amax_history, scales, largest = (
        torch.zeros(16, 8, device="cuda"),
        torch.ones(8, device="cuda"),
        torch.full((8,), 448.0, device="cuda"),
    )
    for _ in range(2):  # the first call compiles and loads
        with nothing_waits():
            for layout in Layout:
                ops.quantize(x, *BOTH[layout].flat)
            ops.quantize(x, *BOTH[Layout.TENSOR].flat, scale, amax)
            ops.transpose(ops.quantize_columns(x, torch.ones(300, device="cuda"), E4M3.dtype))
            ops.observe(x, amax)
            ops.update_scales(torch.ones(8, device="cuda"), amax_history, scales, largest, 0.0, "max")


def test_kernels_run_on_the_current_stream() -> None:
    """On another stream, after a long wait, the cast reads values written earlier on that stream."""
    x = torch.zeros(1024, 1024, device="cuda", dtype=BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        data, scale_inv, *_ = ops.quantize(x, *ROWS[Layout.TENSOR].flat)
    stream.synchronize()
    assert torch.equal(data.float() * scale_inv, torch.full_like(x, 3.0, dtype=torch.float32))


@LAYOUTS
def test_a_graph_replays_with_new_values(layout: Layout) -> None:
    x = torch.randn(500, 768, device="cuda", dtype=BF16)

    def cast() -> tuple[Tensor, ...]:
        return ops.quantize(x, *BOTH[layout].flat)

    graph, results = captured(cast)
    for seed in range(3):
        values = sample(500, 768, BF16, seed)
        x.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        for name, a, b in zip(RESULTS, results, reference(values, BOTH[layout])):
            assert_same(a, b, name)


def test_a_delayed_step_in_a_graph() -> None:
    """Replays of cast, observe and update give the same scales as the CPU."""
    on_card, on_cpu = ({"x": torch.empty(64, 256, dtype=BF16, device=on), "amax": torch.zeros(1, device=on),
                        "amax_history": torch.zeros(4, 1, device=on), "scale": torch.zeros(1, device=on),
                        "largest": torch.full((1,), 448.0, device=on)} for on in ("cuda", "cpu"))  # fmt: skip

    def step(s: dict[str, Tensor]) -> Tensor:
        data = ops.quantize(s["x"], *ROWS[Layout.TENSOR].flat, s["scale"][0], s["amax"][0])[0]
        ops.update_scales(s["amax"], s["amax_history"], s["scale"], s["largest"], 0.0, "max")
        return data

    step(on_card)
    on_card["scale"].zero_(), on_card["amax_history"].zero_(), on_card["amax"].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data = step(on_card)
    for seed in range(6):
        values = sample(64, 256, BF16, seed)
        on_card["x"].copy_(values)
        on_cpu["x"].copy_(values)
        graph.replay()
        assert_same(data, step(on_cpu), "data")
        for name in ("scale", "amax_history", "amax"):
            assert_same(on_card[name], on_cpu[name], name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_tensors_device_is_used() -> None:
    x = sample(200, 300, BF16)
    data = ops.quantize(x.to("cuda:1"), *BOTH[Layout.TENSOR].flat)[0]
    assert data.device.index == 1
    assert_same(data, reference(x, BOTH[Layout.TENSOR])[0], "data")


SANITIZED = """
from tests.cuda_kernels.cases import fused_cases
from tests.cuda_kernels.cases import kernel_cases
from tests.tiers import every_row

pytestmark = every_row
for case in [*kernel_cases.CASES, *fused_cases.CASES][::3]:
    case.run("cuda")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "7", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True)
    if "not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
