"""The kinds of instructions that a kernel has: opcodes with the qualifiers that change what is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.ptx_on_cpu.parse import Instruction, parse

_ADVICE = re.compile(r"uni|weak|ca|cg|cs|cv|nc|wb|wt|L[12]::.*|evict.*|level::.*")
"""What says how, not what: branches that all threads take, caches."""

_DEFAULTS = {
    "barrier": {"release", "acquire"},
    "cp": {"tile"},
    "red": {"relaxed", "gpu"},
    "atom": {"relaxed", "gpu"},
}
"""What an opcode means without being told."""

_SAME_IN_MODULAR_ARITHMETIC = {"add", "sub", "neg", "shl", "mul", "mad", "redux", "red", "atom"}
_ONLY_MOVED = {"mov", "ld", "st", "selp"}


def kind(i: Instruction) -> str:
    """The instruction's kind, such as ``wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3``.

    One kind are types that differ in nothing that the instruction looks at, widths N of wgmma, ``add.f32`` and
    ``add.rn.f32``, ``shared`` and ``shared::cta``. Not so wgmma with A in registers.
    """
    modifiers = [m for m in i.modifiers if not _ADVICE.fullmatch(m)]
    modifiers = [m for m in modifiers if m not in _DEFAULTS.get(i.opcode, ())]
    modifiers = [re.sub(r"^m64n\d+", "m64nN", m).replace("shared::cta", "shared") for m in modifiers]
    if i.opcode in ("add", "sub", "mul") and modifiers[-1] == "f32":
        modifiers = [m for m in modifiers if m != "rn"]
    if i.opcode in _ONLY_MOVED and modifiers:
        modifiers[-1] = re.sub(r"^[usf](?=\d+$)", "b", modifiers[-1])
    if i.opcode in _SAME_IN_MODULAR_ARITHMETIC and not {"wide", "hi", "sat", "min", "max"} & set(modifiers):
        modifiers[-1] = re.sub(r"^[usb](?=\d+$)", "s", modifiers[-1])
    if i.opcode == "setp" and modifiers[0] in ("eq", "ne"):
        modifiers[-1] = re.sub(r"^[us](?=\d+$)", "b", modifiers[-1])
    name = ".".join([i.opcode, *modifiers])
    from_registers = i.opcode == "wgmma" and "mma_async" in modifiers and i.operands[1].startswith("{")
    return f"{name} (A in registers)" if from_registers else name


def kinds(ptx: str) -> set[str]:
    """The kinds of all instructions of a module."""
    return {kind(i) for i in _instructions(ptx)}


def _instructions(ptx: str) -> Iterator[Instruction]:
    for function in parse(ptx.rstrip("\0")).functions.values():
        for statement in function.statements:
            if isinstance(statement.content, Instruction):
                yield statement.content
