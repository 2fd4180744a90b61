"""Launches kernels on the CPU."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import threading
from collections.abc import Collection, Sequence
from typing import Literal

import torch

from tests.ptx_on_cpu import build, tensor_map
from tests.ptx_on_cpu.errors import EmulatorError
from tests.ptx_on_cpu.parse import Parameter
from tests.ptx_on_cpu.tensor_map import TensorMap
from tests.ptx_on_cpu.trace import Trace
from tests.ptx_on_cpu.translate import translate
from tests.ptx_on_cpu.writer import c_name

Argument = torch.Tensor | TensorMap | bytes | int | float | None
Size = tuple[int, int, int]

_SCHEDULES = ("forward", "reverse", "random")
_COPIES = ("eager", "late", "random")
_ACCUMULATIONS = ("float32", "hopper")
_STACK_BYTES = 1 << 17  # of a thread, besides its local memory
_LARGEST_CLUSTER = 16
_LARGEST_SHARED = {"sm_90a": 227 * 1024, "sm_90": 227 * 1024}  # of a block; elsewhere:
_LARGEST_SHARED_ELSEWHERE = 99 * 1024
_FLOATS = {4: "<f", 8: "<d"}

# The runtime keeps one launch in global variables.
_one_launch = threading.Lock()


class _Range(ctypes.Structure):
    """Range of runtime.h."""

    _fields_ = (("start", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_uint32))


class _Launch(ctypes.Structure):
    """Launch of runtime.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("static_shared", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("stack_bytes", ctypes.c_uint32),
        ("ranges_count", ctypes.c_uint32),
        ("regions_count", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)),
        ("regions", ctypes.POINTER(_Range)),
        ("races", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("copies", ctypes.c_uint32),
        ("accumulation", ctypes.c_uint32),
        ("uses_cp_async", ctypes.c_uint32),
        ("uses_async_proxy", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("parameters_bytes", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("trace", ctypes.c_void_p),
        ("trace_capacity", ctypes.c_uint32),
        ("trace_count", ctypes.c_uint32),
        ("error", ctypes.c_char * 4000),
    )


class Program:
    """A kernel, translated and compiled.

    Args:
        ptx: a module with one ``.entry``.

    Raises:
        EmulatorError: if an instruction is not supported. The message names the instruction and its line.
    """

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx.rstrip("\0")
        self._translation = translate(self.ptx)
        self._library = build.kernel_library(self._translation.source)
        self._kernel = getattr(self._library, self._translation.symbol)

    def set_variable(self, name: str, value: int) -> None:
        """Sets a ``.global .u32`` of the module. It keeps the value in later launches."""
        (memory,) = (each for each in self._translation.memory if each.symbol == c_name("g_" + name))
        ctypes.c_uint32.in_dll(self._library, memory.symbol).value = value

    def launch(
        self,
        grid: Size,
        block: Size,
        args: Sequence[Argument],
        *,
        cluster: Size = (1, 1, 1),
        dynamic_shared: int = 0,
        races: bool = True,
        schedule: Literal["forward", "reverse", "random"] = "forward",
        seed: int = 0,
        copies: Literal["eager", "late", "random"] = "eager",
        accumulation: Literal["float32", "hopper"] = "float32",
        read_only: Collection[int] = (),
        registers: int | None = None,
        strict: bool = True,
        memory: Sequence[torch.Tensor] = (),
        trace: Trace | None = None,
    ) -> None:
        """Runs the kernel to its end.

        `args` are the kernel's parameters in their order. A tensor is passed as its address, and its whole storage
        may be accessed; None is a null pointer; a :class:`TensorMap` or bytes are passed by value; numbers are packed
        as the parameter's type. `read_only` holds indices of arguments that must not be written, `memory` tensors
        whose addresses are contained in arguments that are bytes.

        `schedule` is the order in which threads run between two synchronizations, and the order of blocks. `copies`
        is when asynchronous copies arrive: ``"eager"`` at once; ``"late"`` not before a thread waits for them (stores
        that no thread waits for, not before all blocks have ended); or ``"random"``. `seed` makes random orders
        reproducible. `races` looks for unordered accesses, of threads to shared memory and of blocks to global memory.
        `accumulation` is the arithmetic of FP8 tensor cores: ``"hopper"`` keeps 13 bits after the leading product's
        point, an approximation. `registers` is the number of registers of a thread at entry, which setmaxnreg changes;
        None derives it from the PTX's directives.

        `strict` checks two rules that CUTLASS follows: a fence.mbarrier_init is needed before a copy signals a new
        mbarrier, and no two threads store to one address, even the same value. Kernels of Triton need
        ``strict=False``: they synchronize only the block, and store copies of one value in one instruction.

        `trace` records the threads' synchronization and their use of shared memory, in the order of execution.

        Raises:
            EmulatorError: for an access out of bounds, misaligned or to read-only memory; a race; a deadlock;
                divergence at a collective instruction; a missing proxy fence; a copy that no thread waited for. The
                message names block, thread, PTX line and, where the PTX has line information, the line of its source.
        """
        translation = self._translation
        self._check_shape(grid, block, cluster, dynamic_shared)
        parameters, parameters_address = self._pack(args, read_only)
        ranges = self._ranges([*args, *memory], read_only)
        regions = _regions([*args, *memory], ranges)
        launch = _Launch(
            grid=grid,
            block=block,
            cluster=cluster,
            static_shared=translation.static_shared,
            dynamic_shared=dynamic_shared,
            stack_bytes=_STACK_BYTES + -(-translation.depot_bytes // 4096) * 4096,
            ranges_count=len(ranges),
            ranges=(_Range * len(ranges))(*ranges),
            regions_count=len(regions),
            regions=(_Range * len(regions))(*regions),
            races=races,
            schedule=_SCHEDULES.index(schedule),
            copies=_COPIES.index(copies),
            accumulation=_ACCUMULATIONS.index(accumulation),
            uses_cp_async=translation.uses_cp_async,
            uses_async_proxy=translation.uses_async_proxy,
            registers=translation.registers if registers is None else registers,
            parameters_bytes=max((p.offset + p.size for p in translation.parameters), default=0),
            strict=strict,
            seed=seed,
        )
        if trace is not None:
            launch.trace, launch.trace_capacity = trace.events.ctypes.data, len(trace.events)
        with _one_launch:
            failed = build.runtime().rt_launch(ctypes.byref(launch), self._kernel, ctypes.c_void_p(parameters_address))
        del parameters
        if failed:
            raise EmulatorError(self._located(launch.error.decode()))
        if trace is not None:
            if launch.trace_count > len(trace.events):
                raise EmulatorError(f"a trace of {launch.trace_count} events: {len(trace.events)} fit")
            trace.events = trace.events[: launch.trace_count]

    def _check_shape(self, grid: Size, block: Size, cluster: Size, dynamic_shared: int) -> None:
        translation, threads, blocks = self._translation, math.prod(block), math.prod(cluster)
        shared = translation.static_shared + dynamic_shared
        largest = _LARGEST_SHARED.get(translation.target, _LARGEST_SHARED_ELSEWHERE)
        if any(len(size) != 3 or min(size) < 1 for size in (grid, block, cluster)):
            raise EmulatorError(
                f"grid {grid}, block {block} and cluster {cluster} have to be three positive numbers each"
            )
        if threads > (translation.largest_block or 1024):
            raise EmulatorError(f"a block of {threads} threads: the kernel is for {translation.largest_block or 1024}")
        if blocks > _LARGEST_CLUSTER or any(g % c for g, c in zip(grid, cluster)):
            raise EmulatorError(f"cluster {cluster}: at most {_LARGEST_CLUSTER} blocks, and a divisor of grid {grid}")
        if translation.cluster not in (None, cluster):
            raise EmulatorError(f"cluster {cluster}: the kernel is for {translation.cluster}")
        if shared > largest:
            raise EmulatorError(f"{shared} bytes of shared memory: {translation.target} has {largest}")

    def _pack(self, args: Sequence[Argument], read_only: Collection[int]) -> tuple[ctypes.Array[ctypes.c_char], int]:
        """The parameters' bytes, and their address: a multiple of 64, as required for tensor maps."""
        parameters = self._translation.parameters
        if len(args) != len(parameters):
            raise EmulatorError(f"the kernel takes {len(parameters)} arguments, not {len(args)}")
        size = max((p.offset + p.size for p in parameters), default=0)
        buffer = ctypes.create_string_buffer(size + 64)
        start = -ctypes.addressof(buffer) % 64
        for index, (parameter, argument) in enumerate(zip(parameters, args)):
            try:
                packed = _packed(parameter, argument, index not in read_only)
            except (ValueError, struct.error) as error:
                raise EmulatorError(f"argument {index} for .{parameter.type} {parameter.name}: {error}") from error
            ctypes.memmove(ctypes.addressof(buffer) + start + parameter.offset, packed, len(packed))
        return buffer, ctypes.addressof(buffer) + start

    def _ranges(self, args: Sequence[Argument], read_only: Collection[int]) -> list[_Range]:
        """One range for each argument, so that messages can number them, and one for each variable of the module."""
        ranges = []
        for index, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                storage = argument.untyped_storage()
                ranges.append(_Range(storage.data_ptr(), storage.nbytes(), index not in read_only))
            else:
                ranges.append(_Range(0, 0, 0))
        for memory in self._translation.memory:
            address = ctypes.addressof(ctypes.c_char.in_dll(self._library, memory.symbol))
            ranges.append(_Range(address, memory.bytes, memory.writable))
        return ranges or [_Range(0, 0, 0)]

    def _located(self, message: str) -> str:
        """Adds the text of PTX lines, and the lines of the source that they were compiled from."""
        lines = self.ptx.splitlines()
        files = dict(re.findall(r"\.file\s+(\d+)\s+\"([^\"]+)\"", self.ptx))

        def describe(match: re.Match[str]) -> str:
            number = int(match[1])
            if not 0 < number <= len(lines):
                return match[0]
            before = (re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line) for line in lines[number - 1 :: -1])
            location = next(filter(None, before), None)
            source = f", {files.get(location[1], '?')}:{location[2]}" if location else ""
            return f"{match[0]} ({lines[number - 1].strip()}{source})"

        return re.sub(r"PTX line (\d+)", describe, message)


def _regions(args: Sequence[Argument], ranges: Sequence[_Range]) -> list[_Range]:
    """Memory shared by blocks, with each storage once."""
    storages = [arg.tensor.untyped_storage() for arg in args if isinstance(arg, TensorMap)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    sizes |= {each.start: each.bytes for each in ranges if each.bytes}
    return [_Range(start, size, True) for start, size in sizes.items()]


def _packed(parameter: Parameter, argument: Argument, writable: bool) -> bytes:
    if isinstance(argument, TensorMap):
        if parameter.size != tensor_map.BYTES:
            raise ValueError("a tensor map is passed by value, in 128 bytes")
        return argument.encode(writable=writable)
    if isinstance(argument, bytes):
        if len(argument) != parameter.size:
            raise ValueError(f"{len(argument)} bytes: it has {parameter.size}")
        return argument
    if isinstance(argument, torch.Tensor):
        if argument.device.type != "cpu":
            raise ValueError(f"the tensor is on {argument.device}")
        argument = argument.data_ptr()
    if isinstance(argument, float) or parameter.type in ("f32", "f64"):
        if parameter.type[0] not in "fb" or parameter.size not in _FLOATS or argument is None:
            raise ValueError(f"{argument} is not of this type")
        return struct.pack(_FLOATS[parameter.size], argument)
    value, bits = argument or 0, 8 * parameter.size
    if not -(1 << bits - 1) <= value < 1 << bits:
        raise ValueError(f"{value} does not fit {bits} bits")
    return (value % (1 << bits)).to_bytes(parameter.size, "little")
