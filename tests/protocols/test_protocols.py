"""Barriers of every pipelined kernel: nothing goes wrong in any interleaving, and a planted slip is found."""

from __future__ import annotations

from functools import cache

import pytest

from cuda_kernels.attention.block import TILE
from cuda_kernels.attention.forward_tiles import forward_offsets
from cuda_kernels.attention.spec import AttentionSpec
from tests.cuda_kernels.emulated import needs_compilers
from tests.protocols.faults import planted
from tests.protocols.kernels import KERNELS, MOST_TILES, Pipelined
from tests.protocols.order import every_interleaving
from tests.protocols.protocol import Arrive, Copy, Multiply, Op, Place, Process, Protocol, Wait
from tests.tiers import thorough

pytestmark = needs_compilers

DEFAULT = {"forward-64", "dq-64", "dkv-64", "two warpgroups", "scales of both"}
"""Each pipeline once, of kernels that other tests of the default run compile, too; the others are of other channels and
of other tiles."""
ROWS = [pytest.param(kernel, id=kernel.name, marks=() if kernel.name in DEFAULT else thorough) for kernel in KERNELS]

LAST_TURN = ("bar", 0, 2)
"""Of forward's two named barriers the one that the first warpgroup waits at."""


@cache
def protocol(kernel: Pipelined, size: tuple[int, ...]) -> Protocol:
    return kernel.protocol(*size)


def count(programs: Protocol, kind: type) -> int:
    """In the program of one thread of each warp: how many programs a warp's threads have depends on the tiles."""
    of_warps: dict[str, Process] = {}
    for process in programs:
        of_warps.setdefault(process.name.partition(", lanes")[0], process)
    return sum(isinstance(op, kind) for process in of_warps.values() for op, _ in process.steps)


@pytest.mark.parametrize("kernel", ROWS)
def test_no_interleaving_goes_wrong(kernel: Pipelined) -> None:
    """From no tile to five, for attention to six: no deadlock, no stage overwritten while it is read, no
    phase missed or taken for another.

    Forward's second warpgroup hands over a turn that nobody takes. It is harmless: all threads end, and none joins that
    barrier later.
    """
    for size in kernel.sizes:
        outcome = every_interleaving(protocol(kernel, size))
        assert not outcome.faults, (size, outcome.faults)
        assert outcome.left == ({LAST_TURN: 128} if kernel.name.startswith("forward") else {}), size


def test_a_program_is_what_the_kernel_says() -> None:
    """Of forward's producer for one tile, with the places and sizes of the kernel's own constants."""
    (forward,) = [kernel for kernel in KERNELS if kernel.name == "forward-64"]
    spec = AttentionSpec(64, "bfloat16")
    places = forward_offsets(spec)
    (steps,) = [each.steps for each in protocol(forward, (1,)) if count((each,), Copy)]
    expected: list[Op] = []
    for name, barrier, size in (("q", "full_q", TILE), ("k", "full_k", TILE), ("v", "full_v", 64 * 128)):
        if name != "q":
            expected.append(Wait((0, places[f"empty_{name}"]), 1))
        filled = (Place(0, places[name], places[name] + size),)
        expected += [Arrive((0, places[barrier]), size), Copy(filled, places[barrier])]
    assert [op for op, _ in steps if isinstance(op, Wait | Arrive | Copy)] == expected


@pytest.mark.parametrize("kernel", ROWS)
def test_programs_are_whole(kernel: Pipelined) -> None:
    """Each tile has its copies and its products, so that what is searched is the kernel's work."""
    tiles = range(1, MOST_TILES + 1)
    by_tiles = [next(size for size in kernel.sizes if size[0] == each) for each in tiles]
    for kind in (Copy, Multiply):
        counts = [count(protocol(kernel, size), kind) for size in by_tiles]
        (of_a_tile,) = {after - before for before, after in zip(counts, counts[1:])}
        assert of_a_tile > 0


SLIPS = {
    "dropped arrive", "dropped arrive, once", "doubled arrive", "doubled arrive, once", "dropped wait", "wrong parity",
    "count too large", "count too small", "missing stage", "wrong size", "dropped copy",
    "arrive before the products are done",
}  # fmt: skip
"""What can go wrong in every kernel."""


@pytest.mark.parametrize("kernel", ROWS)
def test_a_planted_slip_is_found(kernel: Pipelined) -> None:
    """Each, in the launches of some size: not every number of tiles turns every ring."""
    tried: set[tuple[str, str]] = set()
    found: set[tuple[str, str]] = set()
    launches = [protocol(kernel, size) for size in kernel.sizes]
    for launch in launches[4:]:
        faults = [fault for fault in planted(launch, launches) if (fault.kind, fault.where) not in found]
        tried |= {(fault.kind, fault.where) for fault in faults}
        found |= {(fault.kind, fault.where) for fault in faults if every_interleaving(fault.protocol).faults}
        kinds = {kind for kind, _ in tried}
        if tried == found and kinds >= SLIPS:
            break
    assert tried == found
    assert kinds >= SLIPS
    assert ("dropped turn" in kinds) == kernel.name.startswith("forward")
