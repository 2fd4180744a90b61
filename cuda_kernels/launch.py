"""From a kernel's source to its launch: compiled for the device, kept on disk, started on torch's current stream.

Kernels take tensor maps, addresses, integers and floats, never arrays; what differs from start to start comes first:
maps, and int64. A launch writes those into a buffer that holds the others already, and the driver copies it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from cuda_kernels.cache import cached, toolchain

if TYPE_CHECKING:
    from cuda_kernels.tensor_maps import Map

_FORMATS = {"int64": "q", "int32": "i", "float32": "f", "tensor_map": "128s"}


Argument = Union[Tensor, "Map", bytes, int]
Executor = Callable[["Kernel", int, Sequence["Argument | float"]], None]


class KernelError(RuntimeError):
    """Kernels cannot be compiled or started here; the message says why and what to install."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One variant of one kernel.

    Attributes:
        name: tells it from every other variant, e.g. ``quantize(bfloat16, e4m3, tensor)``.
        function: the Python source, for Numba.
        parameters: a Numba type for each parameter: int64 for an address, int32, int64 or float32, a tuple of
            one of them, or a tensor map.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        blocks_per_multiprocessor: how many shall fit side by side on Hopper; limits the registers of a thread.
        cluster: how many run as one cluster; the kernel's code says so too.
        architectures: which it is for.
    """

    name: str
    function: Callable[..., None]
    parameters: tuple[Any, ...]
    threads: int
    shared_bytes: int = 0
    blocks_per_multiprocessor: int = 1
    cluster: int = 1
    architectures: tuple[str, ...] = ("90a", "89", "120")
    _loaded: dict[int, int] = field(default_factory=dict, repr=False)

    def blocks_side_by_side(self, arch: str) -> int:
        """How many blocks shall fit into a multiprocessor of ``arch``.

        Cards with GDDR memory need fewer bytes in flight, and the assembler for them spends more registers.
        """
        return (
            self.blocks_per_multiprocessor
            if arch.startswith(("9", "10"))
            else max(1, self.blocks_per_multiprocessor - 1)
        )

    def ltoir(self, arch: str) -> bytes:
        """The kernel for ``arch`` (``"90a"``), before link-time optimization; the slow step."""
        from numba import cuda
        from numba.cuda import types

        code, _ = cuda.compile(
            self.function,
            types.void(*self.parameters),
            device=False,
            abi="numba",
            cc=compute_capability(arch),
            launch_bounds=(self.threads, self.blocks_side_by_side(arch)),
            output="ltoir",
        )
        return bytes(code)

    def cubin(self, arch: str) -> bytes:
        """Machine code for ``arch``: from the cache, or compiled and put there."""
        return cached(self.key("cubin", arch), lambda: link(self.ltoir(arch), arch, "cubin")[0])

    def key(self, what: str, arch: str) -> str:
        """Under which ``what`` is made of this kernel is kept; another one when a source or a compiler changes."""
        made_of = f"{what} {toolchain(self.function.__module__)} {self.name} {arch}"
        return hashlib.sha256(made_of.encode()).hexdigest()

    @cached_property
    def layout(self) -> struct.Struct:
        """How the parameters lie in memory: C's alignment, which is the driver's."""
        return struct.Struct("@" + "".join(self._formats))

    @cached_property
    def _formats(self) -> list[str]:
        flat = (str(kind) for parameter in self.parameters for kind in getattr(parameter, "types", (parameter,)))
        return [_FORMATS[kind] for kind in flat]


class Launch:
    """A kernel made ready for tensors that lie alike: addresses are all that is left to say when it starts.

    Attributes:
        kernel: what to start.
        blocks: how many.
        numbers: its last parameters; those before are tensor maps and int64.
        device: where, the current one when it starts.

    Raises:
        KernelError: the kernel cannot be compiled or loaded.
    """

    def __init__(self, kernel: Kernel, blocks: int, numbers: Sequence[int | float], device: torch.device) -> None:
        self.kernel, self.blocks, self.numbers, self.device = kernel, blocks, tuple(numbers), device
        self._index, self._handle = None, 0
        if is_card(device):
            self._index = device.index or 0
            self._handle = _loaded(kernel, self._index)
            self._kept = threading.local()
        elif device.type not in EXECUTORS:
            raise KernelError(f"nothing runs kernels on {device.type}")

    def start(self, *addresses: Argument) -> None:
        """Start it on the current stream; ``addresses`` are as :func:`address_on` and ``tensor_maps.map_on`` give them.

        Raises:
            KernelError: the driver refuses.
        """
        if self._index is None:
            return EXECUTORS[self.device.type](self.kernel, self.blocks, (*addresses, *self.numbers))
        try:
            write, start, stream, extra = self._kept.ready
        except AttributeError:
            write, start, stream, extra = self._kept.ready = self._made_ready(len(addresses))
        write(*addresses)
        result = start(stream(self._index), 0, extra)[0]
        if result:
            raise KernelError(f"{self.kernel.name} did not start: the CUDA driver answered {result!r}")
        return None

    def _made_ready(self, addresses: int) -> tuple[Any, ...]:
        """What writes addresses, starts the kernel, gives the stream, and the address of what tells of the parameters.

        Each thread has its own, since backward runs in threads beside the forward pass.
        """
        kernel, block = self.kernel, _ParameterBlock(self.kernel.layout)
        formats = kernel._formats[:addresses]
        nothing = [b"" if each == "128s" else 0 for each in formats]
        kernel.layout.pack_into(block.buffer, 0, *nothing, *self.numbers)
        shape = self.blocks, 1, 1, kernel.threads, 1, 1
        start = partial(_driver().cuLaunchKernel, self._handle, *shape, kernel.shared_bytes)
        write = partial(struct.Struct("@" + "".join(formats)).pack_into, block.buffer, 0)
        self._kept.block = block  # which owns the memory
        return write, start, torch._C._cuda_getCurrentRawStream, block.extra


def zeroing(device: torch.device, elements: int) -> Callable[[Any], object]:
    """What makes contiguous 32-bit ``elements`` at an address 0, on the current stream, without torch's dispatcher."""
    if not is_card(device):
        return Tensor.zero_
    index, memset, stream = device.index or 0, _driver().cuMemsetD32Async, torch._C._cuda_getCurrentRawStream

    def zero(address: int) -> None:
        result = memset(address, 0, elements, stream(index))[0]
        if result:
            raise KernelError(f"memory was not set to 0: the CUDA driver answered {result!r}")

    return zero


def compute_capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """``"90a"`` as Numba wants it: ``(9, 0, "a")``."""
    digits = arch.rstrip("af")
    number = int(digits[:-1]), int(digits[-1])
    return number if digits == arch else (*number, arch[-1])


def link(ltoir: bytes, arch: str, target: str) -> tuple[bytes, str]:
    """Link-time optimize to ``"cubin"`` or ``"ptx"``; also what the assembler reported of registers and spills.

    Only this way keeps ``setmaxnreg``: the assembler inside nvJitLink drops it when it is given PTX.
    """
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
    except ImportError:  # cuda-core before 0.5
        from cuda.core.experimental import Linker, LinkerOptions, ObjectCode
    options = {"ptx": True} if target == "ptx" else {"ptxas_options": ["-v"]}
    linker = Linker(
        ObjectCode.from_ltoir(ltoir),
        options=LinkerOptions(arch=f"sm_{arch}", link_time_optimization=True, **options),
    )
    code = bytes(linker.link(target).code)
    return code, linker.get_info_log().rstrip("\0")


# --- Devices ----------------------------------------------------------------------------------------------------------


@cache
def architecture(index: int) -> str:
    """The target of CUDA device ``index``: ``"89"``, ``"90a"``, ``"120"``, ...

    Raises:
        KernelError: its tensor cores know no FP8.
    """
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(index)
        raise KernelError(f"{name} has compute capability {major}.{minor}; FP8 kernels need 8.9 (Ada) or later")
    return f"{major}{minor}" + ("a" if major == 9 else "")


def is_card(device: torch.device) -> bool:
    """Whether the CUDA driver starts kernels there."""
    return device.type == "cuda"


def address_on(device: torch.device) -> Callable[[Tensor], Argument]:
    """What a launch there takes for a tensor: its address, or on other devices, where memory is checked, itself."""
    return Tensor.data_ptr if is_card(device) else lambda tensor: tensor


def architecture_of(device: torch.device) -> str:
    """As :func:`architecture`; where kernels are emulated, Hopper's."""
    return architecture(device.index or 0) if device.type == "cuda" else "90a"


@cache
def name_of(device: torch.device) -> str:
    """The card's name; that of the device's type where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run side by side, at one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class _ParameterBlock:
    """Memory for a kernel's parameters.

    Attributes:
        buffer: they lie there.
        extra: address of what tells the driver so.
    """

    def __init__(self, layout: struct.Struct) -> None:
        self.buffer = ctypes.create_string_buffer(layout.size)
        self._size = ctypes.c_size_t(layout.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._BUFFER_SIZE and ..._END
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self._size), 0)
        self.extra = ctypes.addressof(self._extra)


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelError('numba-cuda is not installed; pip install "lightning-fp8[cuda]"') from error
    return driver


def _loaded(kernel: Kernel, index: int) -> int:
    """The handle of ``kernel`` on CUDA device ``index``, which is the current one."""
    handle = kernel._loaded.get(index)
    if handle is None:
        handle = kernel._loaded[index] = _load(kernel, index)
    return handle


def _load(kernel: Kernel, index: int) -> int:
    driver = _driver()
    try:
        code = kernel.cubin(architecture(index))
    except ImportError as error:
        raise KernelError(f'{error}; pip install "lightning-fp8[cuda]"') from error
    except Exception as error:
        if isinstance(error, KernelError):
            raise
        raise KernelError(
            f"{kernel.name} cannot be compiled for {torch.cuda.get_device_name(index)}: {error}"
        ) from error
    entry = re.search(rb"\.text\.(\w+)", code)
    assert entry is not None
    library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    handle = _checked(driver.cuLibraryGetKernel(library, entry[1]))
    if kernel.shared_bytes > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuKernelSetAttribute(attribute, kernel.shared_bytes, handle, driver.CUdevice(index)))
    return int(handle)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise KernelError(f"the CUDA driver answered {result[0]!r}; it may be older than numba-cuda's CUDA libraries")
    return result[1] if len(result) > 1 else None


EXECUTORS: dict[str, Executor] = {}
"""What starts a kernel for tensors that are not on a card, by the type of their device.

It gets the kernel, the number of blocks, and all parameters, tensors for addresses.
"""
