"""Writes the C function of a PTX function: its scopes, registers and operands. See `instructions` for instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tests.ptx_on_cpu.accumulators import accumulators_of
from tests.ptx_on_cpu.parse import BITS, Function, Instruction, Label, Module, Registers, Scope, Statement, Variable
from tests.ptx_on_cpu.types import READERS, WRITERS, as_value, signed, unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMETERS_BASE = 0x400  # the runtime's PARAMETERS_BASE

_SPECIAL_REGISTERS = {
    "%laneid": "t->lane",
    "%warpid": "t->warp->id",
    "WARP_SZ": "32",
    "%lanemask_eq": "(1u << t->lane)",
    "%lanemask_lt": "((1u << t->lane) - 1)",
    "%lanemask_le": "((2u << t->lane) - 1)",
    "%lanemask_ge": "(-(1u << t->lane))",
    "%lanemask_gt": "(-(2u << t->lane))",
    "%cluster_ctarank": "t->block->rank",
    "%cluster_nctarank": "(t->launch->cluster[0] * t->launch->cluster[1] * t->launch->cluster[2])",
    "%dynamic_smem_size": "t->launch->dynamic_shared",
}
for _i, _axis in enumerate("xyz"):
    _SPECIAL_REGISTERS |= {
        f"%tid.{_axis}": f"t->tid[{_i}]",
        f"%ntid.{_axis}": f"t->launch->block[{_i}]",
        f"%ctaid.{_axis}": f"t->block->id[{_i}]",
        f"%nctaid.{_axis}": f"t->launch->grid[{_i}]",
        f"%clusterid.{_axis}": f"(t->block->id[{_i}] / t->launch->cluster[{_i}])",
        f"%nclusterid.{_axis}": f"(t->launch->grid[{_i}] / t->launch->cluster[{_i}])",
        f"%cluster_ctaid.{_axis}": f"(t->block->id[{_i}] % t->launch->cluster[{_i}])",
        f"%cluster_nctaid.{_axis}": f"t->launch->cluster[{_i}]",
    }


class Unsupported(Exception):
    """An instruction needs what the emulator does not support."""


def c_name(ptx_name: str) -> str:
    return re.sub(r"\W", "_", ptx_name)


@dataclass(frozen=True)
class Register:
    name: str
    type: str
    number: int | None = None  # the index of a register that may hold the result of a wgmma in flight


@dataclass
class Unit:
    """State shared by the functions of a module."""

    module: Module
    shared_offsets: dict[str, int] = field(default_factory=dict)
    global_names: set[str] = field(default_factory=set)
    uses_cp_async: bool = False
    uses_async_proxy: bool = False


Handler = Callable[["Writer", Instruction], None]
HANDLERS: dict[str, Handler] = {}


def instruction(*opcodes: str, types: str = "", options: str = "") -> Callable[[Handler], Handler]:
    """Registers the translation of `opcodes`.

    Args:
        types: values that the last modifier may have; "" if the opcode has no type.
        options: patterns of the other modifiers. A modifier that matches none raises :class:`Unsupported`.
    """

    def register(handler: Handler) -> Handler:
        def checked(writer: Writer, i: Instruction) -> None:
            others = i.modifiers
            if types:
                if not others or others[-1] not in types.split():
                    raise Unsupported(f"{i.opcode} of this type")
                others = others[:-1]
            for modifier in others:
                if not any(fnmatchcase(modifier, option) for option in options.split()):
                    raise Unsupported(f"{i.opcode} with .{modifier}")
            handler(writer, i)

        for opcode in opcodes:
            HANDLERS[opcode] = checked
        return handler

    return register


class Writer:
    """Translates one function. Handlers call `emit`, `bits`, `value`, `assign` and `address`."""

    def __init__(self, unit: Unit, function: Function) -> None:
        self.unit = unit
        self.function = function
        self.lines: list[str] = []
        self.accumulators = accumulators_of(function)
        self.declarations = self.accumulators.declarations
        self.depot_bytes = 0
        self.line = 0
        self._scopes: list[tuple[int, dict[str, Register]]] = [(0, {})]
        self._scopes_opened = 0
        self._locals: dict[str, int] = {}
        self._labels = self._collect_labels()

    def _collect_labels(self) -> set[tuple[int, str]]:
        """The labels with their scopes. They are collected first, since jumps may precede them."""
        labels, stack, opened = set(), [0], 0
        for statement in self.function.statements:
            if isinstance(statement.content, Scope):
                if statement.content.opens:
                    opened += 1
                    stack.append(opened)
                else:
                    stack.pop()
            elif isinstance(statement.content, Label):
                labels.add((stack[-1], statement.content.name))
        return labels

    # Statements

    def write(self, statement: Statement) -> None:
        """Translates a statement. Raises :class:`Unsupported`."""
        self.line = statement.line
        content = statement.content
        if isinstance(content, Instruction):
            self._instruction(content)
        elif isinstance(content, Registers):
            for name in content.names:
                self._declare(name, content.type)
        elif isinstance(content, Variable):
            self._variable(content)
        elif isinstance(content, Label):
            self.lines.append(f"{self._c_label(self._scopes[-1][0], content.name)}:;")
        elif content.opens:
            self._scopes_opened += 1
            self._scopes.append((self._scopes_opened, {}))
        else:
            self._scopes.pop()

    def _instruction(self, i: Instruction) -> None:
        handler = HANDLERS.get(i.opcode)
        if handler is None:
            raise Unsupported(f"instruction {i.opcode}")
        if not i.guard:
            handler(self, i)
            return
        with self.braces(f"if ({self.predicate(i.guard)})"):
            handler(self, i)

    def _declare(self, name: str, kind: str) -> None:
        scope, registers = self._scopes[-1]
        number = self.accumulators.numbers.get(name)
        if number is not None and BITS[kind] == 32:
            registers[name] = Register(f"accumulator_registers[{number}]", kind, number)
            return
        register = Register(f"r{scope}_{c_name(name)}", kind)
        registers[name] = register
        self.declarations.append(f"    {unsigned(kind)} {register.name} = 0;")

    def _variable(self, variable: Variable) -> None:
        if variable.size is None:
            raise Unsupported("a variable without a size")
        if variable.space == "local":
            self.depot_bytes = -(-self.depot_bytes // variable.align) * variable.align
            self._locals[variable.name] = self.depot_bytes
            self.depot_bytes += variable.size
        elif variable.space == "param":
            scope, registers = self._scopes[-1]
            name = f"p{scope}_{c_name(variable.name)}"
            registers[variable.name] = Register(name, "param")
            self.declarations.append(f"    u8 {name}[{max(variable.size, 8)}] __attribute__((aligned(16)));")
        else:
            raise Unsupported("shared variables inside of a function")

    def label(self, name: str) -> str:
        for scope, _ in reversed(self._scopes):
            if (scope, name) in self._labels:
                return self._c_label(scope, name)
        raise Unsupported(f"label {name} is not known here")

    @staticmethod
    def _c_label(scope: int, name: str) -> str:
        return f"L{scope}_{c_name(name)}"

    # Output

    def emit(self, *lines: str) -> None:
        self.lines += [f"    {line}" for line in lines]

    def mark(self) -> None:
        """Sets the line for messages. Called before operations that may fail or wait."""
        self.emit(f"t->line = {self.line};")

    @contextmanager
    def braces(self, head: str = "") -> Iterator[None]:
        self.emit(f"{head} {{".strip())
        yield
        self.emit("}")

    # Operands

    def find(self, name: str) -> Register | None:
        return next((registers[name] for _, registers in reversed(self._scopes) if name in registers), None)

    def register(self, name: str) -> Register:
        register = self.find(name)
        if register is None:
            raise Unsupported(f"register {name} is not declared")
        return register

    def predicate(self, operand: str) -> str:
        """The C condition of ``p``, ``!p`` or an immediate."""
        if operand.startswith("!"):
            return f"!{self.predicate(operand[1:].strip())}"
        if re.fullmatch(r"-?\d+", operand):
            return str(int(int(operand) != 0))
        return self.register(operand).name

    def _symbol(self, name: str) -> str:
        """The address of a variable or parameter."""
        if name in self._locals:
            return f"(u64)(depot + {self._locals[name]})"
        if name in self.unit.shared_offsets:
            return f"(t->block->first_shared + {self.unit.shared_offsets[name]})"
        if name in self.unit.global_names:
            return f"(u64){c_name('g_' + name)}"
        for parameter in self.function.parameters:
            if parameter.name == name and self.function.is_entry:
                return f"{PARAMETERS_BASE + parameter.offset}ull"
            if parameter.name == name:
                return f"(u64)(parameters + {parameter.offset})"
        raise Unsupported(f"operand {name}")

    def bits(self, operand: str, kind: str) -> str:
        """A C expression of the operand's bits, unsigned and as wide as `kind`."""
        special = _SPECIAL_REGISTERS.get(operand)
        if special:
            return f"(({unsigned(kind)})({special}))"
        register = self.find(operand)
        if register and register.type == "param":
            return f"(u64){register.name}"
        if register:
            name = register.name
            if register.number is not None:
                name = f"settled(t, &accumulators, {register.number}, {self.line})"
            return name if BITS[register.type] == BITS[kind] else f"(({unsigned(kind)}){name})"
        exact = re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand)
        if exact:
            return f"0x{exact[1]}u" if exact[1] else f"0x{exact[2]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", operand):
            value = int(operand.rstrip("U"), 0) % (1 << BITS[kind])
            return f"(({unsigned(kind)}){value:#x}ull)"
        if kind in ("f32", "f64") and re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", operand):
            return f"{WRITERS[kind]}({operand})"
        return self.symbol_with_offset(operand)

    def copied(self, operand: str, kind: str) -> str:
        """Like :meth:`bits`, for a mov, which may copy a register of a wgmma in flight."""
        register = self.find(operand)
        accumulates = register and register.number is not None and BITS[kind] == 32
        return register.name if register and accumulates else self.bits(operand, kind)

    def symbol_with_offset(self, operand: str) -> str:
        name, offset = _base_and_offset(operand)
        return f"({self._symbol(name)} + ({offset}))" if offset else self._symbol(name)

    def parameter(self, operand: str) -> str:
        """The C pointer of ``[name + offset]`` in the parameter space of a call, of the result, or of the function."""
        name, offset = _base_and_offset(operand.strip("[] "))
        register = self.find(name)
        if register and register.type == "param":
            return f"{register.name} + {offset}"
        if register:
            return f"(u8 *)rt_parameter_to_generic(t, {self.bits(name, 'u64')} + {offset})"
        for prefix, parameters in (("result", self.function.results), ("parameters", self.function.parameters)):
            for parameter in parameters:
                if parameter.name == name:
                    return f"{prefix} + {parameter.offset + offset}"
        raise Unsupported(f"parameter {name}")

    def value(self, operand: str, kind: str) -> str:
        """A C expression of the operand's value: a number of that PTX type."""
        return as_value(self.bits(operand, kind), kind)

    def halves(self, operand: str, kind: str) -> tuple[str, str]:
        """The two values of an operand of type f16x2, bf16x2 or f32x2, low half first."""
        reader, bits, width = READERS[kind[:-2]], self.bits(operand, kind), BITS[kind] // 2
        return f"{reader}((u{width}){bits})", f"{reader}((u{width})({bits} >> {width}))"

    def assign(self, register: str, kind: str, expression: str) -> None:
        """Sets a register to a number of type `kind`, sign-extended if the register is wider."""
        if register == "_":
            self.emit(f"(void)({expression});")
            return
        target = self.register(register)
        if kind in WRITERS:
            expression = f"{WRITERS[kind]}({expression})"
        elif kind == "pred" or target.type == "pred":
            expression = f"({expression}) != 0"
        elif kind[0] == "s":
            expression = f"({signed(kind)})({expression})"
        else:
            expression = f"({unsigned(kind)})({expression})"
        self.emit(f"{target.name} = {expression};")

    def assign_halves(self, register: str, kind: str, low: str, high: str) -> None:
        writer, width = WRITERS[kind[:-2]], BITS[kind]
        self.assign(register, f"b{width}", f"(u{width}){writer}({low}) | (u{width}){writer}({high}) << {width // 2}")

    def address(self, operand: str) -> str:
        """The C expression of type u64 of ``[register + offset]``."""
        name, offset = _base_and_offset(operand.strip("[] "))
        base = self.bits(name, "u64")
        return f"({base} + ({offset}ll))" if offset else base

    @staticmethod
    def vector(operand: str) -> list[str]:
        """The elements of ``{a, b}``, or the operand alone."""
        return [x.strip() for x in operand.strip("{} ").split(",")]


def _base_and_offset(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?", text.strip())
    if not match:
        raise Unsupported(f"operand {text}")
    offset = int(match[3], 0) if match[3] else 0
    return match[1], -offset if match[2] == "-" else offset
