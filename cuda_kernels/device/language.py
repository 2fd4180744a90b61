"""The words of kernel code, in plain Python: types, instructions, device functions. None of them imports a compiler.

:mod:`cuda_kernels.lowering.compiler` gives each its meaning in Numba when a kernel is compiled. A kernel whose machine
code lies in the cache is started without Numba, LLVM or anything of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Type:
    """A type of a register or a parameter, by Numba's name for it. Called in a kernel it converts."""

    name: str


# Any, since kernels call them.
i16, i32, i64 = (Type(f"int{bits}") for bits in (16, 32, 64))  # type: Any, Any, Any
u32: Any = Type("uint32")
f32: Any = Type("float32")
void: Any = Type("void")
tensor_map: Any = Type("tensor_map")
"""A ``CUtensorMap`` that is passed to a kernel by value."""


@dataclass(frozen=True)
class UniTuple:
    """``count`` values of one type."""

    dtype: Any
    count: int


def u32x(num_registers: int) -> UniTuple:
    """The type of ``num_registers`` 32-bit registers."""
    return UniTuple(u32, num_registers)


class Cuda:
    """``numba.cuda`` inside of kernels: ``cuda.threadIdx``, ``cuda.syncthreads`` ..."""


cuda: Any = Cuda()


@dataclass(frozen=True, eq=False)
class Device:
    """A function that kernels call; it is inlined where they do."""

    function: FunctionType


def device(function: Callable[..., Any]) -> Any:
    """Decorates a function that kernels call.

    What a loop would do with registers that its index chooses is written as functions of which each has its own index,
    and which are put together one after the other: Numba unrolls no loop, and ptxas puts an array whose index varies
    into memory.
    """
    assert isinstance(function, FunctionType)
    return Device(function)


const: Any = Type("const")
"""An operand that is known when the kernel is compiled: an immediate."""


@dataclass(frozen=True, eq=False)
class Instruction:
    """One PTX template; see :func:`asm`."""

    template: str
    result: Any
    operands: tuple[Any, ...]
    pure: bool


def asm(template: str, result: Any = void, *operands: Any, pure: bool = False) -> Any:
    """A function for one PTX template.

    Args:
        template: PTX with ``$0 $1 ...`` for results and operands.
        result: the type of the result, a ``UniTuple`` for several, ``void`` for none.
        operands: a type for each operand, a ``UniTuple`` for several registers, or :data:`const`. A tuple that has the
            result's type is read and written in the same registers.
        pure: whether it may be moved, merged or dropped: it reads and writes registers only.
    """
    return Instruction(template, result, operands, pure)


@dataclass(frozen=True)
class Lowered:
    """What a module that knows LLVM makes of some arguments; the module is imported when a kernel is compiled."""

    module_name: str
    name: str
    arguments: tuple[Any, ...] = ()


def lowered(module: str, name: str) -> Callable[..., Any]:
    """Stands for the function ``name`` of ``cuda_kernels.lowering.<module>``: ``(*arguments) -> Lowered``."""
    return lambda *arguments: Lowered(f"cuda_kernels.lowering.{module}", name, arguments)
