"""Reads files of ``torch.save`` and pickles: values, and tensors that are loaded on demand.

No code in a file is executed. The standard library's unpickler in Python reads the opcodes. A name in the file (a class
or function) is looked up in a table of constructors in this module, and only these are called. Sizes are checked
against the size of the file before memory is allocated, so that memory stays within a constant factor of it.

There are two containers: a zip archive (torch 1.6 and later), and the older sequence of pickles, which is still used
for a tensor inside a plain pickle. ``torch.load(pickle_module=...)`` reads both, but is not safe for malicious files:

- an archive with a ``constants.pkl`` is passed to ``torch.jit.load``, regardless of ``pickle_module``, which runs the
  file's TorchScript;
- before pytorch/pytorch#165553, a storage whose size exceeds its record is read beyond the end of the record;
- a compressed archive is decompressed, and a storage of the older format allocated, to any size in the file;
- a tar archive is extracted to disk;
- with ``TORCH_FORCE_WEIGHTS_ONLY_LOAD=1`` it always raises.

The unpickler in C is not used, because its methods cannot be replaced. It also allocates its memo up to the largest
index in the file (4 GiB for a pickle of 9 bytes), crashes when it hashes deeply nested tuples, and lets a file set
attributes of any object that it can name, for example ``torch._utils._rebuild_tensor_v2.__defaults__``.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

Constructor = Callable[..., Any]
Lookup = Callable[[str], Constructor | None]

MAX_PICKLE_BYTES = 1 << 30
_ZIP_SIGNATURE = b"PK\x03\x04"
_INT64_MAX = (1 << 63) - 1
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

_STORAGE_DTYPES = {
    **{
        f"torch.{device}{name}Storage": dtype
        for device in ("", "cuda.")
        for name, dtype in {
            "Float": torch.float32,
            "Double": torch.float64,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexFloat": torch.complex64,
            "ComplexDouble": torch.complex128,
        }.items()
    },
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
}
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# Transformer Engine's recipes, and Megatron-LM's subclass of one.
_RECIPE = re.compile(r"transformer_engine\.common\.recipe\.\w+|megatron\.core\.[\w.]*\.TEDelayedScaling")
# Both read a tensor's storage from bytes. Megatron-LM replaces torch's function by its own.
_LOAD_FROM_BYTES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
_BUILTINS = ("builtins", "__builtin__")


# --- Values -----------------------------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint, or a value in it, cannot be read. The message has the key and the reason."""


@dataclass(frozen=True)
class Global:
    """A name in the file, with the constructor for it. It can only be called."""

    name: str
    constructor: Constructor


@dataclass
class Standin:
    """The content of an object whose class is not imported.

    Attributes:
        name: ``module.Class``.
        args: the arguments of the constructor.
        state: the attributes.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def build(self, state: Any) -> None:
        """Set the attributes, without a copy, because many objects of a file may share them.

        Raises:
            CheckpointError: If attributes were set before.
        """
        state = state[0] if isinstance(state, tuple) and state else state  # (attributes, slots)
        if isinstance(state, dict) and state:
            if self.state:
                raise CheckpointError("an object is given a state twice")
            self.state = state


class Buffer(io.BytesIO):
    """``io.BytesIO`` from a pickle. Each copy of its bytes is charged to ``budget``."""

    def __init__(self, budget: _Budget, data: Any = b"") -> None:
        budget.spend(len(data))
        super().__init__(data)
        self.budget = budget

    def build(self, state: Any) -> None:
        if not (isinstance(state, tuple) and state and isinstance(state[0], (bytes, bytearray))):
            raise CheckpointError("an io.BytesIO has no bytes")
        self.budget.spend(len(state[0]))
        self.write(state[0])
        self.seek(0)


@dataclass
class Storage:
    """``numel`` elements of ``dtype`` in a file."""

    dtype: torch.dtype
    numel: int
    read: Callable[[], bytes] | None = None
    _elements: Tensor | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def elements(self) -> Tensor:
        """The storage as a tensor ``[numel]``. It is cached, so that tensors continue to share a storage.

        Raises:
            CheckpointError: If the number of bytes in the file does not match.
        """
        if self._elements is None:
            data = self.read() if self.read else b""
            if len(data) != self.num_bytes:
                raise CheckpointError(f"a tensor claims {self.numel} {self.dtype} and has {len(data)} bytes")
            self._elements = (
                torch.frombuffer(bytearray(data), dtype=self.dtype)
                if data
                else torch.empty(0, dtype=self.dtype, device="cpu")
            )
        return self._elements


@dataclass(frozen=True)
class TensorRecord:
    """A tensor in a file that is not loaded yet."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.stride)
        sensible = all(type(number) is int and 0 <= number <= _INT64_MAX for number in numbers)
        if not sensible or len(self.shape) != len(self.stride) or len(self.shape) > 64:
            raise CheckpointError("a tensor has no sensible shape, stride or offset")
        reach = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride)) + 1
        available, rest = divmod(self.storage.num_bytes, self.dtype.itemsize)
        if rest or self.numel > _INT64_MAX or (self.numel and reach > available):
            raise CheckpointError(f"a tensor of shape {self.shape} claims {reach} elements of {available}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def repeats(self) -> bool:
        """Whether it has more elements than are stored, so that a copy may take any amount of memory."""
        return self.numel > self.storage.numel

    def load(self) -> Tensor:
        """Load the tensor to the CPU.

        Raises:
            CheckpointError: If the shape is invalid, or the number of bytes in the file does not match.
        """
        if not self.numel:
            try:
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            except RuntimeError as error:  # sizes with a 0 whose other sizes overflow int64
                reason = str(error).partition("\n")[0]
                raise CheckpointError(f"a tensor of shape {self.shape} cannot be made: {reason}") from None
        elements = self.storage.elements()
        return elements.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


# --- Pickles ----------------------------------------------------------------------------------------------------------

_KEYS = (str, int, float, bytes, bool, type(None))
"""The types of keys of dictionaries and elements of sets. Tuples are excluded, since hashing nested ones recurses."""

_OPCODES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes if opcode.proto <= 5}
_REFUSED = {"PERSID", "INST", "OBJ", "STRING", "BINSTRING", "SHORT_BINSTRING", "EXT1", "EXT2", "EXT4", "FROZENSET"}
_REFUSED |= {"NEWOBJ_EX", "NEXT_BUFFER", "READONLY_BUFFER"}
_PYTHONS: Any = pickle._Unpickler.dispatch


class _Methods(dict[int, Any]):
    """The opcodes that are supported. Others are refused by name."""

    def __missing__(self, code: int) -> Any:
        if code not in _OPCODES:
            raise pickle.UnpicklingError(f"unknown opcode {code:#x}")
        raise CheckpointError(f"the pickle holds the opcode {_OPCODES[code]}, which no checkpoint needs")


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, with the opcodes that create objects replaced by methods of this class."""

    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, stream: io.BytesIO, lookup: Lookup, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(stream)
        self.lookup, self.persistent = lookup, persistent

    def find_class(self, module: str, name: str) -> Global:
        full_name = f"{module}.{name}"
        constructor = self.lookup(full_name)
        if constructor is None:
            raise CheckpointError(f"it asks for {full_name[:200]!r}, which is not on the list of names that are read")
        return Global(full_name, constructor)

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise CheckpointError("it holds a persistent id outside a torch.save archive")
        return self.persistent(pid)

    def load_proto(self) -> None:
        self.read(1)

    def load_frame(self) -> None:  # frames are not needed, because the data is in memory
        self.read(8)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            if isinstance(function, Standin):
                raise CheckpointError(f"it calls what {function.name[:200]!r} gives, which is not supported")
            raise TypeError(f"{type(function).__name__} is called")
        self.append(function.constructor(*arguments))

    load_newobj = load_reduce

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, (Standin, Buffer)):
            target.build(state)
        elif not isinstance(target, dict):  # ignore attributes of an OrderedDict
            raise TypeError(f"{type(target).__name__} is given a state")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        _set_items(self.stack[-1], items)

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if not isinstance(target, set):
            raise TypeError(f"{type(target).__name__} is given elements")
        target.update(_checked_keys(items, "a set's element"))

    def load_stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise pickle.UnpicklingError("it holds more than one value")
        _PYTHONS[pickle.STOP[0]](self)

    def load_bytearray8(self) -> None:  # the base class allocates memory before it checks the size
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


_Unpickler.dispatch = _Methods(
    {
        code: vars(_Unpickler).get(f"load_{name.lower()}", _PYTHONS[code])
        for code, name in _OPCODES.items()
        if name not in _REFUSED
    }
)


def _set_items(target: Any, items: list[Any]) -> None:
    if isinstance(target, Standin):
        raise CheckpointError(f"it holds a dictionary of class {target.name[:200]!r}, which is not supported")
    if not isinstance(target, dict):
        raise TypeError(f"{type(target).__name__} is given items")
    target.update(zip(_checked_keys(items[::2], "a dictionary's key"), items[1::2], strict=True))


def _checked_keys(keys: list[Any], what: str) -> list[Any]:
    """Check ``keys`` before they are hashed, because integers of more than 64 bits can be chosen to collide."""
    for key in keys:
        if not isinstance(key, _KEYS):
            raise CheckpointError(
                f"{what} that is neither text nor number is not supported: a {type(key).__name__}; save the file "
                "without it"
            )
        if isinstance(key, int) and key.bit_length() > 64:
            raise CheckpointError(f"{what} that has {key.bit_length()} bits is not supported: at most 64 are read")
    return keys


def unpickle(data: bytes | io.BytesIO, lookup: Lookup, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle.

    Args:
        data: one pickle. A stream is positioned after its end.
        lookup: returns the constructor for a global's dotted name, or None to refuse it.
        persistent: returns the value for a persistent id; ``None`` refuses all.

    Raises:
        CheckpointError: If a name is refused, an opcode is not supported, or the data is damaged.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return _Unpickler(stream, lookup, persistent).load()
    except CheckpointError:
        raise
    except EOFError:
        raise CheckpointError("the pickle is damaged: it ends too early") from None
    except Exception as error:  # damaged data can raise anything: stack underflow, wrong types, truncation, ...
        raise CheckpointError(f"the pickle is damaged ({type(error).__name__}: {str(error)[:200]})") from None


# --- Names ------------------------------------------------------------------------------------------------------------


class _Budget:
    """The number of bytes that constructors may still copy. Valid files use each byte at most twice."""

    def __init__(self, size: int) -> None:
        self.left = 4 * size + 4096

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise CheckpointError("it unpacks the same bytes again and again")


def _lookup(budget: _Budget, *, nested: bool = False, standins: bool = False) -> Lookup:
    """The constructors for the names that are allowed in a checkpoint."""

    def load_from_bytes(data: Any) -> Storage:
        if not isinstance(data, (bytes, bytearray)):
            raise CheckpointError("a storage is not made of bytes")
        budget.spend(len(data))
        storage = _read_legacy(io.BytesIO(bytes(data)), _lookup(budget, nested=True))
        if not isinstance(storage, Storage):
            raise CheckpointError("the bytes of a storage hold something else")
        return storage

    def encode(text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise CheckpointError("bytes are stored in an unknown way")
        budget.spend(len(text))
        return text.encode("latin1")

    def size(sizes: Any = ()) -> tuple[Any, ...]:
        if not isinstance(sizes, tuple):  # a copy could take more memory than the file
            raise CheckpointError("a torch.Size is not made of a tuple")
        return sizes

    def elements(items: Any = ()) -> set[Any]:
        if not isinstance(items, (list, tuple)):
            raise CheckpointError(f"a set of a {type(items).__name__} is not supported")
        budget.spend(4 * len(items))
        return set(_checked_keys([*items], "a set's element"))

    def counter(counts: Any = None) -> Counter[Any]:
        if counts is not None and type(counts) is not dict:
            raise CheckpointError(f"a collections.Counter of a {type(counts).__name__} is not supported")
        budget.spend(4 * len(counts or ()))
        return Counter(counts)

    def device(kind: Any, index: Any = None) -> torch.device:
        if not isinstance(kind, str) or not (index is None or type(index) is int):
            raise CheckpointError("a torch.device is not made of a name and a number")
        return torch.device(kind) if index is None else torch.device(kind, index)

    def member(getattr_: str, owner: Any = None, name: Any = None) -> Standin:
        """A member of an enumeration, which Python 3.11.2 pickles by getattr."""
        if not (isinstance(owner, Global) and _RECIPE.fullmatch(owner.name) and isinstance(name, str)):
            raise CheckpointError(f"it asks for {getattr_!r}, which is not on the list of names that are read")
        return Standin(owner.name, (name,))

    constructors: dict[str, Constructor] = {
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch.Size": size,
        "collections.OrderedDict": lambda: {},
        "_codecs.encode": encode,
        "_io.BytesIO": partial(Buffer, budget),
        "io.BytesIO": partial(Buffer, budget),
    }
    if standins:
        constructors |= {f"{module}.set": elements for module in _BUILTINS}
        constructors |= {f"{module}.frozenset": lambda x=(): frozenset(elements(x)) for module in _BUILTINS}
        constructors |= {"collections.Counter": counter, "torch.device": device}
    else:
        constructors |= {f"{module}.getattr": partial(member, f"{module}.getattr") for module in _BUILTINS}
    if not nested:
        constructors |= dict.fromkeys(_LOAD_FROM_BYTES, load_from_bytes)

    def lookup(global_name: str) -> Constructor | None:
        if global_name in constructors:
            return constructors[global_name]
        if global_name in _STORAGE_DTYPES or global_name in DTYPES:
            return _not_callable
        if global_name.startswith("transformer_engine.pytorch.") and "tensor" in global_name.lower():
            raise CheckpointError(
                f"FP8 primary weights of fp8_model_init are not supported ({global_name[:200]}); in Transformer Engine "
                "replace each by its dequantize() and save the state dict again"
            )
        return (lambda *args: Standin(global_name, args)) if standins or _RECIPE.fullmatch(global_name) else None

    return lookup


def _not_callable(*_: Any) -> Any:
    raise CheckpointError("a dtype is called")


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = None, hooks: Any = None, bits: Any = None
) -> TensorRecord:
    _refuse_lazy(bits)
    return TensorRecord(_storage(storage), _storage(storage).dtype, offset, tuple(shape), tuple(stride))


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, bits: Any = None
) -> TensorRecord:
    if not isinstance(dtype, Global) or dtype.name not in DTYPES:
        raise CheckpointError("a tensor has no dtype")
    _refuse_lazy(bits)
    return TensorRecord(_storage(storage), DTYPES[dtype.name], offset, tuple(shape), tuple(stride))


def _refuse_lazy(bits: Any) -> None:
    if bits:
        raise CheckpointError(
            "a tensor is stored as what its conjugate or its negative is made of, which is not supported; save its "
            "resolve_conj().resolve_neg()"
        )


def _storage(value: Any) -> Storage:
    if not isinstance(value, Storage):
        raise CheckpointError("a tensor has no storage")
    return value


def _parse_persistent_id(persistent_id: Any) -> tuple[torch.dtype, str, int]:
    """The dtype, key and number of elements of ``("storage", type, storage_key, location, numel, ...)``."""
    if not (
        isinstance(persistent_id, tuple)
        and len(persistent_id) >= 5
        and persistent_id[0] == "storage"
        and isinstance(persistent_id[1], Global)
    ):
        raise CheckpointError("a persistent id names no storage")
    dtype = _STORAGE_DTYPES.get(persistent_id[1].name)
    storage_key = persistent_id[2]
    numel = persistent_id[4]
    if dtype is None or not isinstance(storage_key, str) or type(numel) is not int or not 0 <= numel <= _INT64_MAX:
        raise CheckpointError(f"a storage of {persistent_id[1].name[:200]!r} cannot be read")
    return dtype, storage_key, numel


# --- Files ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Any]:
    """The value of the ``torch.save`` file ``path``. Its :class:`TensorRecord` can be loaded inside this context.

    Objects of unknown classes are :class:`Standin`.

    Raises:
        CheckpointError: If the file is not a checkpoint, or is damaged.
        OSError: If the file cannot be opened.
    """
    with path.open("rb") as file:
        yield _read(file, path.stat().st_size, standins=True)


def read_archive(data: bytes) -> Any:
    """The value of a ``torch.save`` file, given its bytes. Unknown classes are refused.

    Raises:
        CheckpointError: If the data is damaged, or has a name that is not allowed.
    """
    return _read(io.BytesIO(data), len(data))


def read_pickle(data: bytes) -> Any:
    """The value of a pickle. Unknown classes are refused.

    Raises:
        CheckpointError: If the data is damaged, or has a name that is not allowed.
    """
    return unpickle(data, _lookup(_Budget(len(data))))


def _read(file: BinaryIO, size: int, *, standins: bool = False) -> Any:
    budget = _Budget(size)
    if file.read(4) == _ZIP_SIGNATURE:
        return _read_zip(file, budget, standins=standins)
    if size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"it is not a zip archive, and too large for torch's older format: {size} bytes")
    file.seek(0)
    return _read_legacy(io.BytesIO(file.read()), _lookup(budget, standins=standins))


def _read_zip(file: BinaryIO, budget: _Budget, *, standins: bool = False) -> Any:
    try:
        archive = zipfile.ZipFile(file)
        infos = {info.filename: info for info in archive.infolist()}
    except Exception as error:  # zipfile raises many types of errors on damaged data
        raise CheckpointError(f"the archive is damaged ({type(error).__name__}: {str(error)[:200]})") from None
    for info in infos.values():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise CheckpointError(f"the archive's {info.filename[:200]!r} is compressed; torch.save does not compress")
        budget.spend(info.file_size)

    def read(record: str) -> bytes:
        try:
            return archive.read(infos[record])
        except Exception as error:
            raise CheckpointError(f"the archive's {record[:200]!r} is damaged ({type(error).__name__})") from None

    pickles = [record for record in infos if record.count("/") == 1 and record.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError("the archive was not written by torch.save: it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in infos and read(f"{root}byteorder") != b"little":
        raise CheckpointError("the archive is big-endian; save it again on a little-endian machine")
    if infos[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"data.pkl has {infos[pickles[0]].file_size} bytes; at most {MAX_PICKLE_BYTES} are read")
    storages: dict[str, Storage] = {}

    def persistent(persistent_id: Any) -> Storage:
        dtype, storage_key, numel = _parse_persistent_id(persistent_id)
        record = f"{root}data/{storage_key}"
        if record not in infos:
            raise CheckpointError(f"the archive lacks {record[:200]!r}")
        if infos[record].file_size != numel * dtype.itemsize:
            raise CheckpointError(f"a tensor claims {numel} {dtype} and has {infos[record].file_size} bytes")
        return storages.setdefault(storage_key, Storage(dtype, numel, partial(read, record)))

    return unpickle(read(pickles[0]), _lookup(budget, standins=standins), persistent)


def _read_legacy(stream: io.BytesIO, lookup: Lookup) -> Any:
    header = [unpickle(stream, lookup) for _ in range(3)]
    if header[:2] != [_LEGACY_MAGIC, _LEGACY_PROTOCOL]:
        raise CheckpointError("it was not written by torch.save")
    if not isinstance(header[2], dict) or header[2].get("little_endian") is not True:
        raise CheckpointError("it is big-endian; save it again on a little-endian machine")
    storages: dict[str, Storage] = {}

    def persistent(persistent_id: Any) -> Storage:
        dtype, storage_key, numel = _parse_persistent_id(persistent_id)
        return storages.setdefault(storage_key, Storage(dtype, numel))

    value = unpickle(stream, lookup, persistent)
    for storage_key in _names(unpickle(stream, lookup)):
        storage = storages.get(storage_key)
        size = stream.read(8)
        available = len(stream.getbuffer()) - stream.tell()
        if storage is None or size != storage.numel.to_bytes(8, "little") or storage.num_bytes > available:
            raise CheckpointError(f"the bytes of storage {storage_key[:200]!r} do not fit its tensor")
        storage.read = partial(bytes, stream.read(storage.num_bytes))
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError("the list of storages is damaged")
    return value
