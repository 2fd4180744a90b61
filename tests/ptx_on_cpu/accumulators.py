"""Finds the registers of a function that may hold the result of a wgmma in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.ptx_on_cpu.parse import BITS, Function, Instruction, Registers


@dataclass(frozen=True)
class Accumulators:
    """Indices of registers in the array of accumulators: first those that a wgmma writes, then copies of them."""

    numbers: dict[str, int] = field(default_factory=dict)
    written: int = 0

    @property
    def declarations(self) -> list[str]:
        """C declarations for the start of the function."""
        if not self.numbers:
            return []
        return [
            f"    u32 accumulator_registers[{len(self.numbers)}] = {{0}};",
            f"    Result results[{self.written}] = {{0}};",
            f"    Accumulators accumulators = {{accumulator_registers, results, {len(self.numbers)}, {self.written}}};",
        ]


def accumulators_of(function: Function) -> Accumulators:
    """Copies are the targets of 32-bit movs, anywhere in the function."""
    written: dict[str, None] = {}
    movs: dict[str, set[str]] = {}
    declared: Counter[str] = Counter()
    for statement in function.statements:
        content = statement.content
        if isinstance(content, Registers) and BITS[content.type] == 32:
            declared.update(content.names)
        elif isinstance(content, Instruction) and content.opcode == "wgmma" and content.has("mma_async"):
            written |= dict.fromkeys(name.strip() for name in content.operands[0].strip("{} ").split(","))
        elif isinstance(content, Instruction) and content.opcode == "mov" and BITS.get(content.type) == 32:
            target, source = content.operands
            movs.setdefault(source, set()).add(target)
    numbers = {name: number for number, name in enumerate(written)}
    reached = list(written)
    while reached:
        for target in sorted(movs.get(reached.pop(), ())):
            # A name that several scopes declare is ambiguous here: reading an accumulator into it counts as an access.
            if target not in numbers and declared[target] == 1:
                numbers[target] = len(numbers)
                reached.append(target)
    return Accumulators(numbers, len(written))
