"""How long two warps take for a round of a loop that both run: a model of which instruction issues when.

A multiprocessor's four schedulers have one warp each of two warpgroups that multiply, and all four do the same. So one
scheduler is the whole: each clock it issues the next instruction of one of its warps, in order, when the operands are
there and the unit is free. Products run beside, one after the other, in the order in which they were issued.

- Throughputs: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0, a
  quarter of a multiprocessor's; of products 1979 TFLOP/s (data sheet of the H100 SXM) on 132 multiprocessors at 1.83
  GHz, which are 1024 multiply-adds in FP8 a clock.
- Latencies: four clocks of arithmetic (Jia et al., arXiv:1804.06826, measured on Volta); those of what else is waited
  for are assumed, and that both warps issue in turns where both could.

Memory never lets a warp wait, nor does fetching instructions. What comes out tells two orders of the same work apart;
it is no time that a card has shown.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.machine_code.issue_slots import SCHEDULERS
from tests.machine_code.sass import Code, Instruction, Loop, steps, successors

MULTIPLY_ADDS = 1024
"""In FP8, of each tensor core in a clock."""
ARITHMETIC, UNIFORM, SPECIAL, SHUFFLED, LOADED, MET, DONE, FAR = 4, 6, 18, 23, 23, 20, 20, 500
"""Latencies: of arithmetic, of that of a warp's uniform registers, of the special-function unit; of shuffles, of shared
memory, of barriers, of the end of products, of global memory."""

_UNITS = {
    "MUFU": ("special", 8, SPECIAL),
    "FFMA": ("float", 1, ARITHMETIC),
    "FADD": ("float", 1, ARITHMETIC),
    "FMUL": ("float", 1, ARITHMETIC),
    "IMAD": ("float", 2, ARITHMETIC),
    "SHFL": ("memory", 4, SHUFFLED),
    "LDS": ("memory", 4, LOADED),
    "LDG": ("memory", 4, FAR),
    "SYNCS": ("memory", 4, MET),
    "BRA": ("control", 1, ARITHMETIC),
    "WARPGROUP": ("control", 1, ARITHMETIC),
}
"""Of an opcode: its unit, for how many clocks an instruction of a warp takes it, and when its result is there."""
_TWO_RESULTS = ("ISETP", "FSETP", "PLOP3", "UISETP", "SHFL")
_ROUNDS, _SETTLED = 24, 8
_REGISTER = re.compile(r"\b(U?)(R|P)(\d+)((?:\.\w+)*)")


@dataclass(frozen=True)
class _Work:
    """An instruction, as a scheduler sees it.

    Attributes:
        kind: ``product``, ``wait`` for products, ``take turn`` and ``give turn`` at a named barrier, or ``other``.
        number: clocks of a product; groups of products that may go on behind a wait.
        closes: whether a product is the last one of its group.
    """

    kind: str
    unit: str = "control"
    busy: int = 1
    latency: int = ARITHMETIC
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    number: int = 0
    closes: bool = False


@dataclass
class _Warp:
    """A warp on its way.

    Attributes:
        at: its next instruction.
        free: when it may issue that.
        turns: when each turn comes that it has not taken yet.
        ready: when registers have their values.
        groups: when groups of products end that it has not waited for yet.
        rounds: when rounds of the loop ended.
    """

    at: int = 0
    free: int = 0
    turns: list[int] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


def usual_round(code: Code, loop: Loop) -> list[Instruction]:
    """The shortest way around a loop: what is done once in a while lies beside it."""
    following = successors(code)
    (head,) = {each for at, after in enumerate(following) if at not in loop for each in after if each in loop}
    before: dict[int, int] = {}
    todo = deque([head])
    while todo:
        at = todo.popleft()
        for each in following[at]:
            if each == head:
                way = [at]
                while way[-1] != head:
                    way.append(before[way[-1]])
                return [code[index] for index in reversed(way)]
            if each in loop and each not in before:
                before[each] = at
                todo.append(each)
    raise ValueError("no loop")


def clocks_of_a_round(code: Code, warps: int = 2) -> float:
    """Clocks of a round of the only loop of ``code`` that multiplies, in which each of ``warps`` does all of it."""
    (loop,) = steps(code)
    return _simulated([_work(each) for each in usual_round(code, loop)], warps)


def _simulated(program: Sequence[_Work], count: int) -> float:
    """The first of ``count`` warps has the first turn; one alone always has."""
    warps = [_Warp() for _ in range(count)]
    warps[0].turns.append(0)
    units: dict[str, int] = {}
    clock, products_end, last = 0, 0, warps[0]
    while len(warps[0].rounds) < _ROUNDS:
        for warp in (*(each for each in warps if each is not last), last):
            work = program[warp.at]
            if warp.free > clock or units.get(work.unit, 0) > clock or not _goes_on(work, warp, clock):
                continue
            if work.kind == "product":
                products_end = max(products_end, clock) + work.number
                warp.groups += [products_end + DONE] * work.closes
            elif work.kind == "wait":
                del warp.groups[: max(0, len(warp.groups) - work.number)]
            elif work.kind == "take turn":
                warp.turns.pop(0)
            elif work.kind == "give turn":
                (other,) = [each for each in warps if each is not warp] or [warp]
                other.turns.append(clock + MET)
            units[work.unit] = clock + work.busy
            warp.ready.update(dict.fromkeys(work.writes, clock + work.busy - 1 + work.latency))
            warp.free, warp.at, last = clock + 1, (warp.at + 1) % len(program), warp
            warp.rounds += [clock] * (not warp.at)
            break
        clock += 1
    settled = warps[0].rounds[_SETTLED:]
    return (settled[-1] - settled[0]) / (len(settled) - 1)


def _goes_on(work: _Work, warp: _Warp, clock: int) -> bool:
    """Whether what it waits for is there."""
    if work.kind == "take turn":
        return bool(warp.turns) and warp.turns[0] <= clock
    if work.kind == "wait":
        ended = len(warp.groups) - work.number
        return ended <= 0 or warp.groups[ended - 1] <= clock
    return all(warp.ready.get(register, 0) <= clock for register in work.reads | work.writes)


# --- Instructions -----------------------------------------------------------------------------------------------------


def _work(each: Instruction) -> _Work:
    target, _, sources = each.operands.partition(",")
    reads = _registers(f"{each.guard} {each.operands}")
    if each.opcode == "QGMMA":
        rows, columns, k = map(int, each.name.split(".")[1].split("x"))
        clocks = rows * columns * k // SCHEDULERS // MULTIPLY_ADDS
        # A is four registers, or in shared memory; sums are no operands that are waited for.
        a = re.match(r"\s*(R\d+),", sources)
        uniform = frozenset(name for name in reads if name.startswith("U"))
        return _Work(
            "product",
            reads=uniform | (_registers(a[1], 4) if a else frozenset()),
            number=clocks,
            closes="gsb" in each.operands,
        )
    if each.name.startswith("WARPGROUP.DEPBAR"):
        return _Work("wait", number=int(sources, 16))
    if each.opcode == "BAR":
        return _Work("take turn" if "SYNC" in each.name else "give turn", reads=reads)
    others = ("uniform", 2, UNIFORM) if each.opcode.startswith(("U", "R2UR")) else ("integer", 2, ARITHMETIC)
    unit, busy, latency = _UNITS.get(each.opcode, others)
    if each.opcode in ("BRA", "SYNCS", "WARPGROUP") or "[" in target:
        return _Work("other", unit, busy, latency, reads)
    wide = 2 if each.opcode in ("LDS", "LDG") and "64" in each.name.split(".") else 1
    if each.opcode in _TWO_RESULTS:  # the second one may be a predicate as well, or is the register
        second, _, rest = sources.partition(",")
        if each.opcode == "SHFL" or re.match(r"\s*U?P[\dT]", second):
            target, sources = f"{target} {second}", rest
    return _Work("other", unit, busy * wide, latency, _registers(f"{each.guard} {sources}"), _registers(target, wide))


def _registers(operands: str, width: int = 1) -> frozenset[str]:
    """Names of registers and predicates; of pairs both."""
    return frozenset(
        f"{uniform}{kind}{index}"
        for uniform, kind, number, suffix in _REGISTER.findall(operands)
        for index in range(int(number), int(number) + (2 if ".64" in suffix else width))
    )
