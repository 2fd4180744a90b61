"""What every kernel is tested with: calls of the ops' kernel side, and what they must give.

A case runs on the CPU, where kernels are emulated, and on a card.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops.cast import observe_op, quantize_columns_op, quantize_op
from lightning_fp8.ops.scales import update_scales_op
from lightning_fp8.ops.transpose import transpose_op
from lightning_fp8.scaled import Cast, Layout
from tests.op_sides import kernels_of, reference_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One call and its check.

    Attributes:
        name: of the test.
        run: takes a device, calls the kernels there, and asserts what they gave.
    """

    name: str
    run: Callable[[str], None]


def sample(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over many binades, with zeros of both signs, a NaN-free row maximum and some tiny numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-12, 8, (rows, columns), generator=generator).float())
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    x[torch.rand(rows, columns, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to the bit, but for the payload of a NaN; wherever either lies."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if actual.dtype == torch.float8_e8m0fnu:
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), what
        return
    a, b = actual.float(), expected.float()
    assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN elsewhere"
    a, b = a.nan_to_num(nan=0.0).view(torch.int32), b.nan_to_num(nan=0.0).view(torch.int32)
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}"


def assert_padded_with_zeros(data: Tensor) -> None:
    """The gap between the rows of ``data`` holds zeros, for a GEMM to read; NaN only where the row has some."""
    if data.numel() and data.stride(0) > data.shape[1] and data.dim() == 2:
        whole = data.view(torch.uint8).as_strided((data.shape[0], data.stride(0)), (data.stride(0), 1))
        assert not whole[~data.float().isnan().any(1), data.shape[1] :].any()


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
    count: bool = False,
) -> None:
    """A tensor scaled from itself is what the reference gives."""
    overflow_counts, expected_counts = (
        torch.zeros(2, dtype=torch.int64, device=on) if count else None for on in (device, "cpu")
    )
    on_device = x if x.device.type == device else _moved(x, device)
    cast = Cast(float8_of(dtype), layout, power_2, epsilon, rowwise, columnwise)
    actual = kernels_of(quantize_op)(on_device, cast, None, None, overflow_counts)
    expected = reference_of(quantize_op)(x, cast, None, None, expected_counts)
    for name, a, b in zip(RESULTS, actual, expected):
        assert_same(a, b, name)
    assert_padded_with_zeros(actual[0])
    assert_padded_with_zeros(actual[2])
    if count:
        assert_same(overflow_counts, expected_counts, "overflow_counts")  # type: ignore[arg-type]


def check_quantize_with_scale(
    x: Tensor,
    dtype: torch.dtype,
    scale: float,
    device: str,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: float | None = None,
    count: bool = False,
) -> None:
    """A tensor with a given scale (0: its own) is what the reference gives, amax and overflow_counts included."""
    results = []
    cast = Cast(float8_of(dtype), Layout.TENSOR).usage(rowwise, columnwise)
    for quantize, on in ((kernels_of(quantize_op), device), (reference_of(quantize_op), "cpu")):
        scale_tensor = torch.tensor(scale, device=on)
        collected = torch.tensor(amax, device=on) if amax is not None else None
        overflow_counts = torch.zeros(2, dtype=torch.int64, device=on) if count else None
        where = _moved(x, on)
        results.append((*quantize(where, cast, scale_tensor, collected, overflow_counts), collected, overflow_counts))
    for name, a, b in zip((*RESULTS, "amax", "overflow_counts"), *results):
        if b is not None:
            assert_same(a, b, name)


def check_quantize_columns(x: Tensor, dtype: torch.dtype, device: str) -> None:
    """A tensor with a given scale for each column is what the reference gives."""
    # Of NaN, infinity and 0 a column each, where there are so many.
    scale = torch.exp2(torch.linspace(-10, 14, x.shape[1])) * 1.1
    scale[5:8] = torch.tensor([torch.nan, torch.inf, 0.0])[: len(scale[5:8])]
    actual = kernels_of(quantize_columns_op)(_moved(x, device), scale.to(device), dtype)
    assert_same(actual, reference_of(quantize_columns_op)(x, scale, dtype), "codes")
    assert_aligned(actual)


def check_transpose(codes: Tensor, device: str) -> None:
    """Every byte is where the transposed tensor has it, in rows as a GEMM's operand has them."""
    actual = kernels_of(transpose_op)(_moved(codes.view(torch.uint8), device).view(codes.dtype))
    assert actual.dtype == codes.dtype
    assert torch.equal(actual.view(torch.uint8).cpu(), codes.view(torch.uint8).t())
    assert_aligned(actual)


def every_code(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """All 256 codes, NaN included, in an order that differs from row to row."""
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randint(256, (rows, columns), dtype=torch.uint8, generator=generator).view(dtype)


def assert_aligned(codes: Tensor) -> None:
    """Rows of an operand's codes begin at multiples of 16 bytes; the gap between them holds zeros."""
    assert codes.stride(1) == 1
    assert codes.stride(0) % 16 == codes.data_ptr() % 16 == 0
    whole = codes.view(torch.uint8).as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1))
    assert not whole[:, codes.shape[1] :].any()


def check_observe(x: Tensor, amax: float, device: str) -> None:
    actual, expected = torch.tensor(amax, device=device), torch.tensor(amax)
    kernels_of(observe_op)(_moved(x, device), actual)
    reference_of(observe_op)(x, expected)
    assert_same(actual, expected, "amax")


def check_update_scales(length: int, n: int, device: str, *, margin: float = 0.0, algorithm: str = "max") -> None:
    generator = torch.Generator().manual_seed(length + n)
    amax = torch.rand(n, generator=generator) * 10
    amax[0], amax[n // 2], amax[-1] = 0.0, torch.nan, torch.inf
    amax_history, scale = torch.rand(length, n, generator=generator), torch.rand(n, generator=generator)
    amax_history[:, n // 3] = 0.0
    fp8_max = torch.where(torch.rand(n, generator=generator) < 0.5, 448.0, 57344.0)
    amax[1 : n // 3 : 2] = 1e-38  # the scale overflows float32
    amax[n // 3], fp8_max[n // 3] = 1e-36, 448.0  # only without the margin
    results = []
    for update, on in ((kernels_of(update_scales_op), device), (reference_of(update_scales_op), "cpu")):
        state = [tensor.to(on, copy=True) for tensor in (amax, amax_history, scale)]
        update(*state, fp8_max.to(on), margin, algorithm)
        results.append(state)
    for name, a, b in zip(("amax", "amax_history", "scale"), *results):
        assert_same(a, b, name)


def _moved(x: Tensor, device: str) -> Tensor:
    """``x`` on ``device`` with its strides."""
    if device == "cpu":
        return x
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return moved.copy_(x)


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
    *(_self_scaled(layout, FP16, E5M2, RAGGED, count=True, power_2=True) for layout in Layout),
    *(_self_scaled(layout, BF16, E4M3, ALIGNED, columnwise=False, power_2=True) for layout in Layout),
    *(_self_scaled(layout, BF16, E5M2, ALIGNED, rowwise=False, count=True) for layout in Layout),
    _self_scaled(Layout.TENSOR, FP32, E4M3, ALIGNED, epsilon=1e6),
    _self_scaled(Layout.BLOCK_1X128, BF16, E4M3, ALIGNED, epsilon=0.5),
    _given(BF16, E4M3, 3.7, ALIGNED, amax=0.0),
    _given(BF16, E4M3, 0.0, ALIGNED, amax=1e9),
    _given(BF16, E5M2, 1e-3, RAGGED, amax=0.0, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, amax=0.0, columnwise=False),
    _given(BF16, E4M3, 64.0, ALIGNED, rowwise=False),
    _given(FP32, E4M3, 1e4, RAGGED, amax=0.0, count=True),
    _given(FP16, E4M3, 1e4, ALIGNED, count=True, columnwise=False),
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
