"""What ops take beside their operands is checked before a kernel reads or writes it, and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cuda_kernels.host.launch import executing
from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.activation import (
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_quantize_op,
)
from lightning_fp8.ops.cast import observe_op, quantize_columns_op, quantize_op
from lightning_fp8.ops.gemm import Gemm, scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.norm import Norm, norm_backward_op, norm_quantize_op, rms_norm_op
from lightning_fp8.ops.op import Op
from lightning_fp8.ops.scales import update_scales_op
from lightning_fp8.ops.transpose import transpose_op
from lightning_fp8.proofs.comparing import kernels_of
from tests.small import assert_raises

R, K = 32, 64
X, WEIGHT, STATISTICS = torch.ones(R, K), torch.ones(K), torch.ones(2, R)
CAST, LAYER = Cast(E4M3, Layout.TENSOR), Norm(1e-5)
CODES = torch.zeros(R, K, dtype=E4M3.dtype)
ONE = torch.ones(())
WIDE, META = torch.ones((), dtype=torch.float64), torch.ones((), device="meta")
ROWS = torch.ones(3)


def past_the_dispatcher(op: Op, *args: Any) -> Any:
    """As the package calls it; the side of kernels computes."""
    with torch.no_grad(), patch.dict(op.implementations, cpu=op.implementations["cuda"]):
        return op(*args)


def by_the_dispatcher(op: Op, *args: Any) -> Any:
    """As a user's code may call it; the reference computes."""
    return op.through_dispatcher()(*args)


SIDES: dict[str, Callable[..., Any]] = {"reference": by_the_dispatcher, "kernels": past_the_dispatcher}

# Op, its arguments, the place of one, what is wrong there, and what is said of it.
Case = tuple[Op, tuple[Any, ...], dict[int, dict[str, Any]]]
SCALAR = {
    "dtype": (WIDE, TypeError, r"{} is torch\.float64; it must be torch\.float32"),
    "shape": (ROWS, ValueError, r"{} has shape \[3\]; it must have \[\]"),
    "device": (META, ValueError, r"{} is on meta, but the other tensors are on cpu"),
}
OF_NORM = {
    "weight dtype": (
        WEIGHT.double(),
        ValueError,
        r"weight is torch\.float64 of .* and be bfloat16, float16 or float32",
    ),
    "weight shape": (
        WEIGHT[:-1],
        ValueError,
        r"weight is .* \(63,\); for x of shape \(32, 64\) it must have shape \[64\]",
    ),
    "weight device": (WEIGHT.to("meta"), ValueError, "weight is on meta, but the other tensors are on cpu"),
}
OF_NORM_BACKWARD = {
    "weight dtype": (WEIGHT.double(), TypeError, r"weight is torch\.float64"),
    "weight shape": (WEIGHT[:-1], ValueError, r"weight has shape \[63\]; it must have \[64\]"),
}
OF_STATISTICS = {
    "dtype": (STATISTICS.bfloat16(), TypeError, r"statistics is torch\.bfloat16; it must be torch\.float32"),
    "of rms": (STATISTICS[:1], ValueError, r"statistics has shape \[1, 32\]; it must have \[2, 32\]"),
    "rows": (STATISTICS[:, :3].contiguous(), ValueError, r"statistics has shape \[2, 3\]"),
    "strides": (torch.ones(R, 2).t(), ValueError, r"statistics has strides \(1, 2\), but must be contiguous"),
}
OF_DY = {
    "dtype": (X.double(), TypeError, r"dy is torch\.float64; it must be torch\.bfloat16 or"),
    "shape": (X[:-1], ValueError, r"dy has shape \[31, 64\]; it must have \[32, 64\]"),
}
OF_GRADIENT = {
    **OF_DY,
    "shape": (X[:-1], ValueError, r"dy has shape \(31, 64\), which is not the shape of gelu of x \(32, 64\)"),
}
OF_FACTOR = {
    "dtype": (X.double(), TypeError, r"factor is torch\.float64; it must be torch\.float32"),
    "shape": (X[:-1], ValueError, r"factor has shape \[31, 64\]; it must have \[32, 64\]"),
    "device": (X.to("meta"), ValueError, r"factor is on meta, but the other tensors are on cpu"),
}
OF_BIAS = {
    "dtype": (torch.ones(R).double(), TypeError, r"bias is torch\.float64"),
    "shape": (torch.ones(R - 1), ValueError, r"bias has shape \[31\]; it must have \[32\]"),
}
OF_OUT = {"shape": (torch.zeros(R, R - 1), ValueError, r"out has shape \[32, 31\]; it must have \[32, 32\]")}
OF_ROWS = {
    "dtype": (ROWS.double(), TypeError, r"{} is torch\.float64"),
    "shape": (ROWS[:2], ValueError, r"{} has shape \[2\]; it must have \[3\]"),
    "strides": (torch.ones(3, 2)[:, 0], ValueError, r"{} has strides \(2,\), but must be contiguous"),
}
OF_HISTORY = {
    "dtype": (torch.ones(4, 3).double(), TypeError, r"amax_history is torch\.float64"),
    "shape": (torch.ones(4, 2), ValueError, r"amax_history has shape \[4, 2\]; it must have \[4, 3\]"),
    "a row": (torch.ones(3), ValueError, r"amax_history has shape \[3\]; it must have \[3, 3\]"),
    "no row": (torch.ones(0, 3), ValueError, r"amax_history has shape \[0, 3\]; it must have \[1, 3\]"),
    "strides": (torch.ones(3, 4).t(), ValueError, r"amax_history has strides \(1, 4\), but must be contiguous"),
}


def named(name: str, wrong: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {what}": (value, error, text.format(name)) for what, (value, error, text) in wrong.items()}


def beside_a_cast(first: int) -> dict[int, dict[str, Any]]:
    return {first: named("scale", SCALAR), first + 1: named("amax", SCALAR)}


PRODUCT = (CODES, ONE, CODES, ONE, Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32))
BESIDE = ONE, ONE.clone()
OPS: dict[str, Case] = {
    "quantize": (quantize_op, (X, CAST, *BESIDE), beside_a_cast(2)),
    "observe": (observe_op, (X, ONE.clone()), {1: named("amax", SCALAR), 0: {
        "integers": (X.int(), TypeError, r"cannot observe torch\.int32; cast to one of torch\.bfloat16"),
        "codes": (X.to(E4M3.dtype), TypeError, r"cannot observe torch\.float8_e4m3fn; cast to one of torch\.bfloat16"),
    }}),
    "quantize columns": (quantize_columns_op, (X, WEIGHT, E4M3.dtype), {
        0: {
            "integers": (X.int(), TypeError, r"cannot quantize torch\.int32; cast to one of torch\.bfloat16"),
            "a vector": (WEIGHT, TypeError, r"a cast takes a 2-D tensor, not shape \(64,\)"),
        },
        1: {
            "dtype": (WEIGHT.double(), TypeError, r"scale is torch\.float64; it must be torch\.float32"),
            "shape": (WEIGHT[:-1], ValueError, r"scale has shape \[63\]; it must have \[64\]"),
            "device": (WEIGHT.to("meta"), ValueError, "scale is on meta, but the other tensors are on cpu"),
            "strides": (torch.ones(K, 2)[:, 0], ValueError, r"scale has strides \(2,\), but must be contiguous"),
        },
        2: {"dtype": (torch.int8, ValueError, r"dtype=torch\.int8 is not an FP8 format; use one of")},
    }),
    "transpose": (transpose_op, (CODES,), {0: {
        "dtype": (X, TypeError, r"transpose takes a 2-D or 3-D tensor in .*e4m3fn or .*, not torch\.float32"),
        "bytes": (CODES.view(torch.uint8), TypeError, r"transpose takes .*, not torch\.uint8 of shape \(32, 64\)"),
        "a vector": (CODES[0], TypeError, r"transpose takes .*, not torch\.float8_e4m3fn of shape \(64,\)"),
    }}),
    "update": (
        update_scales_op,
        (ROWS.clone(), torch.ones(4, 3), ROWS.clone(), ROWS, 0.0, "max"),
        {1: OF_HISTORY, 2: named("scale", OF_ROWS), 3: named("fp8_max", OF_ROWS)},
    ),
    "norm": (
        norm_quantize_op, (X, WEIGHT, WEIGHT, LAYER, CAST, *BESIDE),
        {1: OF_NORM, **{at: wrong for at, wrong in beside_a_cast(5).items() if at < 7}},
    ),
    "norm, nothing known": (
        norm_quantize_op, (X, WEIGHT, WEIGHT, LAYER, CAST.usage(True, True), *BESIDE),
        {1: OF_NORM, **beside_a_cast(5)},
    ),
    "norm, transposed": (
        norm_quantize_op, (X, WEIGHT, WEIGHT, LAYER, CAST.usage(True, True, True), *BESIDE),
        {1: OF_NORM, 5: named("scale", SCALAR), 6: named("amax", SCALAR)},
    ),
    "RMSNorm": (rms_norm_op, (X, WEIGHT, Norm(1e-5), torch.float32, True), {1: OF_NORM}),
    "norm backward": (
        norm_backward_op, (X, X, WEIGHT, STATISTICS, Norm(0.0), False),
        {0: OF_DY, 2: OF_NORM_BACKWARD, 3: OF_STATISTICS},
    ),
    "activation": (activation_quantize_op, (X, "gelu", CAST, *BESIDE), beside_a_cast(3)),
    "activation backward": (
        activation_backward_quantize_op, (X, X, "gelu", None, CAST, *BESIDE), {0: OF_GRADIENT, **beside_a_cast(5)}
    ),
    "gated": (gated_quantize_op, (X, X, "silu", CAST, *BESIDE), {1: OF_FACTOR, **beside_a_cast(4)}),
    "gated backward": (
        gated_backward_quantize_op,
        (X, X, X, "silu", CAST, ONE, ONE.clone(), ONE.clone(), ONE.clone()),
        {
            2: OF_FACTOR, 5: named("scale", SCALAR), 6: named("scale", SCALAR),
            7: named("amax", SCALAR), 8: named("amax", SCALAR),
        },
    ),
    "product": (scaled_mm_op, (*PRODUCT, torch.ones(R)), {5: OF_BIAS}),
    "product, accumulated": (scaled_mm_accumulate_op, (torch.zeros(R, R), *PRODUCT), {0: OF_OUT}),
}  # fmt: skip
CASES = [(op, at, what) for op, (_, _, places) in OPS.items() for at, wrong in places.items() for what in wrong]


@pytest.fixture(autouse=True)
def _kernels_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    plans.clear_plan_cache()
    with executing(lambda *launched: None):
        yield
    plans.clear_plan_cache()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("op", OPS)
def test_what_fits_is_taken(op: str, side: str) -> None:
    called, args, _ = OPS[op]
    SIDES[side](called, *args)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("op", "at", "what"), CASES, ids=lambda value: str(value))
def test_what_does_not_fit_is_refused(op: str, at: int, what: str, side: str) -> None:
    """Also after what fits: plans are kept."""
    called, args, places = OPS[op]
    wrong, error, message = places[at][what]
    changed = (*args[:at], wrong, *args[at + 1 :])
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            SIDES[side](called, *changed)
        SIDES[side](called, *args)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 8), (2, 1, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_of_any_shape_are_observed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Calibration observes inputs as they come, ``[batch, tokens, features]``; kernels take rows."""
    x, amax = torch.randn(shape).to(dtype), torch.tensor(0.25)
    ops.observe(x, amax)
    assert amax == max(0.25, x.abs().amax().float() if x.numel() else 0)
    rows: list[Any] = []
    with executing(lambda kernel, blocks, args: rows.append(args[0])):
        kernels_of(observe_op)(x, torch.zeros(()))
    assert all(tensor.dim() == 2 and tensor.dtype != torch.float64 for tensor in rows)
    assert len(rows) == (x.numel() > 0)


PUBLIC: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scale": (lambda: ops.quantize(X, CAST, scale=WIDE), TypeError, "scale is torch.float64"),
    "x of a backward": (lambda: ops.norm_backward(X, X.double(), WEIGHT, STATISTICS), TypeError, "not torch.float64"),
    "out_dtype": (lambda: ops.scaled_mm(codes(), codes(), out_dtype=WIDE.dtype), TypeError, "out_dtype=torch.float64"),
    "contractions": (lambda: ops.scaled_mm_accumulate(X, codes(), codes(K=8)), ValueError, "contractions differ"),
    "a history of one row": (lambda: update(amax_history=ROWS), ValueError, r"amax_history has shape \[3\]"),
    "an algorithm": (lambda: update(algorithm="mean"), ValueError, "algorithm='mean'.*'max' or 'most_recent'"),
    "a margin": (lambda: update(margin=float("nan")), ValueError, "margin=nan must be from -126 to 126"),
    "a negative eps": (lambda: norm(eps=-1.0), ValueError, "eps=-1.0 must be a finite number of at least 0"),
    "eps nan": (lambda: norm(eps=float("nan")), ValueError, "eps=nan must be a finite number of at least 0"),
    "bias_dtype": (
        lambda: activation(bias_dtype=WIDE.dtype),
        TypeError,
        "bias_dtype=torch.float64 must be None or one",
    ),
    "a gated activation": (
        lambda: ops.gated_quantize(X, X, "swiglu", CAST),
        ValueError,
        r"swiglu splits x, but gated ops have a separate factor; use a plain activation \(silu, not swiglu\)",
    ),
    "an activation": (lambda: activation(activation="elu"), ValueError, "activation='elu' is unknown"),
}


def update(amax_history: Any = None, algorithm: Any = "max", margin: float = 0.0) -> None:
    amax_history = torch.ones(4, 3) if amax_history is None else amax_history
    ops.update_scales(ROWS.clone(), amax_history, ROWS.clone(), ROWS, margin, algorithm)


def norm(eps: Any) -> Any:
    return ops.norm_quantize(X, WEIGHT, None, CAST, eps=eps)


def activation(activation: str = "gelu", bias_dtype: torch.dtype | None = None) -> Any:
    return ops.activation_backward_quantize(X, X, activation, CAST, bias_dtype=bias_dtype)


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
    gemm = Gemm(layout, layout, torch.float32)
    for scales, error in ((a.scale_inv[:-1], ValueError), (a.scale_inv.view(torch.uint8), TypeError)):
        with pytest.raises(error, match="^scale_inv of b"):
            scaled_mm_op(a.data, a.scale_inv, a.data, scales, gemm, None)
