"""Kernels loaded on a device and launched on torch's current stream.

Parameters are ordered: first those of each launch, tensor maps and pointers (int64), then the scalars that are fixed
when a launch is bound. A launch rewrites only the first part of a prefilled parameter buffer, which the driver copies.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_kernels.host import compile_cache, proofs
from cuda_kernels.host.cache_folder import CARRIED_VARIABLE, OFF
from cuda_kernels.host.toolchain import conflicts, install_compilers, versions
from cuda_kernels.kernel import ARCHITECTURES, Kernel, KernelError, compute_capability


class Box(NamedTuple):
    """The box of a matrix that one copy transfers.

    Attributes:
        rows, columns: the size of the box.
        swizzle: whether rows of 128 bytes are swizzled in shared memory, as by
            :func:`~cuda_kernels.device.swizzle.swizzle_128b`.
        transposed: whether the matrix is the transposed tensor.
    """

    rows: int
    columns: int
    swizzle: bool = True
    transposed: bool = False


class Map(NamedTuple):
    """A stand-in for ``CUtensorMap`` in emulation; ``tensor`` is two-dimensional, with contiguous rows."""

    tensor: Tensor
    box: Box


Argument = Tensor | Map | bytes | int
Grid = tuple[int, int, int]
"""The number of blocks in each dimension."""
Executor = Callable[[Kernel, Grid, Sequence[Argument | float]], None]


class NoKernels(KernelError):
    """Kernels are not supported on a device."""


_noted: ContextVar[list[Kernel] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Kernel]]:
    """Context manager that returns a list of the kernels bound by launches of this thread inside it."""
    kernels: list[Kernel] = []
    token = _noted.set(kernels)
    try:
        yield kernels
    finally:
        _noted.reset(token)


class Launch:
    """A kernel bound to a grid and its scalars; :meth:`run` takes only tensor maps and pointers.

    Attributes:
        grid: the grid; an int is the number of blocks in the first dimension.
        scalars: the kernel's last parameters; those before are tensor maps and int64.
        device: the device to launch on. It must be the current device during a launch.

    Raises:
        KernelError: If the kernel cannot be compiled or loaded, or is not proven on this GPU
            (:func:`cuda_kernels.host.proofs.require`).
    """

    def __init__(self, kernel: Kernel, grid: int | Grid, scalars: Sequence[int | float], device: torch.device) -> None:
        noted = _noted.get()
        if noted is not None:
            noted.append(kernel)
        self.kernel = kernel
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self.blocks = math.prod(self.grid)
        self.scalars = tuple(scalars)
        self.device = device
        self._index: int | None = None
        self._handle = 0
        if is_cuda_device(device):
            self._index = device.index or 0
            if self._index not in kernel.loaded:
                kernel.loaded[self._index] = _load(kernel, self._index)
            self._handle = kernel.loaded[self._index]
            proofs.note("loading", kernel)
            self._local = threading.local()
        elif device.type not in EXECUTORS:
            raise NoKernels(f"kernels are not supported on {device.type}")

    def run(self, *addresses: Argument) -> None:
        """Launch on the current stream; ``addresses`` come from :func:`address_on` and ``tensor_maps.map_on``.

        Raises:
            KernelError: If the driver refuses the launch.
        """
        if self._index is None:
            return EXECUTORS[self.device.type](self.kernel, self.grid, (*addresses, *self.scalars))
        try:
            write, launch_kernel, stream, parameters = self._local.binding
        except AttributeError:
            write, launch_kernel, stream, parameters = self._local.binding = self._bind(len(addresses))
        write(*addresses)
        (result,) = launch_kernel(stream(self._index), parameters, 0)
        if result:
            raise KernelError(f"{self.kernel.name} did not start: the CUDA driver returned {result!r}")
        return None

    def _bind(self, addresses: int) -> tuple[Any, ...]:
        """Functions that write addresses, launch the kernel and get the stream, and the address of parameter pointers.

        Each thread has its own, because autograd runs the backward pass in other threads.
        """
        assert self._index is not None
        enter_context(self._index)
        kernel = self.kernel
        buffer, pointers = self._local.block = _parameter_block(kernel)  # owns the memory
        struct_codes = kernel.struct_codes[:addresses]
        nothing = [b"" if code == "128s" else 0 for code in struct_codes]
        kernel.param_struct.pack_into(buffer, 0, *nothing, *self.scalars)
        shape = *self.grid, kernel.threads, 1, 1
        launch_kernel: Callable[..., Any] = partial(_driver().cuLaunchKernel, self._handle, *shape, kernel.shared_bytes)
        if proofs.is_watched():
            launch_kernel = partial(_told_before, kernel, launch_kernel)
        write = partial(struct.Struct("@" + "".join(struct_codes)).pack_into, buffer, 0)
        return write, launch_kernel, torch._C._cuda_getCurrentRawStream, ctypes.addressof(pointers)


def named_launch(kernel: Kernel, grid: int | Grid, device: torch.device, **scalars: int | float) -> Launch:
    """A :class:`Launch` whose bound parameters, the kernel's last ones, are passed by name.

    Raises:
        TypeError: If these are not the last parameters in order.
        KernelError: If the kernel cannot be compiled or loaded.
    """
    if tuple(scalars) != kernel.parameter_names[len(kernel.parameter_names) - len(scalars) :]:
        raise _misnamed(kernel, scalars)
    return Launch(kernel, grid, tuple(scalars.values()), device)


def bind(
    kernel: Kernel, grid: int | Grid, device: torch.device, addresses: Sequence[str], **scalars: int | float
) -> Callable[..., None]:
    """:meth:`Launch.run` of a :func:`named_launch`; ``addresses`` names the parameters of each launch in order."""
    if (*addresses, *scalars) != kernel.parameter_names:
        raise _misnamed(kernel, (*addresses, *scalars))
    return named_launch(kernel, grid, device, **scalars).run


def _misnamed(kernel: Kernel, names: Iterable[str]) -> TypeError:
    return TypeError(
        f"{kernel.name} has the parameters {', '.join(kernel.parameter_names)}; it is bound with {', '.join(names)}"
    )


def _told_before(kernel: Kernel, launch_kernel: Callable[..., Any], *args: Any) -> Any:
    """Launch a kernel in a process that proves it."""
    proofs.note("starting", kernel)
    return launch_kernel(*args)


def _parameter_block(kernel: Kernel) -> tuple[Any, Any]:
    """A C struct of a kernel's parameters, and an array of their addresses, ``kernelParams``.

    A single buffer in C's layout does not work for kernels with tensor maps: on Hopper their alignment of 64 bytes
    applies in the constant bank, where parameters start at 0x210, so that they are shifted by 48 bytes.
    """
    buffer = ctypes.create_string_buffer(kernel.param_struct.size)
    codes = kernel.struct_codes
    ends = [struct.calcsize("@" + "".join(codes[: index + 1])) for index in range(len(codes))]
    addresses = [ctypes.addressof(buffer) + end - struct.calcsize(code) for end, code in zip(ends, codes)]
    return buffer, (ctypes.c_void_p * len(addresses))(*addresses)


def zeroing(device: torch.device, elements: int) -> Callable[[Any], object]:
    """A function that zeroes ``elements`` 32-bit words at an address on the current stream, without the dispatcher."""
    if not is_cuda_device(device):
        return Tensor.zero_
    index = device.index or 0
    memset = _driver().cuMemsetD32Async
    stream = torch._C._cuda_getCurrentRawStream

    def zero(address: int) -> None:
        (result,) = memset(address, 0, elements, stream(index))
        if result == _INVALID_CONTEXT:  # the first CUDA call of a thread
            enter_context(index)
            (result,) = memset(address, 0, elements, stream(index))
        if result:
            raise KernelError(f"memory was not set to 0: the CUDA driver returned {result!r}")

    return zero


_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""


def enter_context(index: int) -> None:
    """Make the primary context of CUDA device ``index`` this thread's current context, if it has none.

    The first CUDA call of an autograd thread may be ours. torch does not select device 0 there, because it is the
    current device already (pytorch/pytorch#124565).
    """
    driver = _driver()
    if not int(_checked(driver.cuCtxGetCurrent())):
        device = _checked(driver.cuDeviceGet(index))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))


# --- Devices ----------------------------------------------------------------------------------------------------------


@cache
def architecture(index: int) -> str:
    """The architecture of kernels for CUDA device ``index``: one of ``"89"``, ``"90a"``, ``"100"``, ``"120"``.

    Machine code runs on GPUs of the same major compute capability and an equal or later minor one (CUDA Programming
    Guide, "Binary compatibility"): code for 10.0 also runs on 10.3. Code for ``90a`` runs on 9.0 only.

    Raises:
        NoKernels: the device is not supported.
    """
    if os.environ.get(CARRIED_VARIABLE) == OFF:
        raise NoKernels(f"{CARRIED_VARIABLE}={OFF}")
    major, minor = torch.cuda.get_device_capability(index)
    for arch in ARCHITECTURES:
        for_major, for_minor, *only = compute_capability(arch)
        if for_major == major and (for_minor == minor or (for_minor < minor and not only)):
            return arch
    raise NoKernels(
        f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}; there are FP8 kernels for 8.9"
        " (Ada), 9.0 (Hopper), 10.x and 12.x (Blackwell)"
    )


@cache
def card(index: int) -> proofs.Card:
    """CUDA device ``index`` for proofs: with the driver's CUDA version and, on Linux, the driver's own version."""
    cuda = int(_checked(_driver().cuDriverGetVersion()))
    version = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    with suppress(OSError):
        found = re.search(r"\b\d{3,}\.\d[\d.]*", Path("/proc/driver/nvidia/version").read_text())
        version = f"{found[0]}, {version}" if found else version
    return proofs.Card(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), version)


def is_cuda_device(device: torch.device) -> bool:
    """Whether kernels on ``device`` are launched by the CUDA driver."""
    return device.type == "cuda"


def address_on(device: torch.device) -> Callable[[Tensor], Argument]:
    """From a tensor to a launch argument: its address on CUDA; else the tensor, so that the emulator checks bounds."""
    return Tensor.data_ptr if is_cuda_device(device) else lambda tensor: tensor


def architecture_of(device: torch.device) -> str:
    """:func:`architecture`; with an executor, the one of :func:`executing`, by default that of 9.0."""
    return architecture(device.index or 0) if device.type == "cuda" else _emulated_architecture


@cache
def name_of(device: torch.device) -> str:
    """The GPU's name; the device type if it is not a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 4 if there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def l2_bytes(device: torch.device) -> int:
    """The size of the L2 cache in bytes; 128 KB if there is no GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 17


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoKernels(f"cuda-bindings is not installed; {install_compilers(torch.version.cuda)}") from error
    return driver


_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""


def _load(kernel: Kernel, index: int) -> int:
    """Load ``kernel`` on CUDA device ``index``, which must be current, and return its handle."""
    _driver()  # raises if it is missing, before anything is compiled
    proofs.note("compiling", kernel)
    code = _machine_code(kernel, architecture(index))
    proofs.require(kernel, card(index), code)
    try:
        return _load_code(kernel, index, code)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # torch caches freed memory, and the driver needs some of it
        return _load_code(kernel, index, code)


def _machine_code(kernel: Kernel, arch: str) -> bytes:
    """The machine code from ``compile_cache``; its errors get advice on what to install."""
    try:
        return compile_cache.cubin(kernel, arch)
    except KernelError:
        raise
    except Exception as error:  # compilers may raise anything
        missing = isinstance(error, ImportError)  # the same for all kernels, so that it is reported once
        what = "kernels cannot be compiled" if missing else f"{kernel.name} cannot be compiled for sm_{arch}"
        install = install_compilers(torch.version.cuda)
        ways_out = [str(conflict) for conflict in conflicts(versions())] or [install] * missing
        raise KernelError("; ".join((f"{what}: {error}", *ways_out))) from error


def _load_code(kernel: Kernel, index: int, code: bytes) -> int:
    driver = _driver()
    entry = re.search(rb"\.text\.(\w+)", code)
    assert entry is not None
    enter_context(index)
    library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    handle = _checked(driver.cuLibraryGetKernel(library, entry[1]))
    if kernel.shared_bytes > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, handle, driver.CUdevice(index)))
    _load_now(handle)
    return int(handle)


def _load_now(handle: Any) -> None:
    """Load machine code now; otherwise the driver would at the first launch, too late to fall back, or in a capture."""
    driver = _driver()
    function = _checked(driver.cuKernelGetFunction(handle))
    try:
        result = driver.cuFuncLoad(function)
    except RuntimeError:  # the driver is older than CUDA 12.4
        return
    _checked(result)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] == _OUT_OF_MEMORY:  # temporary: no reason to stop using the kernel
        raise torch.OutOfMemoryError(f"the CUDA driver has no memory left for a kernel: it returned {result[0]!r}")
    if result[0]:
        raise KernelError(f"the CUDA driver returned {result[0]!r}; it may be older than numba-cuda's CUDA libraries")
    return result[1] if len(result) > 1 else None


EXECUTORS: dict[str, Executor] = {}
"""Functions that run a kernel on tensors that are not on a GPU, by device type.

They are called with the kernel, the grid, and all parameters, with tensors for addresses.
"""
_emulated_architecture = "90a"


@contextmanager
def executing(executor: Executor, architecture: str | None = None) -> Iterator[None]:
    """Context in which ``executor`` runs kernels on CPU tensors, with kernels for ``architecture`` if it is given."""
    global _emulated_architecture
    before, architecture_before = EXECUTORS.get("cpu"), _emulated_architecture
    EXECUTORS["cpu"], _emulated_architecture = executor, architecture or _emulated_architecture
    try:
        yield
    finally:
        _emulated_architecture = architecture_before
        del EXECUTORS["cpu"]
        if before is not None:
            EXECUTORS["cpu"] = before
