"""Starting kernels, without a card: the driver's part is played by fakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.casts.quantize import quantize_tensor_kernel
from cuda_kernels.casts.update_scales import update_scales_kernel
from cuda_kernels.device.tile import tensor_loader
from cuda_kernels.host import cache_folder, compile_cache, launch, tensor_maps
from cuda_kernels.host.launch import Launch, bind, executing
from cuda_kernels.kernel import Kernel, KernelError
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import cast_cuda, plans
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.proofs.comparing import kernels_of
from lightning_fp8.proofs.drawing import sample
from tests.cuda_kernels.cases.kernel_cases import BF16
from tests.cuda_kernels.emulated import ptx_of
from tests.cuda_kernels.launch_everything import every_kernel
from tests.emulator.samples import needs_gcc
from tests.host.card import ADDRESS, KERNEL, Card
from tests.machine_code.test_compiled_kernels import compiled
from tests.tiers import thorough


def test_parameters_lie_in_memory_as_the_kernel_reads_them() -> None:
    """Sizes and alignment by the parameters that the PTX declares."""
    size = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4}
    loader = tensor_loader("float32", 1)
    for kernel in (KERNEL, update_scales_kernel(False), quantize_tensor_kernel(loader, "e4m3", *[True] * 3)):
        declared = re.findall(r"\.param \.(\w+) (?:\.ptr )?(?:\.\w+ )*", ptx_of(kernel).split("{")[0])
        end = 0
        for kind in declared:
            end = -(-end // size[kind]) * size[kind] + size[kind]
        assert end == kernel.param_struct.size


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
from cuda_kernels.host.launch import Box
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
        env=os.environ | {"LD_LIBRARY_PATH": str(folder), "LIGHTNING_FP8_PROVE": "0", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_gcc
def test_maps_and_zeros_through_nvidias_bindings(fake_driver: Path) -> None:
    assert on_the_fake_driver(fake_driver, "-c", THROUGH_THE_BINDINGS) == "started\n"


@thorough
@needs_gcc
@pytest.mark.parametrize("options", [(), ("--every-product",)], ids=" ".join)
def test_every_kernel_starts_through_nvidias_bindings(
    options: tuple[str, ...], fake_driver: Path, tmp_path: Path
) -> None:
    """From built machine code and where no compiler is installed; from the main thread and from a fresh one."""
    for kernel in every_kernel(every_product=bool(options)):
        arch = kernel.architectures[0]
        cache_folder.write_code(tmp_path / compile_cache.source_key(kernel, "cubin", arch), compiled(kernel, arch)[1])
    folders = {cache_folder.CARRIED_VARIABLE: str(tmp_path), cache_folder.CACHE_VARIABLE: str(tmp_path / "empty")}
    assert (
        on_the_fake_driver(fake_driver, "-m", "tests.cuda_kernels.launch_everything", *options, **folders)
        == "started\n"
    )
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
    with pytest.raises(KernelError, match=rf'pip install -e "\.\[{extra}\]" in the checkout'):
        Launch(kernel, 7, (140, 264), card.device)


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
    ("maker", "layout"),
    [
        ("quantize_tensor_kernel", Layout.TENSOR),
        ("quantize_rows_kernel", Layout.ROW),
        ("quantize_blocks_kernel", Layout.BLOCK_1X128),
    ],
)
def test_casts_are_bound_by_name(maker: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that takes two strides in the other order, neither is given for the other."""
    make, other = getattr(cast_cuda, maker), {"out_stride": "out_t_stride", "out_t_stride": "out_stride"}

    def exchanged(*args: Any) -> Kernel:
        kernel = make(*args)
        names = [other.get(name, name) for name in kernel.parameters]
        function = eval(f"lambda {', '.join(names)}: None")
        return Kernel(kernel.name, function, {name: kernel.parameters[name] for name in names}, kernel.threads)

    monkeypatch.setattr(cast_cuda, maker, exchanged)
    plans.clear_plan_cache()
    with executing(lambda *args: None), pytest.raises(TypeError, match="out_t_stride.* out_stride.*; it is bound with"):
        kernels_of(quantize_op)(sample(4, 4, BF16), Cast(E4M3, layout, columnwise=True))
