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
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.casts.quantize import quantize_tensor_kernel
from cuda_kernels.casts.update_scales import update_scales_kernel
from cuda_kernels.device.tile import tensor_loader
from cuda_kernels.gemm import wgmma
from cuda_kernels.gemm.spec import GemmConfig, GemmSpec, Scaling
from cuda_kernels.host import cache_folder, compile_cache, launch, tensor_maps
from cuda_kernels.host.launch import Launch, NoKernels, bind
from cuda_kernels.kernel import Kernel, KernelError, compute_capability
from cuda_kernels.lowering import compiler, entry
from lightning_fp8.formats import E4M3
from lightning_fp8.ops.attention import missing_kernel
from lightning_fp8.ops.core import dispatch
from lightning_fp8.ops.core.alignment import empty_operand
from lightning_fp8.ops.quantize import cuda, launches, reference
from lightning_fp8.scaled import Layout
from tests.cuda_kernels.emulated import executing, ptx_of
from tests.cuda_kernels.kernel_cases import BF16, assert_same, sample
from tests.cuda_kernels.launch_everything import every_kernel
from tests.emulator.ptx_on_cpu_samples import needs_gcc
from tests.machine_code.test_compiled_kernels import compiled

KERNEL = amax_kernel(tensor_loader("bfloat16", 4), False)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on disk and in memory."""
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_memory", {})
    yield tmp_path / "cache"
    cache_folder._warn_once.cache_clear()


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


def test_parameters_lie_in_memory_as_the_kernel_reads_them() -> None:
    """Sizes and alignment by the parameters that the PTX declares."""
    size = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4}
    loader = tensor_loader("float32", 1)
    for kernel in (KERNEL, update_scales_kernel(False), quantize_tensor_kernel(loader, "e4m3", *[True] * 4)):
        declared = re.findall(r"\.param \.(\w+) (?:\.ptr )?(?:\.\w+ )*", ptx_of(kernel).split("{")[0])
        end = 0
        for kind in declared:
            end = -(-end // size[kind]) * size[kind] + size[kind]
        assert end == kernel.param_struct.size


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


class Card:
    """A driver that notes launches and reads their parameters."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.contexts = threading.local()
        self.values: list[tuple[Any, ...]] = []
        self.kernel = KERNEL
        driver = python_types.SimpleNamespace(
            cuLibraryLoadData=lambda code, *rest: (0, code),
            cuLibraryGetKernel=lambda library, name: (0, 4711),
            cuLaunchKernel=self.launch,
            cuKernelGetFunction=lambda kernel: (0, 4712),
            cuFuncLoad=lambda function: (0,),
            cuDeviceGet=lambda index: (0, index),
            cuDevicePrimaryCtxRetain=lambda device: (0, 0xC0 + device),
            cuCtxGetCurrent=lambda: (0, getattr(self.contexts, "current", 0)),
            cuCtxSetCurrent=lambda context: (setattr(self.contexts, "current", context), (0,))[1],
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Card")
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
        launch.architecture.cache_clear()

    def launch(self, *args: Any) -> tuple[int]:
        assert self.contexts.current
        *rest, parameters, extra = args
        assert not extra
        kinds = {"q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
        addresses = (ctypes.c_void_p * len(self.kernel.struct_codes)).from_address(parameters)
        read = (kinds[kind].from_address(address) for kind, address in zip(self.kernel.struct_codes, addresses))
        self.values.append(tuple(value.value for value in read))
        self.launches.append(tuple(rest))
        return (0,)


ADDRESS = 0x7F00_0000_1000


def test_a_launch_hands_its_parameters_to_the_driver(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, kernel = Card(monkeypatch), amax_kernel(tensor_loader("bfloat16", 4), True)
    start = Launch(kernel, 7, (140, 264), card.device).run
    for pitch in (264, 272):
        start(ADDRESS, pitch, 0, ADDRESS + 64)
        assert card.values[-1] == (ADDRESS, pitch, 0, ADDRESS + 64, 140, 264)
        assert card.launches[-1] == (4711, 7, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, 99)


THROUGH_THE_BINDINGS = """
import struct
import torch
from cuda_kernels.host import launch, tensor_maps
from cuda_kernels.host.tensor_maps import Box
from tests.cuda_kernels.launch_everything import CARD, Started, in_a_fresh_thread

noted = Started().noted
x = torch.empty(300, 512, dtype=torch.bfloat16)[:, :200]
encoded = tensor_maps.map_on(CARD, Box(64, 32))
for tensor in (x, x[64:], x):
    found = struct.unpack("<4Q10I", encoded(tensor)[:72])
    assert found[:4] == (tensor.data_ptr(), 200, len(tensor), 1024)
    assert found[4:] == (1, 2, 32, 64, 1, 1, 0, 3, 3, 0)
scales = torch.empty_strided((300, 6), (1, 304))
found = struct.unpack("<4Q10I", tensor_maps.map_on(CARD, Box(1, 128, False, True))(scales)[:72])
assert found == (scales.data_ptr(), 300, 6, 1216, 7, 2, 128, 1, 1, 1, 0, 0, 3, 0)

zero = launch.zeroing(CARD, 77)
for run in (lambda work: work(), in_a_fresh_thread):
    noted.kernel = 0
    run(lambda: zero(0x7F0000001000))
    assert (noted.kernel, noted.grid[0], noted.stream) == (0x7F0000001000, 77, 99)
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


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that only notes what it is asked."""
    folder, source = tmp_path_factory.mktemp("driver"), Path(__file__).parent / "fake_driver.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


def on_the_fake_driver(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_gcc
def test_maps_and_zeros_through_nvidias_bindings(fake_driver: Path) -> None:
    assert on_the_fake_driver(fake_driver, "-c", THROUGH_THE_BINDINGS) == "started\n"


@needs_gcc
def test_every_kernel_starts_through_nvidias_bindings(fake_driver: Path, tmp_path: Path) -> None:
    """From built machine code and where no compiler is installed; from the main thread and from a fresh one."""
    for kernel in every_kernel():
        arch = kernel.architectures[0]
        cache_folder.carry(tmp_path, compile_cache.source_key(kernel, "cubin", arch), compiled(kernel, arch)[1])
    folders = {cache_folder.CARRIED_VARIABLE: str(tmp_path), cache_folder.CACHE_VARIABLE: str(tmp_path / "empty")}
    assert on_the_fake_driver(fake_driver, "-m", "tests.cuda_kernels.launch_everything", **folders) == "started\n"
    assert not (tmp_path / "empty").exists()


def test_threads_do_not_share_their_parameters(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward runs in threads of its own, beside the forward pass."""
    card, buffers = Card(monkeypatch), set()
    start = Launch(KERNEL, 1, (2, 3), card.device).run
    monkeypatch.setattr(launch._driver(), "cuLaunchKernel", lambda *args: (buffers.add(args[-2]), (0,))[1])
    start(ADDRESS, 3, 0, ADDRESS)
    start(ADDRESS, 3, 0, ADDRESS)
    assert len(buffers) == 1
    thread = threading.Thread(target=start, args=(ADDRESS, 3, 0, ADDRESS))
    thread.start()
    thread.join()
    assert len(buffers) == 2


def test_machine_code_that_cannot_be_loaded_is_found_when_a_call_is_planned(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver loads it as late as it may, and so would only say so at the first start."""
    card = Card(monkeypatch)
    monkeypatch.setattr(launch._driver(), "cuFuncLoad", lambda function: (209,))
    kernel = amax_kernel.__wrapped__(tensor_loader("bfloat16", 4), True)  # one that is not loaded yet
    with pytest.raises(KernelError, match="209"):
        Launch(kernel, 7, (140, 264), card.device)


def test_memory_that_is_short_is_no_reason_to_do_without_a_kernel(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives back what it keeps; if that does not help, it is torch's own error, and the next call tries again."""
    card, answers, emptied = Card(monkeypatch), [2, 0], []
    monkeypatch.setattr(launch._driver(), "cuFuncLoad", lambda function: (answers.pop(0),))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    kernel = amax_kernel.__wrapped__(tensor_loader("bfloat16", 4), True)  # one that is not loaded yet
    Launch(kernel, 7, (140, 264), card.device)
    assert emptied == [True]
    assert not answers

    answers += [2, 2, 0]
    kernel = amax_kernel.__wrapped__(tensor_loader("bfloat16", 4), True)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        Launch(kernel, 7, (140, 264), card.device)
    Launch(kernel, 7, (140, 264), card.device)
    assert not answers


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda"), (None, "cuda")])
def test_what_is_missing_is_named_for_torchs_cuda(
    cuda: str | None, extra: str, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(compile_cache, "cubin", lambda kernel, arch: import_module("compilers_that_nobody_has"))
    kernel = amax_kernel.__wrapped__(tensor_loader("bfloat16", 4), True)
    with pytest.raises(KernelError, match=rf'pip install "lightning-fp8\[{extra}\]"'):
        Launch(kernel, 7, (140, 264), card.device)


def test_an_old_card_is_refused_by_name(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, kernel = Card(monkeypatch, capability=(8, 0)), amax_kernel(tensor_loader("float16", 1), True)
    with pytest.raises(NoKernels, match=r"A Card has compute capability 8\.0; .* 8\.9"):
        Launch(kernel, 1, (1, 1), card.device)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100"), ((10, 3), "100"), ((12, 0), "120"), ((12, 1), "120")],
)
def test_architectures(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, capability)
    assert launch.architecture(0) == arch
    assert compute_capability("90a") == (9, 0, "a")
    assert compute_capability("120") == (12, 0)


@pytest.mark.parametrize("capability", [(8, 6), (8, 0), (9, 1), (11, 0), (13, 0)])
def test_a_card_without_kernels(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for Hopper's own features runs on nothing later."""
    Card(monkeypatch, capability)
    with pytest.raises(NoKernels, match=f"compute capability {capability[0]}\\.{capability[1]}"):
        launch.architecture(0)
    # Attention of unchanged models, and ours without FP8, ask for a reason on every card.
    assert f"compute capability {capability[0]}.{capability[1]}; there are" in missing_kernel(Card.device, 64)


def test_a_kernel_is_for_its_architectures(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for Hopper is not compiled for Ada; that it is missing there switches no other kernel off."""
    card = Card(monkeypatch, (8, 9))
    hoppers = Kernel("only for Hopper", lambda: None, {}, 32, architectures=("90a",))
    with pytest.raises(KernelError, match="only for Hopper is for sm_90a, not for sm_89") as caught:
        Launch(hoppers, 1, (), card.device)
    assert not isinstance(caught.value, NoKernels)


def test_one_variant_that_cannot_be_made_switches_off_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dispatch.planned(lambda x: -x)
    def plan(device: torch.device, size: int) -> Callable[[int], int]:
        if size == 2:
            raise KernelError("no registers are left")
        return lambda x: x * size

    dispatch.clear_plan_cache()
    cpu = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [plan(cpu, False, size)(5) for size in (1, 2, 3, 2)] == [5, -5, 15, -5]
    assert dispatch.runs_kernels(cpu)
    assert ["no registers are left" in str(each.message) for each in caught] == [True]
    dispatch.clear_plan_cache()


def test_a_kernel_that_copies_its_tensor_maps_is_refused(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotation that maps lie in the parameters is lost: what a change of Numba's calling convention would do."""
    product = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", promote=False)
    kernel = wgmma.gemm_kernel(product, GemmConfig(1, 1, 64, 4))
    monkeypatch.setattr(entry, "_annotate", lambda *args: None)
    compiler._made.cache_clear()
    entry.grid_constant_params.cache_clear()
    with pytest.raises(KernelError, match="does not read its tensor maps in place"):
        compile_cache.cubin(kernel, "90a")
    compiler._made.cache_clear()
    entry.grid_constant_params.cache_clear()


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_without_kernels_the_reference_serves_with_one_warning(layout: Layout) -> None:
    x, config = sample(131, 203, BF16), f"e4m3 {layout.value} rowwise columnwise"
    dispatch.clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            actual = cuda.quantize(x, config)
    assert not dispatch.runs_kernels(x.device)
    dispatch.clear_plan_cache()
    assert ["nothing runs kernels on cpu" in str(w.message) for w in caught] == [True]
    promised = (
        *empty_operand(x.device, layout, E4M3.dtype, 131, 203),
        *empty_operand(x.device, layout, E4M3.dtype, 203, 131),
    )
    for a, b, c in zip(actual, reference.quantize(x, config), promised):
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

    @dispatch.planned(lambda x: pytest.fail("the reference serves"))
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


def test_arguments_are_bound_by_name(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when a launch is bound: the kernel's own names, in its order."""
    card, kernel = Card(monkeypatch), amax_kernel(tensor_loader("bfloat16", 4), True)
    bind(kernel, 7, card.device, ("loader_args", "scale_ptr", "amax_ptr"), rows=140, columns=264)(
        ADDRESS, 272, 0, ADDRESS + 64
    )
    assert card.values[-1] == (ADDRESS, 272, 0, ADDRESS + 64, 140, 264)
    for addresses, scalars in (
        (("loader_args", "scale_ptr", "amax_ptr"), {"columns": 264, "rows": 140}),
        (("loader_args", "amax_ptr", "scale_ptr"), {"rows": 140, "columns": 264}),
        (("loader_args", "scale_ptr", "amax_ptr"), {"rows": 140}),
    ):
        with pytest.raises(
            TypeError,
            match=r"has the parameters loader_args, scale_ptr, amax_ptr, rows, columns; it is bound with loader_args",
        ):
            bind(kernel, 7, card.device, addresses, **scalars)


@pytest.mark.parametrize(
    ("maker", "options_text"),
    [
        ("quantize_tensor_kernel", "e4m3 tensor rowwise columnwise"),
        ("quantize_rows_kernel", "e4m3 row rowwise columnwise"),
        ("quantize_blocks_kernel", "e4m3 1x128 rowwise columnwise"),
    ],
)
def test_casts_are_bound_by_name(maker: str, options_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that takes two strides in the other order, neither is given for the other."""
    make, other = getattr(launches, maker), {"out_stride": "out_t_stride", "out_t_stride": "out_stride"}

    def exchanged(*args: Any) -> Kernel:
        kernel = make(*args)
        names = [other.get(name, name) for name in kernel.parameters]
        function = eval(f"lambda {', '.join(names)}: None")
        return Kernel(kernel.name, function, {name: kernel.parameters[name] for name in names}, kernel.threads)

    monkeypatch.setattr(launches, maker, exchanged)
    dispatch.clear_plan_cache()
    with executing(lambda *args: None), pytest.raises(TypeError, match="out_t_stride.* out_stride.*; it is bound with"):
        cuda.quantize(sample(4, 4, BF16), options_text)
