"""Fused ops: the reference against float64 and its autograd, the kernels' PTX on the CPU against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.formats import E4M3, E5M2
from lightning_fp8.ops.activation import cuda as activation_cuda
from lightning_fp8.ops.activation import reference as activation_reference
from lightning_fp8.ops.activation.schema import is_gated
from lightning_fp8.ops.core import dispatch
from lightning_fp8.ops.norm import cuda as norm_cuda
from lightning_fp8.ops.norm import cuda_backward as norm_cuda_backward
from lightning_fp8.ops.quantize.options import format_quantize_options, parse_quantize_options
from lightning_fp8.ops.quantize.outputs import CastOutputs
from lightning_fp8.scaled import Cast, Layout, ScaledTensor
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.cuda_kernels.fused_cases import CASES, LONG, assert_close_codes, norm_inputs, sides_of, values
from tests.cuda_kernels.kernel_cases import BF16, FP16, FP32, Case, assert_same
from tests.float8_reference import cast
from tests.ops.test_ops import POWER_2, expected

LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
ACTIVATIONS = pytest.mark.parametrize("name", ops.ACTIVATIONS)
library = torch.ops.lightning_fp8

# --- The reference ----------------------------------------------------------------------------------------------------


def check_operand(operand: ScaledTensor | None, y: Tensor, layout: Layout) -> None:
    """``operand`` is the cast of the float64 ``y``, but for values within float32's error of two codes' middle."""
    assert operand is not None
    codes, dequantized = expected(y.numpy(), layout)
    assert_close_codes(operand.data, torch.from_numpy(codes).view(torch.float8_e4m3fn), "codes")
    same = operand.data.view(torch.uint8).numpy() == codes
    np.testing.assert_allclose(operand.dequantize().double().numpy()[same], dequantized[same], rtol=2e-6)


def exact_norm(x: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, zero_centered: bool) -> Tensor:
    """In x's dtype, by torch."""
    gamma = weight + 1 if zero_centered else weight
    if rms:
        return F.rms_norm(x, x.shape[1:], gamma, 1e-5)
    return F.layer_norm(x, x.shape[1:], gamma, bias, 1e-5)


def exact_activation(x: Tensor, name: str) -> Tensor:
    """In x's dtype, by torch."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "": torch.sigmoid,
        "ge": lambda x: F.gelu(x, approximate="tanh"),
        "qge": lambda x: x * torch.sigmoid(1.702 * x),
        "re": F.relu,
        "sre": lambda x: F.relu(x).square(),
        "si": F.silu,
        "swi": F.silu,
    }
    if name.endswith("glu"):
        a, b = x.chunk(2, 1)
        return functions[name.removesuffix("glu")](a) * b
    return functions[name.removesuffix("lu")](x)


@LAYOUTS
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize(("shape", "dtype", "zero_centered"), [((70, 100), BF16, False), ((33, 257), FP32, True)])
def test_norm(rms: bool, layout: Layout, shape: tuple[int, int], dtype: torch.dtype, zero_centered: bool) -> None:
    x, weight, bias = norm_inputs(shape, dtype, FP32, rms)
    target = Cast(E4M3, layout, layout in POWER_2)
    options = {"eps": 1e-5, "rms": rms, "zero_centered": zero_centered}
    (row, column), statistics = ops.norm_quantize(x, weight, bias, target, columnwise=True, **options)
    doubles = x.double(), weight.double(), None if bias is None else bias.double()
    y = exact_norm(*doubles, rms, zero_centered)
    check_operand(row, y, layout)
    check_operand(column, y.t(), layout)
    moment = x.double().square().mean(1) if rms else x.double().var(1, correction=0)
    assert statistics.shape == (1 if rms else 2, shape[0])
    torch.testing.assert_close(statistics[-1].double(), (moment + 1e-5).rsqrt(), rtol=1e-6, atol=0.0)
    if not rms:
        torch.testing.assert_close(statistics[0].double(), x.double().mean(1), rtol=1e-6, atol=1e-6)
    only = ops.norm_quantize(x, weight, bias, target, rowwise=False, columnwise=True, **options).operands
    assert only.rowwise is None
    check_operand(only.columnwise, y.t(), layout)


def test_variance_of_a_distant_mean() -> None:
    """E[x²] - E[x]² would lose every digit of it."""
    x = torch.randn(5, 1000) + 3000
    rstd = ops.norm_quantize(x, torch.ones(1000), None, Cast(E4M3, Layout.TENSOR), eps=0.0).statistics[1]
    torch.testing.assert_close(rstd.double(), x.double().var(1, correction=0).rsqrt(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)
def test_given_scale(float8: object, scale: float) -> None:
    """Delayed scaling: what is seen is the amax of the float32 values, and 0 scales from it."""
    assert float8 in (E4M3, E5M2)
    x, weight, bias = norm_inputs((40, 56), BF16, FP32, False)
    y = exact_norm(x.double(), weight.double(), bias.double(), False, False)  # type: ignore[union-attr]
    g = exact_activation(x.double(), "swiglu")
    target = Cast(float8, Layout.TENSOR)  # type: ignore[arg-type]
    for exact, run in (
        (y, lambda **given: ops.norm_quantize(x, weight, bias, target, eps=1e-5, **given).operands),
        (g, lambda **given: ops.activation_quantize(x, "swiglu", target, **given)),
    ):
        exact_amax, amax = exact.abs().max(), torch.tensor(0.25)
        row, none = run(scale=torch.tensor(scale), amax=amax)
        assert none is None
        used = scale or float(float8.max / exact_amax)  # type: ignore[attr-defined]
        codes = torch.from_numpy(cast(exact.numpy(), used, float8.name))  # type: ignore[attr-defined]
        assert_close_codes(row.data, codes.view(row.data.dtype), "codes")
        torch.testing.assert_close(row.scale_inv.double(), torch.tensor(1 / used).double(), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(amax.double(), exact_amax, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(70, 100), (1, 1), (3, 257)])
def test_norm_backward(rms: bool, zero_centered: bool, shape: tuple[int, int]) -> None:
    x, weight, bias = norm_inputs(shape, FP32, FP32, rms)
    dy = values(*shape, FP32, seed=5)
    statistics = ops.norm_quantize(x, weight, bias, Cast(E4M3, Layout.TENSOR), eps=1e-5, rms=rms).statistics
    dx, dweight, dbias = ops.norm_backward(
        dy, x, weight, statistics, rms=rms, zero_centered=zero_centered, bias_gradient=not rms
    )
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, *([] if rms else [bias]))]
    exact_norm(*leaves, *([None] if rms else []), rms, zero_centered).backward(dy.double())
    for actual, leaf in zip((dx, dweight, dbias), leaves):
        assert actual is not None
        size = float(leaf.grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(actual.double(), leaf.grad, rtol=1e-4, atol=1e-5 * size + 1e-6)
    assert (dbias is None) == rms


def test_gradients_have_their_tensors_dtypes() -> None:
    x, weight, bias = norm_inputs((9, 16), FP16, BF16, False)
    statistics = ops.norm_quantize(x, weight, bias, Cast(E4M3, Layout.TENSOR), eps=1e-5).statistics
    gradients = ops.norm_backward(x.float(), x, weight, statistics, bias_gradient=True)
    assert [gradient.dtype for gradient in gradients if gradient is not None] == [FP16, BF16, BF16]
    for dtype in (BF16, FP32):
        assert ops.activation_backward_quantize(
            x, x, "relu", Cast(E5M2, Layout.TENSOR), bias_dtype=dtype
        )[1].dtype == dtype  # type: ignore[union-attr]  # fmt: skip


@LAYOUTS
@ACTIVATIONS
def test_activation(name: str, layout: Layout) -> None:
    """Values, gradients and their sums are float64's, in both operands."""
    columns = 2 * 101 if is_gated(name) else 101
    x, target = values(67, columns, FP32, spread=2.0), Cast(E4M3, layout, layout in POWER_2)
    leaf = x.double().requires_grad_()
    y = exact_activation(leaf, name)
    row, column = ops.activation_quantize(x, name, target, columnwise=True)
    check_operand(row, y.detach(), layout)
    check_operand(column, y.detach().t(), layout)
    dy = values(67, 101, FP32, seed=1)
    y.backward(dy.double())
    assert leaf.grad is not None
    (row, column), dbias = ops.activation_backward_quantize(dy, x, name, target, bias_dtype=FP32, columnwise=True)
    check_operand(row, leaf.grad, layout)
    check_operand(column, leaf.grad.t(), layout)
    torch.testing.assert_close(dbias.double(), leaf.grad.sum(0), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


@LAYOUTS
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated(name: str, layout: Layout) -> None:
    """Two tensors instead of two halves of one: values and both gradients are float64's, in both operands."""
    x, factor, dy = (values(67, 101, FP32, seed=seed, spread=2.0) for seed in range(3))
    target = Cast(E4M3, layout, layout in POWER_2)
    leaves = [tensor.double().requires_grad_() for tensor in (x, factor)]
    y = exact_activation(leaves[0], name) * leaves[1]
    y.backward(dy.double())
    for (row, column), exact in (
        (ops.gated_quantize(x, factor, name, target, columnwise=True), y.detach()),
        (ops.gated_backward_quantize(dy, x, factor, name, target, columnwise=True), leaves[0].grad),
        (ops.gated_quantize(x, dy, name, target, columnwise=True), leaves[1].grad),
    ):
        assert exact is not None
        check_operand(row, exact, layout)
        check_operand(column, exact.t(), layout)


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_limits(name: str) -> None:
    """At the ends of the number line values and slopes are the limits, not 0 times infinity; NaN stays as in torch."""
    x = torch.tensor([-math.inf, -1e30, -200.0, 200.0, 1e30, math.inf, math.nan])
    forward, backward = activation_reference.ACTIVATIONS[name]
    right = {"srelu": x[3:6] ** 2}.get(name, x[3:6])
    slopes = {"srelu": 2 * x[3:6]}.get(name, torch.ones(3))
    torch.testing.assert_close(forward(x), torch.cat([torch.zeros(3), right, x[6:]]), equal_nan=True)
    torch.testing.assert_close(
        backward(torch.ones(7), x)[:6], torch.cat([torch.zeros(3), slopes]), equal_nan=True, atol=1e-6, rtol=0.0
    )
    assert torch.equal(backward(torch.ones(7), x)[6:].isnan(), torch.tensor([name != "relu"]))


# --- The ops ----------------------------------------------------------------------------------------------------------


@LAYOUTS
def test_registration(layout: Layout) -> None:
    """Schemas, what is written to, shapes and strides on fake tensors."""
    x, weight, bias = norm_inputs((35, 48), BF16, FP32, False)
    given: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
    if layout is Layout.TENSOR:
        given.append((torch.tensor(2.0), torch.tensor(0.0)))
    for scale, amax in given:
        for usage in ((True, False), (False, True), (True, True)):
            cast, rest = (
                format_quantize_options(Cast(E4M3, layout), *usage),
                (scale, amax, torch.zeros(2, dtype=torch.int64)),
            )
            layer, rms = f"layer eps=1e-5 zero_centered, {cast}", f"rms eps=1e-5, {cast}"
            torch.library.opcheck(library.norm_quantize, (x, weight, bias, layer, *rest))
            torch.library.opcheck(library.norm_quantize, (x, weight, None, rms, *rest))
            torch.library.opcheck(library.activation_quantize, (x, f"swiglu, {cast}", *rest))
            gradients = library.activation_backward_quantize
            torch.library.opcheck(gradients, (x, x, f"gelu bias=bfloat16, {cast}", *rest))
            torch.library.opcheck(gradients, (x[:, :24], x, f"reglu, {cast}", *rest))
            torch.library.opcheck(library.gated_quantize, (x, x, f"silu, {cast}", *rest), test_utils="test_schema")
    cast = format_quantize_options(Cast(E4M3, layout), True, True)  # without anything to write to
    torch.library.opcheck(library.norm_quantize_unobserved, (x, weight, bias, f"layer eps=1e-5, {cast}"))
    torch.library.opcheck(library.activation_quantize_unobserved, (x, f"swiglu, {cast}"))
    torch.library.opcheck(library.gated_quantize_unobserved, (x, x, f"silu, {cast}"))
    torch.library.opcheck(library.gated_backward_quantize_unobserved, (x, x, x, f"silu, {cast}"))
    torch.library.opcheck(library.activation_backward_quantize_unobserved, (x, x, f"gelu bias=bfloat16, {cast}"))
    statistics = torch.stack((x.float().mean(1), torch.ones(35)))
    torch.library.opcheck(library.norm_backward, (x.float(), x, weight, statistics, "layer zero_centered bias"))
    torch.library.opcheck(library.norm_backward, (x, x, weight, statistics[1:], "rms"))


def arguments(op: str, x: Tensor, options_text: str) -> tuple[object, ...]:
    """What ``op`` takes for a tensor that is cast so."""
    if op == "norm_quantize":
        return x, torch.ones(x.shape[1]), torch.ones(x.shape[1]), f"layer eps=1e-5, {options_text}"
    if op == "activation_backward_quantize":
        return x, x, f"gelu bias=float32, {options_text}"
    tensors = {"activation_quantize": 1, "gated_quantize": 2, "gated_backward_quantize": 3}[op]
    return *[x] * tensors, f"gelu, {options_text}"


CAST_OPS = (
    "norm_quantize",
    "activation_quantize",
    "activation_backward_quantize",
    "gated_quantize",
    "gated_backward_quantize",
)


@LAYOUTS
@pytest.mark.parametrize("op", CAST_OPS)
@pytest.mark.filterwarnings("ignore:FP8 kernels do not run on cpu")
def test_without_kernels(op: str, layout: Layout) -> None:
    """Where none run, the reference's results lie as the kernels' do."""
    dispatch.clear_plan_cache()
    x, options_text = values(35, 49, BF16), format_quantize_options(Cast(E4M3, layout), columnwise=True)
    cuda, reference = sides_of(op)
    results = getattr(cuda, op)(*arguments(op, x, options_text))
    dispatch.clear_plan_cache()
    like = CastOutputs(x.device, parse_quantize_options(options_text), 35, 49).allocate()
    assert [result.stride() for result in results[:4]] == [tensor.stride() for tensor in like]
    for actual, right in zip(
        results,
        getattr(reference, op)(*arguments(op, x, options_text)),
    ):
        assert_same(actual, right, op)


@pytest.mark.parametrize("op", CAST_OPS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (7, 0)])
def test_nothing(op: str, shape: tuple[int, int]) -> None:
    """An empty tensor has empty operands and sums of nothing."""
    options_text = "e4m3 tensor rowwise columnwise"
    data, scale_inv, data_t, _, *beside = getattr(library, op)(*arguments(op, torch.zeros(shape), options_text))
    assert data.shape == shape
    assert data_t.shape == shape[::-1]
    assert scale_inv == 1
    if op == "activation_backward_quantize":
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
        "pass scale too": lambda: ops.activation_quantize(x, "gelu", tensor, amax=torch.tensor(1.0)),
        "'elu' is unknown; use one of gelu, geglu": lambda: ops.activation_quantize(x, "elu", tensor),
        "two halves": lambda: ops.activation_quantize(x[:, :5], "swiglu", tensor),
        "no gradient of swiglu": lambda: ops.activation_backward_quantize(x, x, "swiglu", tensor),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# --- The kernels ------------------------------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


def gradient_sums(name: str, dy: Tensor, x: Tensor) -> Tensor:
    """The float32 sums over rows of the gradient that the kernels cast; of one row, the gradient itself."""
    options_text = f"{name} bias=float32, e5m2 tensor rowwise nonzero"
    return activation_cuda.activation_backward_quantize(dy, x, options_text, torch.tensor(1.0), torch.tensor(0.0))[-1]


@needs_compilers
@pytest.mark.parametrize("name", ["geglu", "swiglu"])
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
@pytest.mark.parametrize("name", ["geglu", "swiglu"])
def test_special_values(name: str, emulator: Emulator) -> None:
    """Infinities, NaN and huge numbers, each with each as x, gate and dy, give what the reference gives."""
    emulator.races = False
    special = torch.tensor([-math.inf, math.inf, math.nan, -3e38, 3e38, -200.0, 30.0, -0.0, 0.0, 1.0, -1e-30, 1e-30])
    x, gate, dy = (grid.reshape(1, -1) for grid in torch.meshgrid(special, special, special, indexing="ij"))
    row = torch.cat([x, gate], 1)
    actual = gradient_sums(name, dy, row)
    right = activation_reference.activation_backward_quantize(dy, row, f"{name} bias=float32, e5m2 tensor rowwise")[-1]
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-37, equal_nan=True)


@needs_compilers
@pytest.mark.parametrize("schedule", ["reverse", "random"])
def test_the_order_of_threads_changes_nothing(schedule: str, emulator: Emulator) -> None:
    """Sums along rows and over rows are the same to the bit."""
    x, weight, bias = norm_inputs(LONG, BF16, FP32, False)
    dy, g = values(*LONG, FP32, seed=3), values(37, 2 * 264, BF16)

    def results() -> list[Tensor]:
        given = torch.tensor(0.0), torch.tensor(0.0)
        *operands, statistics = norm_cuda.norm_quantize(x, weight, bias, "layer eps=1e-5, e4m3 tensor rowwise", *given)
        gradients = norm_cuda_backward.norm_backward(dy, x, weight, statistics, "layer bias")
        sums = gradient_sums("geglu", g[:, :264].float(), g.float())
        return [*operands[:2], given[1], statistics, *gradients, sums]

    before = results()
    emulator.schedule = schedule  # type: ignore[assignment]
    for actual, right in zip(results(), before):
        assert_same(actual, right, schedule)
