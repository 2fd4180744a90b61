"""Stores of tensors, copies of bytes and copies between blocks in the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.emulator.copies.bodies import DUMP, MAP_ADDRESS, ONE, START, WAIT, caught, fails, modes, module, program, run
from tests.emulator.samples import needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, TensorMap

pytestmark = needs_gcc


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
