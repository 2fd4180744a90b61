"""A kernel as it is declared: its source, its parameters, its launch bounds.

Kernels take tensor maps, addresses, integers and floats, never arrays; what differs from start to start comes first:
maps, and int64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cuda_kernels.device.language import UniTuple

ARCHITECTURES = ("90a", "89", "100", "120")
"""Those that kernels are for which say nothing else."""

_FORMATS = {"int64": "q", "int32": "i", "float32": "f", "tensor_map": "128s"}


class KernelError(RuntimeError):
    """Kernels cannot be compiled or started here; the message says why and what to install."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One variant of one kernel.

    Attributes:
        name: tells it from every other variant, e.g. ``quantize(bfloat16, e4m3, tensor)``.
        function: kernel code; see :mod:`cuda_kernels.device.language`.
        parameters: a type for each parameter: int64 for an address, int32, int64 or float32, a tuple of one of them, or
            a tensor map.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        blocks_per_multiprocessor: how many shall fit side by side on Hopper; limits the registers of a thread.
        cluster: how many run as one cluster; the kernel's code says so too.
        architectures: which it is for.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[Any, ...]
    threads: int
    shared_bytes: int = 0
    blocks_per_multiprocessor: int = 1
    cluster: int = 1
    architectures: tuple[str, ...] = ARCHITECTURES
    _loaded: dict[int, int] = field(default_factory=dict, repr=False)

    def blocks_side_by_side(self, arch: str) -> int:
        """How many blocks shall fit into a multiprocessor of ``arch``.

        Cards with GDDR memory need fewer bytes in flight, and the assembler for them spends more registers.
        """
        return (
            self.blocks_per_multiprocessor
            if arch.startswith(("9", "10"))
            else max(1, self.blocks_per_multiprocessor - 1)
        )

    @cached_property
    def parameter_kinds(self) -> tuple[str, ...]:
        """The type of each parameter, those of tuples one by one."""
        kinds: list[str] = []
        for each in self.parameters:
            kinds += [each.dtype.name] * each.count if isinstance(each, UniTuple) else [each.name]
        return tuple(kinds)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """Those of the module ``struct`` for the parameters, in native alignment."""
        return tuple(_FORMATS[kind] for kind in self.parameter_kinds)

    @cached_property
    def layout(self) -> struct.Struct:
        """The parameters as a C struct."""
        return struct.Struct("@" + "".join(self.formats))


def compute_capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """``"90a"`` as Numba wants it: ``(9, 0, "a")``."""
    digits = arch.rstrip("af")
    number = int(digits[:-1]), int(digits[-1])
    return number if digits == arch else (*number, arch[-1])
