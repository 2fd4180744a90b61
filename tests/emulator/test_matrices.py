"""Matrices in the emulator: ldmatrix, stmatrix, mma and wgmma, and whole products whose synchronisation is removed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.emulator.sample_products import hopper_gemm, mma_gemm
from tests.emulator.samples import TARGETS, needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap
from tests.ptx_on_cpu.mutants import Span, run_as, with_mutants
from tests.tiers import thorough

pytestmark = needs_gcc

ONE, WARP = (1, 1, 1), (32, 1, 1)
MODES: list[dict[str, Any]] = [
    {"races": False},
    {},
    {"schedule": "reverse", "copies": "late"},
    {"schedule": "random", "copies": "random", "seed": 1},
]
modes = pytest.mark.parametrize("mode", MODES, ids=["plain", "races", "late", "random"])


@cache
def program(text: str) -> Program:
    return Program(text)


# Eight rows of sixteen bytes are a matrix; thread t of x4 gives the address of row t mod 8 of matrix t / 8.

MOVE = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r1;
mul.wide.u32 %d0, %r0, 16; add.u64 %d1, x, %d0; add.u64 %d2, out, %d0;
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d1];
{before}
bar.warp.sync 0xffffffff;
{after}
st.global.v4.b32 [%d2], {{%r4, %r5, %r6, %r7}};
"""


def moved(before: str, after: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    program(ptx("x:u64 out:u64", MOVE.format(before=before, after=after), shared=512)).launch(ONE, WARP, [x, out])
    return out


def fragments(matrices: torch.Tensor) -> torch.Tensor:
    """[32 lanes, 8] of [4, 8, 8]: lane l holds elements 2 (l mod 4) and the next of row l / 4 of each matrix."""
    return matrices.view(4, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 8)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_matrices_are_loaded(count: int, transpose: bool) -> None:
    x = torch.arange(256, dtype=torch.int16).view(32, 8)
    registers = ", ".join(f"%r{4 + k}" for k in range(count))
    trans = ".trans" if transpose else ""
    load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r2];"
    actual = moved("st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};", load, x)
    matrices = x.view(4, 8, 8).transpose(1, 2) if transpose else x.view(4, 8, 8)
    expected = fragments(matrices.contiguous())
    assert torch.equal(actual[:, : 2 * count], expected[:, : 2 * count])
    assert torch.equal(actual[:, 2 * count :], x[:, 2 * count :])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_matrices_are_stored(count: int, transpose: bool) -> None:
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    x = fragments(matrices)
    registers = ", ".join(f"%r{4 + k}" for k in range(count))
    trans = ".trans" if transpose else ""
    store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {{{registers}}};"
    actual = moved(store, "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];", x).view(4, 8, 8)
    expected = matrices.transpose(1, 2) if transpose else matrices
    assert torch.equal(actual[:count], expected[:count])


def test_matrix_loads_are_checked() -> None:
    x = torch.zeros(32, 8, dtype=torch.int16)
    for address, message in (("%r2+8", "misaligned shared read of 16"), ("%r2+16", "out-of-bounds shared read of 16")):
        load = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [{address}];"
        with pytest.raises(EmulatorError, match=message):
            moved("", load, x)
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];"
    store = "xor.b32 %r3, %r2, 16; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};"
    moved(store, load, x)
    text = MOVE.format(before=store, after=load).replace("bar.warp.sync 0xffffffff;", "")
    with pytest.raises(EmulatorError, match="race"):
        program(ptx("x:u64 out:u64", text, shared=512)).launch(ONE, WARP, [x, x.clone()])


# mma: lane l loads its registers from matrices in global memory, a row of A or a column of B at a time.

MMA = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 2; and.b32 %r2, %r0, 3;
mad.lo.u32 %r3, %r1, 32, 0; mad.lo.u32 %r3, %r2, 4, %r3; cvt.u64.u32 %d0, %r3;
add.u64 %d1, a, %d0; add.u64 %d2, b, %d0;
ld.global.b32 %r10, [%d1]; ld.global.b32 %r11, [%d1+256]; ld.global.b32 %r12, [%d1+16]; ld.global.b32 %r13, [%d1+272];
ld.global.b32 %r14, [%d2]; ld.global.b32 %r15, [%d2+16];
mad.lo.u32 %r4, %r1, 32, 0; mad.lo.u32 %r4, %r2, 8, %r4; cvt.u64.u32 %d3, %r4; add.u64 %d4, c, %d3; add.u64 %d5, d, %d3;
ld.global.v2.f32 {{%f0, %f1}}, [%d4]; ld.global.v2.f32 {{%f2, %f3}}, [%d4+256];
{mma} {{%f4, %f5, %f6, %f7}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f0, %f1, %f2, %f3}};
st.global.v2.f32 [%d5], {{%f4, %f5}}; st.global.v2.f32 [%d5+256], {{%f6, %f7}};
"""
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "f16": torch.float16}


EIGHT_BITS = [f"m16n8k32.row.col.f32.{a}.{b}.f32" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
SIXTEEN_BITS = [f"m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in ("bf16", "f16")]


@pytest.mark.parametrize("accumulation", ["float32", "hopper"])
@pytest.mark.parametrize("shape", [*EIGHT_BITS, *(f"kind::f8f6f4.{x}" for x in EIGHT_BITS), *SIXTEEN_BITS])
def test_mma(shape: str, accumulation: Any) -> None:
    a_type, b_type = shape.split(".")[-3:-1]
    k = 32 // DTYPES[a_type].itemsize
    a, b = torch.randn(16, k).to(DTYPES[a_type]), torch.randn(8, k).to(DTYPES[b_type])
    c, d = torch.randn(16, 8), torch.zeros(16, 8)
    launch = program(ptx("a:u64 b:u64 c:u64 d:u64", MMA.format(mma=f"mma.sync.aligned.{shape}"))).launch
    launch(ONE, WARP, [a, b, c, d], accumulation=accumulation)
    exact = c.double() + a.double() @ b.double().T
    largest = (a.double().abs().amax() * b.double().abs().amax()).item()
    atol = 33 * largest * 2**-13 if accumulation == "hopper" and k == 32 else 1e-5
    torch.testing.assert_close(d.double(), exact, rtol=1e-6, atol=atol)


def test_accumulation_like_hopper_drops_what_is_small() -> None:
    """1 + 2**-14 needs 14 bits after the point of the largest product; float32 has them."""
    a, b = torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.zeros(8, 32).to(torch.float8_e4m3fn)
    a[:, :2], b[:, :2] = torch.tensor([1.0, 2.0**-7]), torch.tensor([1.0, 2.0**-7])
    mma = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
    expectations: dict[Any, float] = {"float32": 1 + 2**-14, "hopper": 1.0}
    for accumulation, expected in expectations.items():
        d = torch.zeros(16, 8)
        launch = program(ptx("a:u64 b:u64 c:u64 d:u64", MMA.format(mma=mma))).launch
        launch(ONE, WARP, [a, b, torch.zeros(16, 8), d], accumulation=accumulation)
        assert (d == expected).all()


# Products of whole matrices


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k).to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn)


def run_mma_gemm(text: str, threads: int, shared: int, shape: Sequence[int], **mode: Any) -> float:
    """The largest error."""
    m, n, k = shape
    a, b = operands(m, n, k)
    d = torch.zeros(m, n)
    grid = (-(-n // 32), -(-m // 32), 1)
    arguments: list[Any] = [a, b, d, m, n, k]
    program(text).launch(grid, (threads, 1, 1), arguments, dynamic_shared=shared, read_only=[0, 1], **mode)
    return (d.double() - a.double() @ b.double().T).abs().max().item()


@modes
@pytest.mark.parametrize("shape", [(32, 32, 64), (70, 46, 176)], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_product_by_mma(target: str, shape: tuple[int, int, int], mode: dict[str, Any]) -> None:
    assert run_mma_gemm(*mma_gemm(target), shape, **mode) < 1e-4


def run_hopper_gemm(text: str, n_tile: int, cluster: int, shape: Sequence[int], **mode: Any) -> bool:
    """Whether the result, but for the order of summation, is the rounded product."""
    m, n, k = shape
    _, threads, shared = hopper_gemm(n_tile, cluster)
    a, b = operands(m, n, k)
    d = torch.full((m, n), 7.0, dtype=torch.bfloat16)
    maps = [TensorMap(a, (128, 128), 128), TensorMap(b, (n_tile // cluster, 128), 128), TensorMap(d, (64, 64), 128)]
    program(text).launch(
        (2 * cluster, 1, 1),
        (threads, 1, 1),
        [*maps, torch.tensor([0.125]), m, n, k],
        cluster=(cluster, 1, 1),
        dynamic_shared=shared,
        read_only=[0, 1],
        **mode,
    )
    expected = a.double() @ b.double().T * 0.125
    return bool(((d.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all())


@modes
@pytest.mark.parametrize("shape", [(128, 256, 128), (300, 392, 656)], ids=str)
@pytest.mark.parametrize(
    "kernel",
    [
        (256, 1),
        (128, 2, True),
        *(pytest.param(kernel, marks=thorough) for kernel in ((128, 1), (128, 2), (256, 2), (128, 1, True))),
    ],
    ids=str,
)
def test_product_by_wgmma(kernel: tuple[Any, ...], shape: tuple[int, int, int], mode: dict[str, Any]) -> None:
    assert run_hopper_gemm(hopper_gemm(*kernel)[0], kernel[0], kernel[1], shape, **mode)


def test_products_by_wgmma_accumulate_like_hopper() -> None:
    m, n, k = 128, 128, 128
    text, threads, shared = hopper_gemm(128, 1)
    a, b, d = torch.zeros(m, k), torch.zeros(n, k), torch.zeros(m, n, dtype=torch.bfloat16)
    a[:, :2], b[:, :2] = torch.tensor([1.0, 2.0**-7]), torch.tensor([-1.0, 2.0**-7])
    a[:, 32], b[:, 32] = 1.0, 1.0
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    maps = [TensorMap(a, (128, 128), 128), TensorMap(b, (128, 128), 128), TensorMap(d, (64, 64), 128)]
    expectations: dict[Any, float] = {"float32": 2.0**-14, "hopper": 0.0}
    for accumulation, expected in expectations.items():
        arguments: list[Any] = [*maps, torch.tensor([1.0]), m, n, k]
        program(text).launch(ONE, (threads, 1, 1), arguments, dynamic_shared=shared, accumulation=accumulation)
        assert (d == expected).all()


def test_operands_of_wgmma_may_lie_in_registers() -> None:
    """A of 64 x 32 from registers, B of 8 x 32 from shared memory without a swizzle: two columns of 16 bytes."""
    registers = ", ".join(f"%r1{k}" for k in range(4))
    body = f"""
    mov.u32 %r0, %tid.x; mov.u32 %r1, memory; shr.u32 %r2, %r0, 5; and.b32 %r3, %r0, 31;
    setp.ge.u32 %p0, %r0, 16; @%p0 bra STORED;
    mul.wide.u32 %d0, %r0, 16; add.u64 %d0, b, %d0; ld.global.v4.b32 {{{registers}}}, [%d0];
    shr.u32 %r4, %r0, 1; and.b32 %r5, %r0, 1; shl.b32 %r4, %r4, 4; mad.lo.u32 %r4, %r5, 128, %r4; add.u32 %r4, %r4, %r1;
    st.shared.v4.b32 [%r4], {{{registers}}};
    STORED:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r4, %r3, 2; and.b32 %r5, %r3, 3; mad.lo.u32 %r6, %r2, 16, %r4; shl.b32 %r7, %r6, 5;
    mad.lo.u32 %r7, %r5, 4, %r7; cvt.u64.u32 %d1, %r7; add.u64 %d1, a, %d1;
    ld.global.b32 %r10, [%d1]; ld.global.b32 %r11, [%d1+256];
    ld.global.b32 %r12, [%d1+16]; ld.global.b32 %r13, [%d1+272];
    shr.u32 %r8, %r1, 4; cvt.u64.u32 %d2, %r8; or.b64 %d2, %d2, {8 << 16 | 16 << 32}; setp.ne.u32 %p1, %r1, %r1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3 {{%f0, %f1, %f2, %f3}}, {{{registers}}}, %d2, %p1, -1, 1;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    shl.b32 %r9, %r6, 5; mad.lo.u32 %r9, %r5, 8, %r9; cvt.u64.u32 %d3, %r9; add.u64 %d3, d, %d3;
    st.global.v2.f32 [%d3], {{%f0, %f1}}; st.global.v2.f32 [%d3+256], {{%f2, %f3}};
    """
    a, b = torch.randn(64, 32).to(torch.float8_e5m2), torch.randn(8, 32).to(torch.float8_e4m3fn)
    d = torch.zeros(64, 8)
    text = ptx("a:u64 b:u64 d:u64", body, shared=256)
    program(text).launch(ONE, (128, 1, 1), [a, b, d])
    torch.testing.assert_close(d.double(), -(a.double() @ b.double().T), rtol=1e-6, atol=1e-5)
    for removed, message in {
        "fence.proxy.async.shared::cta;": "wgmma reads byte .* no fence.proxy.async",
        "bar.sync 0;": "race|no fence",
        "wgmma.fence.sync.aligned;": "without wgmma.fence",
        "wgmma.commit_group.sync.aligned;": "is read before wgmma.wait_group",
        "wgmma.wait_group.sync.aligned 0;": "is read before wgmma.wait_group",
    }.items():
        assert removed in text
        with pytest.raises(EmulatorError, match=message):
            program(text.replace(removed, "")).launch(ONE, (128, 1, 1), [a, b, d])


# Mutants: without one synchronisation, something notices in some mode.

SYNCHRONIZATION = re.compile(
    r"^\s*(bar\.|barrier\.|mbarrier\.arrive|fence\.|wgmma\.(fence|commit|wait)|cp\.async\.(bulk\.)?(commit|wait)"
    r"|\{ \.reg \.b32 a; mapa|\{ \.reg \.pred p; again).*$",
    re.MULTILINE,
)


def synchronizations(text: str) -> list[Span]:
    """Lines that synchronize; a mutant lacks one of them."""
    return [found.span() for found in SYNCHRONIZATION.finditer(text)]


def notices(launch: Any, mode: dict[str, Any]) -> bool:
    try:
        return not launch(**mode)
    except EmulatorError:
        return True


def survivors(text: str, run: Any) -> list[str]:
    """Lines that can be removed without anybody noticing."""
    spans = synchronizations(text)
    mutants = with_mutants(text, [[span] for span in spans])
    launch = partial(run, mutants)
    assert all(launch(**mode) for mode in MODES), "it is wrong as it is"
    found = []
    for number, (start, end) in enumerate(spans, 1):
        run_as(program(mutants), number)
        if not any(notices(launch, mode) for mode in MODES[1:]):
            found.append(text[start:end].strip())
    return found


@thorough
def test_the_product_by_mma_needs_each_synchronization() -> None:
    text, threads, shared = mma_gemm("sm_90a")
    assert len(synchronizations(text)) >= 4
    assert (
        survivors(text, lambda mutant, **mode: run_mma_gemm(mutant, threads, shared, (32, 40, 448), **mode) < 1e-4)
        == []
    )


@thorough
def test_the_product_by_wgmma_needs_each_synchronization() -> None:
    text, _, _ = hopper_gemm(128, 2)
    assert len(synchronizations(text)) >= 12
    shape = (300, 256, 784)
    assert survivors(text, lambda mutant, **mode: run_hopper_gemm(mutant, 128, 2, shape, **mode)) == []
