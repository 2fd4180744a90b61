"""What ops take beside their operands is checked before a kernel reads or writes it, and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cuda_kernels.host import launch
from lightning_fp8 import ops
from lightning_fp8.formats import E4M3
from lightning_fp8.ops.activation import cuda as activation_cuda
from lightning_fp8.ops.activation import cuda_gated
from lightning_fp8.ops.activation import reference as activation_reference
from lightning_fp8.ops.core import dispatch
from lightning_fp8.ops.core.checks import CheckedAddresses
from lightning_fp8.ops.gemm import cuda as gemm_cuda
from lightning_fp8.ops.gemm import reference as gemm_reference
from lightning_fp8.ops.norm import cuda as norm_cuda
from lightning_fp8.ops.norm import cuda_backward as norm_cuda_backward
from lightning_fp8.ops.norm import reference as norm_reference
from lightning_fp8.ops.quantize import cuda, reference
from lightning_fp8.ops.scales import cuda as scales_cuda
from lightning_fp8.ops.scales import reference as scales_reference
from lightning_fp8.scaled import Cast, Layout
from tests.cuda_kernels.emulated import executing
from tests.small import assert_raises

R, K = 32, 64
X, WEIGHT, STATISTICS = torch.ones(R, K), torch.ones(K), torch.ones(2, R)
CAST = "e4m3 tensor rowwise"
CODES = torch.zeros(R, K, dtype=E4M3.dtype)
ONE, COUNTS = torch.ones(()), torch.zeros(2, dtype=torch.int64)
WIDE, META = torch.ones((), dtype=torch.float64), torch.ones((), device="meta")
ROWS = torch.ones(3)

Op = Callable[..., Any]


def find(op: str, modules: tuple[ModuleType, ...]) -> Op:
    return next(vars(module)[op] for module in modules if op in vars(module))


REFERENCES = (reference, gemm_reference, norm_reference, activation_reference, scales_reference)
CUDA_SIDES = (cuda, gemm_cuda, norm_cuda, norm_cuda_backward, activation_cuda, cuda_gated, scales_cuda)
SIDES: dict[str, Callable[[str], Op]] = {
    "reference": lambda op: find(op, REFERENCES),
    "kernels": lambda op: find(op, CUDA_SIDES),
}

# Op, its arguments, the place of one, what is wrong there, and what is said of it.
Case = tuple[str, tuple[Any, ...], dict[int, tuple[Any, type[Exception], str]]]
SCALAR = {
    "dtype": (WIDE, TypeError, r"{} is torch\.float64; it must be torch\.float32"),
    "shape": (ROWS, ValueError, r"{} has shape \[3\]; it must have \[\]"),
    "device": (META, ValueError, r"{} is on meta and what it belongs to on cpu; move one"),
}
COUNT = {
    "dtype": (COUNTS.int(), TypeError, r"overflow_counts is torch\.int32; it must be torch\.int64"),
    "shape": (COUNTS[:1], ValueError, r"overflow_counts has shape \[1\]; it must have \[2\]"),
    "strides": (
        torch.zeros(2, 2, dtype=torch.int64)[:, 0],
        ValueError,
        r"overflow_counts of strides \(2,\) must be contiguous",
    ),
}
OF_NORM = {
    "weight dtype": (WEIGHT.double(), TypeError, r"weight is torch\.float64"),
    "weight shape": (WEIGHT[:-1], ValueError, r"weight has shape \[63\]; it must have \[64\]"),
}
OF_STATISTICS = {
    "dtype": (STATISTICS.bfloat16(), TypeError, r"statistics is torch\.bfloat16; it must be torch\.float32"),
    "of rms": (STATISTICS[:1], ValueError, r"statistics has shape \[1, 32\]; it must have \[2, 32\]"),
    "rows": (STATISTICS[:, :3].contiguous(), ValueError, r"statistics has shape \[2, 3\]"),
    "strides": (torch.ones(R, 2).t(), ValueError, r"statistics of strides \(1, 2\) must be contiguous"),
}
OF_DY = {
    "dtype": (X.double(), TypeError, r"dy is torch\.float64; it must be torch\.bfloat16 or"),
    "shape": (X[:-1], ValueError, r"dy has shape \[31, 64\]; it must have \[32, 64\]"),
}
OF_FACTOR = {
    "dtype": (X.double(), TypeError, r"factor is torch\.float64; it must be torch\.float32"),
    "shape": (X[:-1], ValueError, r"factor has shape \[31, 64\]; it must have \[32, 64\]"),
    "device": (X.to("meta"), ValueError, r"factor is on meta and what it belongs to on cpu; move one"),
}
OF_BIAS = {
    "dtype": (torch.ones(R).double(), TypeError, r"bias is torch\.float64"),
    "shape": (torch.ones(R - 1), ValueError, r"bias has shape \[31\]; it must have \[32\]"),
}
OF_OUT = {"shape": (torch.zeros(R, R - 1), ValueError, r"out has shape \[32, 31\]; it must have \[32, 32\]")}
OF_ROWS = {
    "dtype": (ROWS.double(), TypeError, r"{} is torch\.float64"),
    "shape": (ROWS[:2], ValueError, r"{} has shape \[2\]; it must have \[3\]"),
    "strides": (torch.ones(3, 2)[:, 0], ValueError, r"{} of strides \(2,\) must be contiguous"),
}
OF_HISTORY = {
    "dtype": (torch.ones(4, 3).double(), TypeError, r"amax_history is torch\.float64"),
    "shape": (torch.ones(4, 2), ValueError, r"amax_history has shape \[4, 2\]; it must have \[4, 3\]"),
    "a row": (torch.ones(3), ValueError, r"amax_history has shape \[3\]; it must have \[3, 3\]"),
    "no row": (torch.ones(0, 3), ValueError, r"amax_history has shape \[0, 3\]; it must have \[1, 3\]"),
    "strides": (torch.ones(3, 4).t(), ValueError, r"amax_history of strides \(1, 4\) must be contiguous"),
}


def named(name: str, wrong: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {what}": (value, error, text.format(name)) for what, (value, error, text) in wrong.items()}


def beside_a_cast(first: int) -> dict[int, dict[str, Any]]:
    return {first: named("scale", SCALAR), first + 1: named("amax", SCALAR), first + 2: COUNT}


PRODUCT = (CODES, ONE, CODES, ONE, "tensor tensor float32")
OPS: dict[str, tuple[str, tuple[Any, ...], dict[int, dict[str, Any]]]] = {
    "quantize": ("quantize", (X, CAST, ONE, ONE.clone(), COUNTS), beside_a_cast(2)),
    "observe": ("observe", (X, ONE.clone()), {1: named("amax", SCALAR), 0: {
        "integers": (X.int(), TypeError, r"cannot observe torch\.int32; cast to one of torch\.bfloat16"),
    }}),
    "update": (
        "update_scales",
        (ROWS.clone(), torch.ones(4, 3), ROWS.clone(), ROWS, 0.0, "max"),
        {1: OF_HISTORY, 2: named("scale", OF_ROWS), 3: named("fp8_max", OF_ROWS)},
    ),
    "norm": (
        "norm_quantize", (X, WEIGHT, WEIGHT, f"layer eps=1e-05, {CAST}", ONE, ONE.clone(), None),
        {1: OF_NORM, **{at: wrong for at, wrong in beside_a_cast(4).items() if at < 6}},
    ),
    "norm, nothing known": (
        "norm_quantize", (X, WEIGHT, WEIGHT, f"layer eps=1e-05, {CAST} columnwise", ONE, ONE.clone(), COUNTS),
        {1: OF_NORM, **beside_a_cast(4)},
    ),
    "norm, bands": (
        "norm_quantize", (X, WEIGHT, WEIGHT, f"layer eps=1e-05, {CAST} columnwise nonzero", ONE, ONE.clone(), None),
        {1: OF_NORM, 4: named("scale", SCALAR), 5: named("amax", SCALAR)},
    ),
    "norm backward": (
        "norm_backward", (X, X, WEIGHT, STATISTICS, "layer eps=0.0"), {0: OF_DY, 2: OF_NORM, 3: OF_STATISTICS}
    ),
    "activation": ("activation_quantize", (X, f"gelu, {CAST}", ONE, ONE.clone(), COUNTS), beside_a_cast(2)),
    "activation backward": (
        "activation_backward_quantize", (X, X, f"gelu, {CAST}", ONE, ONE.clone(), COUNTS),
        {0: OF_DY, **beside_a_cast(3)},
    ),
    "gated": (
        "gated_quantize", (X, X, f"silu, {CAST}", ONE, ONE.clone(), COUNTS), {1: OF_FACTOR, **beside_a_cast(3)}
    ),
    "gated backward": (
        "gated_backward_quantize", (X, X, X, f"silu, {CAST}", ONE, ONE.clone(), COUNTS),
        {2: OF_FACTOR, **beside_a_cast(4)},
    ),
    "product": ("scaled_mm", (*PRODUCT, torch.ones(R)), {5: OF_BIAS}),
    "product, observed": ("scaled_mm_observed", (*PRODUCT, None, ONE.clone()), {6: named("amax", SCALAR)}),
    "product, accumulated": ("scaled_mm_accumulate", (torch.zeros(R, R), *PRODUCT), {0: OF_OUT}),
}  # fmt: skip
CASES = [(op, at, what) for op, (_, _, places) in OPS.items() for at, wrong in places.items() for what in wrong]


@pytest.fixture(autouse=True)
def _kernels_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    dispatch.clear_plan_cache()
    with executing(lambda *launched: None):
        yield
    dispatch.clear_plan_cache()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("op", OPS)
def test_what_fits_is_taken(op: str, side: str) -> None:
    name, args, _ = OPS[op]
    SIDES[side](name)(*args)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("op", "at", "what"), CASES, ids=lambda value: str(value))
def test_what_does_not_fit_is_refused(op: str, at: int, what: str, side: str) -> None:
    """Also after what fits: plans are kept."""
    name, args, places = OPS[op]
    wrong, error, message = places[at][what]
    changed = (*args[:at], wrong, *args[at + 1 :])
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            SIDES[side](name)(*changed)
        SIDES[side](name)(*args)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 8), (2, 1, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_of_any_shape_are_observed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Calibration observes inputs as they come, ``[batch, tokens, features]``; kernels take rows."""
    x, amax = torch.randn(shape).to(dtype), torch.tensor(0.25)
    ops.observe(x, amax)
    assert amax == max(0.25, x.abs().amax().float() if x.numel() else 0)
    rows: list[Any] = []
    with executing(lambda kernel, blocks, args: rows.append(args[0])):
        cuda.observe(x, torch.zeros(()))
    assert all(tensor.dim() == 2 and tensor.dtype != torch.float64 for tensor in rows)
    assert len(rows) == (x.numel() > 0)


def test_an_address_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_cuda_device", lambda device: True)
    checked = CheckedAddresses(torch.device("cpu"))
    checked.keep(5, 7)
    assert checked == {0, 5, 7}
    monkeypatch.setattr(launch, "is_cuda_device", lambda device: False)
    checked = CheckedAddresses(torch.device("cpu"))
    checked.keep(X)
    assert checked == {0}


PUBLIC: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scale": (lambda: ops.quantize(X, SCALED, scale=WIDE), TypeError, "scale is torch.float64"),
    "x of a backward": (lambda: ops.norm_backward(X, X.double(), WEIGHT, STATISTICS), TypeError, "not torch.float64"),
    "out_dtype": (lambda: ops.scaled_mm(codes(), codes(), out_dtype=WIDE.dtype), TypeError, "out_dtype=torch.float64"),
    "contractions": (lambda: ops.scaled_mm_accumulate(X, codes(), codes(K=8)), ValueError, "contractions differ"),
    "a history of one row": (lambda: update(amax_history=ROWS), ValueError, r"amax_history has shape \[3\]"),
    "an algorithm": (lambda: update(algorithm="mean"), ValueError, "algorithm='mean'.*'max' or 'most_recent'"),
    "a margin": (lambda: update(margin=float("nan")), ValueError, "margin=nan must lie from -126 to 126"),
    "a negative eps": (lambda: norm(eps=-1.0), ValueError, "eps=-1.0; it must be a finite number"),
    "eps nan": (lambda: norm(eps=float("nan")), ValueError, "eps=nan; it must be a finite number"),
    "bias_dtype": (
        lambda: activation(bias_dtype=WIDE.dtype),
        TypeError,
        "bias_dtype=torch.float64 must be None or one",
    ),
    "a gated activation": (
        lambda: ops.gated_quantize(X, X, "swiglu", SCALED),
        ValueError,
        "swiglu would split x: pass silu for swiglu",
    ),
    "an activation": (lambda: activation(activation="elu"), ValueError, "activation='elu' is unknown"),
}
SCALED = Cast(E4M3, Layout.TENSOR)


def update(amax_history: Any = None, algorithm: Any = "max", margin: float = 0.0) -> None:
    amax_history = torch.ones(4, 3) if amax_history is None else amax_history
    ops.update_scales(ROWS.clone(), amax_history, ROWS.clone(), ROWS, margin, algorithm)


def norm(eps: Any) -> Any:
    return ops.norm_quantize(X, WEIGHT, None, SCALED, eps=eps)


def activation(activation: str = "gelu", bias_dtype: torch.dtype | None = None) -> Any:
    return ops.activation_backward_quantize(X, X, activation, SCALED, bias_dtype=bias_dtype)


def codes(K: int = K) -> Any:
    return ops.quantize(torch.ones(R, K), Cast(E4M3, Layout.ROW)).rowwise


@pytest.mark.parametrize("case", PUBLIC)
def test_public_functions(case: str) -> None:
    assert_raises(*PUBLIC[case])


def test_eps_may_be_any_number() -> None:
    assert torch.equal(norm(np.float64(1.0)).statistics, norm(1).statistics)
    assert norm(1).statistics[1, 0] == 1  # of a row of ones


@pytest.mark.parametrize("layout", [Layout.ROW, Layout.BLOCK_1X128, Layout.MX_1X32])
def test_scales_that_are_not_the_operands_are_refused(layout: Layout) -> None:
    a = ops.quantize(X, Cast(E4M3, layout)).rowwise
    assert a is not None
    options_text = f"{layout.value} {layout.value} float32"
    for scales, error in ((a.scale_inv[:-1], ValueError), (a.scale_inv.view(torch.uint8), TypeError)):
        with pytest.raises(error, match="^scale_inv of b"):
            gemm_reference.scaled_mm(a.data, a.scale_inv, a.data, scales, options_text)
