"""What the kernels of the fused ops are tested with; see :mod:`tests.cuda_kernels.cases.kernel_cases`.

Kernel and reference both compute in float32, in another order and with other exponentials: where a value lies that
close to the middle between two codes, either code is right. ReLU forms have one order and must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import float8_of
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.activation import (
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_quantize_op,
    is_gated,
)
from lightning_fp8.ops.norm import Norm, norm_quantize_op
from lightning_fp8.ops.op import Op
from lightning_fp8.proofs import casts
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.drawing import values
from tests.cuda_kernels.cases.kernel_cases import BF16, E4M3, E5M2, FP16, FP32


def check_cast(
    op: Op, inputs: Sequence[Any], device: str, fp8: torch.dtype = E4M3, layout: Layout = Layout.TENSOR, *,
    scale: float | None = None, amax: float | None = None, power_2: bool = False, epsilon: float = 0.0,
    rowwise: bool = True, columnwise: bool = True, nonzero: bool = False, exact: bool = False,
) -> None:  # fmt: skip
    """:func:`lightning_fp8.proofs.casts.check_cast` with a cast of these options."""
    cast = Cast(float8_of(fp8), layout, power_2, epsilon, rowwise, columnwise, nonzero)
    casts.check_cast(op, inputs, cast, device, scale=scale, amax=amax, exact=exact)


def strided(x: Tensor) -> Tensor:
    """The same numbers as the middle columns of a wider tensor."""
    wide = torch.full((x.shape[0], x.shape[1] + 32), torch.nan, dtype=x.dtype)
    wide[:, 16:-16] = x
    return wide[:, 16:-16]


def norm_inputs(
    shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype, rms: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    x = strided(values(*shape, dtype) + (0.0 if rms else 3.0))
    weight = values(1, shape[1], weight_dtype, seed=1)[0]
    return x, weight, None if rms else values(1, shape[1], weight_dtype, seed=2)[0]


def check_norm(
    shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype, device: str, *,
    rms: bool = False, zero_centered: bool = False, **config: Any,
) -> None:  # fmt: skip
    inputs = norm_inputs(shape, dtype, weight_dtype, rms)
    check_cast(norm_quantize_op, (*inputs, Norm(1e-5, rms, zero_centered)), device, **config)


def check_norm_backward(
    shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype, dy_dtype: torch.dtype, device: str, *,
    rms: bool = False, zero_centered: bool = False,
) -> None:  # fmt: skip
    x, weight, _ = norm_inputs(shape, dtype, weight_dtype, rms)
    dy = values(*shape, dy_dtype, seed=3)
    casts.check_norm_backward(dy, x, weight, Norm(0.0, rms, zero_centered), not rms, device)


def check_rms_norm(
    shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype, device: str, *,
    zero_centered: bool = False, rounds_first: bool = False,
) -> None:  # fmt: skip
    x, weight, _ = norm_inputs(shape, dtype, weight_dtype, True)
    casts.check_rms_norm(x, weight, Norm(1e-5, True, zero_centered), out_dtype, rounds_first, device)


def check_activation(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str, **config: Any) -> None:
    """``shape``: of the values."""
    columns = 2 * shape[1] if is_gated(name) else shape[1]
    x = strided(values(shape[0], columns, dtype, spread=2.0))
    check_cast(activation_quantize_op, (x, name), device, exact="relu" in name or "reglu" in name, **config)


def check_activation_backward(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    dy_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    device: str,
    **config: Any,
) -> None:
    """``shape``: of dy."""
    columns = 2 * shape[1] if is_gated(name) else shape[1]
    x, dy = values(shape[0], columns, dtype, spread=2.0), strided(values(*shape, dy_dtype, seed=1))
    exact = "relu" in name or "reglu" in name
    check_cast(activation_backward_quantize_op, (dy, x, name, bias_dtype), device, exact=exact, **config)


def check_gated(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str, **config: Any) -> None:
    """The product or, with ``backward``, both gradients; one tensor is part of a wider one."""
    x, factor, dy = (values(*shape, dtype, seed=seed, spread=2.0) for seed in range(3))
    op, inputs = gated_quantize_op, (x, strided(factor), name)
    if config.pop("backward", False):
        op, inputs = gated_backward_quantize_op, (dy, *inputs)
    check_cast(op, inputs, device, exact=name == "relu", **config)


ALIGNED, RAGGED, LONG, FULL = (140, 264), (131, 203), (53, 2056), (21, 4096)
"""More than one tile each way, the last of them not full; LONG's rows take two or more warps each,
and each block has several; FULL's fill the registers of theirs."""


def _norm(name: str, *args: Any, **config: Any) -> Case:
    return Case(f"norm-{name}", lambda device: check_norm(*args, device, **config))


def _norm_backward(name: str, *args: Any, **config: Any) -> Case:
    return Case(f"norm_backward-{name}", lambda device: check_norm_backward(*args, device, **config))


def _activation(name: str, note: str, *args: Any, **config: Any) -> Case:
    return Case(f"{name}-{note}", lambda device: check_activation(name, *args, device, **config))


def _activation_backward(name: str, note: str, *args: Any, **config: Any) -> Case:
    return Case(f"{name}_backward-{note}", lambda device: check_activation_backward(name, *args, device, **config))


def _gated(name: str, note: str, *args: Any, **config: Any) -> Case:
    return Case(f"gated-{name}-{note}", lambda device: check_gated(name, *args, device, **config))


_ROWS = {"columnwise": False}
_GIVEN = {"scale": 20.0, "amax": 0.5}
_KNOWN = {"nonzero": True, "columnwise": False}

CASES: list[Case] = [
    _norm("rms-bf16-given", ALIGNED, BF16, BF16, rms=True, zero_centered=True, **_GIVEN, **_ROWS),
    _norm("rms-bf16-scale=0", ALIGNED, BF16, BF16, rms=True, zero_centered=True, scale=0.0, amax=0.5, **_ROWS),
    _norm("rms-bf16-long-known", LONG, BF16, FP32, rms=True, **_GIVEN, **_ROWS, nonzero=True),
    _norm("layer-bf16-long-scale=0", LONG, BF16, FP32, scale=0.0, amax=1e9, **_ROWS),
    _norm("rms-bf16-long-both-known", LONG, BF16, FP32, rms=True, zero_centered=True, **_GIVEN, nonzero=True),
    _norm("layer-bf16-both-known", ALIGNED, BF16, BF16, **_GIVEN, nonzero=True),
    _norm("rms-bf16-both-own", ALIGNED, BF16, BF16, rms=True, power_2=True, epsilon=1e-3),
    _norm("layer-fp32-ragged-transposed-known", RAGGED, FP32, FP16, fp8=E5M2, scale=3.0, rowwise=False, nonzero=True),
    _norm("rms-bf16-full", FULL, BF16, BF16, rms=True, **_GIVEN, **_ROWS),
    _norm("layer-bf16-full-scale=0", FULL, BF16, FP32, scale=0.0, **_ROWS),
    _norm("layer-fp32-own", ALIGNED, FP32, FP32, fp8=E5M2, power_2=True, epsilon=1e-3, **_ROWS),
    _norm("rms-bf16-both-count", ALIGNED, BF16, BF16, rms=True, scale=300.0, amax=1e9),
    _norm("layer-bf16-long-128x128", LONG, BF16, FP32, layout=Layout.BLOCK_128X128, power_2=True),
    _norm("rms-bf16-both-scale=0", ALIGNED, BF16, BF16, rms=True, scale=0.0, amax=0.5),
    _norm("layer-bf16-ragged-both-count", RAGGED, BF16, FP32, scale=300.0, amax=1e9),
    _norm("layer-fp16-ragged-rows", RAGGED, FP16, FP16, layout=Layout.ROW),
    _norm("layer-bf16-1x128", ALIGNED, BF16, BF16, layout=Layout.BLOCK_1X128, power_2=True),
    _norm("layer-fp32-ragged-1x32", RAGGED, FP32, BF16, layout=Layout.MX_1X32),
    _norm("rms-fp16-128x128", ALIGNED, FP16, FP32, rms=True, layout=Layout.BLOCK_128X128, rowwise=False),
    Case("rms_norm-bf16", lambda device: check_rms_norm(ALIGNED, BF16, BF16, BF16, device, rounds_first=True)),
    Case("rms_norm-bf16-centered", lambda device: check_rms_norm(LONG, BF16, FP32, FP32, device, zero_centered=True)),
    Case("rms_norm-bf16-head", lambda device: check_rms_norm((70, 128), BF16, BF16, BF16, device, rounds_first=True)),
    Case("rms_norm-fp32-full", lambda device: check_rms_norm(FULL, FP32, FP32, BF16, device)),
    _norm_backward("rms-bf16-long", LONG, BF16, BF16, BF16, rms=True, zero_centered=True),
    _norm_backward("layer-bf16-long", LONG, BF16, FP32, FP32),
    _norm_backward("layer-fp32-ragged", RAGGED, FP32, BF16, FP16),
    _norm_backward("rms-bf16-full", FULL, BF16, BF16, BF16, rms=True),
    _norm_backward("layer-bf16-full", FULL, BF16, FP32, BF16),
    _norm_backward("rms-bf16-3-vectors", (9, 8320), BF16, BF16, BF16, rms=True),
    _norm_backward("rms-bf16-1024-threads", (9, 12320), BF16, BF16, BF16, rms=True),
    _norm_backward("rms-bf16-wide", (17, 16400), BF16, BF16, BF16, rms=True),
    _activation("swiglu", "bf16-given", ALIGNED, BF16, **_GIVEN),
    _activation("swiglu", "bf16-scale=0", ALIGNED, BF16, scale=0.0, amax=1e9),
    _activation("gelu", "fp32-ragged-1x32", RAGGED, FP32, layout=Layout.MX_1X32),
    _activation("relu", "fp16-rows", ALIGNED, FP16, layout=Layout.ROW),
    _activation("sreglu", "bf16-ragged-known-count", RAGGED, BF16, **_GIVEN, nonzero=True),
    _activation_backward("swiglu", "bf16-given-bias", ALIGNED, BF16, BF16, BF16, fp8=E5M2, **_GIVEN),
    _activation_backward("swiglu", "bf16-scale=0-bias", ALIGNED, BF16, BF16, BF16, fp8=E5M2, scale=0.0, amax=0.0),
    _activation_backward("geglu", "fp32-known-bias", ALIGNED, FP32, FP32, FP16, fp8=E5M2, **_GIVEN, **_KNOWN),
    _activation_backward("silu", "bf16-rows-bias", ALIGNED, BF16, FP32, FP32, layout=Layout.ROW),
    _activation_backward("srelu", "bf16-ragged-1x128-bias", RAGGED, BF16, BF16, BF16, layout=Layout.BLOCK_1X128),
    _activation_backward("reglu", "bf16-ragged-128x128", RAGGED, BF16, BF16, None, layout=Layout.BLOCK_128X128),
    _activation_backward("qgeglu", "bf16-given-bias", ALIGNED, BF16, BF16, BF16, fp8=E5M2, **_GIVEN, **_KNOWN),
    _activation_backward("glu", "bf16-ragged-rows", RAGGED, BF16, BF16, None, layout=Layout.ROW, columnwise=False),
    _activation_backward("relu", "fp16-1x32", ALIGNED, FP16, BF16, None, layout=Layout.MX_1X32),
    _gated("silu", "bf16-scale=0", ALIGNED, BF16, scale=0.0, amax=1e9),
    _gated("gelu", "fp32-ragged-1x32", RAGGED, FP32, layout=Layout.MX_1X32),
    _gated("silu", "bf16-backward-scale=0", ALIGNED, BF16, fp8=E5M2, backward=True, scale=0.0, amax=0.0),
    _gated("gelu", "fp32-backward-1x128", ALIGNED, FP32, backward=True, layout=Layout.BLOCK_1X128),
    _gated("relu", "bf16-backward-given", ALIGNED, BF16, fp8=E5M2, backward=True, nonzero=True, **_GIVEN),
    _gated("silu", "bf16-backward-own", ALIGNED, BF16, backward=True, power_2=True, columnwise=False),
    _gated("relu", "bf16-backward-ragged-rows", RAGGED, BF16, backward=True, layout=Layout.ROW),
    _gated("silu", "bf16-backward-128x128", ALIGNED, BF16, backward=True, layout=Layout.BLOCK_128X128),
    _gated("gelu", "fp16-backward-1x32", ALIGNED, FP16, backward=True, layout=Layout.MX_1X32),
]
