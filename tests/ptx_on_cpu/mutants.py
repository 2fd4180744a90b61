"""Compiles many mutants of a kernel as one program, since translation and compilation dominate the time of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.ptx_on_cpu.emulator import Program

Span = tuple[int, int]
"""Start and end of a part of a PTX text that consists of whole statements."""

_VARIABLE = "running_mutant"
_GUARD = re.compile(r"@!?\s*[\w$%]+\s*\Z")


def with_mutants(ptx: str, mutants: Sequence[Sequence[Span]]) -> str:
    """Returns the module with a conditional jump over each span, taken by the mutants that lack the span.

    A jump is inserted in the line of its span, so that line numbers do not change.

    Args:
        mutants: for each mutant, the spans that it lacks.
    """
    lacking: dict[Span, list[int]] = {}
    for number, spans in enumerate(mutants, 1):
        for span in spans:
            lacking.setdefault(_with_guard(ptx, span), []).append(number)
    inserted: list[tuple[int, bool, int, str]] = []  # at equal places: ends before starts, outer before inner starts
    for index, ((start, end), numbers) in enumerate(lacking.items()):
        label = f"BEHIND_{index}"
        jumps = " ".join(f"setp.eq.u32 %lacks, %mutant, {number}; @%lacks bra {label};" for number in numbers)
        load = f"ld.global.u32 %mutant, [{_VARIABLE}];"
        inserted.append((start, True, -end, f" {{ .reg .pred %lacks; .reg .b32 %mutant; {load} {jumps} }} "))
        inserted.append((end, False, -start, f" {label}: "))
    parts, position = [], 0
    for place, _, _, text in sorted(inserted):
        parts += [ptx[position:place], text]
        position = place
    return "".join([*parts, ptx[position:].rstrip("\0"), f"\n.global .align 4 .u32 {_VARIABLE};\n"])


def run_as(program: Program, mutant: int) -> None:
    """Selects the mutant for later launches of a program :func:`with_mutants`, counted from 1; 0 is the original."""
    program.set_variable(_VARIABLE, mutant)


def _with_guard(ptx: str, span: Span) -> Span:
    """The span including the predicate of its first instruction, which would otherwise guard the next one."""
    start, end = span
    guard = _GUARD.search(ptx, ptx.rfind("\n", 0, start) + 1, start)
    return (guard.start() if guard else start), end
