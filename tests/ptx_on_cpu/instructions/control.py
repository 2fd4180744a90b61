"""Branches, calls, and hints for the scheduler."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import Instruction, split_operands
from tests.ptx_on_cpu.writer import Unsupported, Writer, c_name, instruction


@instruction("bra", options="uni")
def bra(w: Writer, i: Instruction) -> None:
    label = w.label(i.operands[0])
    if f"{label}:;" in w.lines:
        w.mark()
        w.emit("turn(t);")
    w.emit(f"goto {label};")


@instruction("ret", options="uni")
def ret(w: Writer, i: Instruction) -> None:
    w.emit("return;")


@instruction("exit")
def exit_(w: Writer, i: Instruction) -> None:
    w.mark()
    w.emit("rt_exit(t);")


@instruction("trap", "brkpt")
def trap(w: Writer, i: Instruction) -> None:
    w.mark()
    w.emit(f'rt_fail(t, "{i.opcode}");')


@instruction("call", options="uni")
def call(w: Writer, i: Instruction) -> None:
    """``call (result), function, (parameters);``, where each of the lists is optional."""
    operands = list(i.operands)
    result = operands.pop(0).strip("() ") if operands[0].startswith("(") else ""
    name = operands.pop(0)
    given = split_operands(operands[0].strip("() ")) if operands else ()
    if name == "__assertfail":
        w.mark()
        w.emit('rt_fail(t, "an assertion of the kernel failed");')
        return
    function = w.unit.module.functions.get(name)
    if function is None:
        raise Unsupported(f"a call of {name}")
    size = max((p.offset + p.size for p in function.parameters), default=8)
    with w.braces():
        w.emit(f"u8 arguments[{size}] __attribute__((aligned(16)));")
        for parameter, argument in zip(function.parameters, given):
            w.emit(f"memcpy(arguments + {parameter.offset}, {w.register(argument).name}, {parameter.size});")
        w.emit(f"{c_name('f_' + name)}(t, arguments, {w.register(result).name if result else 'NULL'});")


@instruction("nanosleep", types="u32")
def nanosleep(w: Writer, i: Instruction) -> None:
    w.mark()
    w.emit('rt_spin(t, "nanosleep");')


@instruction("griddepcontrol", options="launch_dependents wait")
def griddepcontrol(w: Writer, i: Instruction) -> None:
    """No-op: kernels run one after another in the emulator."""
