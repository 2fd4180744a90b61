"""Triton's kernels, what each is called with, and what it must give: float64's result, or the kernel's own definition.

Operands of products are small integers, so that every order of summation gives the exact product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from tests.float8_reference import cast as cast_reference
from tests.float8_reference import value_of_code
from tests.foreign.compiler import DEFAULT, Argument, Descriptor, Launcher, Options
from tests.foreign.kernels import attention, elementwise, hopper, products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
NAMES = {E4M3: "E4M3", E5M2: "E5M2"}


@dataclass(frozen=True)
class Case:
    """One launch and its check.

    Attributes:
        kind: what of the hardware it is about.
    """

    kind: str
    name: str
    run: Callable[[Launcher], None]


def _integers(shape: Sequence[int], dtype: torch.dtype, seed: int, limit: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, tuple(shape), generator=generator).to(FP32).to(dtype)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    """Values over many binades."""
    generator = torch.Generator().manual_seed(seed)
    binades = torch.randint(-12, 8, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator) * torch.exp2(binades.float())


def _words(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Integers of all sizes."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high, tuple(shape), dtype=dtype, generator=generator)
    return values >> torch.randint(0, torch.iinfo(dtype).bits - 2, tuple(shape), dtype=dtype, generator=generator)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal as numbers, in every element; NaN where NaN is expected."""
    a, b = actual.double(), expected.double()
    wrong = ((a != b) & ~(a.isnan() & b.isnan())).nonzero()
    assert actual.shape == expected.shape
    assert not len(wrong), f"{len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}"


# Matrix products


def _product(
    kernel: Any,
    options: Options = DEFAULT,
    tile: tuple[int, int, int] = (128, 128, 128),
    types: tuple[torch.dtype, torch.dtype, torch.dtype] = (E4M3, E4M3, FP32),
    shape: tuple[int, int, int] = (256, 256, 384),
    *,
    grid: Sequence[int] | None = None,
    takes_shape: bool = False,
    pointers: bool = False,
    **constants: Any,
) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        (m, n, k), (rows, columns, inner) = shape, tile
        a, b, c = _integers((m, k), types[0], 1), _integers((n, k), types[1], 2), torch.zeros(m, n, dtype=types[2])
        blocks = ((rows, inner), (columns, inner), (rows, columns))
        args: list[Argument] = [a, b, c]
        if not pointers:
            args = [Descriptor(tensor, block) for tensor, block in zip((a, b, c), blocks)]
        sizes = [m, n, k] if takes_shape else [k]
        tiles = grid or (-(-m // rows), -(-n // columns))
        launch(kernel, tiles, [*args, *sizes], options, BM=rows, BN=columns, BK=inner, **constants)
        assert_equal(c, (a.double() @ b.double().T).to(types[2]))

    return run


def _gluon_product(
    kernel: Any, options: Options, types: tuple[torch.dtype, ...], cga: Sequence[list[list[int]]], **constants: Any
) -> Callable[[Launcher], None]:
    """Two tiles each way of 128·n x 128, n blocks in a cluster; in K steps of 128 bytes, one less than fills the ring
    evenly."""

    def run(launch: Launcher) -> None:
        rows, columns, inner = 128 * options.num_ctas, 128, 128 // types[0].itemsize
        a, b = _integers((2 * rows, 5 * inner), types[0], 1), _integers((2 * columns, 5 * inner), types[1], 2)
        c = torch.zeros(2 * rows, 2 * columns, dtype=types[2])
        blocks = ((rows, inner), (columns, inner), (rows, columns))
        args = [
            Descriptor(tensor, block, gl.NVMMASharedLayout(128, 8 * tensor.itemsize, 2, cga_layout=split))
            for tensor, block, split in zip((a, b, c), blocks, cga)
        ]
        launch(kernel, (2, 2), [*args, a.shape[1]], options, **constants)
        assert_equal(c, (a.double() @ b.double().T).to(types[2]))

    return run


def _added_tiles(launch: Launcher) -> None:
    a, c = _integers((256, 32), FP32, 1), _integers((64, 32), FP32, 2)
    expected = c + a.view(4, 64, 32).sum(0)
    layout = gl.NVMMASharedLayout(128, 32, 2)
    launch(hopper.add_tiles, (4,), [Descriptor(a, (64, 32), layout), Descriptor(c, (64, 32), layout)], BM=64)
    assert_equal(c, expected)


_ALONE: list[list[int]] = []
_SHARED, _HALVES = [[0, 0]], [[1, 0]]  # of a cluster of two: both need all of it, or each has half of its rows
_CLUSTER_SUMS = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32], cga_layout=_HALVES)

_descriptor = products.descriptor_product
_pointer: dict[str, Any] = {"pointers": True, "takes_shape": True, "shape": (100, 80, 192), "PRECISION": "tf32"}

PRODUCTS = [
    Case("wgmma FP8", "128x128-4warps", _product(_descriptor)),
    Case("wgmma FP8", "128x256-8warps-4stages", _product(_descriptor, Options(90, 8, 4), (128, 256, 64))),
    Case("wgmma FP8", "256x128-8warps", _product(_descriptor, Options(90, 8, 2), (256, 128, 128))),
    Case("wgmma FP8", "64x64-e5m2", _product(_descriptor, Options(90, 4, 2), (64, 64, 64), (E4M3, E5M2, FP32))),
    Case("wgmma FP8", "e5m2-to-bf16", _product(_descriptor, DEFAULT, (64, 128, 128), (E5M2, E4M3, BF16))),
    Case("wgmma FP8", "ragged", _product(_descriptor, types=(E4M3, E4M3, FP16), shape=(200, 136, 208))),
    Case(
        "wgmma FP8",
        "through-cp.async",
        _product(products.pointer_product, Options(90), (64, 64, 64), **_pointer),
    ),
    Case("wgmma FP16", "bf16", _product(_descriptor, DEFAULT, (128, 128, 64), (BF16, BF16, BF16))),
    Case("wgmma FP16", "fp16-8warps", _product(_descriptor, Options(90, 8), (128, 128, 64), (FP16, FP16, FP16))),
    Case(
        "persistent",
        "persistent",
        _product(products.persistent_product, grid=(3,), takes_shape=True, SPECIALIZE=False),
    ),
    Case("warp-specialized", "one-tile", _product(products.specialized_product, Options(90, 8))),
    Case("warp-specialized", "64-rows", _product(products.specialized_product, tile=(64, 128, 128))),
    Case(
        "warp-specialized",
        "persistent",
        _product(products.persistent_product, Options(90, 8), grid=(3,), takes_shape=True, SPECIALIZE=True),
    ),
    Case(
        "warp-specialized",
        "gluon-fp8",
        _gluon_product(hopper.specialized, DEFAULT, (E4M3, E4M3, FP32), [_ALONE] * 3, STAGES=3),
    ),
    Case(
        "warp-specialized",
        "gluon-bf16-8warps",
        _gluon_product(hopper.specialized, Options(90, 8), (BF16, BF16, BF16), [_ALONE] * 3, STAGES=3),
    ),
    Case("cluster", "two-blocks", _product(_descriptor, Options(num_ctas=2), (256, 128, 128))),
    Case(
        "cluster",
        "multicast",
        _gluon_product(
            hopper.multicast,
            Options(num_ctas=2),
            (E4M3, E4M3, FP32),
            [_HALVES, _SHARED, _HALVES],
            BM=256,
            BN=128,
            BK=128,
            LAYOUT=_CLUSTER_SUMS,
        ),
    ),
    Case("tensor adds", "split-k", _product(products.split_product, grid=(2, 2, 2), PARTS=2)),
    Case("tensor adds", "gluon", _added_tiles),
    *(
        Case(
            "mma.sync FP8",
            f"sm_{arch}-{NAMES[a]}-{NAMES[b]}",
            _product(products.pointer_product, Options(arch), (64, 64, 64), (a, b, FP32), **_pointer),
        )
        for arch, a, b in ((89, E4M3, E4M3), (89, E4M3, E5M2), (89, E5M2, E4M3), (120, E4M3, E4M3))
    ),
    Case("mma.sync FP8", "sm_120-descriptors", _product(_descriptor, Options(120), (64, 64, 64))),
    *(
        Case(
            "mma.sync FP16",
            f"sm_89-{name}",
            _product(products.pointer_product, Options(89), (64, 64, 64), (dtype, dtype, dtype), **_pointer),
        )
        for name, dtype in (("bf16", BF16), ("fp16", FP16))
    ),
    Case(
        "fma",
        "sm_89-fp32",
        _product(products.pointer_product, Options(89), (32, 32, 32), (FP32,) * 3, **_pointer | {"PRECISION": "ieee"}),
    ),
]


# Attention


def _attention(kernel: Any, options: Options, dtype: torch.dtype, narrow: Any) -> Callable[[Launcher], None]:
    """Scores are integers from -5 to 5, exponentials powers of two: all is exact up to the last division."""

    def run(launch: Launcher) -> None:
        rows, length, depth, block = 128, 256, 128, 64
        places = torch.rand(rows, depth, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :5]
        q = torch.zeros(rows, depth).scatter_(1, places, 1.0).to(dtype)
        k = _integers((length, depth), dtype, 2, 1)
        v, out = _integers((length, depth), dtype, 3), torch.zeros(rows, depth)
        args: list[Argument] = [q, k, v, out]
        if kernel is attention.attention:
            transposed = Descriptor(v.T.contiguous(), (depth, block))
            args = [Descriptor(q, (64, depth)), Descriptor(k, (block, depth)), transposed, Descriptor(out, (64, depth))]
        launch(kernel, (2,), [*args, length], options, D=depth, BM=64, BN=block, P=narrow)
        expected = _online_attention(q.double(), k.double(), v.double(), block, dtype)
        torch.testing.assert_close(out.double(), expected, rtol=2**-22, atol=0)

    return run


def _online_attention(q: Tensor, k: Tensor, v: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """softmax(q kᵀ) v in base 2 and float64, P in `dtype` relative to the largest score so far."""
    highest = torch.full((len(q), 1), -torch.inf, dtype=torch.float64)
    total, sums = torch.zeros_like(highest), torch.zeros_like(q)
    for keys, values in zip(k.split(block), v.split(block)):
        scores = q @ keys.T
        higher = torch.maximum(highest, scores.amax(1, keepdim=True))
        p, correction = torch.exp2(scores - higher), torch.exp2(highest - higher)
        total = total * correction + p.sum(1, keepdim=True)
        sums = sums * correction + p.float().to(dtype).double() @ values
        highest = higher
    return sums / total


ATTENTION = [
    Case("attention", "wgmma-e4m3", _attention(attention.attention, DEFAULT, E4M3, tl.float8e4nv)),
    Case("attention", "wgmma-bf16-2stages", _attention(attention.attention, Options(90, 4, 2), BF16, tl.bfloat16)),
    Case("attention", "sm_89-e4m3", _attention(attention.pointer_attention, Options(89), E4M3, tl.float8e4nv)),
    Case("attention", "sm_120-e5m2", _attention(attention.pointer_attention, Options(120), E5M2, tl.float8e5)),
]


# Casts


def _sixteen_bits(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit type, or float32's with these upper bits and as many between them."""
    codes = torch.arange(2**16, dtype=I32)
    if dtype != FP32:
        return codes.to(torch.int16).view(dtype)
    return torch.cat([(codes << 16).view(FP32), _normal((2**15,), 5)])


def _narrowed(source: torch.dtype, target: torch.dtype, arch: int) -> Callable[[Launcher], None]:
    """To FP8: to the nearest, ties to even, saturating; as worked out in Python's numbers."""

    def run(launch: Launcher) -> None:
        x = _sixteen_bits(source)
        y = torch.zeros(len(x), dtype=target)
        launch(elementwise.cast, (-(-len(x) // 2048),), [x, y, len(x)], Options(arch), ROUNDING="rtne", BLOCK=2048)
        codes = torch.from_numpy(cast_reference(x.float().numpy(), 1.0, NAMES[target]))
        nan = x.isnan()
        assert torch.equal(y.view(torch.uint8)[~nan], codes[~nan])
        assert y.float()[nan].isnan().all()

    return run


def _halved(target: torch.dtype) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x = _sixteen_bits(FP32)
        y = torch.zeros(len(x), dtype=target)
        launch(elementwise.cast, (-(-len(x) // 2048),), [x, y, len(x)], ROUNDING="rtne", BLOCK=2048)
        assert_equal(y, x.to(target))

    return run


def _widened(source: torch.dtype, target: torch.dtype) -> Callable[[Launcher], None]:
    """All 256 codes; but Triton's E5M2 to bfloat16 takes its infinities and NaNs for numbers."""

    def run(launch: Launcher) -> None:
        codes = torch.arange(256).to(torch.uint8)
        y = torch.zeros(256, dtype=target)
        launch(elementwise.cast, (1,), [codes.view(source), y, 256], ROUNDING=None, BLOCK=256)
        expected = torch.tensor([value_of_code(NAMES[source], code) for code in range(256)])
        taken = expected.isfinite() if (source, target) == (E5M2, BF16) else torch.ones(256, dtype=torch.bool)
        assert_equal(y[taken], expected[taken])

    return run


CASTS = [
    *(
        Case("cast", f"sm_{arch}-{str(source)[6:]}-{NAMES[target]}", _narrowed(source, target, arch))
        for arch in (89, 90)
        for source in (FP32, BF16, FP16)
        for target in (E4M3, E5M2)
    ),
    *(Case("cast", f"float32-{str(target)[6:]}", _halved(target)) for target in (BF16, FP16)),
    *(
        Case("cast", f"{NAMES[source]}-{str(target)[6:]}", _widened(source, target))
        for source in (E4M3, E5M2)
        for target in (FP32, BF16, FP16)
    ),
]


# Rows, reductions, atomics, numbers


def _row_statistics(dtype: torch.dtype, options: Options) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x = _integers((3, 700), dtype, 1, 1000)
        total, largest, place = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=I32)
        launch(elementwise.row_statistics, (3,), [x, total, largest, place, 700], options, BLOCK=1024)
        assert_equal(total, x.sum(1))
        assert_equal(largest, x.amax(1))
        assert_equal(x.gather(1, place.long()[:, None])[:, 0], x.amax(1))

    return run


def _bit_statistics(launch: Launcher) -> None:
    x = _words((2, 512), I32, 1)
    results = [torch.zeros(2, dtype=I32) for _ in range(3)]
    launch(elementwise.bit_statistics, (2,), [x, *results], BLOCK=512)
    for result, operation in zip(results, (np.bitwise_and, np.bitwise_or, np.bitwise_xor)):
        assert_equal(result, torch.from_numpy(operation.reduce(x.numpy(), axis=1)))


def _integer_reductions(launch: Launcher) -> None:
    x = _words((2, 512), I32, 1)
    total, largest, least = (torch.zeros(2, dtype=I32) for _ in range(3))
    launch(elementwise.integer_reductions, (2,), [x, total, largest, least], BLOCK=512)
    unsigned = x.numpy().view(np.uint32)
    assert_equal(total, torch.from_numpy(unsigned.sum(1, dtype=np.uint32).view(np.int32)))
    assert_equal(largest, torch.from_numpy(unsigned.max(1).view(np.int32)))
    assert_equal(least, x.amin(1))


def _running(launch: Launcher) -> None:
    x = _integers((2, 256), I32, 1, 99)
    sums, ordered = torch.zeros_like(x), torch.zeros_like(x)
    launch(elementwise.running, (2,), [x, sums, ordered], BLOCK=256)
    assert_equal(sums, x.cumsum(1))
    assert_equal(ordered, x.sort(1).values)


def _transposed(dtype: torch.dtype) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x, y = _normal((64, 128), 1).to(dtype), torch.zeros(128, 64, dtype=dtype)
        launch(elementwise.transpose, (1,), [x, y], ROWS=64, COLUMNS=128)
        assert_equal(y, x.T)

    return run


def _layer_norm(launch: Launcher) -> None:
    x, weight, bias, y = _normal((3, 600), 1), _normal((600,), 2), _normal((600,), 3), torch.zeros(3, 600, dtype=BF16)
    launch(elementwise.layer_norm, (3,), [x, weight, bias, y, 600, 1e-5], BLOCK=1024)
    expected = torch.nn.functional.layer_norm(x.double(), (600,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4)


def _quantized_rows(launch: Launcher) -> None:
    x, codes, scales = _normal((5, 300), 1), torch.zeros(5, 300, dtype=E4M3), torch.zeros(5)
    launch(elementwise.quantize_rows, (5,), [x, codes, scales, 300], LARGEST=448.0, BLOCK=512)
    scale = np.exp2(np.floor(np.log2(448 / x.abs().amax(1).double().numpy())))
    assert_equal(scales, torch.from_numpy(1 / scale))
    for row in range(5):
        expected = cast_reference(x[row].numpy(), float(scale[row]), "E4M3")
        assert torch.equal(codes[row].view(torch.uint8), torch.from_numpy(expected))


def _histogram(launch: Launcher) -> None:
    x, counts = _integers((1000,), I32, 1, 7) + 8, torch.zeros(16, dtype=I32)
    launch(elementwise.histogram, (4,), [x, counts, 1000], BINS=16, BLOCK=256)
    assert_equal(counts, torch.bincount(x, minlength=16))


def _collected(launch: Launcher) -> None:
    x = _integers((1000,), I32, 1, 500)
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
    x = _words((500,), I32, 1).abs()
    total, largest = torch.zeros(4, dtype=I64), torch.zeros(4, dtype=I32)
    launch(elementwise.count_bits, (2,), [x, total, largest, 500], BLOCK=256)
    assert_equal(total, x.view(-1, 4).long().sum(0))
    assert_equal(largest, x.view(-1, 4).amax(0))


def _locked_sum(launch: Launcher) -> None:
    x, total, lock = _integers((5, 128), FP32, 1), torch.zeros(128), torch.zeros(1, dtype=I32)
    launch(elementwise.locked_sum, (5,), [x, total, lock], BLOCK=128)
    assert_equal(total, x.sum(0))
    assert lock.item() == 0


def _gelu(launch: Launcher) -> None:
    x, gate, y = _normal((500,), 1).to(BF16), _normal((500,), 2).to(BF16), torch.zeros(500)
    launch(elementwise.gelu, (2,), [x, gate, y, 500], BLOCK=256)
    expected = torch.nn.functional.gelu(x.double()) * torch.sigmoid(gate.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


def _operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two rows of 256 numbers, some of them equal, zero or, of floats, infinite or no numbers."""
    x, y = (_normal((256,), seed) if dtype == FP32 else _words((256,), dtype, seed) for seed in (1, 2))
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
    x, bf16, fp16 = _normal((9,), 1), torch.zeros(9, dtype=BF16), torch.zeros(9, dtype=FP16)
    values, remainder, wide = x.clone(), torch.zeros(9, dtype=I32), _words((9,), I64, 3)
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

CASES = [*PRODUCTS, *ATTENTION, *CASTS, *ROWS]
