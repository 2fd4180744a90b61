"""Parses PTX text into modules, functions and statements."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from tests.ptx_on_cpu.errors import EmulatorError

BITS = {
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "pred": 1,
}


@dataclass(frozen=True)
class Variable:
    """A variable of a module, or of a function's local or parameter space."""

    name: str
    space: str
    type: str
    align: int
    size: int | None  # in bytes; None for dynamic shared memory, which the launch sizes
    data: bytes = b""


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    offset: int
    size: int


@dataclass(frozen=True)
class Registers:
    """``.reg .f32 %f<4>;`` or ``.reg .pred p, q;``: the declared names."""

    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    """A brace. Declarations are visible only up to the matching closing brace."""

    opens: bool


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # a predicate, with "!" before it if it is negated; "" if there is none

    @property
    def type(self) -> str:
        return self.modifiers[-1]

    def has(self, *modifiers: str) -> bool:
        return any(m in self.modifiers for m in modifiers)

    def one_of(self, *modifiers: str) -> str | None:
        return next((m for m in self.modifiers if m in modifiers), None)


@dataclass(frozen=True)
class Statement:
    line: int
    text: str
    content: Registers | Variable | Label | Scope | Instruction


@dataclass
class Function:
    name: str
    is_entry: bool
    results: list[Parameter]
    parameters: list[Parameter]
    attributes: str
    statements: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    target: str
    variables: list[Variable]
    functions: dict[str, Function]


def _error(line: int, text: str, why: str) -> EmulatorError:
    return EmulatorError(f"PTX line {line}: {why}: {' '.join(text.split())[:200]}")


def _without_comments(ptx: str) -> str:
    ptx = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), ptx, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", ptx)


_DIRECTIVE = re.compile(r"\.(?:version|target|address_size|file|loc|pragma)\b[^\n]*")
_SECTION = re.compile(r"\.section\b[^{]*\{[^}]*\}")
_FUNCTION = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.(?:entry|func)\b[^{;]*")
_VARIABLE = re.compile(r"(?:\.(?:visible|weak|extern|common)\s+)*\.(shared|global|const)\b([^;=]*)(?:=([^;]*))?;")
_STATEMENT = re.compile(
    r"(?P<brace>[{}])"
    r"|(?P<skipped>\.(?:loc|pragma)\b[^\n;]*;?)"
    r"|(?P<label>[\w$%]+)\s*:(?!:)"
    r"|(?P<text>[^;{}][^;]*);"
)
_DECLARED = re.compile(r"\s*(?:\.align\s+(\d+)\s*)?\.(\w+)\s+([\w$.]+)\s*(\[\s*(\d*)\s*\])?\s*$")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)??(?:\.align\s+\d+\s+)?)?([\w$.]+)(?:\[(\d+)\])?\s*$"
)
_HEAD = re.compile(
    r"(?:\.(?:visible|weak)\s+)*\.(entry|func)\s*(?:\(([^)]*)\))?\s*([\w$.]+)\s*(?:\(([^)]*)\))?(.*)$", re.DOTALL
)
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?(\w+)((?:\.[\w:]+)*)\s*(.*)$", re.DOTALL)


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(p for p in parts if p)


def _initial_bytes(text: str, element: int) -> bytes:
    numbers = re.sub(r"[{},\s]+", " ", text).split()
    if not all(re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", n) for n in numbers):
        raise ValueError("unsupported initial value")
    values = (int(n.rstrip("U"), 0) % (1 << 8 * element) for n in numbers)
    return b"".join(v.to_bytes(element, "little") for v in values)


def _variable(space: str, declaration: str, initial: str | None) -> Variable:
    match = _DECLARED.match(declaration)
    if not match or match[2] not in BITS:
        raise ValueError("unsupported declaration")
    align, kind, name, brackets, count = match.groups()
    element = BITS[kind] // 8
    data = _initial_bytes(initial, element) if initial else b""
    size: int | None = element * int(count or 0)
    if not brackets:
        size = element
    elif not count:
        size = len(data) or None
    return Variable(name, space, kind, int(align or element), size, data)


def _parameters(text: str) -> list[Parameter]:
    parameters, offset = [], 0
    for part in split_operands(text):
        match = _PARAMETER.match(part)
        if not match or match[2] not in BITS:
            raise ValueError(f"unsupported parameter {part}")
        align, kind, name, count = match.groups()
        element = BITS[kind] // 8
        offset = -(-offset // int(align or element)) * int(align or element)
        parameters.append(Parameter(name, kind, offset, element * int(count or 1)))
        offset += parameters[-1].size
    return parameters


def _registers(text: str) -> Registers:
    kind, names = text.split(None, 1)
    if kind.lstrip(".") not in BITS:
        raise ValueError(f"unsupported register type {kind}")
    expanded: list[str] = []
    for name in split_operands(names):
        numbered = re.fullmatch(r"([\w$%.]+)<(\d+)>", name)
        expanded += [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
    return Registers(kind.lstrip("."), tuple(expanded))


def _content(text: str) -> Registers | Variable | Instruction:
    if text.startswith(".reg"):
        return _registers(text[4:].strip())
    space = re.match(r"\.(local|param|shared)\b(.*)$", text, re.DOTALL)
    if space:
        return _variable(space[1], space[2], None)
    match = _INSTRUCTION.match(text)
    if not match:
        raise ValueError("unsupported statement")
    negated, predicate, opcode, modifiers, operands = match.groups()
    guard = negated + predicate if predicate else ""
    return Instruction(opcode, tuple(modifiers.split(".")[1:]), split_operands(operands), guard)


class _Parser:
    def __init__(self, ptx: str) -> None:
        self.text = _without_comments(ptx)
        self.position = 0
        self.line_ends = [m.start() for m in re.finditer("\n", self.text)]

    def line(self) -> int:
        return bisect_right(self.line_ends, self.position - 1) + 1

    def skip_space(self) -> bool:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position < len(self.text)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def module(self) -> Module:
        target = re.search(r"\.target\s+(\w+)", self.text)
        module = Module(target[1] if target else "", [], {})
        while self.skip_space():
            line, start = self.line(), self.position
            if self.take(_DIRECTIVE) or self.take(_SECTION):
                continue
            try:
                if variable := self.take(_VARIABLE):
                    module.variables.append(_variable(variable[1], variable[2], variable[3]))
                elif head := self.take(_FUNCTION):
                    self.function(module, head[0])
                else:
                    raise ValueError("unsupported directive")
            except ValueError as error:
                raise _error(line, self.text[start : start + 200], str(error)) from error
        return module

    def function(self, module: Module, head: str) -> None:
        opening, self.position = self.text[self.position : self.position + 1], self.position + 1
        if opening == ";":  # a declaration
            return
        match = _HEAD.match(head)
        if not match:
            raise ValueError("unsupported function")
        kind, results, name, parameters, attributes = match.groups()
        is_entry = kind == "entry"
        function = Function(name, is_entry, _parameters(results or ""), _parameters(parameters or ""), attributes)
        module.functions[name] = function
        depth = 1
        while depth:
            if not self.skip_space():
                raise ValueError("a function without an end")
            statement = self.statement()
            if statement is None:
                continue
            if isinstance(statement.content, Scope):
                depth += 1 if statement.content.opens else -1
            if depth:
                function.statements.append(statement)

    def statement(self) -> Statement | None:
        line, start = self.line(), self.position
        match = self.take(_STATEMENT)
        if not match:
            raise _error(line, self.text[start : start + 80], "unsupported statement")
        if match["skipped"]:
            return None
        if match["brace"]:
            return Statement(line, match["brace"], Scope(match["brace"] == "{"))
        if match["label"]:
            return Statement(line, match["label"], Label(match["label"]))
        text = match["text"].strip()
        try:
            return Statement(line, text, _content(text))
        except ValueError as error:
            raise _error(line, text, str(error)) from error


def parse(ptx: str) -> Module:
    """The module of a PTX text.

    Raises:
        EmulatorError: with the line that cannot be parsed.
    """
    return _Parser(ptx).module()
