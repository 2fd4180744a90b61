"""Many mutants of a kernel in one program, since translating and compiling one takes far longer than it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.ptx_on_cpu.emulator import Program

Span = tuple[int, int]
"""Where a part of a PTX text starts and ends: whole statements."""

_VARIABLE = "running_mutant"
_GUARD = re.compile(r"@!?\s*[\w$%]+\s*\Z")


def with_mutants(ptx: str, mutants: Sequence[Sequence[Span]]) -> str:
    """The module with a jump over each span, which those mutants take that lack it.

    A jump stands in the line of its span, so that lines keep their numbers.

    Args:
        mutants: for each the parts that it lacks.
    """
    lacking: dict[Span, list[int]] = {}
    for number, spans in enumerate(mutants, 1):
        for span in spans:
            lacking.setdefault(_with_guard(ptx, span), []).append(number)
    inserted: list[tuple[int, bool, int, str]] = []  # of two at one place the one that closes first, or the outer one
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
    """Later launches of a program :func:`with_mutants` run as this one, counted from 1; 0 lacks nothing."""
    program.set_variable(_VARIABLE, mutant)


def _with_guard(ptx: str, span: Span) -> Span:
    """The span and the predicate of its first instruction, which would guard the next one without it."""
    start, end = span
    guard = _GUARD.search(ptx, ptx.rfind("\n", 0, start) + 1, start)
    return (guard.start() if guard else start), end
