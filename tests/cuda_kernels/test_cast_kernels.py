"""Every cast kernel, its compiled PTX run on the CPU with the race detector on, against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product as product_of
from typing import Any

import pytest
import torch

from cuda_kernels.device import tile
from cuda_kernels.host.launch import Launch
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import cast_cuda
from lightning_fp8.ops.cast import quantize_columns_op, quantize_op
from lightning_fp8.ops.cast_cuda import CastOutputs
from lightning_fp8.ops.norm import Norm, rms_norm_op
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import WrongResult, assert_same, kernels_of, reference_of
from lightning_fp8.proofs.drawing import sample
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.kernel_cases import (
    BF16,
    CASES,
    FP16,
    FP32,
    check_experts,
    check_quantize,
    check_quantize_with_scale,
    experts,
)
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.ptx_on_cpu import EmulatorError
from tests.tiers import covering, late_rows, thorough

pytestmark = [needs_compilers, pytest.mark.usefixtures("emulator")]


@late_rows("case", lambda: tiered(CASES))
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


@pytest.mark.parametrize("schedule", ["reverse", "random"])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_the_order_of_threads_changes_nothing(layout: Layout, schedule: str, emulator: Emulator) -> None:
    emulator.schedule = schedule  # type: ignore[assignment]
    check_quantize(sample(140, 264, BF16), E4M3.dtype, layout, "cpu")


@pytest.mark.parametrize(
    "layout", covering(Layout, lambda layout: {Layout.ROW} & {layout}), ids=lambda layout: layout.value
)
def test_an_expert_in_the_place_of_another_is_noticed(
    layout: Layout, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its offset in one address: of each result, of the amaxes, of the values."""
    emulator.races = False
    cast = Cast(E4M3, layout, columnwise=True)

    def check() -> None:
        clear_plan_cache()
        check_experts(experts((2, 20, 40), BF16), cast, "cpu")

    check()
    mutants: list[tuple[str, Callable[..., Any]]] = [
        (
            "experts_loader",
            lambda loader, one_scale: replace(tile.experts_loader(loader, one_scale), load=loader.load, name="wrong"),
        ),
        *(("CastOutputs", partial(_without_step, index)) for index in ((0, 2) if layout.has_one_scale else range(4))),
    ]
    if layout is Layout.ROW:
        mutants.append(("experts_loader", lambda loader, one_scale: tile.experts_loader(loader, True)))
    for name, wrong in mutants:
        with monkeypatch.context() as patched:
            patched.setattr(cast_cuda, name, wrong)
            with pytest.raises((EmulatorError, WrongResult)):
                check()
    clear_plan_cache()


def _without_step(index: int, *args: Any) -> CastOutputs:
    outputs = CastOutputs(*args)
    assert outputs.steps[index]
    outputs.steps[index] = 0
    return outputs


def every_bf16() -> torch.Tensor:
    """All 2**16 codes: NaN, infinities, zeros of both signs, subnormals."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)


SCALES = [1.0, 448.0, 57344.0, 0.1, 1.0 / 3.0, 2.0**-20, 3.0e38, 1.0e-38, 1.7, 5.0e-42]


@pytest.mark.parametrize("columns", [16392, 100])
def test_rows_that_the_norm_kernel_does_not_hold_are_told(columns: int, emulator: Emulator) -> None:
    """They are too long, or not a multiple of 8. The specification computes them."""
    arguments = torch.randn(3, columns).to(BF16), torch.ones(columns, dtype=BF16), Norm(1e-5, rms=True), BF16, True
    with pytest.warns(RuntimeWarning, match=f"rms_norm has no kernel for {columns} columns of torch.bfloat16"):
        found = kernels_of(rms_norm_op)(*arguments)
    for a, b in zip(found, reference_of(rms_norm_op)(*arguments)):
        assert_same(a, b, "norm")
    assert not emulator.launched


@pytest.mark.parametrize(
    ("scale", "float8"),
    covering([*zip(SCALES, [E4M3, E5M2] * 5), (1.0, E5M2), (448.0, E4M3)], lambda row: row[1:]),
    ids=lambda each: each.name if isinstance(each, Float8) else str(each),
)
def test_every_bfloat16(scale: float, float8: Float8, emulator: Emulator) -> None:
    emulator.races = False
    check_quantize_with_scale(every_bf16(), float8.dtype, scale, "cpu", amax=0.0)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_every_bfloat16_scaled_from_itself(layout: Layout, emulator: Emulator) -> None:
    emulator.races = False
    values = every_bf16()
    check_quantize(values, E4M3.dtype, layout, "cpu")
    finite = torch.where(values.isfinite(), values, torch.ones_like(values))
    check_quantize(finite, E4M3.dtype, layout, "cpu")
    check_quantize(finite.flip(0).t().contiguous(), E4M3.dtype, layout, "cpu")


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -3e38])
@pytest.mark.parametrize(
    "layout", covering(Layout, lambda layout: {Layout.TENSOR} & {layout}), ids=lambda layout: layout.value
)
def test_one_element(layout: Layout, value: float) -> None:
    check_quantize(torch.tensor([[value]]), E4M3.dtype, layout, "cpu")


@thorough
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_a_special_value_among_others(layout: Layout) -> None:
    for special in (math.nan, math.inf):
        x = sample(131, 203, FP32)
        x[77, 130] = special
        check_quantize(x, E4M3.dtype, layout, "cpu")


@thorough
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_a_long_and_narrow_tensor(layout: Layout, emulator: Emulator) -> None:
    emulator.races = False
    check_quantize(sample(131_072, 17, BF16), E4M3.dtype, layout, "cpu", rowwise=False)


@thorough
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_rows_apart(layout: Layout) -> None:
    """Views: a slice of columns, every third row, one row broadcast, a transposed tensor."""
    base = sample(400, 300, BF16)
    for view in (base[:140, 20:284], base[::3, :264], base[:1, :264].expand(140, 264), base[:264, :140].t()):
        check_quantize(view, E4M3.dtype, layout, "cpu")


@thorough
@pytest.mark.parametrize("layout", [Layout.TENSOR, Layout.MX_1X32], ids=lambda layout: layout.value)
def test_rows_alone_are_read_16_bytes_at_a_time(layout: Layout, emulator: Emulator) -> None:
    """Where rows begin at multiples of them."""
    base = sample(400, 304, BF16)
    for view, wide in ((base[:140, 8:272], True), (base[::3, :264], True), (base[:140, 20:284], False)):
        emulator.launched.clear()
        check_quantize(view, E4M3.dtype, layout, "cpu", columnwise=False)
        assert ["vector=8" in kernel.name for kernel in emulator.launched] == [wide] * len(emulator.launched)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (7, 0)])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_nothing(layout: Layout, shape: tuple[int, int], emulator: Emulator) -> None:
    """An empty tensor has empty operands, and no kernel is started."""
    x, cast = torch.zeros(shape, dtype=FP16), Cast(E4M3, layout, columnwise=True)
    for a, b in zip(kernels_of(quantize_op)(x, cast), reference_of(quantize_op)(x, cast)):
        assert_same(a, b, "empty")
    assert not emulator.launched


@pytest.mark.parametrize(
    ("scale", "float8"),
    covering([*product_of(SCALES, [E4M3, E5M2])], lambda row: row[1:]),
    ids=lambda each: each.name if isinstance(each, Float8) else str(each),
)
def test_every_bfloat16_by_columns(scale: float, float8: Float8, emulator: Emulator) -> None:
    """Scales differ from column to column by small factors, which round."""
    emulator.races = False
    values = every_bf16()
    scales = (scale * torch.linspace(1.0, 2.0, values.shape[1])).clamp(max=3.4e38)
    codes = kernels_of(quantize_columns_op)(values, scales, float8.dtype)
    assert_same(codes, reference_of(quantize_columns_op)(values, scales, float8.dtype), "codes")


def test_more_than_2_31_elements() -> None:
    """Rows 2**31 elements apart, in what is read and in both copies that are written: addresses do not wrap."""
    from cuda_kernels.casts.quantize import quantize_tensor_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host.launch import Launch

    rows, columns, pitch = 3, 8, 2**31
    values = sample(rows, columns, BF16)
    # Memory that is never touched is never taken.
    x = torch.empty(rows * pitch, dtype=BF16).as_strided((rows, columns), (pitch, 1)).copy_(values)
    out = torch.empty(rows * pitch, dtype=torch.uint8)
    out_t = torch.empty(columns * pitch, dtype=torch.uint8)
    scale, inverse = torch.tensor([2.0]), torch.empty(1)
    kernel = quantize_tensor_kernel(tensor_loader("bfloat16", 4), "e4m3", True, True, False)
    start = Launch(kernel, 1, (rows, columns, 0, 0, 0.0, pitch, pitch), x.device).run
    start(x, pitch, scale, 0, 0, out, inverse, out_t)
    codes = (values.float() * 2).clamp(-448, 448).to(E4M3.dtype).view(torch.uint8)
    assert torch.equal(out.as_strided((rows, columns), (pitch, 1)), codes)
    assert torch.equal(out_t.as_strided((columns, rows), (pitch, 1)), codes.t())


def test_codes_more_than_2_31_bytes_apart() -> None:
    """As above, of the transpose and of the cast by columns' scales."""
    from cuda_kernels.casts.quantize import quantize_columns_kernel
    from cuda_kernels.casts.transpose import transpose_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host.launch import Launch

    rows, columns, pitch = 3, 8, 2**31
    values, scale = sample(rows, columns, BF16), torch.logspace(-2, 2, columns)
    codes = torch.empty(rows * pitch, dtype=torch.uint8)
    out = torch.empty(columns * pitch, dtype=torch.uint8)
    kernel = quantize_columns_kernel(tensor_loader("bfloat16", 8), "e4m3")
    Launch(kernel, 1, (rows, columns, pitch), values.device).run(values, columns, scale, codes)
    expected = (values.float() * scale).clamp(-448, 448).to(E4M3.dtype).view(torch.uint8)
    assert torch.equal(codes.as_strided((rows, columns), (pitch, 1)), expected)
    Launch(transpose_kernel(4), 1, (rows, columns, pitch), values.device).run(codes, pitch, out)
    assert torch.equal(out.as_strided((columns, rows), (pitch, 1)), expected.t())


def test_results_are_the_same_every_time(emulator: Emulator) -> None:
    x = sample(300, 300, BF16)
    runs = []
    for seed in range(3):
        emulator.schedule, emulator.seed = "random", seed
        runs.append(kernels_of(quantize_op)(x, Cast(E4M3, Layout.TENSOR, columnwise=True)))
    for other in runs[1:]:
        for a, b in zip(runs[0], other):
            assert_same(a, b, "repeated")


def test_blocks_without_a_kernel_are_refused() -> None:
    from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.kernel import KernelError

    quads, octets = tensor_loader("bfloat16", 4), tensor_loader("bfloat16", 8)
    with pytest.raises(KernelError, match="scales of 1x16 are not supported; blocks are 1x32, 1x64, 1x128, 128x128"):
        quantize_blocks_kernel(quads, "e4m3", (1, 16), False, True, True)
    with pytest.raises(KernelError, match="scales of 1x128 e8m0 are not supported"):
        quantize_blocks_kernel(quads, "e4m3", (1, 128), True, True, False)
    with pytest.raises(KernelError, match="scales of 1x128 are not supported with bfloat16, vector=8"):
        quantize_blocks_kernel(octets, "e4m3", (1, 128), False, True, False)


@thorough
@pytest.mark.parametrize(("block_columns", "vector"), [(64, 4), (64, 8), (32, 4)])
def test_float32_scales_of_parts_of_a_row(block_columns: int, vector: int) -> None:
    """Blocks that the kernel has code for and no layout has: each is what its largest value says."""
    from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel
    from cuda_kernels.device.tile import tensor_loader

    rows, columns = 140, 200
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(BF16)
    columnwise = vector == 4
    kernel = quantize_blocks_kernel(
        tensor_loader("bfloat16", vector), "e4m3", (1, block_columns), False, True, columnwise
    )
    results = []
    for r, k in ((rows, columns), (columns, rows)):
        results += [
            torch.full((r, -(-k // 16) * 16), math.nan).to(E4M3.dtype),
            torch.full((-(-k // block_columns), r), math.nan),
        ]
    strides = [each.stride(0) for each in results]
    Launch(kernel, 4, (rows, columns, 0, 0.0, *strides), x.device).run(x, columns, *results)
    for values, data, scale_inv in ((x, *results[:2]), (x.t(), *results[2:]))[: 1 + columnwise]:
        k = values.shape[1]
        padded = torch.nn.functional.pad(values.float(), (0, -k % block_columns))
        blocks = padded.view(values.shape[0], -1, block_columns)
        scale = 448 / blocks.abs().amax(2).double()
        codes = (blocks * scale.float()[..., None]).clamp(-448, 448).to(E4M3.dtype).view(padded.shape)
        assert_same(data[:, :k], codes[:, :k], "data")
        torch.testing.assert_close(scale_inv.t(), (1 / scale).float(), rtol=2.0**-22, atol=0)
