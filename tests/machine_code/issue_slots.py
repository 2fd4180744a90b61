"""How many instructions a warp issues for a tile, counted in the disassembly; and what time a tile may take.

A multiprocessor of Hopper has four warp schedulers, and each issues one instruction of one of its warps per clock (CUDA
C++ Programming Guide, compute capability 9.0). So ``slots * warps / 4`` clocks is the least that a block's tile takes,
whatever memory does. Which pipe executes an instruction, and stalls, are not counted: this is a bound, not a timing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from heapq import heappop, heappush

SCHEDULERS = 4
"""Of a multiprocessor, CUDA C++ Programming Guide, compute capability 9.0."""
MULTIPROCESSORS, CLOCK = 132, 1.755e9
"""Of an H200 SXM, and its clock in Hz under load; its boost clock of 1.98 GHz would allow more instructions."""
COPY_BANDWIDTH = 4.3e12
"""Bytes per second, read and written, that a copy reaches on an H200, of the 4.8e12 of its memory."""

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);|^\s*(\.L\w+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L\w+)\)")


class NoWalk(ValueError):
    """No way through a kernel does what was asked for."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        name: with its modifiers, ``"LDG.E.64"``.
        predicated: whether a predicate decides if it does anything; it takes its slot in any case.
        operands: as they are written.
    """

    name: str
    predicated: bool
    operands: str


def parsed(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of ``nvdisasm -c``, and for each label the number of the instruction behind it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for predicate, name, operands, label in _LINE.findall(listing):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(Instruction(name, bool(predicate), operands.strip()))
    return instructions, labels


def _next(at: int, instruction: Instruction, labels: Mapping[str, int]) -> tuple[int, ...]:
    """The instructions that may follow; none behind the kernel's end, nor where a subroutine is called."""
    kind, target = instruction.name.partition(".")[0], _TARGET.search(instruction.operands)
    following = (at + 1,)
    if kind == "EXIT":
        return following if instruction.predicated else ()
    if kind in ("CALL", "RET"):
        return following if instruction.predicated else ()
    if kind == "BRA":
        if target is None:
            raise ValueError(f"a branch without a label: {instruction}")
        # `BRA P0, label` and `BRA.DIV UR0, label` are taken or not, as `@P0 BRA label` is.
        always = not instruction.predicated and instruction.operands.startswith("`")
        return (labels[target[1]],) if always else (*following, labels[target[1]])
    if kind in ("BRX", "JMP", "JMX"):
        raise ValueError(f"where {instruction} leads is not known")
    return following


def issue_slots(listing: str, work: Mapping[str, int]) -> int:
    """Instructions that a warp issues on the cheapest walk from a kernel's begin to its end that does ``work``.

    ``work`` says how often instructions have to be issued, by patterns of their names (``{"LDG.E.128*": 8}``). So a
    loop counts as often as it has to run, a body for ragged tiles is left out where one for whole tiles does as much
    with less, and so is what is done once in a while: by one thread, for another kind of scale, for a division of
    subnormals. What each warp does beside has to be named in ``work`` to be counted.

    Raises:
        NoWalk: there is none.
    """
    instructions, labels = parsed(listing)
    patterns = tuple(work)
    of = [tuple(fnmatchcase(each.name, pattern) for pattern in patterns) for each in instructions]
    start = (0, tuple(work.values()))
    best, queue = {start: 0}, [(0, *start)]
    while queue:
        slots, at, left = heappop(queue)
        if at >= len(instructions) or slots > best[at, left]:
            continue
        instruction = instructions[at]
        left = tuple(max(0, count - hit) for count, hit in zip(left, of[at]))
        if instruction.name == "EXIT" and not any(left):
            return slots + 1
        for following in _next(at, instruction, labels):
            state = following, left
            if slots + 1 < best.get(state, slots + 2):
                best[state] = slots + 1
                heappush(queue, (slots + 1, *state))
    raise NoWalk(f"no way through these {len(instructions)} instructions issues {dict(work)}")


def slots_of_another(listing: str, work: Mapping[str, int]) -> int:
    """Instructions that a second round of ``work`` adds, in a kernel that takes one piece of work after another."""
    twice = {pattern: 2 * count for pattern, count in work.items()}
    return issue_slots(listing, twice) - issue_slots(listing, work)


def issue_clocks(slots: int, threads: int) -> float:
    """Clocks in which a multiprocessor issues ``slots`` instructions of each warp of a block of ``threads``."""
    return slots * (threads / 32) / SCHEDULERS


def memory_clocks(number_of_bytes: int) -> float:
    """Clocks in which a multiprocessor's share of the memory's bandwidth moves so many bytes."""
    return number_of_bytes / (COPY_BANDWIDTH / MULTIPROCESSORS / CLOCK)
