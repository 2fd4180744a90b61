"""Triton's kernels of rows, reductions, atomics and numbers, against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.float8_reference import cast as cast_reference
from tests.foreign.case import BF16, E4M3, FP16, FP32, I32, I64, Case, assert_equal, integers, normal, words
from tests.foreign.compiler import DEFAULT, Launcher, Options
from tests.foreign.kernels import elementwise

# Rows, reductions, atomics, numbers


def _row_statistics(dtype: torch.dtype, options: Options) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x = integers((3, 700), dtype, 1, 1000)
        total, largest, place = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=I32)
        launch(elementwise.row_statistics, (3,), [x, total, largest, place, 700], options, BLOCK=1024)
        assert_equal(total, x.sum(1))
        assert_equal(largest, x.amax(1))
        assert_equal(x.gather(1, place.long()[:, None])[:, 0], x.amax(1))

    return run


def _bit_statistics(launch: Launcher) -> None:
    x = words((2, 512), I32, 1)
    results = [torch.zeros(2, dtype=I32) for _ in range(3)]
    launch(elementwise.bit_statistics, (2,), [x, *results], BLOCK=512)
    for result, operation in zip(results, (np.bitwise_and, np.bitwise_or, np.bitwise_xor)):
        assert_equal(result, torch.from_numpy(operation.reduce(x.numpy(), axis=1)))


def _integer_reductions(launch: Launcher) -> None:
    x = words((2, 512), I32, 1)
    total, largest, least = (torch.zeros(2, dtype=I32) for _ in range(3))
    launch(elementwise.integer_reductions, (2,), [x, total, largest, least], BLOCK=512)
    unsigned = x.numpy().view(np.uint32)
    assert_equal(total, torch.from_numpy(unsigned.sum(1, dtype=np.uint32).view(np.int32)))
    assert_equal(largest, torch.from_numpy(unsigned.max(1).view(np.int32)))
    assert_equal(least, x.amin(1))


def _running(launch: Launcher) -> None:
    x = integers((2, 256), I32, 1, 99)
    sums, ordered = torch.zeros_like(x), torch.zeros_like(x)
    launch(elementwise.running, (2,), [x, sums, ordered], BLOCK=256)
    assert_equal(sums, x.cumsum(1))
    assert_equal(ordered, x.sort(1).values)


def _transposed(dtype: torch.dtype) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x, y = normal((64, 128), 1).to(dtype), torch.zeros(128, 64, dtype=dtype)
        launch(elementwise.transpose, (1,), [x, y], ROWS=64, COLUMNS=128)
        assert_equal(y, x.T)

    return run


def _layer_norm(launch: Launcher) -> None:
    x, weight, bias, y = normal((3, 600), 1), normal((600,), 2), normal((600,), 3), torch.zeros(3, 600, dtype=BF16)
    launch(elementwise.layer_norm, (3,), [x, weight, bias, y, 600, 1e-5], BLOCK=1024)
    expected = torch.nn.functional.layer_norm(x.double(), (600,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4)


def _quantized_rows(launch: Launcher) -> None:
    x, codes, scales = normal((5, 300), 1), torch.zeros(5, 300, dtype=E4M3), torch.zeros(5)
    launch(elementwise.quantize_rows, (5,), [x, codes, scales, 300], LARGEST=448.0, BLOCK=512)
    scale = np.exp2(np.floor(np.log2(448 / x.abs().amax(1).double().numpy())))
    assert_equal(scales, torch.from_numpy(1 / scale))
    for row in range(5):
        expected = cast_reference(x[row].numpy(), float(scale[row]), "E4M3")
        assert torch.equal(codes[row].view(torch.uint8), torch.from_numpy(expected))


def _histogram(launch: Launcher) -> None:
    x, counts = integers((1000,), I32, 1, 7) + 8, torch.zeros(16, dtype=I32)
    launch(elementwise.histogram, (4,), [x, counts, 1000], BINS=16, BLOCK=256)
    assert_equal(counts, torch.bincount(x, minlength=16))


def _collected(launch: Launcher) -> None:
    x = integers((1000,), I32, 1, 500)
    sums, last, bits = torch.zeros(8), torch.zeros(8, dtype=I32), torch.zeros(24, dtype=I32)
    least, most = torch.full((8,), 2**30, dtype=I32), torch.full((8,), -(2**30), dtype=I32)
    bits[16:] = -1
    launch(elementwise.collect, (4,), [x, sums, least, most, bits, last, 1000], BLOCK=256)
    columns = x.view(-1, 8)
    assert_equal(sums, columns.sum(0))
    assert_equal(least, columns.amin(0))
    assert_equal(most, columns.amax(0))
    for part, operation in zip(bits.view(3, 8), (np.bitwise_or, np.bitwise_xor, np.bitwise_and)):
        assert_equal(part, torch.from_numpy(operation.reduce(columns.numpy(), axis=0)))
    assert (last == 1).all()


def _counted(launch: Launcher) -> None:
    x = words((500,), I32, 1).abs()
    total, largest = torch.zeros(4, dtype=I64), torch.zeros(4, dtype=I32)
    launch(elementwise.count_bits, (2,), [x, total, largest, 500], BLOCK=256)
    assert_equal(total, x.view(-1, 4).long().sum(0))
    assert_equal(largest, x.view(-1, 4).amax(0))


def _locked_sum(launch: Launcher) -> None:
    x, total, lock = integers((5, 128), FP32, 1), torch.zeros(128), torch.zeros(1, dtype=I32)
    launch(elementwise.locked_sum, (5,), [x, total, lock], BLOCK=128)
    assert_equal(total, x.sum(0))
    assert lock.item() == 0


def _gelu(launch: Launcher) -> None:
    x, gate, y = normal((500,), 1).to(BF16), normal((500,), 2).to(BF16), torch.zeros(500)
    launch(elementwise.gelu, (2,), [x, gate, y, 500], BLOCK=256)
    expected = torch.nn.functional.gelu(x.double()) * torch.sigmoid(gate.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


def _operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two rows of 256 numbers, some of them equal, zero or, of floats, infinite or no numbers."""
    x, y = (normal((256,), seed) if dtype == FP32 else words((256,), dtype, seed) for seed in (1, 2))
    y[::7] = x[::7]
    x[1::11], y[2::13] = 0, 0
    if dtype == FP32:
        x[5::17], y[6::17], x[7::29] = torch.nan, torch.nan, torch.inf
    return x, y


def _computed(kernel: Any, dtype: torch.dtype, expected: Callable[..., list[Any]]) -> Callable[[Launcher], None]:
    """Rows of results as NumPy computes them."""

    def run(launch: Launcher) -> None:
        x, y = _operands(dtype)
        with np.errstate(all="ignore"):
            rows = expected(x.numpy(), y.numpy())
        results = torch.zeros(len(rows), 256, dtype=dtype)
        launch(kernel, (1,), [x, y, results], BLOCK=256)
        for result, row in zip(results, rows):
            assert_equal(result, torch.from_numpy(np.asarray(row).astype(x.numpy().dtype)))

    return run


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as C divides."""
    return np.array([abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b)])


def _wide_integers(a: np.ndarray, b: np.ndarray) -> list[Any]:
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    return [
        a - b,
        np.minimum(a, b),
        np.maximum(a, b),
        np.minimum(ua, ub).view(np.int64),
        np.where(a <= b, a & b, a ^ b),
        np.where(ua > ub, -a, ~b),
        np.where((a == b) | (ua < ub), a >> (b & 63), a << (b & 63)),
        np.where(a >= b, a, b) * b,
        _quotient(a, np.where(b == 0, 1, b)),
    ]


def _narrow_integers(a: np.ndarray, b: np.ndarray) -> list[Any]:
    ua, ub = a.view(np.uint32), b.view(np.uint32)
    divisor = np.where(b == 0, 7, b)
    quotient = _quotient(a, divisor)
    upper = (ua.astype(np.uint64) * ub.astype(np.uint64)) >> np.uint64(32)
    return [
        quotient,
        a - quotient * divisor,
        np.maximum(ua, ub).view(np.int32),
        np.where(ua <= ub, a, b),
        upper.astype(np.uint32).view(np.int32),
    ]


def _floats(a: np.ndarray, b: np.ndarray) -> list[Any]:
    return [
        a / b,
        np.sqrt(a),
        np.fmin(a, b),
        np.maximum(a, b),
        np.where(a < b, 1.0, 2.0),
        np.where(a <= b, a, b),
        np.where(a != b, 3.0, 4.0),
        np.where(a >= b, np.abs(a), -b),
        (a.astype(np.float64) * b + a).astype(np.float32),
        np.where(np.isnan(a), 6.0, 5.0),
        np.where(~(a > b), a, 7.0),
        np.where(~(a < b), b, 8.0),
    ]


def _comparisons(a: np.ndarray, b: np.ndarray) -> list[Any]:
    ua, ub, where = a.view(np.uint64), b.view(np.uint64), np.arange(256)
    conditions = [a == b, a != b, a < b, a <= b, a > b, a >= b, ua < ub, ua <= ub]
    return [np.where(condition, n, where) for condition, n in zip(conditions, (3, 5, 7, 11, 13, 17, 19, 23))]


def _scalars(launch: Launcher) -> None:
    x, bf16, fp16 = normal((9,), 1), torch.zeros(9, dtype=BF16), torch.zeros(9, dtype=FP16)
    values, remainder, wide = x.clone(), torch.zeros(9, dtype=I32), words((9,), I64, 3)
    launch(elementwise.scalars, (9,), [x, bf16, fp16, remainder, 37, wide])
    assert_equal(bf16, values.to(BF16))
    assert_equal(fp16, values.to(FP16))
    assert_equal(remainder, torch.fmod((torch.arange(9) - 2) * 1001, 37))
    assert_equal(x, torch.from_numpy(wide.numpy().astype(np.float32)))


ROWS = [
    Case("reduction", "int32", _row_statistics(I32, DEFAULT)),
    Case("reduction", "float32-8warps", _row_statistics(FP32, Options(90, 8))),
    Case("reduction", "sm_89-int32-1warp", _row_statistics(I32, Options(89, 1))),
    Case("reduction", "bits", _bit_statistics),
    Case("reduction", "unsigned", _integer_reductions),
    Case("reduction", "running-and-sorted", _running),
    Case("reduction", "layer-norm", _layer_norm),
    Case("reduction", "quantized-rows", _quantized_rows),
    *(Case("transposition", str(dtype)[6:], _transposed(dtype)) for dtype in (FP32, BF16, E4M3)),
    Case("atomics", "histogram", _histogram),
    Case("atomics", "each-kind", _collected),
    Case("atomics", "wide-and-unsigned", _counted),
    Case("atomics", "lock", _locked_sum),
    Case("numbers", "gelu", _gelu),
    Case("numbers", "int64", _computed(elementwise.wide_integers, I64, _wide_integers)),
    Case("numbers", "int32", _computed(elementwise.narrow_integers, I32, _narrow_integers)),
    Case("numbers", "float32", _computed(elementwise.floats, FP32, _floats)),
    Case("numbers", "int64-comparisons", _computed(elementwise.comparisons, I64, _comparisons)),
    Case("numbers", "scalars", _scalars),
]
