"""A kernel as it is declared: its source, its parameters, its launch bounds; and its machine code, kept on disk.

Kernels take tensor maps, addresses, integers and floats, never arrays; what differs from start to start comes first:
maps, and int64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cuda_kernels.cache import cached, carried, compilers
from cuda_kernels.fingerprint import code_fingerprint, fingerprint, source_of_module
from cuda_kernels.language import UniTuple

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
        function: kernel code; see :mod:`cuda_kernels.language`.
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

    def cubin(self, arch: str) -> bytes:
        """Machine code for ``arch``: carried from elsewhere, or as :meth:`built`.

        Raises:
            KernelError: as :meth:`built`.
            ImportError: it has to be compiled, and a compiler is missing.
        """
        self._check(arch)
        found = carried(self.source_key("cubin", arch), f"{self.name} for sm_{arch}")
        return found if found is not None else self.built(arch)

    def built(self, arch: str) -> bytes:
        """Machine code for ``arch`` by the compilers here: from the cache, or compiled and put there.

        Raises:
            KernelError: it is not for ``arch``, or what the compilers made of it breaks what a launch relies on.
            ImportError: a compiler is missing.
        """
        self._check(arch)
        return cached(self.key("cubin", arch), lambda: self._compiled(arch))

    def _check(self, arch: str) -> None:
        if arch not in self.architectures:
            raise KernelError(f"{self.name} is for sm_{', sm_'.join(self.architectures)}, not for sm_{arch}")

    def _compiled(self, arch: str) -> bytes:
        from cuda_kernels import compiler

        code, report = compiler.link(compiler.ltoir(self, arch), arch, "cubin")
        # Where the annotations of tensor maps by value are lost, a kernel copies them to its stack, and the tensor
        # memory accelerator reads an address that is none.
        if "tensor_map" in self.parameter_kinds and " 0 bytes stack frame" not in report:
            raise KernelError(f"{self.name}, compiled for sm_{arch}, does not read its tensor maps in place: {report}")
        return code

    def key(self, what: str, arch: str) -> str:
        """Under which ``what`` is made of this kernel is kept; another one when its source or a compiler changes."""
        return _hashed(f"{self.source_key(what, arch)} {code_fingerprint(self.function)} {compilers()}")

    def source_key(self, what: str, arch: str) -> str:
        """The same, whatever compiles it."""
        bounds = (
            self.parameters,
            self.threads,
            self.blocks_side_by_side(arch),
            source_of_module("cuda_kernels.compiler"),
        )
        return _hashed(f"{what} {arch} {self.name} {bounds} {self._fingerprint}")

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.function)

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


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def compute_capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """``"90a"`` as Numba wants it: ``(9, 0, "a")``."""
    digits = arch.rstrip("af")
    number = int(digits[:-1]), int(digits[-1])
    return number if digits == arch else (*number, arch[-1])
