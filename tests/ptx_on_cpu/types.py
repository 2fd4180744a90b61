"""Types of PTX in C: reading a register's bits as a value, and writing a value as bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ptx_on_cpu.parse import BITS

if TYPE_CHECKING:
    pass

# C functions that convert a register's bits to a floating-point value, and back.
READERS = {"f16": "f16_value", "bf16": "bf16_value", "f32": "float_of", "f64": "double_of"}
WRITERS = {"f16": "f16_from", "bf16": "bf16_from", "f32": "bits_of", "f64": "bits_of_double"}


def unsigned(kind: str) -> str:
    """The C type of a register of that PTX type."""
    return f"u{max(BITS[kind], 8)}"


def signed(kind: str) -> str:
    return f"s{max(BITS[kind], 8)}"


def is_integer(kind: str) -> bool:
    return kind[0] in "sub" and kind[1:].isdigit()


def as_value(bits: str, kind: str) -> str:
    """The C expression of the number with these bits."""
    if kind in READERS:
        return f"{READERS[kind]}({bits})"
    return f"(({signed(kind)}){bits})" if kind[0] == "s" else bits


def as_bits(value: str, kind: str) -> str:
    """The C expression of the bits that represent a number."""
    return f"{WRITERS[kind]}({value})" if kind in WRITERS else f"({unsigned(kind)})({value})"
