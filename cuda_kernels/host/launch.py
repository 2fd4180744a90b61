"""Kernels loaded on a device and started on torch's current stream.

Parameters are ordered: those of each launch first, tensor maps and pointers (int64), then the scalars that are fixed
when a launch is bound. A launch rewrites only the first part of a prefilled parameter buffer, which the driver copies.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from cuda_kernels.host import compile_cache, proofs
from cuda_kernels.host.cache_folder import CARRIED_VARIABLE, OFF
from cuda_kernels.host.toolchain import conflicts, versions
from cuda_kernels.kernel import ARCHITECTURES, Kernel, KernelError, compute_capability

if TYPE_CHECKING:
    from cuda_kernels.host.tensor_maps import Map

Argument = Union[Tensor, "Map", bytes, int]
Executor = Callable[[Kernel, int, Sequence["Argument | float"]], None]


class NoKernels(KernelError):
    """None of the kernels run on a device."""


_noted: ContextVar[list[Kernel] | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[list[Kernel]]:
    """A list of the kernels that launches of this thread are bound to inside."""
    kernels: list[Kernel] = []
    token = _noted.set(kernels)
    try:
        yield kernels
    finally:
        _noted.reset(token)


class Launch:
    """A kernel bound to a grid and its scalars; :meth:`run` takes only tensor maps and pointers.

    Attributes:
        kernel: the kernel to start.
        blocks: blocks of the grid.
        scalars: the kernel's last parameters; those before are tensor maps and int64.
        device: the device to start it on, which is the current one then.

    Raises:
        KernelError: the kernel cannot be compiled or loaded, or the card has not proven it
            (:func:`cuda_kernels.host.proofs.require`).
    """

    def __init__(self, kernel: Kernel, blocks: int, scalars: Sequence[int | float], device: torch.device) -> None:
        noted = _noted.get()
        if noted is not None:
            noted.append(kernel)
        self.kernel = kernel
        self.blocks = blocks
        self.scalars = tuple(scalars)
        self.device = device
        self._index: int | None = None
        self._handle = 0
        if is_cuda_device(device):
            self._index = device.index or 0
            self._handle = compile_cache.loaded(kernel, self._index, partial(_load, kernel, self._index))
            proofs.binding(kernel)
            self._local = threading.local()
        elif device.type not in EXECUTORS:
            raise NoKernels(f"nothing runs kernels on {device.type}")
        elif device.type in PROVEN_CODE:
            proofs.require(kernel, *PROVEN_CODE[device.type](kernel))
            proofs.binding(kernel)

    def run(self, *addresses: Argument) -> None:
        """Start it on the current stream; :func:`address_on` and ``tensor_maps.map_on`` give ``addresses``.

        Raises:
            KernelError: the driver refuses.
        """
        if self._index is None:
            if self.device.type in PROVEN_CODE:
                proofs.starting(self.kernel)
            return EXECUTORS[self.device.type](self.kernel, self.blocks, (*addresses, *self.scalars))
        try:
            write, launch_kernel, stream, parameters = self._local.binding
        except AttributeError:
            write, launch_kernel, stream, parameters = self._local.binding = self._bind(len(addresses))
        write(*addresses)
        (result,) = launch_kernel(stream(self._index), parameters, 0)
        if result:
            raise KernelError(f"{self.kernel.name} did not start: the CUDA driver answered {result!r}")
        return None

    def _bind(self, addresses: int) -> tuple[Any, ...]:
        """Functions that write addresses, start the kernel and get the stream, and the parameter pointers' address.

        Each thread has its own, since backward runs in threads beside the forward pass.
        """
        assert self._index is not None
        enter_context(self._index)
        kernel = self.kernel
        block = _ParameterBlock(self.kernel)
        struct_codes = kernel.struct_codes[:addresses]
        nothing = [b"" if code == "128s" else 0 for code in struct_codes]
        kernel.param_struct.pack_into(block.buffer, 0, *nothing, *self.scalars)
        shape = self.blocks, 1, 1, kernel.threads, 1, 1
        launch_kernel: Callable[..., Any] = partial(_driver().cuLaunchKernel, self._handle, *shape, kernel.shared_bytes)
        if proofs.is_watched():
            launch_kernel = partial(_told_before, kernel, launch_kernel)
        write = partial(struct.Struct("@" + "".join(struct_codes)).pack_into, block.buffer, 0)
        self._local.block = block  # which owns the memory
        return write, launch_kernel, torch._C._cuda_getCurrentRawStream, block.pointers


def named_launch(kernel: Kernel, blocks: int, device: torch.device, **scalars: int | float) -> Launch:
    """A :class:`Launch` whose bound parameters, the kernel's last ones, are given by name.

    Raises:
        TypeError: these are not the last parameters in their order.
        KernelError: the kernel cannot be compiled or loaded.
    """
    if tuple(scalars) != kernel.parameter_names[len(kernel.parameter_names) - len(scalars) :]:
        raise _misnamed(kernel, scalars)
    return Launch(kernel, blocks, tuple(scalars.values()), device)


def bind(
    kernel: Kernel, blocks: int, device: torch.device, addresses: Sequence[str], **scalars: int | float
) -> Callable[..., None]:
    """:meth:`Launch.run` of ``kernel`` on ``blocks`` blocks, whose parameters are named once, here.

    Args:
        addresses: the parameters of each launch, in the order in which it passes them.
        scalars: the parameters that are bound.

    Raises:
        TypeError: these are not the kernel's parameters in their order.
        KernelError: the kernel cannot be compiled or loaded.
    """
    named = *addresses, *scalars
    if named != kernel.parameter_names:
        raise _misnamed(kernel, named)
    return Launch(kernel, blocks, tuple(scalars.values()), device).run


def _misnamed(kernel: Kernel, names: Iterable[str]) -> TypeError:
    return TypeError(
        f"{kernel.name} has the parameters {', '.join(kernel.parameter_names)}; it is bound with {', '.join(names)}"
    )


def _told_before(kernel: Kernel, launch_kernel: Callable[..., Any], *args: Any) -> Any:
    """Start a kernel in a process that proves it."""
    proofs.starting(kernel)
    return launch_kernel(*args)


class _ParameterBlock:
    """Memory for a kernel's parameters.

    Attributes:
        buffer: they lie there, as a C struct of them.
        pointers: address of an array of their addresses, ``kernelParams``. The driver knows where each goes; one buffer
            of C's layout is not what a kernel with tensor maps reads: on Hopper their alignment of 64 bytes counts in
            the constant bank, whose parameters begin at 0x210, and moves them by 48.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.buffer = ctypes.create_string_buffer(kernel.param_struct.size)
        first = ctypes.addressof(self.buffer)
        struct_codes = kernel.struct_codes
        ends = [struct.calcsize("@" + "".join(struct_codes[: index + 1])) for index in range(len(struct_codes))]
        addresses = [first + end - struct.calcsize(code) for end, code in zip(ends, struct_codes)]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.pointers = ctypes.addressof(self._pointers)


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
            raise KernelError(f"memory was not set to 0: the CUDA driver answered {result!r}")

    return zero


_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""


def enter_context(index: int) -> None:
    """Make the primary context of CUDA device ``index`` this thread's, if the thread has none.

    The first CUDA call of an autograd thread may be ours, and torch does not select device 0 there, since it is the
    current one already (pytorch/pytorch#124565).
    """
    driver = _driver()
    if not int(_checked(driver.cuCtxGetCurrent())):
        device = _checked(driver.cuDeviceGet(index))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device))))


# --- Devices ----------------------------------------------------------------------------------------------------------


@cache
def architecture(index: int) -> str:
    """The architecture of kernels for CUDA device ``index``: one of ``"89"``, ``"90a"``, ``"100"``, ``"120"``.

    Machine code runs on GPUs of the same major capability and the same minor one or a later (CUDA Programming Guide,
    "Binary compatibility"): that for 10.0 on 10.3 too. That for ``90a`` runs on 9.0 only.

    Raises:
        NoKernels: there are none for it.
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
    """CUDA device ``index`` as proofs name it: with the CUDA version of the driver and, on Linux, its own."""
    cuda = int(_checked(_driver().cuDriverGetVersion()))
    version = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    with suppress(OSError):
        found = re.search(r"\b\d{3,}\.\d[\d.]*", Path("/proc/driver/nvidia/version").read_text())
        version = f"{found[0]}, {version}" if found else version
    return proofs.Card(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), version)


def is_cuda_device(device: torch.device) -> bool:
    """Whether the CUDA driver starts kernels there."""
    return device.type == "cuda"


def address_on(device: torch.device) -> Callable[[Tensor], Argument]:
    """Tensor to launch argument: its address on CUDA; elsewhere the tensor, so that the emulator checks bounds."""
    return Tensor.data_ptr if is_cuda_device(device) else lambda tensor: tensor


def architecture_of(device: torch.device) -> str:
    """As :func:`architecture`; where an executor starts kernels, the one that :func:`executing` says, or 9.0's."""
    return architecture(device.index or 0) if device.type == "cuda" else _emulated_architecture


@cache
def name_of(device: torch.device) -> str:
    """The GPU's name; that of the device's type where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 4 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoKernels(f"cuda-bindings is not installed; {_install()}") from error
    return driver


def _install() -> str:
    """The command that installs compilers and bindings of torch's CUDA version."""
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda"
    return f'pip install "lightning-fp8[{extra}]"'


_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""


def _load(kernel: Kernel, index: int) -> int:
    """Load ``kernel`` on CUDA device ``index``, which is the current one, and return its handle."""
    _driver()  # where it is missing nothing need be compiled
    proofs.compiling(kernel)
    code = _machine_code(kernel, architecture(index))
    proofs.require(kernel, card(index), code)
    try:
        return _load_code(kernel, index, code)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # torch keeps what it frees, and the driver needs some of it
        return _load_code(kernel, index, code)


def _machine_code(kernel: Kernel, arch: str) -> bytes:
    """What ``compile_cache`` gives; where it fails, the error says what to install."""
    try:
        return compile_cache.cubin(kernel, arch)
    except KernelError:
        raise
    except Exception as error:  # of compilers, whatever they raise
        missing = isinstance(error, ImportError)  # for all kernels alike: said once
        what = "kernels cannot be compiled" if missing else f"{kernel.name} cannot be compiled for sm_{arch}"
        ways_out = conflicts(versions()) or [_install()] * missing
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
    """Load machine code now; else the driver does at the first start, too late for a fallback, or inside a graph."""
    driver = _driver()
    function = _checked(driver.cuKernelGetFunction(handle))
    try:
        result = driver.cuFuncLoad(function)
    except RuntimeError:  # a driver before CUDA 12.4
        return
    _checked(result)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] == _OUT_OF_MEMORY:  # which passes: no reason to do without a kernel from now on
        raise torch.OutOfMemoryError(f"the CUDA driver has no memory left for a kernel: it answered {result[0]!r}")
    if result[0]:
        raise KernelError(f"the CUDA driver answered {result[0]!r}; it may be older than numba-cuda's CUDA libraries")
    return result[1] if len(result) > 1 else None


EXECUTORS: dict[str, Executor] = {}
"""Functions that start a kernel for tensors that are not on a GPU, by the type of their device.

They get the kernel, the number of blocks, and all parameters, tensors for addresses.
"""
PROVEN_CODE: dict[str, Callable[[Kernel], tuple[proofs.Card, bytes]]] = {}
"""By the type of a device whose executor starts only proven kernels: a kernel's card and code, as proofs know them."""
_emulated_architecture = "90a"


@contextmanager
def executing(executor: Executor, architecture: str | None = None) -> Iterator[None]:
    """Let ``executor`` start kernels for CPU tensors, those of ``architecture`` where it is given."""
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
