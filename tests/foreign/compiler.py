"""Compiles Triton's kernels without a GPU, keeps their PTX on disk, and runs it on the emulator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from cuda_kernels.host.cache_folder import cached
from tests.ptx_on_cpu import Program, TensorMap

SWIZZLES = (0, 32, 64, 128)
TYPES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Descriptor:
    """A tensor that a kernel copies in blocks; Gluon's kernels also name the layout of a block in shared memory."""

    tensor: torch.Tensor
    block: Sequence[int]
    layout: Any = None

    @property
    def type(self) -> str:
        layout = f",{self.layout!r}" if self.layout else ""
        return f"tensordesc<{TYPES[self.tensor.dtype]}{list(self.block)}{layout}>"


@dataclass(frozen=True)
class Options:
    """Triton's options, under its names."""

    arch: int = 90
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1

    @property
    def compiler(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name != "arch"} | {"enable_fp_fusion": True}


DEFAULT = Options()

Argument = torch.Tensor | Descriptor | int | float


class Launcher(Protocol):
    """Starts a kernel on a grid of blocks, or of clusters where there are some."""

    def __call__(
        self, kernel: Any, grid: Sequence[int], args: Sequence[Argument], options: Options = ..., **constants: Any
    ) -> None: ...


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX, and what Triton's launcher knows besides.

    Attributes:
        maps: for each descriptor its block in shared memory and the swizzle; empty where there are no tensor maps.
    """

    name: str
    ptx: str
    warps: int
    shared: int
    scratch: int
    maps: list[dict[str, Any]] = field(default_factory=list)


def _type(arg: Argument) -> str:
    if isinstance(arg, Descriptor):
        return arg.type
    if isinstance(arg, torch.Tensor):
        return f"*{TYPES[arg.dtype]}"
    return "fp32" if isinstance(arg, float) else "i32"


def _is_aligned(arg: Argument) -> bool:
    """Whether Triton's own launcher would promise that 16 divides it."""
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr() % 16 == 0
    return isinstance(arg, int) and arg % 16 == 0


def compiled(kernel: Any, args: Sequence[Argument], options: Options, constants: dict[str, Any]) -> Compiled:
    """The kernel for arguments of these types; from disk where it was compiled before."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _type(arg) for name, arg in zip(names, args, strict=True)}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {names[k] for k, arg in enumerate(args) if _is_aligned(arg)}
    attributes = {(k,): [["tt.divisibility", 16]] for k, name in enumerate(kernel.arg_names) if name in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", options.arch, 32)

    def build() -> bytes:
        result = triton.compile(source, target=target, options=options.compiler)
        data = result.metadata
        known = [data.name, result.asm["ptx"], data.num_warps, data.shared, data.global_scratch_size]
        return json.dumps([*known, data.tensordesc_meta]).encode()

    key = hashlib.sha256(f"{triton.__version__} {source.hash()} {target} {options}".encode()).hexdigest()
    return Compiled(*json.loads(cached(f"triton_{key}", build)))


@cache
def _program(ptx: str) -> Program:
    return Program(ptx)


def _map(descriptor: Descriptor, layout: dict[str, Any]) -> TensorMap:
    return TensorMap(descriptor.tensor, layout["block_size"], SWIZZLES[layout["swizzle"]])


def arguments(compiled: Compiled, args: Sequence[Argument], scratch: torch.Tensor) -> list[Any]:
    """What Triton's launcher passes: a descriptor with its extents and strides, and two places for scratch last."""
    maps = iter(compiled.maps)
    passed: list[Any] = []
    for arg in args:
        if isinstance(arg, Descriptor):
            shape = [*arg.tensor.shape, *arg.tensor.stride()]
            # Without tensor maps: the address, the shape, and no NaN outside of it, no rounding to TF32.
            head = [_map(arg, next(maps))] if compiled.maps else [arg.tensor, *shape, 0, 0]
            passed += [*head, *shape]
        else:
            passed.append(arg)
    return [*passed, scratch, None]


class Noted:
    """Compiles kernels and runs none.

    Attributes:
        launched: the kernels, in order.
    """

    def __init__(self) -> None:
        self.launched: list[Compiled] = []

    def __call__(
        self,
        kernel: Any,
        grid: Sequence[int],
        args: Sequence[Argument],
        options: Options = DEFAULT,
        **constants: Any,
    ) -> None:
        made = compiled(kernel, args, options, constants)
        self.launched.append(made)
        self.run(made, grid, args, options)

    def run(self, made: Compiled, grid: Sequence[int], args: Sequence[Argument], options: Options) -> None:
        """Run what was compiled."""


class Emulated(Noted):
    """Runs kernels on the emulator, with what it checks.

    Attributes:
        launched: the kernels, in order.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def run(self, made: Compiled, grid: Sequence[int], args: Sequence[Argument], options: Options) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        scratch = torch.zeros(max(1, made.scratch * x * y * z * options.num_ctas), dtype=torch.uint8)
        _program(made.ptx).launch(
            (x * options.num_ctas, y, z),
            (32 * made.warps, 1, 1),
            arguments(made, args, scratch),
            cluster=(options.num_ctas, 1, 1),
            dynamic_shared=made.shared,
            strict=False,
            **self.config,
        )


Check = Callable[[Launcher], None]
