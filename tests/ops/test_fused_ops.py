"""Fused ops: their registration and errors, and the kernels' PTX on the CPU against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.activation import (
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_quantize_op,
)
from lightning_fp8.ops.cast_cuda import CastOutputs
from lightning_fp8.ops.norm import Norm, norm_backward_op, norm_quantize_op
from lightning_fp8.ops.op import Op
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import assert_same, kernels_of, reference_of
from lightning_fp8.proofs.drawing import values
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.fused_cases import CASES, LONG, norm_inputs
from tests.cuda_kernels.cases.kernel_cases import BF16, FP32
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import covering, thorough

LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
ACTIVATIONS = pytest.mark.parametrize("name", ops.ACTIVATIONS)
library = torch.ops.lightning_fp8


# --- The ops ----------------------------------------------------------------------------------------------------------


ONE_LAYOUT = pytest.mark.parametrize(
    "layout",
    covering(Layout, lambda layout: {layout} & {Layout.MX_1X32}),
    ids=lambda layout: layout.value,
)


@ONE_LAYOUT
@pytest.mark.parametrize(
    "usage", [(True, True), *(pytest.param(usage, marks=thorough) for usage in ((True, False), (False, True)))]
)
def test_registration(layout: Layout, usage: tuple[bool, bool]) -> None:
    """Schemas, what is written to, shapes and strides on fake tensors."""
    x, weight, bias = norm_inputs((35, 48), BF16, FP32, False)
    given: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
    if layout is Layout.TENSOR:
        given.append((torch.tensor(2.0), torch.tensor(0.0)))
    for scale, amax in given:
        rest = *Cast(E4M3, layout).usage(*usage).flat, scale, amax
        torch.library.opcheck(library.norm_quantize, (x, weight, bias, *Norm(1e-5, zero_centered=True), *rest))
        torch.library.opcheck(library.norm_quantize, (x, weight, None, *Norm(1e-5, rms=True), *rest))
        torch.library.opcheck(library.activation_quantize, (x, "swiglu", *rest))
        gradients = library.activation_backward_quantize
        torch.library.opcheck(gradients, (x, x, "gelu", BF16, *rest))
        torch.library.opcheck(gradients, (x[:, :24], x, "reglu", None, *rest))
        torch.library.opcheck(library.gated_quantize, (x, x, "silu", *rest), test_utils="test_schema")


@ONE_LAYOUT
def test_registration_of_what_writes_to_nothing(layout: Layout) -> None:
    x, weight, bias = norm_inputs((35, 48), BF16, FP32, False)
    cast = Cast(E4M3, layout, columnwise=True).flat
    torch.library.opcheck(library.norm_quantize_unobserved, (x, weight, bias, *Norm(1e-5), *cast))
    torch.library.opcheck(library.activation_quantize_unobserved, (x, "swiglu", *cast))
    torch.library.opcheck(library.gated_quantize_unobserved, (x, x, "silu", *cast))
    torch.library.opcheck(library.gated_backward_quantize_unobserved, (x, x, x, "silu", *cast))
    torch.library.opcheck(library.activation_backward_quantize_unobserved, (x, x, "gelu", BF16, *cast))
    statistics = torch.stack((x.float().mean(1), torch.ones(35)))
    layer, rms = Norm(0.0, zero_centered=True), Norm(0.0, rms=True)
    torch.library.opcheck(library.rms_norm, (x, weight, *rms, FP32, True))
    torch.library.opcheck(library.norm_backward, (x.float(), x, weight, statistics, *layer, True))
    torch.library.opcheck(library.norm_backward, (x, x, weight, statistics[1:], *rms, False))


def arguments(op: Op, x: Tensor) -> tuple[Any, ...]:
    """What ``op`` takes before the cast, for a tensor that is cast."""
    if op is norm_quantize_op:
        return x, torch.ones(x.shape[1]), torch.ones(x.shape[1]), Norm(1e-5)
    if op is activation_backward_quantize_op:
        return x, x, "gelu", FP32
    tensors = {activation_quantize_op: 1, gated_quantize_op: 2, gated_backward_quantize_op: 3}[op]
    return *[x] * tensors, "gelu"


CAST_OPS = pytest.mark.parametrize(
    "op",
    [
        norm_quantize_op,
        activation_quantize_op,
        activation_backward_quantize_op,
        gated_quantize_op,
        gated_backward_quantize_op,
    ],
    ids=lambda op: op.name,
)


@LAYOUTS
@CAST_OPS
@pytest.mark.filterwarnings("ignore:FP8 kernels do not run on cpu")
def test_without_kernels(op: Op, layout: Layout) -> None:
    """Where none run, the reference's results lie as the kernels' do."""
    plans.clear_plan_cache()
    x, cast = values(35, 49, BF16), Cast(E4M3, layout, columnwise=True)
    results = kernels_of(op)(*arguments(op, x), cast)
    plans.clear_plan_cache()
    like = CastOutputs(x.device, cast, 35, 49).allocate()
    for first in (0, 4) if op is gated_backward_quantize_op else (0,):
        assert [result.stride() for result in results[first : first + 4]] == [tensor.stride() for tensor in like]
    for actual, right in zip(results, reference_of(op)(*arguments(op, x), cast)):
        assert_same(actual, right, op.name)


@CAST_OPS
@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (7, 0)])
def test_nothing(op: Op, shape: tuple[int, int]) -> None:
    """An empty tensor has empty operands and sums of nothing."""
    cast = Cast(E4M3, Layout.TENSOR, columnwise=True)
    none = [None] * (4 if op is gated_backward_quantize_op else 2)
    data, scale_inv, data_t, _, *beside = op(*arguments(op, torch.zeros(shape)), cast, *none)
    assert data.shape == shape
    assert data_t.shape == shape[::-1]
    assert scale_inv == 1
    if op is activation_backward_quantize_op:
        assert torch.equal(beside[0], torch.zeros(shape[1]))


def test_errors() -> None:
    x, tensor, row = torch.randn(4, 6), Cast(E4M3, Layout.TENSOR), Cast(E4M3, Layout.ROW)
    norm: dict[str, float] = {"eps": 1e-5}
    ones = torch.ones(6)
    for message, call in {
        "float64": lambda: ops.norm_quantize(x.double(), ones, None, tensor, **norm),
        "2-D": lambda: ops.activation_quantize(x[None], "gelu", tensor),
        "weight": lambda: ops.norm_quantize(x, ones[:5], None, tensor, **norm),
        "bias is": lambda: ops.norm_quantize(x, ones, ones.half(), tensor, **norm),
        "RMSNorm has no bias": lambda: ops.norm_quantize(x, ones, ones, tensor, rms=True, **norm),
        "scale must be None": lambda: ops.activation_quantize(x, "gelu", row, scale=torch.tensor(1.0)),
        "amax needs scale": lambda: ops.activation_quantize(x, "gelu", tensor, amax=torch.tensor(1.0)),
        "'elu' is unknown; use one of gelu, geglu": lambda: ops.activation_quantize(x, "elu", tensor),
        "two halves": lambda: ops.activation_quantize(x[:, :5], "swiglu", tensor),
        "not the shape of swiglu": lambda: ops.activation_backward_quantize(x, x, "swiglu", tensor),
        "both be given, or neither": lambda: ops.gated_backward_quantize(
            x, x, x, "silu", tensor, {"scale": torch.tensor(1.0)}, {}
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# --- The kernels ------------------------------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.parametrize("case", tiered(CASES), ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


def gradient_sums(name: str, dy: Tensor, x: Tensor) -> Tensor:
    """The float32 sums over rows of the gradient that the kernels cast; of one row, the gradient itself."""
    cast, given = Cast(E5M2, Layout.TENSOR, scale_is_nonzero=True), (torch.tensor(1.0), torch.tensor(0.0))
    sums: Tensor = kernels_of(activation_backward_quantize_op)(dy, x, name, FP32, cast, *given)[-1]
    return sums


@needs_compilers
@pytest.mark.parametrize("name", ["geglu", pytest.param("swiglu", marks=thorough)])
def test_accuracy_of_the_exponential(name: str, emulator: Emulator) -> None:
    """Values and slopes in float32, for gate and dy of 1, against float64: what activation.py says of them."""
    emulator.races = False
    x = torch.cat([torch.linspace(-80, 80, 1021), torch.tensor([-0.0, 1e-30, -1e-30])])
    row = torch.cat([x, torch.ones_like(x)])[None]
    slope, value = gradient_sums(name, torch.ones(1, x.numel()), row).double().chunk(2)
    leaf = x.double().requires_grad_()
    z = leaf * (1 + 0.044715 * leaf.square()) * math.sqrt(8 / math.pi) if name == "geglu" else leaf
    exact = leaf * torch.sigmoid(z)
    exact.sum().backward()
    normal = exact.abs() > 1e-36  # nearer to 0 the reciprocal is flushed
    bound = 2e-7 * z.abs().clamp(min=1)
    assert bool(((value - exact).abs() <= bound * exact.abs())[normal].all())
    assert float(value[~normal].abs().max()) < 1e-36
    z_slope = (1 + 3 * 0.044715 * leaf.square()) * math.sqrt(8 / math.pi) if name == "geglu" else 1.0
    addends = torch.sigmoid(z) * (1 + (leaf * torch.sigmoid(-z) * z_slope).abs())
    assert bool(((slope - leaf.grad).abs() <= bound * addends)[normal].all())  # type: ignore[operator]


@needs_compilers
@pytest.mark.parametrize("name", ["geglu", pytest.param("swiglu", marks=thorough)])
def test_special_values(name: str, emulator: Emulator) -> None:
    """Infinities, NaN and huge numbers, each with each as x, gate and dy, give what the reference gives."""
    emulator.races = False
    special = torch.tensor([-math.inf, math.inf, math.nan, -3e38, 3e38, -200.0, 30.0, -0.0, 0.0, 1.0, -1e-30, 1e-30])
    x, gate, dy = (grid.reshape(1, -1) for grid in torch.meshgrid(special, special, special, indexing="ij"))
    row = torch.cat([x, gate], 1)
    actual = gradient_sums(name, dy, row)
    right = reference_of(activation_backward_quantize_op)(dy, row, name, FP32, Cast(E5M2, Layout.TENSOR))[-1]
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-37, equal_nan=True)


@needs_compilers
@thorough
@pytest.mark.parametrize("schedule", ["reverse", "random"])
def test_the_order_of_threads_changes_nothing(schedule: str, emulator: Emulator) -> None:
    """Sums along rows and over rows are the same to the bit."""
    x, weight, bias = norm_inputs(LONG, BF16, FP32, False)
    dy, g = values(*LONG, FP32, seed=3), values(37, 2 * 264, BF16)

    def results() -> list[Tensor]:
        given = torch.tensor(0.0), torch.tensor(0.0)
        cast, norm = Cast(E4M3, Layout.TENSOR), Norm(1e-5)
        *operands, statistics = kernels_of(norm_quantize_op)(x, weight, bias, norm, cast, *given)
        gradients = kernels_of(norm_backward_op)(dy, x, weight, statistics, norm, True)
        sums = gradient_sums("geglu", g[:, :264].float(), g.float())
        return [*operands[:2], given[1], statistics, *gradients, sums]

    before = results()
    emulator.schedule = schedule  # type: ignore[assignment]
    for actual, right in zip(results(), before):
        assert_same(actual, right, schedule)
