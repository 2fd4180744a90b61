"""A kernel's declaration: its function, its parameters and its launch bounds.

Parameters are addresses, integers, floats and tensor maps, which are passed by value; arrays are not supported. Those
that change with each launch come first: tensor maps and int64. A kernel's module declares their types in its
:class:`Kernel`, by the names of ``device/language.py``: ``i64``, ``i32``, ``f32``, tuples of one, ``tensor_map``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from cuda_kernels.device.language import UniTuple

ARCHITECTURES = ("90a", "89", "100", "120")
"""The architectures of a kernel, unless it specifies others."""

SHARED_BYTES = {"90a": 227 * 1024, "89": 99 * 1024, "100": 227 * 1024, "120": 99 * 1024}
"""Maximum shared memory per block, by architecture (CUDA Programming Guide, "Compute Capabilities")."""

_STRUCT_CODES = {"int64": "q", "int32": "i", "float32": "f", "tensor_map": "128s"}


class KernelError(RuntimeError):
    """Kernels cannot be compiled or launched; the message contains the reason and what to install."""


def typed(kind: Any, names: str) -> dict[str, Any]:
    """The same type for each of the space-separated ``names``: ``typed(i32, "rows columns")``."""
    return dict.fromkeys(names.split(), kind)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One variant of one kernel.

    Attributes:
        name: unique among all variants, e.g. ``quantize(bfloat16, e4m3, tensor)``.
        function: kernel code; see :mod:`cuda_kernels.device.language`.
        parameters: the type of each parameter of ``function`` by name, in order: int64 for an address, int32, int64 or
            float32, a tuple of one of them, or a tensor map. Used by the compiler, and to pack a launch's arguments.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        min_blocks_per_sm: blocks that must fit on a multiprocessor of Hopper; it limits registers per thread.
        architectures: the architectures it can be compiled for.
        loaded: handles of the kernel by index of the CUDA device that it is loaded on.

    Raises:
        TypeError: If ``parameters`` do not match those of ``function``.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    threads: int
    shared_bytes: int = 0
    min_blocks_per_sm: int = 1
    architectures: tuple[str, ...] = ARCHITECTURES
    loaded: dict[int, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        names = tuple(signature(self.function).parameters)
        if tuple(self.parameters) != names:
            raise TypeError(f"{self.name} takes {', '.join(names)}; types are given for {', '.join(self.parameters)}")

    def min_blocks_on(self, arch: str) -> int:
        """Blocks that must fit on a multiprocessor of ``arch``.

        GPUs with GDDR memory need fewer bytes in flight, and their assembler uses more registers.
        """
        return self.min_blocks_per_sm if arch.startswith(("9", "10")) else max(1, self.min_blocks_per_sm - 1)

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """The name of each parameter; a tuple counts as one."""
        return tuple(self.parameters)

    @cached_property
    def parameter_kinds(self) -> tuple[str, ...]:
        """The type of each parameter; a tuple has one per element."""
        kinds: list[str] = []
        for kind in self.parameters.values():
            kinds += [kind.dtype.name] * kind.count if isinstance(kind, UniTuple) else [kind.name]
        return tuple(kinds)

    @cached_property
    def struct_codes(self) -> tuple[str, ...]:
        """The format characters of Python's ``struct`` for the parameters, in native alignment."""
        return tuple(_STRUCT_CODES[kind] for kind in self.parameter_kinds)

    @cached_property
    def param_struct(self) -> struct.Struct:
        """The parameters as a C struct."""
        return struct.Struct("@" + "".join(self.struct_codes))


def compute_capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """``"90a"`` in Numba's form: ``(9, 0, "a")``."""
    digits = arch.rstrip("af")
    number = int(digits[:-1]), int(digits[-1])
    return number if digits == arch else (*number, arch[-1])
