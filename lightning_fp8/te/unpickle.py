"""Reads a pickle as data. Nothing is imported and nothing of the file is called.

``pickletools`` cuts the bytes into opcodes; this module builds plain values from them. A name in the file (a class or
function) is looked up in a table of our own constructors, and only these are ever called. Memory stays within a
constant factor of the file: every opcode adds at most its own bytes.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Constructor = Callable[..., Any]
Lookup = Callable[[str], Constructor | None]


class CheckpointError(ValueError):
    """A checkpoint, or a value in it, cannot be read; the message says which and why."""


@runtime_checkable
class Buildable(Protocol):
    """An object that takes the attributes that the file gives an object after making it."""

    def build(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Global:
    """A name of the file, and our constructor for it: its only use is to be called."""

    name: str
    constructor: Constructor


@dataclass
class Standin:
    """An object of a class that is known by name only: what the file says it was made of.

    Attributes:
        name: ``module.Class``.
        args: its constructor's arguments.
        state: its attributes.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def build(self, state: Any) -> None:
        state = state[0] if isinstance(state, tuple) and state else state  # (attributes, slots)
        if isinstance(state, dict):
            self.state.update(state)


_MARK = object()
_KEYS = (str, int, float, bytes, bool, type(None))
"""What may be a dictionary's key: hashing nested tuples recurses as deep as the file says."""

_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set}
_ARGUMENTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def unpickle(data: bytes | io.BytesIO, lookup: Lookup, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value that a pickle stands for.

    Args:
        data: one pickle; a stream is left behind its end.
        lookup: the constructor of a global's dotted name, or None to refuse it.
        persistent: what a persistent id stands for; ``None`` refuses them.

    Raises:
        CheckpointError: a refused name, an unknown opcode or damaged bytes.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _Machine(lookup, persistent).run(stream)
    except CheckpointError:
        raise
    except Exception as error:  # whatever damaged bytes provoke: stack underflow, wrong types, truncation, ...
        raise CheckpointError(f"the pickle is damaged ({type(error).__name__}: {str(error)[:200]})") from None


class _Machine:
    def __init__(self, lookup: Lookup, persistent: Callable[[Any], Any] | None) -> None:
        self.lookup = lookup
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: io.BytesIO) -> Any:
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name == "STOP":
                (value,) = self._pop(len(self.stack))
                return value
            if name in _VALUES:
                self.stack.append(_VALUES[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _ARGUMENTS:
                self.stack.append(argument)
            elif name in _TUPLES:
                self.stack.append(tuple(self._pop(_TUPLES[name])))
            elif operation := getattr(self, f"op_{name.lower()}", None):
                operation(argument)
            else:
                raise CheckpointError(f"the pickle holds the opcode {name}, which no checkpoint needs")
        raise CheckpointError("the pickle has no end")

    def _pop(self, count: int) -> list[Any]:
        popped = self.stack[len(self.stack) - count :]
        if len(popped) < count or any(value is _MARK for value in popped):
            raise IndexError("stack underflow")
        del self.stack[len(self.stack) - count :]
        return popped

    def _pop_to_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:  # an IndexError where there is none
            index -= 1
            if index < 0:
                raise IndexError("no mark")
        popped = self.stack[index + 1 :]
        del self.stack[index:]
        return popped

    def _top(self, kind: type) -> Any:
        top = self.stack[-1]
        if top is _MARK or not isinstance(top, kind):
            raise TypeError(f"{type(top).__name__} on top of the stack")
        return top

    # Opcodes, by their names in pickletools.

    def op_proto(self, version: int) -> None:
        pass

    def op_frame(self, size: int) -> None:
        pass

    def op_mark(self, _: None) -> None:
        self.stack.append(_MARK)

    def op_pop(self, _: None) -> None:
        self.stack.pop()

    def op_pop_mark(self, _: None) -> None:
        self._pop_to_mark()

    def op_dup(self, _: None) -> None:
        self.stack.append(self._top(object))

    def op_put(self, index: int) -> None:
        self.memo[index] = self._top(object)

    op_binput = op_long_binput = op_put

    def op_memoize(self, _: None) -> None:
        self.op_put(len(self.memo))

    def op_get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    op_binget = op_long_binget = op_get

    def op_append(self, _: None) -> None:
        (value,) = self._pop(1)
        self._top(list).append(value)

    def op_appends(self, _: None) -> None:
        popped = self._pop_to_mark()
        self._top(list).extend(popped)

    def op_setitem(self, _: None) -> None:
        self._set_items(self._pop(2))

    def op_setitems(self, _: None) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, popped: list[Any]) -> None:
        if not all(isinstance(key, _KEYS) for key in popped[::2]):
            raise TypeError("a dictionary's key is neither text nor number")
        self._top(dict).update(zip(popped[::2], popped[1::2], strict=True))

    def op_additems(self, _: None) -> None:
        popped = self._pop_to_mark()
        if not all(isinstance(value, _KEYS) for value in popped):
            raise TypeError("a set's element is neither text nor number")
        self._top(set).update(popped)

    def op_tuple(self, _: None) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def op_list(self, _: None) -> None:
        self.stack.append(self._pop_to_mark())

    def op_dict(self, _: None) -> None:
        popped = self._pop_to_mark()
        self.stack.append({})
        self._set_items(popped)

    def op_global(self, argument: str) -> None:
        module_name, _, name = argument.partition(" ")
        self._push_global(f"{module_name}.{name}")

    def op_stack_global(self, _: None) -> None:
        module_name, name = self._pop(2)
        if not isinstance(module_name, str) or not isinstance(name, str):
            raise TypeError("a global's name is no text")
        self._push_global(f"{module_name}.{name}")

    def _push_global(self, name: str) -> None:
        constructor = self.lookup(name)
        if constructor is None:
            raise CheckpointError(f"it asks for {name[:200]!r}, which is not on the list of names that are read")
        self.stack.append(Global(name, constructor))

    def op_reduce(self, _: None) -> None:
        function, arguments = self._pop(2)
        self.stack.append(_call(function, arguments))

    op_newobj = op_reduce

    def op_build(self, _: None) -> None:
        (state,) = self._pop(1)
        target = self._top(object)
        if isinstance(target, Buildable):
            target.build(state)
        elif not isinstance(target, dict):  # an OrderedDict's attributes are of no interest
            raise TypeError(f"{type(target).__name__} is given a state")

    def op_binpersid(self, _: None) -> None:
        (persistent_id,) = self._pop(1)
        if self.persistent is None:
            raise CheckpointError("it holds a persistent id outside a torch.save archive")
        self.stack.append(self.persistent(persistent_id))


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise TypeError(f"{type(function).__name__} is called")
    return function.constructor(*arguments)
