"""From kernel code to machine code: :mod:`cuda_kernels.device.language` in Numba's terms, compiled and linked.

Imported only when a kernel has to be compiled.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.cgutils import pack_array, unpack_tuple
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import core_models, intrinsic, register_model
from numba.cuda.typing import signature as numba_signature

from cuda_kernels.device.language import Cuda, Device, Instruction, Lowered, Type, UniTuple, const
from cuda_kernels.kernel import Kernel, compute_capability
from cuda_kernels.references import references

try:
    from cuda_kernels.lowering.inlining import fast_inlining
except ImportError as error:
    fast_inlining = nullcontext  # type: ignore[assignment]
    warnings.warn(f"kernels compile up to five times slower: {error}", stacklevel=1)

try:
    from cuda_kernels.lowering.repeats import fewer_repeats
except ImportError as error:
    fewer_repeats = nullcontext  # type: ignore[assignment]
    warnings.warn(f"kernels compile up to two times slower: {error}", stacklevel=1)

if not hasattr(np, "row_stack"):  # gone with NumPy 2.5; numba-cuda 0.30.4 asks for it before it compiles anything
    np.row_stack = np.vstack

# --- Words in Numba's terms -------------------------------------------------------------------------------------------


class _TensorMap(types.Type):  # type: ignore[misc]
    pass


TENSOR_MAP = ir.ArrayType(ir.IntType(64), 16)
"""A ``CUtensorMap``; kernels have its address."""


@register_model(_TensorMap)
class _TensorMapModel(core_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, TENSOR_MAP.as_pointer())


_tensor_map = _TensorMap("tensor_map")


def type_of(kind: Type | UniTuple) -> Any:
    """Numba's type."""
    if isinstance(kind, UniTuple):
        return types.UniTuple(type_of(kind.dtype), kind.count)
    return _tensor_map if kind.name == "tensor_map" else getattr(types, kind.name)


def in_numba(word: Any) -> Any:
    """What Numba takes for a word of kernel code; for anything else the thing itself."""
    if isinstance(word, Cuda):
        return cuda
    if isinstance(word, (Device, Instruction, Lowered)):
        return _made(word)
    return type_of(word) if isinstance(word, (Type, UniTuple)) else word


@cache
def _made(word: Device | Instruction | Lowered) -> Any:
    if isinstance(word, Device):
        return cuda.jit(device=True, inline="always", debug=False, opt=True)(_function_in_numba(word.function))
    if isinstance(word, Instruction):
        return _instruction(word)
    return getattr(import_module(word.module_name), word.name)(*word.arguments)


def _function_in_numba(function: FunctionType) -> FunctionType:
    """``function`` with what it names replaced."""
    named = {name: in_numba(value) for name, value in references(function).items()}
    closure = tuple(CellType(named[name]) for name in function.__code__.co_freevars)
    scope = {"__name__": function.__module__, "__builtins__": __builtins__, **named}
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    made.__qualname__ = function.__qualname__
    return made


def signature(result: Any, *operands: Any) -> Any:
    """Numba's signature of kernel code's types."""
    return numba_signature(
        *(type_of(kind) if isinstance(kind, (Type, UniTuple)) else kind for kind in (result, *operands))
    )


def intrinsic_of(name: str, arity: int, typing: Any) -> Any:
    """An intrinsic of ``arity`` operands; Numba reads their number from the signature."""
    operands = [Parameter(f"x{index}", Parameter.POSITIONAL_OR_KEYWORD) for index in range(arity)]
    typing.__signature__ = Signature([Parameter("context", Parameter.POSITIONAL_OR_KEYWORD), *operands])
    typing.__name__ = name
    return intrinsic(typing)


_REGISTER = {"i16": "h", "i32": "r", "i64": "l", "float": "f"}


def inline(
    builder: Any,
    template: str,
    result: Any,
    constraints: str,
    operands: Sequence[Any],
    *,
    pure: bool = False,
    convergent: bool = True,
) -> Any:
    """A call of inline assembly.

    Args:
        result: an LLVM type.
        pure: it reads and writes registers only, and may be moved, merged or dropped.
        convergent: threads do it together (barriers, votes, products of warps): it may not be moved to where only some
            of them come by.
    """
    code = ir.InlineAsm(
        ir.FunctionType(result, [value.type for value in operands]),
        template,
        constraints if pure else ",".join(filter(None, (constraints, "~{memory}"))),
        side_effect=not pure,
    )
    return builder.call(code, list(operands), attrs=("convergent",) if convergent else ())


def _instruction(word: Instruction) -> Any:
    """The intrinsic for a PTX template."""
    result = type_of(word.result)
    operands = [const if kind is const else type_of(kind) for kind in word.operands]
    results = [] if result is types.void else list(result) if isinstance(result, types.BaseTuple) else [result]

    def lower(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        constraints = ["=" + _REGISTER[str(context.get_value_type(kind))] for kind in results]
        inputs: list[Any] = []
        for operand, kind, value in zip(operands, sig.args, args):
            if operand is const:
                constraints.append("n")
                inputs.append(ir.IntType(32)(kind.literal_value))
                continue
            parts = unpack_tuple(builder, value) if isinstance(operand, types.BaseTuple) else [value]
            tied = isinstance(operand, types.BaseTuple) and operand == result
            constraints += [str(index) if tied else _REGISTER[str(part.type)] for index, part in enumerate(parts)]
            inputs += parts
        result_types = [context.get_value_type(kind) for kind in results]
        returned = ir.LiteralStructType(result_types) if len(results) > 1 else (result_types or [ir.VoidType()])[0]
        value = inline(
            builder, word.template, returned, ",".join(constraints), inputs, pure=word.pure, convergent=not word.pure
        )
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return value
        return pack_array(builder, [builder.extract_value(value, index) for index in range(len(results))])

    def typing(typingctx: Any, *args: Any) -> Any:
        known = (isinstance(arg, types.IntegerLiteral) for operand, arg in zip(operands, args) if operand is const)
        if all(known):
            return numba_signature(result, *(arg if op is const else op for op, arg in zip(operands, args))), lower
        return None

    return intrinsic_of(word.template.strip("{ ").split()[0], len(operands), typing)


# --- Compiling --------------------------------------------------------------------------------------------------------


class _ForNVVM(NamedTuple):
    """What Numba makes of a kernel: LLVM's intermediate representation, which names no architecture, and options."""

    kernel: Kernel
    launch_bounds: tuple[int, int]
    arch: str
    modules: list[str]
    options: dict[str, Any]


_last: list[_ForNVVM] = []
"""Of the kernel that was compiled last, if any."""
_compiling = threading.Lock()


def ltoir(kernel: Kernel, arch: str) -> bytes:
    """``kernel`` for ``arch`` (``"90a"``), before link-time optimization; the slow step.

    Nearly all of its time goes into what Numba makes for NVVM. Where that was made last, for another architecture with
    the same launch bounds, it is taken again: the code differs in nothing but the names that Numba gives to functions.
    """
    launch_bounds = kernel.threads, kernel.min_blocks_on(arch)
    with _compiling:
        for last in _last:
            if (last.kernel, last.launch_bounds) == (kernel, launch_bounds) and last.arch != arch:
                return bytes(nvvm.compile_ir(last.modules, **last.options, arch=f"compute_{arch}"))
        _last.clear()
        with _noting_what_nvvm_gets() as noted:
            code = _compiled(kernel, arch, launch_bounds)
        _last.extend(_ForNVVM(kernel, launch_bounds, arch, *each) for each in noted if len(noted) == 1)
    return code


@contextmanager
def _noting_what_nvvm_gets() -> Iterator[list[tuple[list[str], dict[str, Any]]]]:
    noted: list[tuple[list[str], dict[str, Any]]] = []
    compile_ir = nvvm.compile_ir

    def noting(modules: list[str], **options: Any) -> Any:
        noted.append((modules, {name: value for name, value in options.items() if name != "arch"}))
        return compile_ir(modules, **options)

    nvvm.compile_ir = noting
    try:
        yield noted
    finally:
        nvvm.compile_ir = compile_ir


def _compiled(kernel: Kernel, arch: str, launch_bounds: tuple[int, int]) -> bytes:
    assert isinstance(kernel.function, FunctionType)
    with fast_inlining(), fewer_repeats(), _without_garbage_collection():
        code, _ = cuda.compile(
            _function_in_numba(kernel.function),
            types.void(*(type_of(kind) for kind in kernel.parameters.values())),
            device=False,
            abi="numba",
            cc=compute_capability(arch),
            launch_bounds=launch_bounds,
            debug=False,  # whatever Numba's environment variables say: they are not in the key
            opt=True,
            output="ltoir",
        )
    return bytes(code)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Numba makes hundreds of thousands of objects for a kernel. Python's collector, which they set off, would walk all
    objects of the process each time, those of torch and of the model, too: a fifth to a third of the compilation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def link(ltoir: bytes, arch: str, target: str) -> tuple[bytes, str]:
    """Link-time optimize to ``"cubin"`` or ``"ptx"``; also what the assembler reported of registers and spills.

    Only this way keeps ``setmaxnreg``: the assembler inside nvJitLink drops it when it is given PTX.
    """
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
    except ImportError:  # cuda-core before 0.5
        from cuda.core.experimental import Linker, LinkerOptions, ObjectCode
    options = {"ptx": True} if target == "ptx" else {"ptxas_options": ["-v"]}
    linker = Linker(
        ObjectCode.from_ltoir(ltoir),
        options=LinkerOptions(arch=f"sm_{arch}", link_time_optimization=True, **options),
    )
    code = bytes(linker.link(target).code)
    return code, linker.get_info_log().rstrip("\0")
