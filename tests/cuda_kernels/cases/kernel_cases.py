"""What every kernel is tested with: calls of the ops' kernel side, and what they must give.

A case runs on the CPU, where kernels are emulated, and on a card.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import float8_of
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.grouped import quantize_experts_op
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.casts import (
    check_cast,
    check_observe,
    check_quantize_columns,
    check_transpose,
    check_update_scales,
)
from lightning_fp8.proofs.drawing import every_code, sample

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RESULTS = ("data", "scale_inv", "data_t", "scale_inv_t")


def check_quantize(
    x: Tensor,
    dtype: torch.dtype,
    layout: Layout,
    device: str,
    *,
    power_2: bool = False,
    epsilon: float = 0.0,
    rowwise: bool = True,
    columnwise: bool = True,
) -> None:
    """A tensor scaled from itself is what the reference gives."""
    cast = Cast(float8_of(dtype), layout, power_2, epsilon, rowwise, columnwise)
    check_cast(quantize_op, (x,), cast, device, exact=True)


def check_quantize_with_scale(
    x: Tensor,
    dtype: torch.dtype,
    scale: float,
    device: str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: float | None = None,
) -> None:
    """A tensor with a given scale (0: its own) is what the reference gives, amax included."""
    cast = Cast(float8_of(dtype), Layout.TENSOR).usage(rowwise, columnwise)
    check_cast(quantize_op, (x,), cast, device, scale=scale, amax=amax, exact=True)


def check_experts(w: Tensor, cast: Cast, device: str, *, scale: float | None = None, amax: float | None = None) -> None:
    """Each expert of ``w [E, N, K]`` is what the reference of a cast without experts gives, all in one launch.

    Those of layout ``tensor`` are one matrix for the reference.
    """
    check_cast(quantize_experts_op, (w,), cast, device, scale=scale, amax=amax, exact=True)


def experts(shape: tuple[int, int, int], dtype: torch.dtype, special: bool = False) -> Tensor:
    """``[E, N, K]`` of several magnitudes; ``special``: the second one is zero, and the last has one NaN."""
    w = torch.stack([sample(*shape[1:], dtype, seed=expert) * 2.0**-expert for expert in range(shape[0])])
    if special:
        w[1], w[-1, 5, 7] = 0.0, torch.nan
    return w


def _name(*parts: Any) -> str:
    return "-".join(
        str(part).removeprefix("torch.").removeprefix("float8_") for part in parts if part not in ("", None)
    )


def _self_scaled(layout: Layout, dtype: torch.dtype, fp8: torch.dtype, shape: tuple[int, int], **config: Any) -> Case:
    flags = "+".join(key for key, value in config.items() if value is True)
    off = "+".join(f"no_{key}" for key, value in config.items() if value is False)
    name = _name("quantize", layout.value, dtype, fp8, f"{shape[0]}x{shape[1]}", flags, off)
    return Case(name, lambda device: check_quantize(sample(*shape, dtype), fp8, layout, device, **config))


def _given(dtype: torch.dtype, fp8: torch.dtype, scale: float, shape: tuple[int, int], **config: Any) -> Case:
    flags = "+".join(f"{key}={value}" for key, value in config.items())
    name = _name("given", dtype, fp8, f"{shape[0]}x{shape[1]}", f"scale={scale}", flags)
    return Case(name, lambda device: check_quantize_with_scale(sample(*shape, dtype), fp8, scale, device, **config))


def _experts(
    layout: Layout, dtype: torch.dtype, shape: tuple[int, int, int], *,
    special: bool = False, scale: float | None = None, amax: float | None = None, **usage: bool,
) -> Case:  # fmt: skip
    flags = "+".join(f"{key}={value}" for key, value in usage.items())
    name = _name("experts", layout.value, dtype, "x".join(map(str, shape)), "special" * special, scale, flags)
    cast = Cast(float8_of(E4M3), layout).usage(usage.get("rowwise", True), usage.get("columnwise", True))
    return Case(
        name, lambda device: check_experts(experts(shape, dtype, special), cast, device, scale=scale, amax=amax)
    )


ALIGNED, RAGGED = (140, 264), (131, 203)
"""More than one tile each way, the last of them not full; RAGGED's rows begin anywhere."""

BLOCK_LAYOUTS = (Layout.ROW, Layout.BLOCK_1X128, Layout.BLOCK_128X128, Layout.MX_1X32)

CASES: list[Case] = [
    *(
        _self_scaled(layout, dtype, E4M3, shape)
        for layout, (dtype, shape) in itertools.product(Layout, [(BF16, ALIGNED), (FP32, RAGGED)])
    ),
    _self_scaled(Layout.TENSOR, BF16, E4M3, RAGGED),
    _self_scaled(Layout.MX_1X32, BF16, E4M3, RAGGED),
    _self_scaled(Layout.BLOCK_1X128, FP32, E4M3, ALIGNED),
    _self_scaled(Layout.BLOCK_128X128, FP16, E4M3, ALIGNED),
    *(_self_scaled(layout, FP16, E5M2, RAGGED, power_2=True) for layout in Layout),
    *(_self_scaled(layout, BF16, E4M3, ALIGNED, columnwise=False, power_2=True) for layout in Layout),
    *(_self_scaled(layout, BF16, E5M2, ALIGNED, rowwise=False) for layout in Layout),
    _self_scaled(Layout.TENSOR, FP32, E4M3, ALIGNED, epsilon=1e6),
    _self_scaled(Layout.BLOCK_1X128, BF16, E4M3, ALIGNED, epsilon=0.5),
    _given(BF16, E4M3, 3.7, ALIGNED, amax=0.0),
    _given(BF16, E4M3, 0.0, ALIGNED, amax=1e9),
    _given(BF16, E5M2, 1e-3, RAGGED, amax=0.0, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, amax=0.0, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, rowwise=False),
    _given(FP32, E4M3, 1e4, RAGGED, amax=0.0),
    _given(FP16, E4M3, 1e4, ALIGNED, columnwise=False),
    *(_experts(layout, BF16, (3, *ALIGNED)) for layout in Layout),
    *(_experts(layout, FP32, (3, *RAGGED), special=layout is not Layout.TENSOR) for layout in Layout),
    *(_experts(layout, FP16, (1, 33, 20)) for layout in Layout),
    *(_experts(layout, BF16, (2, *ALIGNED), columnwise=False) for layout in Layout),
    *(_experts(layout, BF16, (2, *ALIGNED), rowwise=False) for layout in Layout),
    _experts(Layout.TENSOR, BF16, (3, 20, 40), special=True),
    _experts(Layout.TENSOR, BF16, (3, *ALIGNED), scale=3.7, amax=0.0),
    _experts(Layout.TENSOR, BF16, (2, *ALIGNED), scale=0.0, amax=1e9),
    *(
        Case(
            _name("quantize_columns", dtype, fp8, f"{shape[0]}x{shape[1]}"),
            lambda device, shape=shape, dtype=dtype, fp8=fp8: check_quantize_columns(
                sample(*shape, dtype), fp8, device
            ),
        )
        for dtype, fp8, shape in (
            (BF16, E4M3, ALIGNED),
            (FP16, E5M2, RAGGED),
            (FP32, E4M3, ALIGNED),
            (BF16, E4M3, (129, 100)),
        )
    ),
    *(
        Case(
            _name("transpose", fp8, f"{shape[0]}x{shape[1]}"),
            lambda device, shape=shape, fp8=fp8: check_transpose(every_code(*shape, fp8), device),
        )
        for fp8, shape in ((E4M3, ALIGNED), (E5M2, RAGGED), (E4M3, (300, 260)), (E4M3, (1, 1)))
    ),
    Case("transpose-experts", lambda device: check_transpose(every_code(3 * 144, 264, E4M3).view(3, 144, 264), device)),
    Case(
        "transpose-experts of odd sizes",
        lambda device: check_transpose(every_code(3 * 33, 301, E5M2).view(3, 33, 301)[..., 3:103], device),
    ),
    Case("transpose-rows apart", lambda device: check_transpose(every_code(300, 300, E4M3)[:259:2, 8:272], device)),
    Case("transpose-rows anywhere", lambda device: check_transpose(every_code(300, 301, E4M3)[:, 3:203], device)),
    Case("observe-bf16", lambda device: check_observe(sample(*ALIGNED, BF16), 0.25, device)),
    Case("observe-less-than-amax", lambda device: check_observe(sample(*RAGGED, FP16), 1e30, device)),
    Case("observe-nan", lambda device: check_observe(torch.tensor([[1.0, torch.nan, -3.0]]), 1e30, device)),
    Case("update_scales-16x5", lambda device: check_update_scales(16, 5, device)),
    Case("update_scales-1024x70", lambda device: check_update_scales(1024, 70, device, margin=1.0)),
    Case("update_scales-300x33", lambda device: check_update_scales(300, 33, device, algorithm="most_recent")),
    Case("update_scales-1x7", lambda device: check_update_scales(1, 7, device)),
    Case("update_scales-257x9", lambda device: check_update_scales(257, 9, device)),
]
