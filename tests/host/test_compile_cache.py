"""Kernels are compiled once and kept, whatever else happens."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_kernels.host import cache_folder, compile_cache
from cuda_kernels.lowering import compiler
from tests.host.card import KERNEL
from tests.tiers import thorough


def test_a_kernel_is_compiled_once(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile_cache.cubin(KERNEL, "90a")
    assert code.startswith(b"\x7fELF")
    monkeypatch.setattr(cache_folder, "_memory", {})
    monkeypatch.setattr(compiler, "link", None)  # compiling again would fail
    assert compile_cache.cubin(KERNEL, "90a") == code
    (file,) = cold.iterdir()
    assert file.read_bytes()[32:] == code


@pytest.mark.parametrize(
    "damage", [lambda b: b[:100], lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]]
)
def test_a_damaged_file_is_built_again(cold: Path, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder.cached("key", lambda: b"code of a kernel, to be damaged") == (cold / "key").read_bytes()[32:]
    whole = (cold / "key").read_bytes()
    (cold / "key").write_bytes(damage(whole))
    monkeypatch.setattr(cache_folder, "_memory", {})
    assert cache_folder.cached("key", lambda: whole[32:]) == whole[32:]
    assert (cold / "key").read_bytes() == whole


@thorough
def test_two_processes_compile_into_one_cold_cache(cold: Path) -> None:
    """Both start before either has finished, as ranks do; both get the kernel, and the file is whole."""
    program = """
import sys
import hashlib
from cuda_kernels.host import compile_cache
from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.device.tile import tensor_loader
KERNEL = amax_kernel(tensor_loader("bfloat16", 4), False)
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(compile_cache.cubin(KERNEL, "90a")).hexdigest(), flush=True)
"""
    environment = os.environ | {cache_folder.CACHE_VARIABLE: str(cold)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    digests = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests[0] == digests[1]
    (file,) = cold.iterdir()
    assert hashlib.sha256(file.read_bytes()[32:]).hexdigest() == digests[0]


def test_a_folder_that_cannot_be_written_warns_once(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold.parent.joinpath("file").touch()
    monkeypatch.setenv(
        cache_folder.CACHE_VARIABLE, str(cold.parent / "file" / "cache")
    )  # not a folder: nobody may write
    with pytest.warns(RuntimeWarning, match=cache_folder.CACHE_VARIABLE) as caught:
        codes = [cache_folder.cached(key, key.encode) for key in ("a", "b")]
    assert codes == [b"a", b"b"]
    assert len(caught) == 1
    assert cache_folder.cached("a", lambda: pytest.fail("it is in memory")) == b"a"


def test_the_key_names_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of what is carried does not: it was compiled elsewhere."""
    key, carried = compile_cache.cache_key(KERNEL, "cubin", "90a"), compile_cache.source_key(KERNEL, "cubin", "90a")
    assert (
        len(
            {key, compile_cache.cache_key(KERNEL, "cubin", "89"), compile_cache.cache_key(KERNEL, "ptx", "89"), carried}
        )
        == 4
    )
    monkeypatch.setattr(compile_cache, "versions", lambda tools: dict.fromkeys(tools, "of another day"))
    compile_cache.compilers.cache_clear()
    assert key != compile_cache.cache_key(KERNEL, "cubin", "90a")
    assert carried == compile_cache.source_key(KERNEL, "cubin", "90a")
    monkeypatch.undo()
    compile_cache.compilers.cache_clear()


def test_a_hash_of_sources_knows_which_file_has_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_of(**texts: str) -> str:
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(compile_cache, "_with_imports", lambda module_name: set(texts))
        monkeypatch.setattr(compile_cache, "_file_of", lambda name: tmp_path / name)
        return compile_cache.source_hash.__wrapped__("any")

    hashes = [hash_of(a="1", b="2"), hash_of(a="2", b="1"), hash_of(a="1", c="2"), hash_of(a="1", b="2")]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]
