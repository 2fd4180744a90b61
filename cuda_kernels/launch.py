"""From a kernel's source to its launch: compiled for the device, kept on disk, started on torch's current stream.

Kernels take addresses, integers and floats, never arrays. A launch packs them into one buffer, which the driver copies.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.cache import cached, toolchain

_FORMATS = {"int64": "q", "int32": "i", "float32": "f"}

Argument = Tensor | int | float
Executor = Callable[["Kernel", int, Sequence[Argument], "Launch | None"], None]


class KernelError(RuntimeError):
    """Kernels cannot be compiled or started here; the message says why and what to install."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One variant of one kernel.

    Attributes:
        name: tells it from every other variant, e.g. ``quantize(bfloat16, e4m3, tensor)``.
        function: the Python source, for Numba.
        parameters: a Numba type for each parameter: int64 for an address, int32, int64 or float32, or a tuple of
            one of them.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        blocks_per_multiprocessor: how many shall fit side by side on Hopper; limits the registers of a thread.
    """

    name: str
    function: Callable[..., None]
    parameters: tuple[Any, ...]
    threads: int
    shared_bytes: int = 0
    blocks_per_multiprocessor: int = 1
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

    def ptx(self, arch: str) -> str:
        """What :meth:`cubin` assembles, as text."""
        return link(self.ltoir(arch), arch, "ptx")[0].decode().rstrip("\0")

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
        flat = (str(kind) for parameter in self.parameters for kind in getattr(parameter, "types", (parameter,)))
        return struct.Struct("@" + "".join(_FORMATS[kind] for kind in flat))

    def launch(self, blocks: int, args: Sequence[Argument]) -> None:
        """Start ``blocks`` blocks on the device of the first argument, a tensor; a tensor is passed as its address.

        Raises:
            KernelError: the kernel cannot be compiled or started.
        """
        first = args[0]
        if first.is_cuda:  # type: ignore[union-attr]
            _start(self, blocks, first.get_device(), pack(self, args))  # type: ignore[union-attr]
        else:
            EXECUTORS[first.device.type](self, blocks, args, None)  # type: ignore[union-attr]


class Launch:
    """A kernel made ready for tensors that lie alike: addresses are all that is left to say when it starts.

    Attributes:
        kernel: its first parameters are int64: addresses, and what else differs from start to start.
        blocks: how many to start.
        numbers: its other parameters.
    """

    def __init__(self, kernel: Kernel, blocks: int, numbers: Sequence[int | float]) -> None:
        self.kernel, self.blocks, self.numbers = kernel, blocks, tuple(numbers)
        self._kept = _Kept()

    def __call__(self, *addresses: Argument) -> None:
        """Start it; a tensor, the first of the addresses among them, is passed as its address.

        Raises:
            KernelError: the kernel cannot be compiled or started.
        """
        first = addresses[0]
        if first.is_cuda:  # type: ignore[union-attr]
            _start(self.kernel, self.blocks, first.get_device(), self.packed(addresses))  # type: ignore[union-attr]
        else:
            EXECUTORS[first.device.type](self.kernel, self.blocks, (*addresses, *self.numbers), self)  # type: ignore[union-attr]

    def packed(self, addresses: Sequence[Argument]) -> int:
        """Put ``addresses`` where the driver reads them; the address of what tells it where that is."""
        if self._kept.block is None:
            block = _ParameterBlock(self.kernel)
            self.kernel.layout.pack_into(block.buffer, 0, *[0] * len(addresses), *self.numbers)
            self._kept.block = block
        block = self._kept.block
        values = [each.data_ptr() if each.__class__ is Tensor else each for each in addresses]  # type: ignore[union-attr]
        try:
            block.words[: len(values)] = values
        except TypeError:  # a tensor of another class: a parameter
            block.words[: len(values)] = [each if isinstance(each, int) else each.data_ptr() for each in values]  # type: ignore[union-attr]
        return block.extra


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


@cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks run side by side, at one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class _ParameterBlock:
    """Memory for a kernel's parameters.

    Attributes:
        buffer: as a kernel's ``layout`` says.
        words: the same as int64.
        extra: address of what tells the driver of it.
    """

    def __init__(self, kernel: Kernel) -> None:
        size = kernel.layout.size
        self.buffer = ctypes.create_string_buffer(size)
        self.words: Any = (ctypes.c_int64 * (size // 8)).from_buffer(self.buffer)
        self._size = ctypes.c_size_t(size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._BUFFER_SIZE and ..._END
        self._extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self._size), 0)
        self.extra = ctypes.addressof(self._extra)


class _Kept(threading.local):
    """A launch's parameters: of each thread its own, since backward runs in threads beside the forward pass."""

    block: _ParameterBlock | None = None


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.of: dict[Kernel, _ParameterBlock] = {}


_blocks = _Blocks()


def pack(kernel: Kernel, args: Sequence[Argument]) -> int:
    """Put all parameters where the driver reads them; the address of what tells it where that is."""
    block = _blocks.of.get(kernel)
    if block is None:
        block = _blocks.of[kernel] = _ParameterBlock(kernel)
    values = [arg if isinstance(arg, (int, float)) else arg.data_ptr() for arg in args]
    kernel.layout.pack_into(block.buffer, 0, *values)
    return block.extra


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelError('numba-cuda is not installed; pip install "lightning-fp8[cuda]"') from error
    return driver


def _load(kernel: Kernel, index: int) -> int:
    """The handle of ``kernel`` on CUDA device ``index``."""
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
    if int(result[0]):
        raise KernelError(f"the CUDA driver answered {result[0]!r}; it may be older than numba-cuda's CUDA libraries")
    return result[1] if len(result) > 1 else None


def _start(kernel: Kernel, blocks: int, index: int, extra: int) -> None:
    """Start ``kernel`` on CUDA device ``index`` with the parameters that ``extra`` tells of."""
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _start(kernel, blocks, index, extra)
    handle = kernel._loaded.get(index)
    if handle is None:
        handle = kernel._loaded[index] = _load(kernel, index)
    stream = torch._C._cuda_getCurrentRawStream(index)
    (result,) = _driver().cuLaunchKernel(
        handle, blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, 0, extra
    )
    if result:
        raise KernelError(f"{kernel.name} did not start: the CUDA driver answered {result!r}")


EXECUTORS: dict[str, Executor] = {}
"""What starts a kernel for tensors that are not on a card, by the type of their device.

It gets the kernel, the number of blocks, all parameters, and the :class:`Launch` if there is one.
"""
