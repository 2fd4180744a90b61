"""The machine code that a kernel is compiled to."""

from __future__ import annotations

from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.emulated import compiled
from tests.machine_code import sass


def code_of(kernel: Kernel, arch: str = "90a") -> list[sass.Instruction]:
    """The instructions of ``kernel`` for ``arch``, by NVIDIA's disassembler."""
    return sass.parsed(sass.disassembled(compiled(kernel, arch)[1]))
