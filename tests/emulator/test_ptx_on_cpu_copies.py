"""Asynchronous copies in the emulator: cp.async, bulk copies, tensor maps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.ptx_on_cpu_samples import needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap

pytestmark = needs_gcc

ONE = (1, 1, 1)
modes = pytest.mark.parametrize("copies", ["eager", "late", "random"])


@cache
def program(text: str) -> Program:
    return Program(text)


def run(parameters: str, body: str, *args: Any, threads: int = 32, shared: int = 0, **options: Any) -> None:
    module = ptx(parameters, body, shared=shared).replace(".param .b8 param_", ".param .align 64 .b8 param_")
    program(module).launch((options.get("cluster", ONE)), (threads, 1, 1), list(args), **options)


def fails(message: str, parameters: str, body: str, *args: Any, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(parameters, body, *args, **options)


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


# Tensor maps. A thread loads a box; all of them write its bytes, as they lie in shared memory, to the output.

START = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; mov.u32 %r2, 0; setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALIZED;
mbarrier.init.shared::cta.b64 [%r1+{mbarrier}], 1;
fence.mbarrier_init.release.cluster;
INITIALIZED:
bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+{mbarrier}], %r2; @!%p1 bra WAIT;"
MAP_ADDRESS = "mov.u64 %d9, param_map; cvta.param.u64 %d9, %d9;"
DUMP = """
COPY: setp.ge.u32 %p2, %r0, {size}; @%p2 bra END;
add.u32 %r3, %r1, %r0; ld.shared.b8 %r4, [%r3]; cvt.u64.u32 %d0, %r0; add.u64 %d0, out, %d0; st.global.b8 [%d0], %r4;
add.u32 %r0, %r0, 32; bra COPY;
END:
"""


def load_body(rank: int, size: int, corner: str = "") -> str:
    mbarrier = -(-size // 128) * 128
    coordinates = corner or ", ".join(f"c{k}" for k in range(rank))
    body = f"""
    {START}
    @%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+{{mbarrier}}], {size};
    {MAP_ADDRESS}
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes
      [%r1], [%d9, {{{{{coordinates}}}}}], [%r1+{{mbarrier}}];
    LOADED:
    {WAIT}
    {DUMP}
    """
    return body.format(mbarrier=mbarrier, size=size)


def module(rank: int, body: str, shared: int) -> str:
    """`ptx` with a by-value tensor map and its coordinates before the output."""
    coordinates = " ".join(f"c{k}:s32" for k in range(rank))
    text = ptx(f"{coordinates} out:u64", body, shared=shared)
    return text.replace("kernel(", "kernel(.param .align 64 .b8 param_map[128], ", 1)


def load_box(
    tensor: torch.Tensor, box: tuple[int, ...], corner: tuple[int, ...], swizzle: Any, **options: Any
) -> torch.Tensor:
    """The bytes of shared memory after a copy of `box` at `corner`, both outermost first."""
    size = torch.Size(box).numel() * tensor.element_size()
    out = torch.zeros(size, dtype=torch.uint8)
    shared = -(-size // 128) * 128 + 8
    text = module(len(box), load_body(len(box), size), shared)
    arguments: list[Any] = [TensorMap(tensor, box, swizzle), *reversed(corner), out]
    program(text).launch(ONE, (32, 1, 1), arguments, **options)
    return out


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


LOAD = load_body(2, 1024)
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


def caught(message: str, launch: Callable[[Any], None]) -> bool:
    """Whether a launch fails with that message in one of two orders of threads."""
    errors = []
    for schedule in ("forward", "reverse"):
        try:
            launch(schedule)
        except EmulatorError as error:
            errors.append(str(error))
    return any(re.search(message, error) for error in errors)


@modes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_around_a_tensor_load(mistake: str, copies: Any) -> None:
    before, after, message = MISTAKES[mistake]
    assert before in LOAD
    tensor, out = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    arguments: list[Any] = [TensorMap(tensor, (8, 128), 128), 0, 0, out]
    text = module(2, LOAD.replace(before, after), 1032)
    assert caught(message, lambda s: program(text).launch(ONE, (32, 1, 1), arguments, copies=copies, schedule=s))


# Stores: threads fill 8 rows of 32 floats with their index, one thread stores the box.

STORE = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; setp.ne.u32 %p0, %r0, 0; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
cvt.rn.f32.u32 %f0, %r0; st.shared.f32 [%r2], %f0;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra END;
mov.u64 %d0, param_map; cvta.param.u64 %d0, %d0;
{store} [%d0, {{c0, c1}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{read} 0;
{after}
END:
"""
PLAIN = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
ADD = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"


def store(text: str, target: torch.Tensor, corner: tuple[int, int], **options: Any) -> None:
    out = torch.zeros(1)
    arguments: list[Any] = [TensorMap(target, (8, 32), 128), corner[1], corner[0], out]
    program(module(2, text, 1024)).launch(ONE, (256, 1, 1), arguments, **options)


@modes
@pytest.mark.parametrize("read", ["", ".read"])
@pytest.mark.parametrize("instruction", [PLAIN, ADD])
@pytest.mark.parametrize("corner", [(0, 0), (4, 8), (-3, -6)])
def test_tensor_stores(corner: tuple[int, int], instruction: str, read: str, copies: Any) -> None:
    target = torch.rand(10, 36)
    units = torch.arange(256.0).view(64, 4)
    box = units[torch.arange(64) ^ (torch.arange(64) // 8)].view(8, 32)
    expected = target.clone()
    for i, j in itertools.product(range(8), range(32)):
        row, column = corner[0] + i, corner[1] + j
        if 0 <= row < 10 and 0 <= column < 36:
            expected[row, column] = box[i, j] + (target[row, column] if instruction == ADD else 0)
    store(STORE.format(store=instruction, read=read, after=""), target, corner, copies=copies)
    assert torch.equal(target, expected)


WAIT_STORE = "cp.async.bulk.wait_group.read 0;"
STORE_MISTAKES = {
    "the proxy fence": ("fence.proxy.async.shared::cta;", "", "no fence.proxy.async"),
    "the barrier": ("bar.sync 0;", "", "race|no fence"),
    "the wait": (WAIT_STORE, "", "without cp.async.bulk.wait_group"),
    "the commit": ("cp.async.bulk.commit_group;", "", "without cp.async.bulk.wait_group"),
    "the last group": (WAIT_STORE, WAIT_STORE.replace("0", "1"), "without cp.async.bulk.wait_group"),
    "writing on": (WAIT_STORE, f"st.shared.f32 [%r2], %f0; {WAIT_STORE}", "which a bulk copy may still be reading"),
}


@modes
@pytest.mark.parametrize("mistake", STORE_MISTAKES)
def test_mistakes_around_a_tensor_store(mistake: str, copies: Any) -> None:
    before, after, message = STORE_MISTAKES[mistake]
    text = STORE.format(store=PLAIN, read=".read", after="")
    assert before in text
    mutant = text.replace(before, after)
    assert caught(message, lambda s: store(mutant, torch.zeros(8, 32), (0, 0), copies=copies, schedule=s))


@modes
def test_shared_memory_is_free_after_the_wait(copies: Any) -> None:
    text = STORE.format(store=PLAIN, read=".read", after="st.shared.f32 [%r2], %f0;")
    store(text, torch.zeros(8, 32), (0, 0), copies=copies)


def test_read_only_tensors_are_not_stored_to() -> None:
    with pytest.raises(EmulatorError, match="read-only"):
        store(STORE.format(store=PLAIN, read="", after=""), torch.zeros(8, 32), (0, 0), read_only=[0])


def test_only_float32_is_reduced() -> None:
    with pytest.raises(EmulatorError, match="other than float32"):
        store(STORE.format(store=ADD, read="", after=""), torch.zeros(8, 32, dtype=torch.int32), (0, 0))


def test_a_wait_for_reading_does_not_wait_for_writing() -> None:
    """As late as possible: after .read the tensor is still as it was, after the other wait it is not."""
    for read, seen in ((".read", 7.0), ("", 3.0)):
        after = "ld.global.f32 %f1, [out]; st.global.f32 [out], %f1; ld.global.f32 %f2, [c2]; st.global.f32 [out], %f2;"
        text = STORE.format(store=PLAIN, read=read, after=after)
        target, out = torch.full((8, 32), 7.0), torch.zeros(1)
        body = ptx("c0:s32 c1:s32 out:u64 c2:u64", text, shared=1024)
        body = body.replace("kernel(", "kernel(.param .align 64 .b8 param_map[128], ", 1)
        program(body).launch(
            ONE, (256, 1, 1), [TensorMap(target, (8, 32), 128), 0, 0, out, target[0, 3:]], copies="late"
        )
        assert out.item() == seen
        assert target[0, 3] == 3.0


# Copies of bytes

BYTES = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; mov.u32 %r2, 0; setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALIZED;
mbarrier.init.shared::cta.b64 [%r1+512], 1;
fence.mbarrier_init.release.cluster;
INITIALIZED:
bar.sync 0;
@%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+512], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [x], 512, [%r1+512];
LOADED:
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+512], %r2; @!%p1 bra WAIT;
shl.b32 %r3, %r0, 4; add.u32 %r3, %r3, %r1;
ld.shared.f32 %f0, [%r3]; add.f32 %f0, %f0, 0f3F800000; st.shared.f32 [%r3], %f0;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra END;
{store} [out], [%r1], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
STORES = {
    "cp.async.bulk.global.shared::cta.bulk_group": 0.0,
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": 1.0,
}


@modes
@pytest.mark.parametrize("instruction", STORES)
def test_copies_of_bytes(instruction: str, copies: Any) -> None:
    x, out = torch.rand(128), torch.rand(128)
    expected = x.clone()
    expected[::4] += 1
    expected += STORES[instruction] * out
    run("x:u64 out:u64", BYTES.format(store=instruction), x, out, shared=520, copies=copies)
    assert torch.equal(out, expected)


def test_copies_of_bytes_are_checked() -> None:
    text = BYTES.format(store="cp.async.bulk.global.shared::cta.bulk_group")
    x, out = torch.zeros(128), torch.zeros(128)
    fails("out-of-bounds global read of 512", "x:u64 out:u64", text, x[:127].clone(), out, shared=520)
    fails("out-of-bounds global write of 512", "x:u64 out:u64", text, x, out[:127].clone(), shared=520)
    fails("not multiples of 16", "x:u64 out:u64", text.replace("[x], 512", "[x], 500"), x, out, shared=520)
    fails("read-only", "x:u64 out:u64", text, x, out, shared=520, read_only=[1])


# Clusters

MULTICAST = f"""
{START.format(mbarrier=256)}
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r5, %cluster_ctarank; mov.b16 %h0, {{mask}};
@%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+256], 256;
mul.lo.u32 %r6, %r5, 128; add.u32 %r7, %r1, %r6; {MAP_ADDRESS} mul.lo.u32 %r8, %r5, 4;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [%r7], [%d9, {{{{c0, %r8}}}}], [%r1+256], %h0;
LOADED:
{WAIT.format(mbarrier=256)}
mov.u32 %r9, %ctaid.x; mul.wide.u32 %d1, %r9, 256; add.u64 out, out, %d1;
{DUMP.format(size=256)}
barrier.cluster.arrive; barrier.cluster.wait;
"""


@modes
@pytest.mark.parametrize("schedule", ["forward", "random"])
def test_a_multicast_reaches_every_block_of_its_mask(schedule: Any, copies: Any) -> None:
    """Each block loads its half of a tile for both."""
    tensor = torch.randint(0, 255, (8, 32), dtype=torch.uint8)
    out = torch.zeros(2, 256, dtype=torch.uint8)
    text = module(1, MULTICAST.format(mask=3), 264)
    arguments: list[Any] = [TensorMap(tensor, (4, 32)), 0, out]
    program(text).launch((2, 1, 1), (32, 1, 1), arguments, cluster=(2, 1, 1), schedule=schedule, copies=copies)
    assert torch.equal(out, tensor.flatten().expand(2, 256))


@pytest.mark.parametrize(
    ("mask", "message"), [(5, "multicast to blocks 0x5"), (0, "multicast"), (1, "deadlock|more than")]
)
def test_masks_of_multicasts_are_checked(mask: int, message: str) -> None:
    tensor, out = torch.zeros((8, 32), dtype=torch.uint8), torch.zeros(2, 256, dtype=torch.uint8)
    with pytest.raises(EmulatorError, match=message):
        program(module(1, MULTICAST.format(mask=mask), 264)).launch(
            (2, 1, 1), (32, 1, 1), [TensorMap(tensor, (4, 32)), 0, out], cluster=(2, 1, 1)
        )


# Each block sends values to the other one: st.async, or a bulk copy between their shared memories.
SEND = f"""
{START.format(mbarrier=256)}
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6;
@!%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+256], 128;
shl.b32 %r8, %r0, 2; mad.lo.u32 %r9, %r5, 100, %r0;
{{send}}
{WAIT.format(mbarrier=256)}
add.u32 %r10, %r1, %r8; ld.shared.b32 %r11, [%r10];
mov.u32 %r12, %ctaid.x; mad.lo.u32 %r12, %r12, 32, %r0; mul.wide.u32 %d1, %r12, 4; add.u64 %d1, out, %d1;
st.global.b32 [%d1], %r11;
barrier.cluster.arrive; barrier.cluster.wait;
"""
SENDERS = {
    "st.async": """
    add.u32 %r13, %r7, %r8;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13], %r9, [%r7+256];
    """,
    "cp.async.bulk": """
    add.u32 %r13, %r1, %r8; st.shared.b32 [%r13+128], %r9; fence.proxy.async; bar.sync 0;
    @!%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r1+128], 128, [%r7+256];
    """,
}


@modes
@pytest.mark.parametrize("sender", SENDERS)
def test_blocks_send_values_to_each_other(sender: str, copies: Any) -> None:
    out = torch.zeros(2, 32, dtype=torch.int32)
    run_pair(SEND.format(send=SENDERS[sender]), out, copies=copies)
    assert torch.equal(out, torch.tensor([[100], [0]]) + torch.arange(32))


@modes
@pytest.mark.parametrize("sender", SENDERS)
def test_receivers_have_to_wait(sender: str, copies: Any) -> None:
    text = SEND.format(send=SENDERS[sender]).replace("@!%p1 bra WAIT;", "")
    with pytest.raises(EmulatorError, match="race: .* which a bulk copy wrote"):
        run_pair(text, torch.zeros(2, 32, dtype=torch.int32), copies=copies)


def test_a_copy_between_blocks_needs_a_proxy_fence() -> None:
    text = SEND.format(send=SENDERS["cp.async.bulk"]).replace("fence.proxy.async;", "")
    with pytest.raises(EmulatorError, match="no fence.proxy.async"):
        run_pair(text, torch.zeros(2, 32, dtype=torch.int32))


def run_pair(text: str, out: torch.Tensor, **options: Any) -> None:
    program(ptx("out:u64", text, shared=264)).launch((2, 1, 1), (32, 1, 1), [out], cluster=(2, 1, 1), **options)


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
