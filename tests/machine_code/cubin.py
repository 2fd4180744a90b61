"""What machine code says of its own launch: the ``.nv.info`` sections of a cubin, an ELF file.

The numbers of attributes are those that NVIDIA's disassembler names; a test compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

ATTRIBUTES = {
    "EIATTR_MAX_THREADS": 0x05,
    "EIATTR_PARAM_CBANK": 0x0A,
    "EIATTR_FRAME_SIZE": 0x11,
    "EIATTR_KPARAM_INFO": 0x17,
    "EIATTR_REGCOUNT": 0x2F,
}
_FORMAT_SIZED = 4  # EIFMT_SVAL: two bytes of size, and then the value


@dataclass(frozen=True)
class Entry:
    """A kernel as the driver starts it.

    Attributes:
        parameters: offset and size of each, in bytes, from the first one's place in the constant bank on.
        parameter_bytes: all of them.
        threads: of a block, at most.
        registers: of a thread at entry.
        stack_bytes: of a thread.
    """

    parameters: tuple[tuple[int, int], ...]
    parameter_bytes: int
    threads: int
    registers: int
    stack_bytes: int


def entry_of(cubin: bytes) -> Entry:
    """Of the one kernel in it."""
    sections = dict(_sections(cubin))
    (own,) = (content for name, content in sections.items() if name.startswith(".nv.info."))
    found: dict[int, list[bytes]] = {}
    for attribute, value in (*_attributes(sections[".nv.info"]), *_attributes(own)):
        found.setdefault(attribute, []).append(value)

    def words(name: str) -> list[tuple[int, ...]]:
        """Of each occurrence; what stands in ``.nv.info`` does so for each function, after its symbol."""
        return [struct.unpack(f"<{len(value) // 4}I", value) for value in found.get(ATTRIBUTES[name], [])]

    parameters = {}
    for value in found.get(ATTRIBUTES["EIATTR_KPARAM_INFO"], []):
        _, ordinal, offset, rest = struct.unpack("<IHHI", value)
        parameters[ordinal] = offset, rest >> 18
    (constants,) = found[ATTRIBUTES["EIATTR_PARAM_CBANK"]]
    (threads,) = words("EIATTR_MAX_THREADS")
    assert threads[1:] == (1, 1)
    return Entry(
        tuple(parameters[index] for index in range(len(parameters))),
        struct.unpack("<IHH", constants)[2],
        threads[0],
        max(registers for _, registers in words("EIATTR_REGCOUNT")),
        max(size for _, size in words("EIATTR_FRAME_SIZE")),
    )


def code_of_entry(cubin: bytes) -> bytes:
    """The instructions of the one kernel in it."""
    (code,) = (content for name, content in _sections(cubin) if name.startswith(".text."))
    return code


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<II4Q", elf, table + index * size) for index in range(count)]
    first = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = first + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + length]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        end = at + 4 + (size if kind == _FORMAT_SIZED else 0)
        yield attribute, info[at + 4 : end] if kind == _FORMAT_SIZED else info[at + 2 : end]
        at = end
