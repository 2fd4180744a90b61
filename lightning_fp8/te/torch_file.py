"""Reads files of ``torch.save``, and the pickles inside them, without executing code of theirs.

A checkpoint is read by ``torch.load(weights_only=True)``. Classes that torch refuses become :class:`Unread`, so that a
file is read without the packages of its objects.

The states of Transformer Engine inside it are pickles, or archives of one. The standard library's unpickler in Python
reads their opcodes. A name in them (a class or function) is looked up in a table of constructors in this module, and
only these are called. ``torch.load`` reads an archive that is not a file without these limits: before
pytorch/pytorch#165553 it reads a storage whose size exceeds its record beyond the end of the record, and it
decompresses a record, or allocates a storage of the older format, to any size in the archive.

The unpickler in C is not used, because its methods cannot be replaced. It also allocates its memo up to the largest
index in the file (4 GiB for a pickle of 9 bytes), crashes when it hashes deeply nested tuples, and lets a file set
attributes of any object that it can name, for example ``torch._utils._rebuild_tensor_v2.__defaults__``.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Spend = Callable[[int], None]
"""Charges bytes that are copied or allocated; raises if a valid file would not need them."""
GetStorage = Callable[[torch.dtype, str, int], Tensor]
"""Returns the elements ``[numel]`` of a storage, given its dtype, key and numel."""

_ZIP_SIGNATURE = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

_STORAGES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_DTYPES: dict[str, torch.dtype] = {
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{f"torch.{device}{name}Storage": dtype for device in ("", "cuda.") for name, dtype in _STORAGES.items()},
    **dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), torch.uint8),
}
"""The dtypes that a file names, itself or by the class of a storage."""

# Transformer Engine's recipes, and Megatron-LM's subclass of one.
_RECIPE = re.compile(r"transformer_engine\.common\.recipe\.\w+|megatron\.core\.[\w.]*\.TEDelayedScaling")
# Both read a tensor's storage from bytes. Megatron-LM replaces torch's function by its own.
_LOAD_FROM_BYTES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")


class CheckpointError(ValueError):
    """A checkpoint, or a value in it, cannot be read. The message has the key and the reason."""


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class Unread:
    """An object of a class that is not imported. A subclass of it stands for each such class, and has its name."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __repr__(self) -> str:
        return f"an object of {type(self).__module__}.{type(self).__name__}"


_INERT = {"builtins.frozenset": frozenset}
"""Classes that ``torch.load`` refuses, and that only hold values."""


def load_checkpoint(path: Path, check_sums: bool = False) -> tuple[Any, list[str]]:
    """The value of the ``torch.save`` file ``path``, on the CPU, and the names of the classes that are :class:`Unread`.

    A file of torch 1.6 or later is mapped to memory; torch's older format is read if no class is unread.

    Args:
        check_sums: read the whole file, and compare the checksum of each record, which torch does not do.

    Raises:
        CheckpointError: If the file is not a checkpoint, is damaged, or holds what is not supported.
        OSError: If the file cannot be opened.
    """
    storages: list[tuple[int, int]] = []
    restore = torch.serialization.default_restore_location

    def noted(storage: Any, location: str) -> Any:
        if storage.nbytes():
            storages.append((storage.data_ptr(), storage.nbytes()))
        return restore(storage, location)

    with path.open("rb") as file:
        start = file.read(4)
        try:
            if start != _ZIP_SIGNATURE:
                return torch.load(path, map_location="cpu", weights_only=True), []
            records = _stored_records(archive := zipfile.ZipFile(file))
            if check_sums and (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"the archive's {damaged[:200]!r} is damaged: its checksum differs")
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            for name in refused:
                _refuse_primary_weight(name)
            classes = {name: _INERT.get(name) or _unread(name) for name in refused}
            # Not map_location=noted: torch refuses functions for subclasses of tensors.
            with (
                torch.serialization.safe_globals([(made, name) for name, made in classes.items()]),
                patch.object(torch.serialization, "default_restore_location", noted),
            ):
                value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            _require_whole_records(storages, records)
        except CheckpointError:
            raise
        except Exception as error:  # damaged files raise many types of errors
            raise CheckpointError(_reason(error, start)) from None
    return value, sorted(classes.keys() - _INERT)


def _require_whole_records(storages: list[tuple[int, int]], records: dict[str, zipfile.ZipInfo]) -> None:
    """Raise a CheckpointError unless the mapped storages ``(address, bytes)`` are the records, one each."""
    of_storages = [(info.header_offset, info.file_size) for name, info in records.items() if "/data/" in name]
    sizes = [size for _, size in sorted(of_storages) if size]
    claims = [size for _, size in sorted(storages)]
    if len(claims) != len(sizes):
        raise CheckpointError(f"its tensors name {len(claims)} storages, and it has {len(sizes)}; save it again")
    for claim, size in zip(claims, sizes):
        if claim != size:
            raise CheckpointError(f"a tensor claims {claim} bytes and has {size}")


def _unread(name: str) -> type[Unread]:
    module, _, own_name = name.rpartition(".")
    return type(own_name, (Unread,), {"__module__": module})


def _reason(error: Exception, start: bytes) -> str:
    """The message of an error of ``torch.load``, without the advice around it to load the file unsafely.

    Args:
        start: the first bytes of the file.
    """
    if isinstance(error, (EOFError, zipfile.BadZipFile)):
        return "it is damaged: it ends too early, as after an interrupted copy or save; copy or save it again"
    if start[:1] not in (pickle.PROTO, _ZIP_SIGNATURE[:1]):
        return "it is not a file of torch.save; if its format is another, load it and torch.save its state dict"
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    advised = isinstance(error, pickle.UnpicklingError) and len(lines) > 1  # before it, and a link after it
    own = lines[-2 if advised else 0].rpartition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
    return (
        f"it is damaged, or holds what is not supported: {own.strip()[:300]} ({type(error).__name__}); save it again "
        "without that, with torch.save's defaults"
    )


def _refuse_primary_weight(name: str) -> None:
    if name.startswith("transformer_engine.pytorch.") and "tensor" in name.lower():
        raise CheckpointError(
            f"FP8 primary weights of fp8_model_init are not supported ({name[:200]}); in Transformer Engine replace "
            "each by its dequantize() and save the state dict again"
        )


# --- Pickles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Global:
    """A name in the file, with the constructor for it. It can only be called."""

    name: str
    constructor: Callable[..., Any]


@dataclass
class Standin:
    """The content of an object whose class, ``module.Class``, is not imported: arguments and attributes."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


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
    """Python's unpickler, with the opcodes that create objects replaced by methods of this class.

    Args:
        spend: charges what the functions that the pickle calls copy.
        storage: None refuses storages outside the pickle.
        nested: refuse storages in bytes, because the pickle is inside one.
    """

    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, stream: io.BytesIO, spend: Spend, storage: GetStorage | None, nested: bool) -> None:
        super().__init__(stream)
        self.spend, self.storage = spend, storage
        self.constructors: dict[str, Callable[..., Any]] = {**_CONSTRUCTORS, "_codecs.encode": self.encode}
        if not nested:
            self.constructors |= dict.fromkeys(_LOAD_FROM_BYTES, self.load_from_bytes)

    def find_class(self, module: str, name: str) -> Global | torch.dtype:
        full_name = f"{module}.{name}"
        if full_name in _DTYPES:
            return _DTYPES[full_name]
        _refuse_primary_weight(full_name)
        if _RECIPE.fullmatch(full_name):
            return Global(full_name, lambda *args: Standin(full_name, args))
        if full_name not in self.constructors:
            raise CheckpointError(f"it asks for {full_name[:200]!r}, which is not on the list of names that are read")
        return Global(full_name, self.constructors[full_name])

    def persistent_load(self, pid: Any) -> Tensor:
        if self.storage is None:
            raise CheckpointError("it holds a persistent id outside a torch.save archive")
        kind, dtype, key, _, numel = pid[:5]
        sensible = isinstance(dtype, torch.dtype) and isinstance(key, str) and type(numel) is int and numel >= 0
        if kind != "storage" or not sensible:
            raise CheckpointError("a persistent id names no storage")
        return self.storage(dtype, key, numel)

    def encode(self, text: Any, encoding: Any) -> bytes:
        """Bytes, which protocol 2 writes as text."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise CheckpointError("bytes are stored in an unknown way")
        self.spend(len(text))
        return text.encode("latin1")

    def load_from_bytes(self, data: Any) -> Tensor:
        """A tensor's storage in a plain pickle, which torch writes in its older format."""
        self.spend(len(data))
        storage = _read_legacy(io.BytesIO(data), self.spend, nested=True)
        if not isinstance(storage, Tensor):
            raise CheckpointError("the bytes of a storage hold something else")
        return storage

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise TypeError(f"{type(function).__name__} is called")
        self.append(function.constructor(*arguments))

    load_newobj = load_reduce

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Standin):
            attributes = state[0] if isinstance(state, tuple) and state else state  # (attributes, slots)
            target.state = attributes if isinstance(attributes, dict) else {}
        elif not isinstance(target, dict):  # ignore attributes of an OrderedDict
            raise TypeError(f"{type(target).__name__} is given a state")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError(f"{type(target).__name__} is given items")
        target.update(zip(_checked_keys(items[::2], "a dictionary's key"), items[1::2], strict=True))

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


def _checked_keys(keys: list[Any], what: str) -> list[Any]:
    """Check ``keys`` before they are hashed, because integers of more than 64 bits can be chosen to collide."""
    for key in keys:
        if not isinstance(key, _KEYS):
            unlike = f"{what} that is neither text nor number is not supported: a {type(key).__name__}"
            raise CheckpointError(f"{unlike}; save the file without it")
        if isinstance(key, int) and key.bit_length() > 64:
            raise CheckpointError(f"{what} that has {key.bit_length()} bits is not supported: at most 64 are read")
    return keys


# --- Functions that a pickle may call ---------------------------------------------------------------------------------


def _member(owner: Any = None, name: Any = None) -> Standin:
    """A member of an enumeration of recipes, which Python 3.11.2 pickles by getattr."""
    if not (isinstance(owner, Global) and _RECIPE.fullmatch(owner.name) and isinstance(name, str)):
        raise CheckpointError("it asks for 'builtins.getattr', which is not on the list of names that are read")
    return Standin(owner.name, (name,))


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if not isinstance(sizes, tuple):  # a copy could take more memory than the file
        raise CheckpointError("a torch.Size is not made of a tuple")
    return sizes


def _rebuild_tensor(
    elements: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = None, hooks: Any = None, *others: Any
) -> Tensor:
    """A view of a storage's elements. ``others`` are the dtype, in torch's version 3, and flags of lazy views."""
    if others and isinstance(others[0], torch.dtype):
        elements, others = elements.view(others[0]), others[1:]
    if any(others):
        raise CheckpointError(
            "a tensor is stored as what its conjugate or its negative is made of, which is not supported; save its "
            "resolve_conj().resolve_neg()"
        )
    return elements.as_strided(shape, stride, offset)


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": _size,
    "collections.OrderedDict": lambda: {},
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
}

# --- States -----------------------------------------------------------------------------------------------------------


def read_pickle(data: bytes) -> Any:
    """The value of a pickle. Names that no state needs are refused.

    Raises:
        CheckpointError: If a name is refused, an opcode is not supported, or the data is damaged.
    """
    return _unpickle(io.BytesIO(data), _budget(len(data)))


def read_archive(data: bytes) -> Any:
    """The value of the bytes of a ``torch.save`` file, with the limits and errors of :func:`read_pickle`."""
    read = _read_zip if data.startswith(_ZIP_SIGNATURE) else _read_legacy
    return read(io.BytesIO(data), _budget(len(data)))


def _budget(size: int) -> Spend:
    """Limits what is copied from a file of ``size`` bytes. Valid files need each byte at most twice."""
    left = 4 * size + 4096

    def spend(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            raise CheckpointError("it unpacks the same bytes again and again")

    return spend


def _unpickle(stream: io.BytesIO, spend: Spend, storage: GetStorage | None = None, nested: bool = False) -> Any:
    try:
        return _Unpickler(stream, spend, storage, nested).load()
    except CheckpointError:
        raise
    except EOFError:
        raise CheckpointError("the pickle is damaged: it ends too early") from None
    except Exception as error:  # damaged data can raise anything: stack underflow, wrong types, truncation, ...
        raise CheckpointError(f"the pickle is damaged ({type(error).__name__}: {str(error)[:200]})") from None


def _stored_records(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The records of an archive by name. A CheckpointError refuses compressed ones, which torch.save does not write."""
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise CheckpointError(f"the archive's {info.filename[:200]!r} is compressed; torch.save does not compress")
    return {info.filename: info for info in archive.infolist()}


def _read_zip(stream: io.BytesIO, spend: Spend) -> Any:
    try:
        archive = zipfile.ZipFile(stream)
        records = {}
        for name, info in _stored_records(archive).items():
            spend(info.file_size)
            records[name] = archive.read(info)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many types of errors on damaged data
        raise CheckpointError(f"the archive is damaged ({type(error).__name__}: {str(error)[:200]})") from None
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError("the archive was not written by torch.save: it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if records.get(f"{root}byteorder", b"little") != b"little":
        raise CheckpointError("the archive is big-endian; save it again on a little-endian machine")
    storages: dict[str, Tensor] = {}

    def storage(dtype: torch.dtype, key: str, numel: int) -> Tensor:
        record = records.get(f"{root}data/{key}")
        if record is None:
            raise CheckpointError(f"the archive lacks {f'{root}data/{key}'[:200]!r}")
        if len(record) != numel * dtype.itemsize:
            raise CheckpointError(f"a tensor claims {numel} {dtype} and has {len(record)} bytes")
        if key not in storages:
            storages[key] = _bytes_of(record)
        return storages[key].view(dtype)

    return _unpickle(io.BytesIO(records[pickles[0]]), spend, storage)


def _read_legacy(stream: io.BytesIO, spend: Spend, nested: bool = False) -> Any:
    """A file of torch's older format: pickles of its version, the value and the keys of storages; then their bytes."""
    read = partial(_unpickle, stream, spend, nested=nested)
    if [read(), read()] != [_LEGACY_MAGIC, _LEGACY_PROTOCOL]:
        raise CheckpointError("it was not written by torch.save")
    system = read()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError("it is big-endian; save it again on a little-endian machine")
    storages: dict[str, Tensor] = {}

    def storage(dtype: torch.dtype, key: str, numel: int) -> Tensor:
        if key not in storages:
            spend(numel * dtype.itemsize)
            storages[key] = torch.zeros(numel, dtype=dtype, device="cpu")
        return storages[key].view(dtype)

    value, keys = read(storage=storage), read()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or {*keys} != storages.keys():
        raise CheckpointError("the list of storages is damaged")
    for key in keys:
        elements = storages[key]
        size, data = stream.read(8), stream.read(elements.nbytes)
        if size != len(elements).to_bytes(8, "little") or len(data) != elements.nbytes:
            raise CheckpointError(f"the bytes of storage {key[:200]!r} do not fit its tensor")
        elements.view(torch.uint8).copy_(_bytes_of(data))
    return value


def _bytes_of(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
