"""The language of kernel code in plain Python: types, instructions, device functions. It imports no compiler.

:mod:`cuda_kernels.lowering.compiler` translates it to Numba when a kernel is compiled. Launching a cached kernel
imports neither Numba nor LLVM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Type:
    """A type of a register or a parameter, with Numba's name. In a kernel, calling it converts a value."""

    name: str


# Typed as Any, since kernels call them.
i32, i64 = Type("int32"), Type("int64")  # type: Any, Any
u32: Any = Type("uint32")
f32: Any = Type("float32")
void: Any = Type("void")
tensor_map: Any = Type("tensor_map")
"""A ``CUtensorMap`` passed to a kernel by value."""


@dataclass(frozen=True)
class UniTuple:
    """``count`` values of one type."""

    dtype: Any
    count: int


def u32x(num_registers: int) -> UniTuple:
    """The type of ``num_registers`` 32-bit registers."""
    return UniTuple(u32, num_registers)


class Cuda:
    """``numba.cuda`` in kernels: ``cuda.threadIdx``, ``cuda.syncthreads``, ..."""


cuda: Any = Cuda()


@dataclass(frozen=True, eq=False)
class Device:
    """A function called by kernels; it is inlined."""

    function: FunctionType


def device(function: Callable[..., Any]) -> Any:
    """Decorator of functions called by kernels.

    Loops that index registers must be written as a chain of functions with one constant index each: Numba does not
    unroll loops, and ptxas places arrays with a variable index in local memory.
    """
    assert isinstance(function, FunctionType)
    return Device(function)


const: Any = Type("const")
"""An operand that is constant when the kernel is compiled: an immediate."""


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
        result: the type of the result; a ``UniTuple`` for several, ``void`` for none.
        operands: the type of each operand, a ``UniTuple`` for several registers, or :data:`const`. A tuple of the
            result's type is read and written in the same registers.
        pure: whether it only reads and writes registers, so that it can be moved, merged or removed.
    """
    return Instruction(template, result, operands, pure)


@dataclass(frozen=True)
class Lowered:
    """A function that generates LLVM IR from ``arguments``; its module is imported when a kernel is compiled."""

    module_name: str
    name: str
    arguments: tuple[Any, ...] = ()


def lowered(module: str, name: str) -> Callable[..., Any]:
    """A stand-in for the function ``name`` of ``cuda_kernels.lowering.<module>``: ``(*arguments) -> Lowered``."""
    return lambda *arguments: Lowered(f"cuda_kernels.lowering.{module}", name, arguments)
