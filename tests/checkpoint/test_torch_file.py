"""Files are read as torch reads them, and nothing in them is ever called."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fp8.te.torch_file import open_checkpoint, read_archive, read_pickle
from lightning_fp8.te.unpickle import CheckpointError, Standin, unpickle

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


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
        (b"\x80\x04}))s.", "damaged"),  # a tuple as key
        (b"\x80\x04K\x01)R.", "damaged"),  # calls a number
        (b"\x80\x04" + global_("torch.float32") + b")R.", "dtype is called"),
        (b"\x80\x04I1\n\x82\x01.", "EXT1"),
        (b"\x80\x04K\x01", "damaged"),
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


@pytest.mark.parametrize("stride", [b"K\x01\x85", b"K\x00\x85"])
def test_a_tensor_that_claims_2_to_the_60_elements(stride: bytes) -> None:
    def lookup(name: str) -> Any:
        from lightning_fp8.te import torch_file

        return torch_file._lookup(torch_file._Budget(1000))(name)

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


def test_a_compressed_archive_is_refused() -> None:
    import zipfile

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
