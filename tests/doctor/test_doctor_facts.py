"""Where the doctor's facts come from: a driver made for the purpose, numba-cuda's own search, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_kernels.host.toolchain import numbers, versions
from lightning_fp8 import ops
from lightning_fp8.doctor import checks, compilers, driver, machine, probes
from lightning_fp8.doctor.machine import Card, Torch
from lightning_fp8.doctor.processes import Answer, answer_of
from lightning_fp8.ops.core import dispatch
from tests.emulator.samples import needs_gcc

FAKE_DRIVER = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Signatures of cuda.h and nvml.h. */
int cuInit(unsigned flags) {
    if (getenv("FAKE_HANGS")) pause();
    return getenv("FAKE_STATUS") ? atoi(getenv("FAKE_STATUS")) : 0;
}
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device == 7 ? "NVIDIA H200" : "NVIDIA A100", length);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)141 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = attribute == 75 ? (device == 7 ? 9 : 8) : 0;
    return 0;
}
int cuGetErrorName(int status, const char **name) { *name = status == 802 ? "SYSTEM_NOT_READY" : NULL; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.159.03", length); return 0; }
"""


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@needs_gcc
@pytest.mark.usefixtures("fake_driver")
def test_the_driver_is_asked() -> None:
    found = machine.this_machine(1).driver()
    assert (found.version, found.cuda_version, found.problem, found.status) == ("580.159.03", (13, 1), "", 0)
    assert found.cards == (Card("NVIDIA H200", (9, 0), 141 << 30), Card("NVIDIA A100", (8, 0), 141 << 30))
    assert checks.runs_kernels(found)


@needs_gcc
@pytest.mark.usefixtures("fake_driver")
@pytest.mark.parametrize(("status", "name"), [(802, "SYSTEM_NOT_READY"), (77, "error 77")])
def test_a_driver_that_refuses_is_quoted(status: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STATUS", str(status))
    found = machine.this_machine(1).driver()
    assert (found.problem, found.status, found.cards) == (name, status, ())
    assert found.version == "580.159.03"


@needs_gcc
@pytest.mark.usefixtures("fake_driver")
def test_a_driver_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANGS", "1")
    monkeypatch.setattr(machine, "DRIVER_SECONDS", 2)
    found = machine.this_machine(1).driver()
    assert (found.hangs, found.problem) == (True, "did not answer within 2 s")


def test_a_driver_that_crashes_is_no_crash() -> None:
    found = machine.driver_of(Answer(-11), devices=True)
    assert (found.hangs, found.problem, found.cards) == (True, "ended by SIGSEGV", ())


def test_no_driver_is_said() -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    assert driver.driver_says(load) == {"version": None, "problem": "no libcuda.so.1"}


def test_a_hang_has_a_place() -> None:
    program = "import faulthandler\ndef waits():\n faulthandler.dump_traceback()\nwaits()"
    assert answer_of([sys.executable, "-c", program], 60).place == "<string>:3, waits"
    assert Answer(None, "", "waiting\n").place == ""


def test_children_of_what_hangs_are_ended_too() -> None:
    answer = answer_of(["sh", "-c", "sleep 100 & echo $!; wait"], 1.5)
    assert answer.status is None
    child = int(answer.output)
    for _ in range(50):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        break
    else:
        os.kill(child, 9)
        pytest.fail("a child lives on")


@pytest.mark.parametrize(
    ("program", "last_word"),
    [
        ("import sys; print('a'); sys.exit('why')", "why"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import sys; sys.exit(3)", "exit status 3, without a word"),
        ("raise ValueError('no\\nway')", "way"),
    ],
)
def test_a_process_that_fails_says_why(program: str, last_word: str) -> None:
    answer = answer_of([sys.executable, "-c", program], 60)
    assert answer.status
    assert answer.last_word == last_word


def test_numbers_of_the_cuda_driver_api() -> None:
    from cuda.bindings import driver as api

    attributes = api.CUdevice_attribute
    assert driver.COMPUTE_CAPABILITY == (
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    names = {status: api.CUresult(status).name for status in checks._DRIVER_ERRORS}
    assert names == {
        100: "CUDA_ERROR_NO_DEVICE",
        802: "CUDA_ERROR_SYSTEM_NOT_READY",
        803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    }


def test_compilers_are_where_numba_cuda_finds_them() -> None:
    from numba.cuda.cuda_paths import get_cuda_paths

    found, theirs = machine.this_machine(1).compilers(), get_cuda_paths()
    for ours, name in (("libnvvm", "nvvm"), ("libnvrtc", "nvrtc"), ("libdevice", "libdevice")):
        assert found[ours]["path"] == theirs[name].info
    installed = versions()
    if "nvidia-nvvm" in installed:  # else they come from a toolkit
        assert found["libnvvm"]["version"] == installed["nvidia-nvvm"]
        assert numbers(found["libnvJitLink"]["version"]) == numbers(installed["nvidia-nvjitlink"])[:2]


@pytest.mark.parametrize("places", ["", "conda", "home", "empty home", "conda, home", "conda, empty home"])
def test_libdevice_is_searched_as_numba_cuda_does(places: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda import cuda_paths

    for name in places.replace("empty ", "no ").split(", "):
        root = tmp_path / name.replace("no ", "")
        (root / "conda-meta").mkdir(parents=True)
        if not name.startswith("no "):
            (root / compilers.LIBDEVICE).parent.mkdir(parents=True)
            (root / compilers.LIBDEVICE).touch()
    monkeypatch.setattr(compilers, "_files_of", lambda package: None)
    monkeypatch.setattr(cuda_paths, "_get_distribution", lambda package: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "conda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if "home" in places:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    theirs = cuda_paths._get_libdevice_path_decision()[1]
    ours = compilers.libdevice(os.environ, sys.prefix)
    assert ours.get("path") == (theirs if theirs and Path(theirs).is_file() else None)
    assert ("problem" in ours) is ("path" not in ours)


def test_the_version_of_a_toolkits_nvvm(tmp_path: Path) -> None:
    """As NVIDIA's installer writes it into the toolkit's folder; else from the folder's name."""
    for folder in ("cuda", "cuda-12.4"):
        (tmp_path / folder / "nvvm" / "lib64").mkdir(parents=True)
    told = {"cuda": {"name": "CUDA SDK", "version": "13.0.2"}, "cuda_nvcc": {"name": "CUDA NVCC", "version": "13.0.88"}}
    (tmp_path / "cuda" / "version.json").write_text(json.dumps(told))
    library = Path("nvvm", "lib64", "libnvvm.so.4")
    assert compilers._version("libnvvm", str(tmp_path / "cuda" / library)) == "13.0.88"
    assert compilers._version("libnvvm", str(tmp_path / "cuda-12.4" / library)) == "12.4"
    assert compilers._version("libnvvm", "/usr/lib/libnvvm.so.4") == ""


def test_torch_is_read_without_being_imported() -> None:
    assert machine.torch_build() == Torch(torch.__version__, torch.version.cuda)
    program = (
        "import sys; from lightning_fp8.doctor import machine as m; m.torch_build(); print('torch' in sys.modules)"
    )
    assert answer_of([sys.executable, "-c", program], 60).output == "False\n"


def test_a_torch_for_cuda_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file is written for builds with CUDA."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('a library is missing')")
    told = "from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
    (tmp_path / "torch" / "version.py").write_text(told)
    program = "from lightning_fp8.doctor import machine as m; print(m.torch_build())"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    assert answer_of([sys.executable, "-c", program], 60).output == f"{Torch('2.11.0+cu130', '13.0')}\n"


def test_lower_bounds_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=2.8", "lightning>=2.5", "numpy", 'jsonargparse[signatures]>=4.39; extra == "cli"', "a >= 1.2, <3"]
    monkeypatch.setattr(machine, "requires", {"lightning-fp8": asked}.get)
    assert machine.this_machine(1).requirements() == {"torch": "2.8", "lightning": "2.5", "a": "1.2"}


def test_the_cache_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.cache_in(tmp_path / "not" / "there")
    assert (found.kernels, found.bytes, found.problem) == (0, 0, "")
    (tmp_path / ("0af3" * 16)).write_bytes(bytes(100))
    (tmp_path / ("1" * 64)).write_bytes(bytes(11))
    (tmp_path / "gemm-NVIDIA H200.json").write_text("[]")
    found = machine.cache_in(tmp_path)
    assert (found.folder, found.kernels, found.bytes, found.problem) == (str(tmp_path), 2, 111, "")
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setenv("LIGHTNING_FP8_KERNELS", str(tmp_path))
    assert machine.this_machine(1).carried() == found
    monkeypatch.setenv("LIGHTNING_FP8_KERNELS", "")
    assert machine.this_machine(1).carried() is None
    assert machine.cache_in(tmp_path / ("1" * 64) / "cache").problem == "Not a directory"


def test_nearest_is_torchs_rounding() -> None:
    """Of all bfloat16 values that E4M3 can hold, ties and subnormals among them."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.abs() <= 448].double()
    assert torch.equal(probes._nearest(x), x.to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("where", [0, 1])
def test_one_wrong_value_of_a_cast_is_seen(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = probes.cast_both_ways

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results = tuple(codes.clone() for codes in right(x))
        results[where].view(torch.uint8)[-1, -1] ^= 1
        return results  # type: ignore[return-value]

    assert "all 128,000 values right" in probes.cast()
    monkeypatch.setattr(probes, "cast_both_ways", wrong)
    with pytest.raises(ArithmeticError, match="^1 of 64000 " + ("transposed " if where else "values")):
        probes.cast()


@pytest.mark.parametrize(
    "wrong", [lambda y: y.index_put_((torch.tensor(3), torch.tensor(5)), y[3, 5] * 1.02), lambda y: y * torch.nan]
)
def test_one_wrong_value_of_a_product_is_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.scaled_mm
    assert "equals float64 within rounding" in probes.product()
    monkeypatch.setattr(ops, "scaled_mm", lambda a, b: wrong(right(a, b)))
    with pytest.raises(ArithmeticError, match="times as far from the float64 product"):
        probes.product()


@pytest.mark.parametrize(
    ("capabilities", "taken"), [([], "cpu"), ([(8, 0)], "cuda:0"), ([(8, 0), (9, 0), (9, 0)], "cuda:1")]
)
def test_the_first_card_for_fp8_is_tried(
    capabilities: list[tuple[int, int]], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert probes._device.__wrapped__() == torch.device(taken)


def test_a_slow_fallback_is_no_success() -> None:
    """What runs instead of kernels warns; a probe on a card must not pass on it."""
    from cuda_kernels.host.launch import KernelError

    @dispatch.planned(lambda x: x)
    def plan(device: torch.device) -> Any:
        raise KernelError("no such kernel")

    with warnings.catch_warnings():
        probes.refuse_fallbacks()
        with pytest.raises(RuntimeWarning, match="no such kernel"):
            plan(torch.device("cpu"), False)
    dispatch.clear_plan_cache()


PROBING = """
import time
from lightning_fp8.doctor import probes

def waits():
    time.sleep(2)
    raise ValueError("of no\\nuse")

probes.PROBES["cast"] = waits
probes.main("cast", "0.5")
"""


def test_a_probe_says_where_it_hangs_and_why_it_fails() -> None:
    answer = answer_of([sys.executable, "-c", PROBING], 300)
    assert answer.status == 1
    assert answer.place == "<string>:6, waits"
    said, _, loaded = answer.last_word.partition(" (loaded: ")
    assert said == "ValueError: of no use"
    assert not loaded or "libnvJitLink" in loaded  # torch may bring one


def test_libraries_are_named_by_what_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(
        "7f00-7f01 r-xp 00000000 00:1f 9 /usr/local/cuda-13.0/lib64/libnvJitLink.so.13.0.88\n"
        "7f01-7f02 r--p 00000000 00:1f 9 /usr/local/cuda-13.0/lib64/libnvJitLink.so.13.0.88\n"
        "7f03-7f04 r--p 00000000 00:1f 9 /v/nvidia/cu13/lib/libnvrtc.so.13\n"
        "7f04-7f05 r-xp 00000000 00:1f 9 /v/nvidia/cu13/lib/libnvvm.so.4\n"
    )
    paths = ["/usr/local/cuda-13.0/lib64/libnvJitLink.so.13.0.88", "/v/nvidia/cu13/lib/libnvvm.so.4"]
    assert probes._loaded_compilers(tmp_path / "maps") == paths
    assert probes._loaded_compilers(tmp_path / "none") == []
