"""Files are read as torch reads them, and nothing in them is ever called."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fp8.te.torch_file import (
    CheckpointError,
    Standin,
    TensorRecord,
    _Budget,
    _lookup,
    open_checkpoint,
    read_archive,
    read_pickle,
    unpickle,
)
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.complex128]


def saved(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("container", ["zip", "legacy", "pickle"])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, container: str) -> None:
    base = torch.arange(24).remainder(2).to(dtype).view(4, 6)
    value = {"all": base, "transposed": base.t(), "part": base[1:3, ::2], "empty": base[:0], "scalar": base[2, 3]}
    if container == "pickle":
        read = read_pickle(pickle.dumps(value))
    else:
        read = read_archive(saved(value, zipped=container == "zip"))
    assert read.keys() == value.keys()
    for name, tensor in value.items():
        loaded = read[name].load()
        assert loaded.dtype == dtype
        assert loaded.shape == tensor.shape
        assert (
            loaded.contiguous().view(-1).view(torch.uint8).tolist()
            == tensor.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_plain_values_come_back() -> None:
    value = {
        "a": [1, -(2**40), 2.5, None, True],
        "b": OrderedDict(c=("text", b"bytes")),
        3: (),
        "é": 2**70,
    }
    assert read_archive(saved(value)) == value
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert read_pickle(pickle.dumps(value, protocol)) == value
    assert read_pickle(pickle.dumps({1, 2})) == {1, 2}


def test_a_checkpoint_file_shares_storages_and_knows_unknown_classes_by_name(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    file = {"state_dict": OrderedDict(w=torch.nn.Parameter(weight), tied=weight), "buffer": io.BytesIO(b"abc")}
    torch.save(file | {"where": Path("x")}, tmp_path / "a.ckpt")
    with open_checkpoint(tmp_path / "a.ckpt") as read:
        first, second = read["state_dict"]["w"].load(), read["state_dict"]["tied"].load()
        assert torch.equal(first, weight.detach())
        assert first.data_ptr() == second.data_ptr()
        assert read["buffer"].read() == b"abc"
        assert isinstance(read["where"], Standin)
        assert read["where"].name == "pathlib.PosixPath"


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (Evil(os.system, "exit 3"), r"(posix|nt)\.system"),
        (Evil(eval, "1 + 1"), r"builtin(s|__)\.eval"),
        (Evil(getattr, "x", "upper"), r"builtin(s|__)\.getattr"),
        (Evil(torch.load, "x"), r"torch\.serialization\.load"),
        (Evil(__import__, "os"), r"builtin(s|__)\.__import__"),
        (torch.nn.Linear, r"torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_a_foreign_name_is_refused_by_name(payload: Any, named: str) -> None:
    for read in (
        lambda: read_pickle(pickle.dumps({"scale_fwd": payload})),
        lambda: read_archive(saved({"scale_fwd": payload})),
        lambda: read_archive(saved({"scale_fwd": payload}, zipped=False)),
    ):
        with pytest.raises(CheckpointError, match=named):
            read()


def test_the_bytes_inside_a_tensor_are_read_under_the_same_law() -> None:
    inner = saved(Evil(os.system, "exit 3"), zipped=False)
    with pytest.raises(CheckpointError, match=r"(posix|nt)\.system"):
        read_pickle(pickle.dumps(Evil(torch.storage._load_from_bytes, inner)))
    nested = saved(Evil(torch.storage._load_from_bytes, saved(1, zipped=False)), zipped=False)
    with pytest.raises(CheckpointError, match="_load_from_bytes"):
        read_pickle(pickle.dumps(Evil(torch.storage._load_from_bytes, nested)))


def global_(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def tensor_of(storage: bytes, shape: bytes, stride: bytes) -> bytes:
    return global_("torch._utils._rebuild_tensor_v2") + b"(" + storage + b"K\x00" + shape + stride + b"\x89NtR"


HUGE = b"\x8a\x08" + (2**60).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02K\x01Q.", "persistent id"),
        (b"\x80\x04)\x85h\xff.", "damaged"),  # reads a memo that was never written
        (b"\x80\x04]\x94h\x00a.", None),  # a list in itself is no harm
        (b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.", "damaged"),
        (b"\x80\x04" + b"\x85" * 5 + b".", "damaged"),
        (b"\x80\x04}))s.", "neither text nor number is not supported: a tuple; save the file without it"),
        (b"\x80\x04K\x01)R.", "damaged"),  # calls a number
        (b"\x80\x04" + global_("torch.float32") + b")R.", "dtype is called"),
        (b"\x80\x04I1\n\x82\x01.", "EXT1"),
        (b"\x80\x04K\x01", "damaged: it ends too early"),
        (b"\x80\x04K\x01K\x02.", "more than one value"),
        (b"\x80\x04(K\x01.", "more than one value"),
        (b"\x80\x05\x96" + (2**60).to_bytes(8, "little") + b"x.", "damaged"),
        (b"\x80\x04]}" + b"\x85" * 100_000 + b"K\x01s.", "damaged"),  # a key that is nested deeper than any stack
        (b"\x80\x04" + b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "neither text nor number"),
        (b"\x80\x04(K\x01K\x02ibuiltins\nprint\n.", "INST"),
        (b"\x80\x04C\x01a\x98.", "READONLY_BUFFER"),
        (b"\x80\x04(\x91.", "FROZENSET"),
        (b"", "damaged"),
    ],
)
def test_damaged_pickles(data: bytes, message: str | None) -> None:
    if message is None:
        value = read_pickle(data)
        assert value[0] is value
    else:
        with pytest.raises(CheckpointError, match=message):
            read_pickle(data)


REBUILD = "torch._utils._rebuild_tensor_v2"


@pytest.mark.parametrize("given", [b"}", b"N}\x86", b"N}\x8c\x0c__defaults__K\x05\x85s\x86"])
@pytest.mark.parametrize("target", ["torch.Size", REBUILD, "torch.float32", "transformer_engine.common.recipe.A"])
def test_a_file_sets_no_attributes_of_what_it_names(target: str, given: bytes) -> None:
    before = torch._utils._rebuild_tensor_v2.__defaults__
    with pytest.raises(CheckpointError, match="Global is given a state"):
        read_pickle(b"\x80\x04" + global_(target) + given + b"b.")
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before


def test_a_memo_of_large_numbers_takes_no_memory() -> None:
    tracemalloc.start()
    assert read_pickle(b"\x80\x04K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == 7
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_what_torch_would_run_or_unpack_is_refused(tmp_path: Path) -> None:
    """TorchScript, which ``torch.load`` runs whatever its ``pickle_module``, and the oldest format, a tar archive."""
    scripted = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), scripted)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    for data in (scripted.getvalue(), tar.getvalue()):
        with pytest.raises(CheckpointError):
            read_archive(data)
        (tmp_path / "file.pt").write_bytes(data)
        with pytest.raises(CheckpointError), open_checkpoint(tmp_path / "file.pt") as read:
            _tensors(read)


def test_a_storage_that_claims_more_than_its_record_is_refused() -> None:
    """Older torch.load reads on beyond the record."""
    data, edited = io.BytesIO(saved({"a": torch.arange(7.0)})), io.BytesIO()
    with zipfile.ZipFile(data) as source, zipfile.ZipFile(edited, "w") as target:
        for info in source.infolist():
            record = source.read(info)
            target.writestr(
                info.filename, record.replace(b"K\x07", b"K\xc8") if "data.pkl" in info.filename else record
            )
    with pytest.raises(CheckpointError, match="claims 200 torch.float32 and has 28 bytes"):
        read_archive(edited.getvalue())


def _tensors(value: Any) -> Any:
    if isinstance(value, TensorRecord):
        return value.load()
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return type(value)(map(_tensors, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("zipped", [True, False])
def test_files_read_as_torch_reads_them(zipped: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    file = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "half": torch.randn(9).half()[2:7:2]}
    file |= {"steps": [1, (2.5, None)], "shape": torch.Size([2, 3])}
    data = saved(file, zipped)
    (tmp_path / "a.pt").write_bytes(data)
    expected = torch.load(io.BytesIO(data), weights_only=zipped)
    with open_checkpoint(tmp_path / "a.pt") as opened:
        for read in (_tensors(opened), _tensors(read_archive(data))):
            torch.testing.assert_close(read, _plain(expected), rtol=0, atol=0)


def _plain(value: Any) -> Any:
    """Its OrderedDict and torch.Size as the reader gives them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, torch.Size) else value


@pytest.mark.parametrize("stride", [b"K\x01\x85", b"K\x00\x85"])
def test_a_tensor_that_claims_2_to_the_60_elements(stride: bytes) -> None:
    lookup = _lookup(_Budget(1000))
    storage = pickle.dumps(torch.zeros(4).untyped_storage(), 2)[2:-1]
    data = b"\x80\x02" + tensor_of(storage, HUGE + b"\x85", stride) + b"."
    if stride == b"K\x00\x85":  # one element seen often takes no memory
        assert unpickle(data, lookup).numel == 2**60
    else:
        with pytest.raises(CheckpointError, match="claims 1152921504606846976 elements"):
            unpickle(data, lookup)


def test_the_same_bytes_are_not_unpacked_again_and_again() -> None:
    text = "x" * 10_000
    call = global_("_codecs.encode") + b"(h\x00X\x06\x00\x00\x00latin1tR0"
    data = b"\x80\x04X" + len(text).to_bytes(4, "little") + text.encode() + b"\x94" + call * 1000 + b"."
    with pytest.raises(CheckpointError, match="again and again"):
        read_pickle(data)


def called_often(name: str, payload: bytes, times: int) -> bytes:
    """A pickle of one bytearray and a list of what ``name`` makes of it, again and again."""
    data = (
        b"\x80\x05\x96" + len(payload).to_bytes(8, "little") + payload + b"\x940](" + global_(name) + b"\x94h\x00\x85R"
    )
    return data + b"h\x01h\x00\x85R" * times + b"e."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (called_often("io.BytesIO", bytes(1 << 16), 1000), "again and again"),
        (called_often("torch.Size", bytes(1 << 16), 1000), "not made of a tuple"),
        # 1000 buffers that are given one state
        (
            b"\x80\x04B" + (1 << 16).to_bytes(4, "little") + bytes(1 << 16) + b"K\x00N\x87\x940]("
            b"" + (global_("io.BytesIO") + b")\x81h\x00b") * 1000 + b"e.",
            "again and again",
        ),
    ],
    ids=["buffers", "sizes", "states of buffers"],
)
def test_copies_of_the_same_bytes_are_charged(data: bytes, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        read_pickle(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(data)


def test_keys_whose_hashes_collide_at_will_are_refused() -> None:
    """CPython's hash of an integer is its remainder of 2**61 - 1."""
    assert read_pickle(pickle.dumps({2**63: 1, -(2**63): 2, 2**64 - 1: 3})) == {2**63: 1, -(2**63): 2, 2**64 - 1: 3}
    for value in ({k * (2**61 - 1): None for k in range(20, 30)}, {2**64}):
        with pytest.raises(CheckpointError, match=r"has 6\d bits is not supported: at most 64"):
            read_pickle(pickle.dumps(value, 4))


@pytest.mark.parametrize("view", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugate", "negative"])
def test_a_lazy_view_is_not_read_as_what_it_is_made_of(view: Any) -> None:
    data = saved({"x": view(torch.ones(2, dtype=torch.complex64))})
    with pytest.raises(CheckpointError, match="resolve_conj"):
        read_archive(data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_fp8_primary_weights_are_named(protocol: int) -> None:
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    if protocol == 2:  # how pickle writes a class method then
        method = (
            global_("__builtin__.getattr") + global_(f"{name}.Float8Tensor") + b"X\x14\0\0\0_make_in_reduce_ex_1\x86R"
        )
    else:
        method = (
            b"".join(b"\x8c" + bytes([len(x)]) + x.encode() for x in (name, "Float8Tensor._make_in_reduce_ex"))
            + b"\x93"
        )
    with pytest.raises(CheckpointError, match=r"FP8 primary weights of fp8_model_init are not supported.*dequantize"):
        unpickle(b"\x80\x04" + method + b")R.", _lookup(_Budget(1000), standins=True))


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_a_member_of_a_recipes_enumeration_is_read_by_its_name(module: str) -> None:
    """As Python 3.11.2 pickles it; of anything else getattr is refused."""
    owner, name = "transformer_engine.common.recipe.Format", b"X\x06\0\0\0HYBRID\x86R."
    read = unpickle(b"\x80\x02" + global_(f"{module}.getattr") + global_(owner) + name, _lookup(_Budget(1000)))
    assert (read.name, read.args) == (owner, ("HYBRID",))
    for other in (global_("io.BytesIO"), global_("torch.float32"), b"N", b"K\x01"):
        with pytest.raises(CheckpointError, match=rf"asks for '{module}.getattr'"):
            unpickle(b"\x80\x02" + global_(f"{module}.getattr") + other + name, _lookup(_Budget(1000)))


def test_what_a_call_gives_is_not_called() -> None:
    method = global_("__builtin__.getattr") + global_("a.B") + b"K\x01\x86R"
    with pytest.raises(CheckpointError, match=r"calls what '__builtin__.getattr' gives, which is not supported"):
        unpickle(b"\x80\x02" + method + b")R.", _lookup(_Budget(1000), standins=True))


def test_a_compressed_archive_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(None))
        archive.writestr("archive/data/0", bytes(10**7))
    with pytest.raises(CheckpointError, match="compressed"):
        read_archive(buffer.getvalue())


@pytest.mark.parametrize("container", ["zip", "legacy", "pickle"])
def test_truncation_at_every_byte(container: str) -> None:
    value = {"scale_fwd": torch.ones(3), "n": 3}
    data = pickle.dumps(value) if container == "pickle" else saved(value, zipped=container == "zip")
    read = read_pickle if container == "pickle" else read_archive
    for length in range(len(data)):
        try:
            tensor = read(data[:length])["scale_fwd"]
        except CheckpointError:
            continue
        with pytest.raises(CheckpointError):
            tensor.load()


@thorough
def test_mutated_files_call_nothing_and_take_no_memory() -> None:
    """5,000 mutated files in a process that dies of any import, call, opened file, or 256 MiB."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.mutated_files", "5000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "5000 files" in result.stdout
