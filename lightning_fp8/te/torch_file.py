"""Reads what ``torch.save`` and ``pickle.dumps`` write: values, with tensors that are read when asked for.

Two containers exist: a zip archive (torch 1.6 and later) and the older sequence of pickles, which a tensor inside a
plain pickle still is. Sizes are checked against the bytes at hand before memory is taken.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.te.unpickle import CheckpointError, Constructor, Global, Lookup, Standin, unpickle

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
        }.items()
    },
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

# Transformer Engine's recipes, and Megatron-LM's subclass of one.
_RECIPE = re.compile(r"transformer_engine\.common\.recipe\.\w+|megatron\.core\.[\w.]*\.TEDelayedScaling")
# Both read a tensor's storage from bytes; Megatron-LM puts its own in torch's place.
_LOAD_FROM_BYTES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")


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
        """The storage as a tensor ``[numel]``; the same one each time, so that tensors that share a storage still do.

        Raises:
            CheckpointError: the file has another number of bytes for it than it claims.
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
    """A tensor in a file, not read yet."""

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

    def load(self) -> Tensor:
        """The tensor, on the CPU."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        elements = self.storage.elements()
        return elements.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class Buffer(io.BytesIO):
    """``io.BytesIO``, made as a pickle makes it."""

    def build(self, state: Any) -> None:
        if not (isinstance(state, tuple) and state and isinstance(state[0], (bytes, bytearray))):
            raise CheckpointError("an io.BytesIO has no bytes")
        self.write(state[0])
        self.seek(0)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Any]:
    """The value that ``torch.save`` wrote to ``path``. Its :class:`TensorRecord` are readable inside this context.

    Objects of unknown classes are :class:`Standin`.

    Raises:
        CheckpointError: the file is no checkpoint, or damaged.
        OSError: there is no such file.
    """
    with path.open("rb") as file:
        if file.read(4) == _ZIP_SIGNATURE:
            yield _read_zip(file, _Budget(path.stat().st_size), standins=True)
        else:
            if path.stat().st_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path} is no zip archive and too large for torch's older format")
            file.seek(0)
            data = file.read()
            yield _read_legacy(io.BytesIO(data), _lookup(_Budget(len(data)), standins=True))


def read_archive(data: bytes) -> Any:
    """The value of a ``torch.save`` that lies in memory; unknown classes are refused.

    Raises:
        CheckpointError: damaged, or it holds a name that is not on the list.
    """
    budget = _Budget(len(data))
    if data[:4] == _ZIP_SIGNATURE:
        return _read_zip(io.BytesIO(data), budget)
    return _read_legacy(io.BytesIO(data), _lookup(budget))


def read_pickle(data: bytes) -> Any:
    """The value of a ``pickle.dumps``; unknown classes are refused.

    Raises:
        CheckpointError: damaged, or it holds a name that is not on the list.
    """
    return unpickle(data, _lookup(_Budget(len(data))))


class _Budget:
    """Bytes that constructors may still copy: each byte of a file is needed once or twice, a bomb needs it often."""

    def __init__(self, size: int) -> None:
        self.left = 4 * size + 4096

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise CheckpointError("it unpacks the same bytes again and again")


def _lookup(budget: _Budget, *, nested: bool = False, standins: bool = False) -> Lookup:
    """Our constructors for the names that a checkpoint may hold."""

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

    constructors: dict[str, Constructor] = {
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch.Size": lambda sizes=(): tuple(sizes),
        "collections.OrderedDict": lambda: {},
        "_codecs.encode": encode,
        "_io.BytesIO": Buffer,
        "io.BytesIO": Buffer,
    }
    if not nested:
        constructors |= dict.fromkeys(_LOAD_FROM_BYTES, load_from_bytes)

    def lookup(global_name: str) -> Constructor | None:
        if global_name in constructors:
            return constructors[global_name]
        if global_name in _STORAGE_DTYPES or global_name in _DTYPES:
            return _not_callable
        return (lambda *args: Standin(global_name, args)) if standins or _RECIPE.fullmatch(global_name) else None

    return lookup


def _not_callable(*_: Any) -> Any:
    raise CheckpointError("a dtype is called")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorRecord:
    return TensorRecord(_storage(storage), _storage(storage).dtype, offset, tuple(shape), tuple(stride))


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *_: Any
) -> TensorRecord:
    if not isinstance(dtype, Global) or dtype.name not in _DTYPES:
        raise CheckpointError("a tensor has no dtype")
    return TensorRecord(_storage(storage), _DTYPES[dtype.name], offset, tuple(shape), tuple(stride))


def _storage(value: Any) -> Storage:
    if not isinstance(value, Storage):
        raise CheckpointError("a tensor has no storage")
    return value


def _parse_persistent_id(persistent_id: Any) -> tuple[torch.dtype, str, int]:
    """dtype, key and element count of ``("storage", type, storage_key, location, numel, ...)``."""
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


def _read_zip(file: Any, budget: _Budget, *, standins: bool = False) -> Any:
    try:
        archive = zipfile.ZipFile(file)
        infos = {info.filename: info for info in archive.infolist()}
    except Exception as error:  # zipfile raises half a dozen kinds on damaged bytes
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
