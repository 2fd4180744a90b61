"""What a kernel's machine code does wrong in its loops, read from nvdisasm's listing.

The listing names labels and branches; from them follow the loops (Aho, Lam, Sethi, Ullman, Compilers, 9.6: a back edge
goes to an instruction that dominates it), and what lies on the way from a load to the first use of its result.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import files, version
from pathlib import Path

from tests.ptx_on_cpu.build import folder

_PACKAGE = "nvidia-cuda-nvdisasm"

TENSOR_CORES = ("QGMMA", "HGMMA", "IGMMA", "QMMA", "HMMA", "IMMA")
WARPGROUP_PRODUCTS = ("QGMMA", "HGMMA", "IGMMA")
GLOBAL_LOADS = ("LDG", "LD")
LOCAL_MEMORY = ("LDL", "STL")
WAITS = ("WARPGROUP", "SYNCS", "BAR", "MEMBAR", "ERRBAR", "CGAERRBAR", "DEPBAR", "NANOSLEEP", "WARPSYNC", "BRA")
"""What lets a warp wait, or go elsewhere."""

_LINE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing.

    Attributes:
        guard: the predicate it runs under, ``!P0``; none is empty.
        name: with all modifiers, ``MEMBAR.ALL.GPU``.
        operands: as they stand.
        target: the index of the instruction that it branches to.
    """

    guard: str
    name: str
    operands: str
    target: int | None = None

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def gpu_wide(self) -> bool:
        """Whether it waits for what the whole card sees."""
        return self.opcode == "ERRBAR" or (self.opcode == "MEMBAR" and bool({"GPU", "SYS"} & {*self.name.split(".")}))

    def __str__(self) -> str:
        return f"{self.name} {self.operands}".strip()


Code = Sequence[Instruction]
Loop = frozenset[int]
"""Indices of its instructions."""


def disassembled(cubin: bytes, *options: str) -> str:
    """nvdisasm's listing of machine code, by default the instructions alone; several tests read one: kept on disk."""
    options = options or ("-c", "-ndf")  # without its analysis of data flow, which adds nothing but remarks
    digest = hashlib.sha256("\0".join([version(_PACKAGE), *options]).encode() + cubin).hexdigest()[:32]
    kept = folder() / f"listing_{digest}.gz"
    if kept.exists():
        return gzip.decompress(kept.read_bytes()).decode()
    (path,) = (file for file in files(_PACKAGE) or () if file.name == "nvdisasm")
    with tempfile.TemporaryDirectory(dir=folder()) as temporary:
        file = Path(temporary) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [Path(str(path.locate())), *options, file]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        written = Path(temporary) / kept.name
        written.write_bytes(gzip.compress(listing.encode(), 1))
        written.replace(kept)  # other processes may write the same
    return listing


def parsed(listing: str) -> list[Instruction]:
    """The instructions of a listing of one kernel.

    Raises:
        ValueError: it branches where its registers say.
    """
    lines = sorted([*_LINE.finditer(listing), *_LABEL.finditer(listing)], key=lambda found: found.start())
    labels: dict[str, int] = {}
    found: list[tuple[str, str, str]] = []
    for line in lines:
        if line.re is _LABEL:
            labels[line[1]] = len(found)
        else:
            found.append((line[1] or "", line[2], " ".join(line[3].split())))
    code = []
    for guard, name, operands in found:
        target = _TARGET.search(operands) if name.split(".")[0] in ("BRA", "CALL", "JMP") else None
        if name.split(".")[0] in ("BRX", "JMX", "BRXU"):
            raise ValueError(f"{name} {operands} goes where registers say: its loops are unknown")
        code.append(Instruction(guard, name, operands, labels[target[1]] if target else None))
    return code


# --- Loops ------------------------------------------------------------------------------------------------------------


def successors(code: Code) -> list[list[int]]:
    """What may follow each instruction; a call comes back."""
    following: list[list[int]] = []
    for index, each in enumerate(code):
        # BRA takes predicates as operands, too.
        always = not each.guard and not re.match(r"!?U?P\d", each.operands) and not each.name.endswith((".ANY", ".DIV"))
        ends = always and each.opcode in ("EXIT", "RET", "BRA", "JMP", "BPT")
        following.append([index + 1] * (not ends and index + 1 < len(code)))
        if each.target is not None:
            following[-1].append(each.target)
    return following


def _in_order(following: list[list[int]]) -> list[int]:
    """All that is reached from the first, each after what comes before it but for loops: reverse postorder."""
    order: list[int] = []
    seen, stack = {0}, [(0, iter(following[0]))]
    while stack:
        index, rest = stack[-1]
        unseen = next((each for each in rest if each not in seen), None)
        if unseen is None:
            order.append(index)
            stack.pop()
        else:
            seen.add(unseen)
            stack.append((unseen, iter(following[unseen])))
    return order[::-1]


def _preceding(following: list[list[int]], reached: Sequence[int]) -> dict[int, list[int]]:
    preceding: dict[int, list[int]] = {index: [] for index in reached}
    for index in reached:
        for each in following[index]:
            preceding[each].append(index)
    return preceding


def _dominators(order: Sequence[int], preceding: dict[int, list[int]]) -> dict[int, int]:
    """For each instruction those that every way to it meets, as bits of an integer."""
    everything = (1 << max(order) + 1) - 1
    found = dict.fromkeys(order, everything)
    found[order[0]] = 1 << order[0]
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            common = everything
            for each in preceding[index]:
                common &= found[each]
            common |= 1 << index
            changed |= common != found[index]
            found[index] = common
    return found


def loops(code: Code) -> list[Loop]:
    """The natural loops; those that begin with the same instruction are one.

    Raises:
        ValueError: a loop has two entries, so that it is none.
    """
    following = successors(code)
    order = _in_order(following)
    place, preceding = {index: at for at, index in enumerate(order)}, _preceding(following, order)
    dominators = _dominators(order, preceding)
    bodies: dict[int, set[int]] = {}
    for last in order:
        for head in following[last]:
            if place[head] > place[last]:
                continue
            if not dominators[last] >> head & 1:
                raise ValueError(f"a loop is entered at {code[head]} and elsewhere")
            body, todo = bodies.setdefault(head, {head}), [last]
            while todo:
                index = todo.pop()
                if index not in body:
                    body.add(index)
                    todo += preceding[index]
    return [frozenset(body) for body in bodies.values()]


def steps(code: Code) -> list[Loop]:
    """The innermost loops that use tensor cores."""
    using = [loop for loop in loops(code) if any(code[index].opcode in TENSOR_CORES for index in loop)]
    return [loop for loop in using if not any(other < loop for other in using)]


def counts_in_a_step(code: Code) -> tuple[Counter[str], Counter[str]]:
    """How often the only loop that uses tensor cores holds each opcode, and each name, which has the opcode's options.

    Raises:
        ValueError: there are more such loops, or none.
    """
    (step,) = steps(code)
    return Counter(code[index].opcode for index in step), Counter(code[index].name for index in step)


# --- Faults -----------------------------------------------------------------------------------------------------------


def gpu_wide_barriers(code: Code) -> list[str]:
    """Those in loops."""
    wide = [index for index, each in enumerate(code) if each.gpu_wide]
    inside = frozenset().union(*loops(code)) if wide else frozenset()
    return [f"{code[index]} in a loop" for index in wide if index in inside]


def faults_of_steps(code: Code, groups: Set[int] = frozenset({4}), ahead: int | None = None) -> Iterator[str]:
    """What makes tensor cores wait in the loops that use them.

    Args:
        groups: products of a warpgroup that run side by side before their group is closed; four take 128 bytes of K.
        ahead: products between a load from global memory and the first use of what it loads; by default all of a
            step's.
    """
    following = successors(code)
    for loop in steps(code):
        step = sorted(loop)
        for index in step:
            each = code[index]
            if each.opcode in LOCAL_MEMORY:
                yield f"{each}: local memory"
            if each.opcode in GLOBAL_LOADS:
                between = products_until_read(code, following, loop, index)
                products = sum(code[other].opcode in TENSOR_CORES for other in loop)
                if between is not None and between < (products if ahead is None else ahead):
                    yield f"{each}: read after {between} of a step's {products} products"
        yield from _faults_of_groups([code[index] for index in step], groups)


def _faults_of_groups(step: Code, groups: Set[int]) -> Iterator[str]:
    run, waited = 0, ""
    for each in step:
        if each.opcode in WARPGROUP_PRODUCTS:
            if run and waited:
                yield f"{waited} between products"
            run, waited = run + 1, ""
            if "gsb" in each.operands:
                if run not in groups:
                    yield f"{run} products in a group"
                run = 0
        elif each.opcode in WAITS:
            waited = str(each)
    if run:
        yield f"{run} products in no group"


def products_until_read(code: Code, following: list[list[int]], loop: Loop, load: int) -> int | None:
    """The fewest tensor-core instructions on a way inside the loop from a load to what reads any of its result."""
    first = re.match(r"R(\d+)", code[load].operands)
    if first is None:
        return None
    registers = range(int(first[1]), int(first[1]) + _width(code[load]))
    found = (_products_until(code, following, loop, load, register) for register in registers)
    return min((count for count in found if count is not None), default=None)


def _products_until(code: Code, following: list[list[int]], loop: Loop, load: int, register: int) -> int | None:
    fewest = {load: 0}
    todo = deque([load])
    while todo:
        index = todo.popleft()
        for each in following[index]:
            if each not in loop or each == load:
                continue
            if register in _read_by(code[each]):
                return fewest[index]
            if _writes(code[each], f"R{register}"):
                continue
            product = code[each].opcode in TENSOR_CORES
            count = fewest[index] + product
            if count < fewest.get(each, len(code)):
                fewest[each] = count
                # Nearest first: by products only.
                (todo.append if product else todo.appendleft)(each)
    return None


def _width(instruction: Instruction) -> int:
    """Registers of the data that a load or a store moves."""
    return next((count for name, count in (("128", 4), ("64", 2)) if name in instruction.name.split(".")), 1)


def _read_by(instruction: Instruction) -> set[int]:
    """Numbers of the registers that it reads, pairs and fours of them, too, but for a tensor core's matrices."""
    target, _, sources = instruction.operands.partition(",")
    stores = instruction.opcode.startswith(("ST", "RED"))
    if "[" in target or stores:
        sources = instruction.operands
    named = re.findall(r"\bR(\d+)((?:\.\w+)*)", sources)
    read = set()
    for index, (number, suffix) in enumerate(named):
        last = index == len(named) - 1
        width = 2 if ".64" in suffix or (last and "WIDE" in instruction.name.split(".")) else 1
        if stores and last:
            width = max(width, _width(instruction))
        read |= set(range(int(number), int(number) + width))
    return read


def _writes(instruction: Instruction, register: str) -> bool:
    return not instruction.guard and instruction.operands.partition(",")[0].split(".")[0] == register
