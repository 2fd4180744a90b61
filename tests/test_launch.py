"""Compiling, caching and starting kernels, without a card: the driver's part is played by fakes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
import types as python_types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels import cache, launch, tensor_maps
from cuda_kernels.amax import amax_kernel
from cuda_kernels.launch import KernelError, Launch
from cuda_kernels.quantize import quantize_tensor_kernel
from cuda_kernels.scaling import update_scales_kernel
from cuda_kernels.tile import tensor_source
from lightning_fp8.formats import E4M3
from lightning_fp8.ops import cuda, planning, reference
from lightning_fp8.ops.schema import empty_operand
from lightning_fp8.scaled import Layout
from tests.emulated import executing, ptx_of
from tests.kernel_cases import BF16, assert_same, sample
from tests.ptx_on_cpu_samples import needs_gcc

KERNEL = amax_kernel(tensor_source("bfloat16", True), False)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on disk and in memory."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    yield tmp_path / "cache"
    cache._warn_once.cache_clear()


def test_a_kernel_is_compiled_once(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = KERNEL.cubin("90a")
    assert code.startswith(b"\x7fELF")
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(launch, "link", None)  # compiling again would fail
    assert KERNEL.cubin("90a") == code
    (file,) = cold.iterdir()
    assert file.read_bytes()[32:] == code


@pytest.mark.parametrize(
    "damage", [lambda b: b[:100], lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]]
)
def test_a_damaged_file_is_built_again(cold: Path, damage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        cache.cached("key", lambda: b"code of a kernel, long enough to be damaged") == (cold / "key").read_bytes()[32:]
    )
    whole = (cold / "key").read_bytes()
    (cold / "key").write_bytes(damage(whole))
    monkeypatch.setattr(cache, "_memory", {})
    assert cache.cached("key", lambda: whole[32:]) == whole[32:]
    assert (cold / "key").read_bytes() == whole


def test_two_processes_compile_into_one_cold_cache(cold: Path) -> None:
    """Both start before either has finished, as ranks do; both get the kernel, and the file is whole."""
    program = """
import sys
import hashlib
from tests.test_launch import KERNEL
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(KERNEL.cubin("90a")).hexdigest(), flush=True)
"""
    environment = os.environ | {cache.CACHE_VARIABLE: str(cold)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent.parent,
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
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(cold.parent / "file" / "cache"))  # not a folder: nobody may write
    with pytest.warns(RuntimeWarning, match=cache.CACHE_VARIABLE) as caught:
        codes = [cache.cached(key, key.encode) for key in ("a", "b")]
    assert codes == [b"a", b"b"]
    assert len(caught) == 1
    assert cache.cached("a", lambda: pytest.fail("it is in memory")) == b"a"


def test_parameters_lie_in_memory_as_the_kernel_reads_them() -> None:
    """Sizes and alignment by the parameters that the PTX declares."""
    size = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4}
    source = tensor_source("float32", False)
    for kernel in (KERNEL, update_scales_kernel(False, True), quantize_tensor_kernel(source, "e4m3", *[True] * 4)):
        declared = re.findall(r"\.param \.(\w+) (?:\.ptr )?(?:\.\w+ )*", ptx_of(kernel).split("{")[0])
        end = 0
        for kind in declared:
            end = -(-end // size[kind]) * size[kind] + size[kind]
        assert end == kernel.layout.size


def test_the_key_names_source_and_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    key = KERNEL.key("cubin", "90a")
    assert key != KERNEL.key("cubin", "89") != KERNEL.key("ptx", "89")
    monkeypatch.setattr(cache, "version", lambda tool: "of another day")
    cache.toolchain.cache_clear()
    assert key != KERNEL.key("cubin", "90a")
    monkeypatch.undo()
    cache.toolchain.cache_clear()
    names = {path.name for path in cache._sources("cuda_kernels.quantize")}
    assert {"quantize.py", "losses.py", "tile.py", "codec.py", "ptx.py", "launch.py", "cache.py"} == names
    names = {path.name for path in cache._sources("cuda_kernels.gemm.mma")}
    assert {"mma.py", "ampere.py", "epilogue.py", "product.py", "raster.py", "registers.py", "ptx.py"} <= names


class Card:
    """A driver that notes launches and reads their parameters."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.values: list[tuple[Any, ...]] = []
        self.kernel = KERNEL
        driver = python_types.SimpleNamespace(
            cuLibraryLoadData=lambda code, *rest: (0, code),
            cuLibraryGetKernel=lambda library, name: (0, 4711),
            cuLaunchKernel=self.launch,
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Card")
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
        launch.architecture.cache_clear()

    def launch(self, *args: Any) -> tuple[int]:
        extra = (ctypes.c_void_p * 5).from_address(args[-1])
        size = ctypes.c_size_t.from_address(extra[3]).value
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)
        self.values.append(self.kernel.layout.unpack(ctypes.string_at(extra[1], size)))
        self.launches.append(args[:-1])
        return (0,)


ADDRESS = 0x7F00_0000_1000


def test_a_launch_hands_its_parameters_to_the_driver(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, kernel = Card(monkeypatch), amax_kernel(tensor_source("bfloat16", True), True)
    start = Launch(kernel, 7, (140, 264), card.device).start
    for pitch in (264, 272):
        start(ADDRESS, pitch, 0, ADDRESS + 64)
        assert card.values[-1] == (ADDRESS, pitch, 0, ADDRESS + 64, 140, 264)
        assert card.launches[-1] == (4711, 7, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, 99, 0)


THROUGH_THE_BINDINGS = """
import ctypes, struct, sys
import torch
from cuda_kernels import launch
from tests.test_launch import ADDRESS, Card, amax_kernel, tensor_source

torch.cuda.get_device_capability = lambda index: (9, 0)
torch._C._cuda_getCurrentRawStream = lambda index: 99

class Noted(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("kernel", "stream")]
    _fields_ += [("grid", ctypes.c_uint64 * 3), ("block", ctypes.c_uint64 * 3), ("shared", ctypes.c_uint64)]
    _fields_ += [("size", ctypes.c_uint64), ("parameters", ctypes.c_ubyte * 512), ("name", ctypes.c_char * 256)]
    _fields_ += [("code", ctypes.c_ubyte * 4)]

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_driver_noted.restype = ctypes.POINTER(Noted)
noted = driver.fake_driver_noted().contents
kernel = amax_kernel(tensor_source("bfloat16", True), True)
start = launch.Launch(kernel, 7, (140, 264), Card.device).start
for pitch in (264, 272):
    noted.size = 0
    start(ADDRESS, pitch, 0, ADDRESS + 64)
    assert bytes(noted.code) == bytes([0x7F]) + b"ELF"
    assert b"amax" in noted.name
    assert (noted.kernel, noted.stream, noted.shared) == (0x4711, 99, kernel.shared_bytes)
    assert (*noted.grid, *noted.block) == (7, 1, 1, kernel.threads, 1, 1)
    values = kernel.layout.unpack(bytes(noted.parameters)[: noted.size])
    assert values == (ADDRESS, pitch, 0, ADDRESS + 64, 140, 264)

from cuda_kernels import tensor_maps
from cuda_kernels.tensor_maps import Box

x = torch.empty(300, 512, dtype=torch.bfloat16)[:, :200]
encoded = tensor_maps.map_on(Card.device, Box(64, 32))
for tensor in (x, x[64:], x):
    found = struct.unpack("<4Q10I", encoded(tensor)[:72])
    assert found[:4] == (tensor.data_ptr(), 200, len(tensor), 1024)
    assert found[4:] == (1, 2, 32, 64, 1, 1, 0, 3, 3, 0)
scales = torch.empty_strided((300, 6), (1, 304))
found = struct.unpack("<4Q10I", tensor_maps.map_on(Card.device, Box(1, 128, False, True))(scales)[:72])
assert found == (scales.data_ptr(), 300, 6, 1216, 7, 2, 128, 1, 1, 1, 0, 0, 3, 0)

launch.zeroing(Card.device, 77)(ADDRESS)
assert (noted.kernel, noted.grid[0], noted.stream) == (ADDRESS, 77, 99)
print("started")
"""


def test_constants_of_tensor_maps() -> None:
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    assert tensor_maps._KINDS == {
        1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    assert tensor_maps._INTERLEAVE_NONE == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert tensor_maps._SWIZZLE_NONE == swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    assert tensor_maps._SWIZZLE_128B == swizzles.CU_TENSOR_MAP_SWIZZLE_128B
    assert tensor_maps._L2_PROMOTION_256B == driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert tensor_maps._OUTSIDE_IS_0 == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


@needs_gcc
def test_launches_through_nvidias_bindings(tmp_path: Path) -> None:
    """Loading and starting, as on a card, with a driver that only notes what it is asked."""
    source, root = Path(__file__).parent / "fake_driver.c", Path(__file__).parent.parent
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", THROUGH_THE_BINDINGS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.stdout == "started\n", done.stderr


def test_threads_do_not_share_their_parameters(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward runs in threads of its own, beside the forward pass."""
    card, buffers = Card(monkeypatch), set()
    start = Launch(KERNEL, 1, (2, 3), card.device).start
    monkeypatch.setattr(launch._driver(), "cuLaunchKernel", lambda *args: (buffers.add(args[-1]), (0,))[1])
    start(ADDRESS, 3, 0, ADDRESS)
    start(ADDRESS, 3, 0, ADDRESS)
    assert len(buffers) == 1
    thread = threading.Thread(target=start, args=(ADDRESS, 3, 0, ADDRESS))
    thread.start()
    thread.join()
    assert len(buffers) == 2


def test_an_old_card_is_refused_by_name(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, kernel = Card(monkeypatch, capability=(8, 0)), amax_kernel(tensor_source("float16", False), True)
    with pytest.raises(KernelError, match=r"A Card has compute capability 8\.0; .* 8\.9"):
        Launch(kernel, 1, (1, 1), card.device)


@pytest.mark.parametrize(("capability", "arch"), [((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100"), ((12, 0), "120")])
def test_architectures(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, capability)
    assert launch.architecture(0) == arch
    assert launch.compute_capability("90a") == (9, 0, "a")
    assert launch.compute_capability("120") == (12, 0)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_without_kernels_the_reference_serves_with_one_warning(layout: Layout) -> None:
    x, how = sample(131, 203, BF16), f"e4m3 {layout.value} rowwise columnwise"
    planning.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            actual = cuda.quantize(x, how)
    assert not planning.runs_kernels(x.device)
    planning.forget()
    assert ["nothing runs kernels on cpu" in str(w.message) for w in caught] == [True]
    promised = (
        *empty_operand(x.device, layout, E4M3.dtype, 131, 203),
        *empty_operand(x.device, layout, E4M3.dtype, 203, 131),
    )
    for a, b, c in zip(actual, reference.quantize(x, how), promised):
        assert_same(a, b, layout.value)
        assert not a.numel() or a.stride() == c.stride()


def test_what_lies_on_another_card_is_served_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """That card is the current one while memory is taken and kernels start, and while they are made."""
    current, planned_on = [0], []

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        before, current[0] = current[0], other.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)

    @planning.planned(lambda x: pytest.fail("the reference serves"))
    def plan(device: torch.device, size: int) -> Callable[[int], tuple[int, int]]:
        planned_on.append(current[0])
        return lambda x: (x * size, current[0])

    for card in (torch.device("cuda", 1), torch.device("cuda", 0)):
        for _ in range(2):
            assert plan(card, current[0], 7)(6) == (42, card.index)
    assert current == [0]
    assert planned_on == [1, 0]


def test_an_error_of_the_caller_is_not_taken_for_a_missing_kernel() -> None:
    with executing(lambda *args: None), pytest.raises(ValueError, match="'2x2' is not a valid Layout"):
        cuda.quantize(sample(4, 4, BF16), "e4m3 2x2 rowwise")
    with executing(lambda *args: None), pytest.raises(ValueError, match="scale must be None"):
        cuda.quantize(sample(4, 4, BF16), "e4m3 row rowwise", torch.tensor(1.0))
