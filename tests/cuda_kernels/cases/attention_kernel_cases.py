"""What attention's kernels are tested with: the cast of heads, and the forward pass, against the specification."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.host.forward import (
    AttentionProblem,
    CastLaunch,
    ForwardLaunch,
    PackedCodes,
    TransposeLaunch,
)
from cuda_kernels.attention.host.tiles import CastTables, PackedRows, RowSpace, Visible, packed_rows
from cuda_kernels.attention.spec import ORDER_A, ROWS, AttentionSpec
from lightning_fp8.attention.ops import Band, Codes, Lengths, cast, forward, unpack
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import assert_same
from tests.cuda_kernels.cases.kernel_cases import BF16, FP16, FP32

CAUSAL = Band(right=0)
Lists = tuple[list[int], list[int]]


def values(*shape: int, seed: int, exact: bool = False) -> Tensor:
    """Numbers of many sizes, each row its own; if ``exact``, integers about a mean, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        offsets = torch.randint(-3, 4, shape[-1:], generator=generator) * 4.0
        return torch.randint(-9, 10, shape, generator=generator) + offsets
    sizes = torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=generator).float())
    return torch.randn(shape, generator=generator) * sizes


def cumulated(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def rows_of(lengths: Tensor, rows: int | None = None, device: str = "cpu") -> PackedRows:
    """Of sequences one after the other, or in a padded batch with so many ``rows`` for each."""
    cu_seqlens = cumulated(lengths).to(device)
    space = RowSpace(len(lengths), int(lengths.sum()) if rows is None else rows, rows is None)
    return packed_rows(space, cu_seqlens, cu_seqlens.device)


def in_packed_rows(codes: Codes, rows: PackedRows) -> PackedCodes:
    """What the specification's cast of ``[B, H, L, D]`` is in packed rows, both copies."""
    _, heads, _, channels = codes.data.shape
    data = torch.zeros(heads, rows.space.total, channels, dtype=torch.uint8)
    scale_inv = torch.ones(heads, rows.space.blocks)
    for sequence, (length, start) in enumerate(zip(rows.lengths.tolist(), rows.starts.tolist())):
        data[:, start : start + length] = codes.data[sequence, :, :length].view(torch.uint8)
        blocks = -(-length // ROWS)
        scale_inv[:, start // ROWS : start // ROWS + blocks] = codes.scale_inv[sequence, :, :blocks]
    in_order = data.view(heads, -1, 16, channels)[:, :, list(ORDER_A)].reshape(data.shape)
    return PackedCodes(data, in_order.mT.contiguous(), scale_inv)


def moved(codes: PackedCodes, device: str) -> PackedCodes:
    return PackedCodes(*(None if x is None else x.to(device) for x in codes))


def check_cast(
    dtype: torch.dtype,
    channels: int,
    device: str,
    *,
    form: str = "bshd",
    heads: int = 2,
    rows: int = 200,
    lengths: list[int] | None = None,
    copies: tuple[bool, bool] = (True, True),
    centered: bool = False,
    mean_rows: int | None = None,
    special: bool = False,
    shifted: int = 0,
) -> None:
    """Codes and scales are the specification's to the bit.

    Args:
        form: ``bshd`` or ``bhsd``, a batch of two; ``thd`` of sequences of ``lengths``.
        special: with NaN and infinities.
        shifted: elements before the first one, so that no vector is aligned.
    """
    shape = (sum(lengths or []), heads, channels) if form == "thd" else (2, rows, heads, channels)
    x = values(*shape, seed=channels + rows, exact=centered)
    if special:
        flat = x.view(-1)
        flat[5], flat[channels * heads * 3 + 1], flat[-1] = torch.nan, torch.inf, -torch.inf
    memory = torch.zeros(x.numel() + shifted, dtype=dtype)
    x = memory[shifted:].view(shape).copy_(x)
    if form == "thd":
        own = torch.tensor(lengths)
        as_heads, _ = unpack(x, cumulated(own))
        table_rows, strides = rows_of(own, device=device), (0, x.stride(0), x.stride(1))
    else:
        x = x.transpose(1, 2) if form == "bshd" else x.transpose(1, 2).contiguous()
        as_heads, own = x, torch.tensor(lengths or [rows] * 2)
        table_rows, strides = rows_of(own, rows, device), (x.stride(0), x.stride(2), x.stride(1))
    on = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x) if device != "cpu" else x
    aligned = on.data_ptr() % (4 * x.element_size()) == 0
    tables = CastTables.of(table_rows, mean_rows)
    spec = HeadsSpec.of(channels, str(dtype).removeprefix("torch."), strides, aligned)
    mean_blocks = len(tables.summed) if centered else 0
    launch = CastLaunch(spec, heads, table_rows.space, strides, copies, mean_blocks, on.device)
    actual = launch.run(on, tables)
    expected = in_packed_rows(cast(as_heads, centered, own, mean_rows), table_rows)
    for name, a, b, wanted in zip(PackedCodes._fields, actual, expected, (*copies, True)):
        assert (a is not None) == wanted
        if a is not None and b is not None:
            pair = (y.cpu() for y in (a, b))
            assert_same(*(y.view(torch.float8_e4m3fn) if y.dtype == torch.uint8 else y for y in pair), name)


def check_transpose(channels: int, device: str) -> None:
    """Every byte where :data:`ORDER_A` has it."""
    rows = RowSpace(2, 200, ragged=True)
    data = torch.randint(256, (3, rows.total, channels), dtype=torch.uint8, device=device)
    launch = TransposeLaunch(channels, 3, rows, data.device)
    codes = launch.run(PackedCodes(data, None, torch.empty(0)))
    assert codes.data_t is not None
    found = codes.data_t.cpu()
    for place in range(rows.total):
        row = place // 16 * 16 + ORDER_A[place % 16]
        assert torch.equal(found[:, :, place], data[:, row].cpu())


def check_forward(
    channels: int,
    device: str,
    *,
    heads: tuple[int, int] = (1, 1),
    rows: tuple[int, int] = (256, 256),
    band: Band = Band(),  # noqa: B008 (frozen)
    lengths: Lists | None = None,
    ragged: bool = False,
    dtype: torch.dtype = FP32,
    special: bool = False,
    sizes: tuple[float, ...] = (),
    tolerance: float | None = None,
) -> None:
    """The result and its statistics are the specification's but for float32's rounding.

    A probability that lies between two codes may fall to the other side: the result is compared as a whole, and each
    element within what a few of these make.

    Args:
        ragged: sequences of ``lengths`` one after the other; else in a padded batch.
        special: a query, a key and a value are NaN.
        sizes: factors of V's blocks of 128 rows.
        tolerance: relative; by default what float32 needs in emulation, or about 14 bits of sums on a card.
    """
    tolerance = tolerance or (1e-4 if device == "cpu" else 2e-2)
    batch = len(lengths[0]) if lengths else 1
    shapes = [(batch, rows[0], heads[0]), (batch, rows[1], heads[1]), (batch, rows[1], heads[1])]
    q, k, v = (values(*shape, channels, seed=seed) for seed, shape in enumerate(shapes))
    q, k = q.sign() * q.abs().clamp(max=4), k.sign() * k.abs().clamp(max=4)
    for block, size in enumerate(sizes):
        v[:, block * ROWS : (block + 1) * ROWS] *= size
    if special:
        q[0, 7, 0, 3], k[-1, 140, -1, 2], v[0, 190, 0, 1] = torch.nan, torch.inf, -torch.inf
    own = None if lengths is None else Lengths(*(torch.tensor(each) for each in lengths))
    codes = [
        cast(x.transpose(1, 2), False, None if own is None else own[min(which, 1)]) for which, x in enumerate((q, k, v))
    ]
    scale = channels**-0.5
    expected = forward(*codes, scale, band, own, dtype)  # type: ignore[arg-type]

    of_queries, of_keys = (
        rows_of(torch.tensor(lengths[which] if lengths else [rows[which]]), None if ragged else rows[which], device)
        for which in range(2)
    )
    total = sum(lengths[0]) if ragged and lengths else batch * rows[0]
    out = torch.full((total, heads[0], channels), torch.nan, dtype=dtype, device=device)
    largest, total_of_row = (torch.full((heads[0], of_queries.space.total), torch.nan, device=device) for _ in range(2))
    problem = AttentionProblem(
        AttentionSpec(channels, str(dtype).removeprefix("torch.")), heads, of_queries.space, of_keys.space,
        Visible(band.left, band.right, band.bottom_right), scale,
    )  # fmt: skip
    strides = (0 if ragged else rows[0] * heads[0] * channels, heads[0] * channels, channels)
    launch = ForwardLaunch(problem, strides, out.device)
    packed = (
        moved(in_packed_rows(each, table), device)
        for each, table in zip(codes, (of_queries, of_keys, of_keys), strict=True)
    )
    launch.run(problem.visible.tiles_of_queries(of_queries, of_keys), *packed, out, largest, total_of_row)

    for sequence, length in enumerate(of_queries.lengths.tolist()):
        held, first = int(of_queries.held[sequence]), int(of_queries.first_row[sequence])
        start, begin = int(of_queries.starts[sequence]), first if ragged else sequence * rows[0]
        right = [x[sequence, :, :held] for x in expected]
        found = (
            out[begin : begin + held].transpose(0, 1),
            *(x[:, start : start + held] for x in (largest, total_of_row)),
        )
        assert_near(*(x.cpu() for x in found), *right, dtype, tolerance)
        assert not found[0][:, length:].any()


def assert_near(
    o: Tensor, m: Tensor, l: Tensor,  # noqa: E741
    right_o: Tensor, right_m: Tensor, right_l: Tensor,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    assert o.dtype == right_o.dtype == dtype
    torch.testing.assert_close(m, right_m, rtol=tolerance / 10, atol=tolerance / 10, equal_nan=True)
    torch.testing.assert_close(l, right_l, rtol=tolerance, atol=0, equal_nan=True)
    assert torch.equal(o.isnan(), right_o.isnan())
    a, b = (x.double().nan_to_num(0) for x in (o, right_o))
    rounding = {FP32: 0.0, FP16: 2.0**-11, BF16: 2.0**-8}[dtype]
    assert (a - b).norm() <= (tolerance + rounding) * b.norm()
    largest = b.abs().amax(dim=(0, 1))
    # On a GPU a probability's code may be the neighbour of the expected one, 2^-3 of its value apart.
    code = 0.02 if tolerance < 1e-2 else 2.0**-3
    assert ((a - b).abs() <= b.abs() * 2 * rounding + largest * code).all(), (a - b).abs().max()


def _cast(dtype: torch.dtype, channels: int, **how: Any) -> Case:
    words = [f"{key}={value}" for key, value in how.items()]
    name = "-".join(["cast_heads", str(dtype).removeprefix("torch."), str(channels), *words])
    return Case(name.replace(" ", ""), lambda device: check_cast(dtype, channels, device, **how))


def _forward(name: str, channels: int, **how: Any) -> Case:
    return Case(f"attention_forward-{channels}-{name}", lambda device: check_forward(channels, device, **how))


CASES = [
    _cast(BF16, 128),
    _cast(BF16, 128, form="bhsd", special=True),
    _cast(BF16, 128, form="thd", lengths=[130, 0, 1, 128]),
    _cast(BF16, 128, copies=(True, False), centered=True),
    _cast(FP32, 128, lengths=[200, 131], centered=True, special=True),
    _cast(FP16, 128, copies=(False, True), shifted=1),
    _cast(BF16, 64, lengths=[0, 200]),
    _cast(BF16, 64, form="thd", lengths=[1, 0, 257], centered=True, mean_rows=128),
    _cast(FP16, 96, special=True),
    _cast(BF16, 96, copies=(False, True), centered=True, mean_rows=128),
    _cast(BF16, 256, heads=1, special=True, centered=True),
    _cast(FP32, 256, heads=1, copies=(True, False), shifted=3),
    *(Case(f"transpose_heads-{channels}", partial(check_transpose, channels)) for channels in (64, 96, 256)),
    _forward("whole tiles", 128, heads=(2, 1)),
    _forward("causal", 128, rows=(130, 600), band=Band(right=0, bottom_right=True), dtype=BF16),
    _forward("window", 128, rows=(300, 300), band=Band(left=100, right=20), special=True, dtype=FP16),
    _forward("padded", 128, rows=(200, 280), lengths=([200, 70, 0], [0, 280, 130]), band=CAUSAL),
    _forward("scales of V", 128, rows=(128, 640), sizes=(1.0, 1e-30, 1e12, 1e-3, 1e-20)),
    _forward("ragged", 64, heads=(2, 2), rows=(140, 260), lengths=([1, 140], [260, 3]), ragged=True, dtype=BF16),
    _forward("grouped causal", 64, heads=(4, 2), rows=(260, 260), band=CAUSAL),
    _forward("many keys", 64, rows=(128, 1550)),
    _forward("causal", 96, rows=(200, 200), band=CAUSAL, dtype=BF16),
    _forward("window", 256, rows=(150, 430), band=Band(left=200, right=0, bottom_right=True)),
    _forward("whole tiles", 256, rows=(128, 256), dtype=BF16),
]
