"""Bad input gets an error that names the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    FP8FabricPrecision,
    FP8Precision,
    LayerNorm,
    Linear,
    RMSNorm,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
)
from tests.small import assert_raises


def run(linear: nn.Module, x: torch.Tensor) -> None:
    with fp8_autocast():
        linear(x)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "integer input": (lambda: run(Linear(4, 2), torch.ones(3, 4, dtype=torch.int64)), TypeError, "int64.*floating"),
    "features": (lambda: run(Linear(4, 2), torch.ones(3, 5)), ValueError, r"in_features=4.*\(3, 5\)"),
    "scalar": (lambda: run(Linear(4, 2), torch.ones(())), ValueError, "in_features=4"),
    "dtypes": (lambda: run(Linear(4, 2), torch.ones(3, 4).bfloat16()), TypeError, "float32.*bfloat16.*torch.autocast"),
    "meta weight": (lambda: run(Linear(4, 2, device="meta"), torch.ones(3, 4)), ValueError, "meta.*to_empty"),
    "double": (lambda: run(Linear(4, 2).double(), torch.ones(3, 4).double()), TypeError, "float64.*bfloat16"),
    "no inputs": (lambda: Linear(0, 2), ValueError, "in_features=0.*positive"),
    "fractional outputs": (lambda: Linear(2, 2.5), ValueError, "out_features=2.5"),  # type: ignore[arg-type]
    "params_dtype": (lambda: Linear(2, 2, params_dtype=torch.float64), TypeError, "float64.*bfloat16"),
    "split sum": (lambda: Linear(4, 6, parameters_split={"a": 2, "b": 3}), ValueError, "sum to out_features=6"),
    "split uneven": (lambda: Linear(4, 5, parameters_split=["a", "b"]), ValueError, "out_features=5.*2 equal"),
    "split empty": (lambda: Linear(4, 4, parameters_split=[]), ValueError, "parameters_split is empty"),
    "split text": (lambda: Linear(4, 4, parameters_split="ab"), TypeError, "'ab'.*sequence of names"),
    "main_grad": (lambda: run(Linear(4, 2, fuse_wgrad_accumulation=True), torch.ones(3, 4)), ValueError, "main_grad"),
    "norm input": (lambda: LayerNorm(4)(torch.ones(2, 5)), ValueError, r"\(4,\).*\(2, 5\)"),
    "norm integers": (lambda: RMSNorm(4)(torch.ones(2, 4, dtype=torch.int32)), TypeError, "int32.*floating"),
    "norm size": (lambda: RMSNorm(0), ValueError, r"[(\[]0,?[)\]].*positive"),
    "norm without size": (lambda: LayerNorm(), TypeError, "normalized_shape"),
    "norm eps": (lambda: LayerNorm(4, eps=-1.0), ValueError, "eps=-1.0"),
    "recipe": (lambda: FP8Precision("fp8"), ValueError, "'fp8'.*'delayed'"),  # type: ignore[arg-type]
    "fabric recipe": (lambda: FP8FabricPrecision({"name": "x"}), ValueError, "'x'.*'mxfp8'"),  # type: ignore[arg-type]
    "autocast recipe": (lambda: fp8_autocast(fp8_recipe="fp8"), ValueError, "'fp8'.*'delayed'"),
    "weights_dtype": (lambda: FP8Precision(weights_dtype=torch.float64), ValueError, "weights_dtype=torch.float64"),
    "compute_dtype": (lambda: FP8Precision(compute_dtype=torch.int8), ValueError, "compute_dtype=torch.int8"),
    "two dtypes": (
        lambda: FP8Precision("delayed", torch.bfloat16, compute_dtype=torch.float16),
        ValueError,
        "weights_dtype=torch.float32",
    ),
    "layers": (lambda: FP8Precision(num_layers_at_start_in_bf16=-1), ValueError, "num_layers_at_start_in_bf16=-1"),
    "skip": (lambda: FP8Precision(skip="*.head"), TypeError, "'.\\.head'.*sequence"),
    "convert": (lambda: convert_module(nn.Linear(2, 2), num_layers_at_end_in_bf16=-2), ValueError, "-2.*at least 0"),
    "state": (lambda: load_fp8_state_dict(Linear(2, 2), [1]), ValueError, "list.*fp8_state_dict"),  # type: ignore[arg-type]
    "state keys": (lambda: load_fp8_state_dict(Linear(2, 2), {}), ValueError, "lacks.*'scale'"),
    "state count": (
        lambda: load_fp8_state_dict(Linear(2, 2), {**fp8_state_dict(Linear(2, 2)), "updates": -1}),
        ValueError,
        "'updates'.*-1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    assert_raises(*CASES[case])


def test_meta_modules_take_meta_input() -> None:
    with fp8_autocast(fp8_recipe="blockwise"):
        y = Linear(40, 24, device="meta")(torch.empty(3, 5, 40, device="meta"))
    assert y.shape == (3, 5, 24)
    assert y.is_meta


def test_scripting_is_refused_in_words_and_tracing_is_not() -> None:
    model = convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), first_last_layers_bf16=False)
    with pytest.raises(RuntimeError, match=r"torch.jit.script does not support.*torch.compile.*state_dict"):
        torch.jit.script(model)
    x = torch.randn(2, 16)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))
