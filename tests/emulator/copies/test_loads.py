"""Asynchronous copies in the emulator: cp.async, and boxes of tensors that are loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.emulator.copies.bodies import (
    LOAD,
    MAP_ADDRESS,
    ONE,
    caught,
    fails,
    load_body,
    load_box,
    modes,
    module,
    program,
    run,
)
from tests.emulator.samples import needs_gcc
from tests.ptx_on_cpu import EmulatorError, TensorMap

pytestmark = needs_gcc


# cp.async

SMALL_COPIES = """
mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, 16; add.u64 %d1, x, %d0; add.u64 %d2, out, %d0;
mov.u32 %r1, memory; shl.b32 %r2, %r0, 4; add.u32 %r3, %r1, %r2;
cp.async.cg.shared.global [%r3], [%d1], 16;
cp.async.commit_group;
cp.async.ca.shared.global [%r3+1024], [%d1], 4, 2;
cp.async.commit_group;
cp.async.wait_group 1;
bar.sync 0;
xor.b32 %r4, %r2, 512; add.u32 %r4, %r4, %r1;
ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r4];
cp.async.wait_all;
bar.sync 0;
ld.shared.b32 %r8, [%r4+1024];
st.global.v4.b32 [%d2], {%r5, %r6, %r7, %r8};
"""


@modes
def test_small_copies(copies: Any) -> None:
    x = torch.arange(1, 257, dtype=torch.int32)
    out = torch.zeros(256, dtype=torch.int32)
    run("x:u64 out:u64", SMALL_COPIES, x, out, threads=64, shared=2048, copies=copies)
    expected = x.view(64, 4)[torch.arange(64) ^ 32].clone()
    expected[:, 3] = expected[:, 0] & 0xFFFF  # 2 bytes are read, the others are zero
    assert torch.equal(out.view(64, 4), expected)


# Removing the second commit changes nothing: wait_all commits what is left.
REMOVED = [("cp.async.commit_group;", 0), ("cp.async.wait_group 1;", 0), ("cp.async.wait_all;", 0)]
REMOVED += [("bar.sync 0;", 0), ("bar.sync 0;", 1)]


@pytest.mark.parametrize(("text", "which"), REMOVED)
@modes
def test_small_copies_need_their_waits(text: str, which: int, copies: Any) -> None:
    parts = SMALL_COPIES.split(text)
    mutant = text.join(parts[: which + 1]) + text.join(parts[which + 1 :])
    x, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    fails("race: .*cp.async of thread", "x:u64 out:u64", mutant, x, out, threads=64, shared=2048, copies=copies)


def test_small_copies_are_checked() -> None:
    x = torch.zeros(16, dtype=torch.int32)
    fails("misaligned cp.async of 16", "x:u64", "cp.async.cg.shared.global [memory], [x+4], 16;", x, shared=64)
    fails("misaligned shared", "x:u64", "cp.async.ca.shared.global [memory+4], [x], 8;", x, shared=64)
    fails("out-of-bounds global read", "x:u64", "cp.async.ca.shared.global [memory], [x+64], 4;", x, shared=64)
    fails("out-of-bounds shared", "x:u64", "cp.async.ca.shared.global [memory+64], [x], 4;", x, shared=64)
    run("x:u64", "cp.async.ca.shared.global [memory], [x+64], 4, 0;", x, threads=1, shared=64)


def expected_box(tensor: torch.Tensor, box: tuple[int, ...], corner: tuple[int, ...], swizzle: int) -> torch.Tensor:
    """Element by element: zeros outside; 16-byte units of a row are exchanged by the number of their 128-byte line."""
    dense = torch.zeros(box, dtype=tensor.dtype)
    for index in itertools.product(*map(range, box)):
        place = [c + i for c, i in zip(corner, index)]
        if all(0 <= p < n for p, n in zip(place, tensor.shape)):
            dense[index] = tensor[tuple(place)]
    units = dense.flatten().view(torch.uint8).view(-1, 16)
    number = torch.arange(len(units))
    line = number // 8
    moved = number ^ (line % max(swizzle // 16, 1))
    result = torch.zeros_like(units)
    result[moved] = units
    return result.flatten()


BOXES = [
    ((64,), (32,), (40,), 0, torch.uint8),
    ((20, 64), (8, 32), (-3, 16), 0, torch.uint8),
    ((40, 128), (16, 128), (30, 64), 128, torch.uint8),
    ((40, 64), (16, 64), (28, -16), 64, torch.uint8),
    ((40, 64), (16, 32), (2, 48), 32, torch.uint8),
    ((19, 96), (24, 64), (-2, 40), 128, torch.bfloat16),
    ((11, 24), (16, 32), (0, 4), 128, torch.float32),
    ((5, 9, 48), (2, 4, 16), (4, 7, 40), 0, torch.uint8),
    ((3, 4, 5, 16), (2, 2, 3, 16), (2, -1, 3, 0), 32, torch.int16),
    ((2, 3, 4, 5, 8), (1, 2, 2, 3, 8), (1, 2, -1, 3, 0), 0, torch.float32),
]


@modes
@pytest.mark.parametrize(("shape", "box", "corner", "swizzle", "dtype"), BOXES)
def test_tensor_loads(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], swizzle: int, dtype: torch.dtype, copies: Any
) -> None:
    tensor = torch.randint(1, 255, (torch.Size(shape).numel(),)).to(dtype).view(shape)
    actual = load_box(tensor, box, corner, swizzle, copies=copies, schedule="random")
    assert torch.equal(actual, expected_box(tensor, box, corner, swizzle))


def test_hints_of_copies_change_nothing() -> None:
    policy = "createpolicy.fractional.L2::evict_first.b64 %d20, 0f3F800000;"
    body = load_body(2, 1024).replace("complete_tx::bytes\n", "complete_tx::bytes.L2::cache_hint\n")
    body = policy + body.replace("[%r1+1024];\n    LOADED", "[%r1+1024], %d20;\n    LOADED")
    assert body.count("%d20") == 2
    tensor, out = torch.randint(0, 255, (16, 128), dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    program(module(2, body, 1032)).launch(ONE, (32, 1, 1), [TensorMap(tensor, (8, 128), 128), 0, 4, out])
    assert torch.equal(out, expected_box(tensor, (8, 128), (4, 0), 128))

    copy = "cp.async.cg.shared.global.L2::cache_hint.L2::128B [memory], [x], 16, %d20; cp.async.wait_all;"
    x, out = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    load_and_store = "ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [memory]; st.global.v4.b32 [out], {%r0, %r1, %r2, %r3};"
    run("x:u64 out:u64", policy + copy + load_and_store, x, out, threads=1, shared=16)
    assert torch.equal(out, x)


def test_a_tensor_map_of_a_part() -> None:
    """dims and strides may describe every second row of the left half."""
    tensor = torch.randint(0, 255, (16, 64), dtype=torch.uint8)
    tensor_map = TensorMap(tensor, (4, 32), 32, dims=(8, 32), strides=(128, 1))
    out = torch.zeros(128, dtype=torch.uint8)
    program(module(2, load_body(2, 128), 136)).launch(ONE, (32, 1, 1), [tensor_map, 0, 6, out])
    assert torch.equal(out, expected_box(tensor[::2, :32].contiguous(), (4, 32), (6, 0), 32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"box": (8,)}, "differ in rank"),
        ({"box": (8, 8)}, "rows of the box have 8 bytes"),
        ({"box": (257, 16)}, "1 to 256"),
        ({"box": (8, 64), "swizzle": 32}, "do not fit a swizzle of 32"),
        ({"box": (8, 16), "swizzle": 16}, "swizzle 16"),
        ({"box": (8, 16), "strides": (24, 1)}, "strides of \\[24\\] bytes"),
        ({"box": (8, 16), "strides": (64, 2)}, "innermost one has to be 1"),
        ({"box": (8, 16), "dims": (17, 64)}, "exceed the storage"),
        ({"box": (8, 16), "dims": (0, 64)}, "not positive"),
    ],
)
def test_tensor_maps_that_the_driver_would_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorMap(torch.zeros(16, 64, dtype=torch.uint8), **arguments)
    with pytest.raises(ValueError, match="not a multiple of 16"):
        TensorMap(torch.zeros(100, dtype=torch.uint8)[1:], (16,))
    with pytest.raises(ValueError, match="elements of 8 bytes"):
        TensorMap(torch.zeros(100, dtype=torch.float64), (16,))


MISTAKES = {
    "the wait": ("@!%p1 bra WAIT;", "", "race: thread .* which a bulk copy wrote"),
    "the fence": ("fence.mbarrier_init.release.cluster;", "", "no fence.mbarrier_init"),
    "the barrier after the start": ("bar.sync 0;", "", "race|never initialised"),
    "too few bytes": ("[%r1+1024], 1024", "[%r1+1024], 1008", "deadlock|race|block ends"),
    "too many bytes": ("[%r1+1024], 1024", "[%r1+1024], 1040", "deadlock .*mbarrier.try_wait"),
    "an address": ("      [%r1],", "[%r1+64],", "not aligned to 128 bytes"),
    "a place outside": ("      [%r1],", "[%r1+128],", "out-of-bounds shared"),
    "dimensions": (".2d.", ".1d.", "not supported: 2 coordinates"),
    "the map": ("mov.u64 %d9, param_map;", "mov.u64 %d9, out;", "cvta.param of address"),
    "a tensor for the map": (f"{MAP_ADDRESS}", "mov.u64 %d9, out;", "no tensor map|not aligned to 64"),
    "an address that is none": (f"{MAP_ADDRESS}", "mov.u64 %d9, 0x40000000;", "out-of-bounds global read of 128 bytes"),
    "the map's space": (f"{MAP_ADDRESS}", "mov.u64 %d9, param_map;", "parameter space: cvta.param is missing"),
}


@modes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_around_a_tensor_load(mistake: str, copies: Any) -> None:
    before, after, message = MISTAKES[mistake]
    assert before in LOAD
    tensor, out = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    arguments: list[Any] = [TensorMap(tensor, (8, 128), 128), 0, 0, out]
    text = module(2, LOAD.replace(before, after), 1032)
    assert caught(message, lambda s: program(text).launch(ONE, (32, 1, 1), arguments, copies=copies, schedule=s))


def test_a_parameter_has_a_32_bit_address() -> None:
    """As compilers take it who know that a kernel's parameters lie below 4 GiB."""
    tensor = torch.arange(2048, dtype=torch.int32).to(torch.uint8).view(16, 128)
    out = torch.zeros(1024, dtype=torch.uint8)
    text = LOAD.replace(MAP_ADDRESS, "mov.b32 %r9, param_map; cvt.u64.u32 %d9, %r9; cvta.param.u64 %d9, %d9;")
    program(module(2, text, 1032)).launch(ONE, (32, 1, 1), [TensorMap(tensor, (8, 128), 0), 0, 0, out])
    assert torch.equal(out.view(8, 128), tensor[:8])


def test_the_fence_after_a_barriers_initialisation_may_be_left_out_if_asked() -> None:
    tensor, out = torch.ones(16, 128, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    launch = program(module(2, LOAD.replace("fence.mbarrier_init.release.cluster;", ""), 1032)).launch
    arguments: list[Any] = [TensorMap(tensor, (8, 128), 0), 0, 0, out]
    launch(ONE, (32, 1, 1), arguments, strict=False)
    assert torch.equal(out, torch.ones_like(out))
    with pytest.raises(EmulatorError, match=r"no fence\.mbarrier_init"):
        launch(ONE, (32, 1, 1), arguments)
