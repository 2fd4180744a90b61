"""Starts every kernel of the test cases through NVIDIA's bindings on ``fake_driver.c``; run as a program of its own.

No compiler can be imported meanwhile: kernels come from a folder of built ones. Each is started from the main thread
and from a fresh one, as an autograd thread is, and what the driver got is compared with what was passed, at the places
that the kernel's machine code reads.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch


class NoCompiler:
    """An import hook that refuses what compiles."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in ("numba", "numba_cuda", "llvmlite") or name.startswith("cuda.core"):
            raise ImportError(f"{name} is not installed")


if __name__ == "__main__":
    sys.meta_path.insert(0, NoCompiler())  # type: ignore[arg-type]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from cuda_kernels.host import compile_cache, launch  # noqa: E402
from cuda_kernels.host.cache_folder import carried  # noqa: E402
from cuda_kernels.host.launch import Argument, Executor, Grid, Launch, Map  # noqa: E402
from cuda_kernels.host.tensor_maps import map_on  # noqa: E402
from cuda_kernels.kernel import Kernel, compute_capability  # noqa: E402
from tests.machine_code.cubin import Entry, entry_of  # noqa: E402

CARD, STREAM = torch.device("cuda", 0), 99


class Noted(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("kernel", "stream")]
    _fields_ += [("grid", ctypes.c_uint64 * 3), ("block", ctypes.c_uint64 * 3), ("shared", ctypes.c_uint64)]
    _fields_ += [("parameters", ctypes.c_ubyte * 4096), ("name", ctypes.c_char * 4096), ("launches", ctypes.c_uint64)]


class Layout(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint64), ("size", ctypes.c_uint64)]
    _fields_ += [("offsets", ctypes.c_uint64 * 64), ("sizes", ctypes.c_uint64 * 64)]


class Started:
    """The fake driver, and a card of the right capability in torch."""

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.fake_driver_noted.restype = ctypes.POINTER(Noted)
        driver.fake_driver_layout.restype = ctypes.POINTER(Layout)
        self.noted, self.layout = driver.fake_driver_noted().contents, driver.fake_driver_layout().contents
        torch._C._cuda_getCurrentRawStream = lambda index: STREAM
        torch.cuda.get_device_name = lambda index: "a card"  # type: ignore[assignment]

    def load(self, kernel: Kernel, arch: str) -> Entry:
        """Tell the driver what its machine code says."""
        torch.cuda.get_device_capability = lambda index: compute_capability(arch)[:2]  # type: ignore[assignment]
        launch.architecture.cache_clear()
        kernel.loaded.clear()  # one that starts twice is loaded anew: the driver notes the last name
        code = carried(compile_cache.source_key(kernel, "cubin", arch), kernel.name)
        assert code is not None, kernel.name
        entry = entry_of(code)
        self.layout.count, self.layout.size = len(entry.parameters), entry.parameter_bytes
        for index, (offset, size) in enumerate(entry.parameters):
            self.layout.offsets[index], self.layout.sizes[index] = offset, size
        return entry

    def start(self, kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        """As the kernel was started for an executor, from two threads."""
        entry = self.load(kernel, kernel.architectures[0])
        values = [on_the_card(arg) for arg in args]
        addresses = next(i for i, kind in enumerate(kernel.parameter_kinds) if kind not in ("tensor_map", "int64"))
        made = Launch(kernel, grid, values[addresses:], CARD)
        for run in (lambda work: work(), in_a_fresh_thread):
            before = self.noted.launches
            run(lambda: made.run(*values[:addresses]))
            assert self.noted.launches == before + 1, f"{kernel.name} did not start"
            assert (self.noted.kernel, self.noted.stream, self.noted.shared) == (0x4711, STREAM, kernel.shared_bytes)
            assert (*self.noted.grid, *self.noted.block) == (*grid, kernel.threads, 1, 1)
            assert kernel.function.__name__ in self.noted.name.decode(), (kernel.name, self.noted.name)
            for (offset, size), kind, value in zip(entry.parameters, kernel.parameter_kinds, values):
                read = bytes(self.noted.parameters[offset : offset + size])
                assert read == in_memory(kind, value), f"{kernel.name}: a parameter {kind} at {offset}"


def in_memory(kind: str, value: Any) -> bytes:
    """A parameter's bytes."""
    types = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float32": ctypes.c_float}
    return value if kind == "tensor_map" else bytes(types[kind](value))


def on_the_card(arg: Argument | float) -> Any:
    """What a launch on a card takes."""
    if isinstance(arg, Map):
        tensor = arg.tensor.t() if arg.box.transposed else arg.tensor
        return map_on(CARD, arg.box)(tensor)
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def in_a_fresh_thread(work: Any) -> None:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def one_of_each(every_product: bool) -> dict[str, tuple[Kernel, Grid, Sequence[Argument | float]]]:
    """Launches of the test cases: of each kernel's function the first, and of products one for each way to scale."""
    from tests.cuda_kernels.cases.all_cases import CASES, each_once

    found: dict[str, tuple[Kernel, Grid, Sequence[Argument | float]]] = {}

    def note(kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        name = kernel.function.__name__
        kind = kernel.name.split(",")[0] if "gemm" in name else name
        found.setdefault(kind, (kernel, grid, args))

    with patch.dict(launch.EXECUTORS, {"cpu": note}):
        for case in CASES if every_product else [case for case in CASES if case in each_once()]:
            with suppress(AssertionError):  # nothing runs
                case.run("cpu")
    return found


def of_attention_ops(start: Executor) -> list[Kernel]:
    """What both ops of attention launch, in order, each handed to ``start``."""
    from tests.cuda_kernels.cases.attention_op_cases import PROBLEMS, run_ops

    launched: list[Kernel] = []

    def note(kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        launched.append(kernel)
        start(kernel, grid, args)

    with patch.dict(launch.EXECUTORS, {"cpu": note}):
        run_ops(PROBLEMS["thd"], "cpu")
    return launched


def every_kernel(every_product: bool) -> set[Kernel]:
    """All that this program starts."""
    return {kernel for kernel, *_ in one_of_each(every_product).values()} | set(
        of_attention_ops(lambda *launched: None)
    )


if __name__ == "__main__":
    started = Started()
    for launched in one_of_each("--every-product" in sys.argv).values():
        started.start(*launched)
    from tests.cuda_kernels.cases.attention_op_cases import KERNELS

    assert [kernel.function.__name__ for kernel in of_attention_ops(started.start)] == KERNELS
    print("started")
