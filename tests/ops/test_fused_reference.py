"""Fused ops: the reference against float64 and its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.activation import _FORMULAS, is_gated
from lightning_fp8.proofs.comparing import assert_close_codes
from lightning_fp8.proofs.drawing import values
from tests.cuda_kernels.cases.fused_cases import norm_inputs
from tests.cuda_kernels.cases.kernel_cases import BF16, FP16, FP32
from tests.float8_reference import cast
from tests.ops.test_fused_ops import ACTIVATIONS, LAYOUTS
from tests.ops.test_ops import POWER_2, expected

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
        *zip(
            ops.gated_backward_quantize(dy, x, factor, name, target, {"columnwise": True}, {"columnwise": True}),
            (leaf.grad for leaf in leaves),
        ),
    ):
        assert exact is not None
        check_operand(row, exact, layout)
        check_operand(column, exact.t(), layout)


@pytest.mark.parametrize("name", ["gelu", "qgelu", "relu", "srelu", "silu"])
def test_limits(name: str) -> None:
    """At the ends of the number line values and slopes are the limits, not 0 times infinity; NaN stays as in torch."""
    x = torch.tensor([-math.inf, -1e30, -200.0, 200.0, 1e30, math.inf, math.nan])
    forward, backward = _FORMULAS[name]
    right = {"srelu": x[3:6] ** 2}.get(name, x[3:6])
    slopes = {"srelu": 2 * x[3:6]}.get(name, torch.ones(3))
    torch.testing.assert_close(forward(x), torch.cat([torch.zeros(3), right, x[6:]]), equal_nan=True)
    torch.testing.assert_close(
        backward(torch.ones(7), x)[:6], torch.cat([torch.zeros(3), slopes]), equal_nan=True, atol=1e-6, rtol=0.0
    )
    assert torch.equal(backward(torch.ones(7), x)[6:].isnan(), torch.tensor([name != "relu"]))
