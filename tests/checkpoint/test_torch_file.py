"""Files are read as torch reads them, and nothing in them is ever called."""

from __future__ import annotations

import io
import os
import pickle
import shutil
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
from torch.testing._internal.two_tensor import TwoTensor

from lightning_fp8 import Linear, load_te_state_dict
from lightning_fp8.cli.checkpoint import convert, inspect
from lightning_fp8.te.torch_file import CheckpointError, load_checkpoint, read_archive, read_pickle
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
        loaded = read[name]
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
    torch.save(file | {"where": Path("x"), "kinds": frozenset([1])}, tmp_path / "a.ckpt")
    read, unread = load_checkpoint(tmp_path / "a.ckpt")
    first, second = read["state_dict"]["w"], read["state_dict"]["tied"]
    assert torch.equal(first, weight)
    assert first.data_ptr() == second.data_ptr()
    assert read["buffer"].read() == b"abc"
    assert read["kinds"] == frozenset([1])
    assert unread == ["pathlib.PosixPath"]
    assert repr(read["where"]) == "an object of pathlib.PosixPath"
    assert io.BytesIO in torch.serialization.get_safe_globals()  # for Lightning, which loads by itself
    assert not [
        each for each in torch.serialization.get_safe_globals() if isinstance(each, tuple) and each[1] in unread
    ]


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


@pytest.mark.parametrize("where", ["file", "older file", "BytesIO", "older BytesIO", "pickle", "storage"])
@pytest.mark.parametrize(
    "call", [shutil.rmtree, os.remove, eval, exec, os.system, torch.load], ids=lambda f: f.__name__
)
def test_what_a_file_would_call_is_not_called(call: Any, where: str, tmp_path: Path) -> None:
    """Whether the file is then refused, or read without the object, of which only the name is known."""
    path, canary = tmp_path / "evil.ckpt", tmp_path / "canary"
    canary.mkdir() if call is shutil.rmtree else canary.write_bytes(saved(1))
    text = f"__import__('os').remove({str(canary)!r})" if call in (eval, exec) else str(canary)
    payload = Evil(call, f"rm {canary}" if call is os.system else text)
    inner = {
        "BytesIO": lambda: io.BytesIO(saved({"scale_fwd": payload})),
        "older BytesIO": lambda: io.BytesIO(saved({"scale_fwd": payload}, zipped=False)),
        "pickle": lambda: torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": payload})), dtype=torch.uint8),
        "storage": lambda: pickle.dumps(Evil(torch.storage._load_from_bytes, saved(payload, zipped=False))),
    }
    state = inner[where]() if where in inner else payload
    path.write_bytes(saved({"state_dict": {"0._extra_state": state}}, zipped=where != "older file"))
    for command in (inspect, lambda path: convert(path, tmp_path / "out.ckpt")):
        try:
            said = command(path)
        except CheckpointError as error:
            said = str(error)
        assert "no FP8 state" in said or "no Transformer Engine state" in said or call.__name__ in said
    assert ("no Transformer Engine state" in said) == (where == "file" and call.__module__ not in ("posix", "nt"))
    if where in inner:
        for load in (Linear(8, 8).load_state_dict, lambda file: load_te_state_dict(Linear(8, 8), file)):
            with pytest.raises((CheckpointError, RuntimeError), match=rf"_extra_state.*{call.__name__}"):
                load({"_extra_state": state})
    assert canary.exists()
    assert not (tmp_path / "out.ckpt").exists()
    if where.endswith("file") and call is not torch.load:
        torch.load(path, weights_only=False)
        assert not canary.exists(), "the file is harmless"


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
    with pytest.raises(CheckpointError, match="is given a state"):
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
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / "file.pt")


@pytest.mark.parametrize("claim", [1, 6, 8, 9, 40, 200])
def test_a_storage_that_claims_other_bytes_than_its_record_is_refused(claim: int, tmp_path: Path) -> None:
    """Older torch.load reads on beyond the record, and a mapped file is read as far as it claims."""
    data, edited = io.BytesIO(saved({"a": torch.arange(7.0), "b": torch.ones(9), "c": torch.zeros(0)})), io.BytesIO()
    with zipfile.ZipFile(data) as source, zipfile.ZipFile(edited, "w") as target:
        for info in source.infolist():
            record = source.read(info)
            target.writestr(
                info.filename,
                record.replace(b"K\x07", b"K" + bytes([claim])) if "data.pkl" in info.filename else record,
            )
    with pytest.raises(CheckpointError, match=f"claims {claim} torch.float32 and has 28 bytes"):
        read_archive(edited.getvalue())
    (tmp_path / "a.pt").write_bytes(edited.getvalue())
    with pytest.raises(CheckpointError, match=f"claims {4 * claim} bytes and has 28|out of bounds|damaged"):
        load_checkpoint(tmp_path / "a.pt")


def test_subclasses_of_tensors_are_read(tmp_path: Path) -> None:
    pair = TwoTensor(torch.ones(4), torch.arange(4.0))
    torch.save({"a": pair}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([TwoTensor]):
        value, unread = load_checkpoint(tmp_path / "a.pt")
    assert not unread
    assert torch.equal(value["a"].b, pair.b)


def test_a_storage_that_no_tensor_names_is_refused(tmp_path: Path) -> None:
    """As many storages as records, of the same sizes: only then is each compared with its own."""
    torch.save({"a": torch.arange(7.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr("a/data/1", b"12345678")
    with pytest.raises(CheckpointError, match="name 1 storages, and it has 2"):
        load_checkpoint(tmp_path / "a.pt")


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
    torch.testing.assert_close(load_checkpoint(tmp_path / "a.pt")[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(read_archive(data), _plain(expected), rtol=0, atol=0)


def _plain(value: Any) -> Any:
    """Its OrderedDict and torch.Size as the reader gives them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, torch.Size) else value


@pytest.mark.parametrize("stride", [b"K\x01\x85", b"K\x00\x85"])
def test_a_tensor_that_claims_2_to_the_60_elements(stride: bytes) -> None:
    storage = pickle.dumps(torch.zeros(4).untyped_storage(), 2)[2:-1]
    data = b"\x80\x02" + tensor_of(storage, HUGE + b"\x85", stride) + b"."
    if stride == b"K\x00\x85":  # one element seen often takes no memory
        assert read_pickle(data).numel() == 2**60
    else:
        with pytest.raises(
            CheckpointError, match=r"sizes \[1152921504606846976\].* out of bounds for storage of size 16"
        ):
            read_pickle(data)


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
        (
            called_often("torch.storage._load_from_bytes", saved(torch.zeros(1 << 14).untyped_storage(), False), 1000),
            "again",
        ),
        (called_often("torch.Size", bytes(1 << 16), 1000), "not made of a tuple"),
    ],
    ids=["storages", "sizes"],
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


@pytest.mark.parametrize("container", ["file", "state"])
def test_fp8_primary_weights_are_named(container: str, tmp_path: Path) -> None:
    """A weight is pickled as a call of a class method, which protocol 2 gets by getattr."""
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    method = global_("__builtin__.getattr") + global_(f"{name}.Float8Tensor") + b"X\x14\0\0\0_make_in_reduce_ex_1\x86R"
    data = b"\x80\x02" + method + b")R."
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", b"3\n")
    with pytest.raises(CheckpointError, match=r"FP8 primary weights of fp8_model_init are not supported.*dequantize"):
        read_pickle(data) if container == "state" else load_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_a_member_of_a_recipes_enumeration_is_read_by_its_name(module: str) -> None:
    """As Python 3.11.2 pickles it; of anything else getattr is refused."""
    owner, name = "transformer_engine.common.recipe.Format", b"X\x06\0\0\0HYBRID\x86R."
    read = read_pickle(b"\x80\x02" + global_(f"{module}.getattr") + global_(owner) + name)
    assert (read.name, read.args) == (owner, ("HYBRID",))
    for other in (global_("torch.Size"), global_("torch.float32"), b"N", b"K\x01"):
        with pytest.raises(CheckpointError, match=r"asks for 'builtins.getattr'"):
            read_pickle(b"\x80\x02" + global_(f"{module}.getattr") + other + name)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(None))
        archive.writestr("archive/data/0", bytes(10**7))
    (tmp_path / "a.pt").write_bytes(buffer.getvalue())
    for read in (lambda: read_archive(buffer.getvalue()), lambda: load_checkpoint(tmp_path / "a.pt")):
        with pytest.raises(CheckpointError, match="compressed"):
            read()


@pytest.mark.parametrize("container", ["zip", "legacy", "pickle"])
def test_truncation_at_every_byte(container: str) -> None:
    value = {"scale_fwd": torch.ones(3), "n": 3}
    data = pickle.dumps(value) if container == "pickle" else saved(value, zipped=container == "zip")
    read = read_pickle if container == "pickle" else read_archive
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read(data[:length])


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


def test_an_empty_file_ends_too_early(tmp_path: Path) -> None:
    (path := tmp_path / "empty.ckpt").touch()
    with pytest.raises(CheckpointError, match="it ends too early"):
        load_checkpoint(path)
