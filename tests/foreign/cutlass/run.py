"""Runs CUTLASS's product (product.cu) on the emulator, compares it with float64, and notes which instructions it has.

    python -m tests.foreign.cutlass.run FOLDER [--note]

FOLDER holds what README.md's commands made: the kernel's PTX and product.so.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from tests.foreign.opcodes import kinds
from tests.ptx_on_cpu import Program, TensorMap
from tests.ptx_on_cpu.tensor_map import BYTES

MET = Path(__file__).parent / "met.txt"
_MAGIC = struct.pack("<Q", 0x70616D6465746F6E)
_NOTED = struct.Struct("<Q5Q9I5H")  # NotedMap of product.cu
_SWIZZLES = (0, 32, 64, 128)
_LARGEST = 1 << 14  # bytes of parameters


def _map(noted: bytes, tensors: Sequence[torch.Tensor]) -> bytes:
    """The emulator's tensor map for what was asked of ``cuTensorMapEncodeTiled``; dimensions come innermost first."""
    _, address, *rest = _NOTED.unpack_from(noted)
    strides, dims, (rank, _, swizzle, plain), box = rest[:4], rest[4:9], rest[9:13], rest[13:]
    tensor = next(t for t in tensors if t.data_ptr() == address)
    assert plain, "interleaved, or with gaps between elements"
    elements = [1, *(stride // tensor.itemsize for stride in strides[: rank - 1])]
    made = TensorMap(tensor, box[:rank][::-1], _SWIZZLES[swizzle], dims=dims[:rank][::-1], strides=elements[::-1])
    return made.encode(writable=True)


def parameters(
    library: ctypes.CDLL, tensors: Sequence[torch.Tensor], shape: tuple[int, int, int], processors: int
) -> tuple[bytes, list[int]]:
    """The kernel's parameters with the emulator's tensor maps, and its launch: grid, block, bytes of shared memory."""
    library.fill.restype = ctypes.c_size_t
    buffer = ctypes.create_string_buffer(_LARGEST)
    launch = (ctypes.c_uint32 * 7)()
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    size = library.fill(*pointers, *shape, processors, buffer, ctypes.c_size_t(_LARGEST), launch)
    assert size, "CUTLASS does not take this product"
    filled = bytearray(buffer.raw[:size])
    for place in range(0, size - BYTES + 1, 8):
        if filled[place : place + 8] == _MAGIC:
            filled[place : place + BYTES] = _map(bytes(filled[place : place + BYTES]), tensors)
    return bytes(filled), list(launch)


def ptx_in(folder: Path) -> str:
    """nvcc names its files by architecture where it compiles for more than one: the kernel is in the longest."""
    return max((path.read_text() for path in folder.glob("product*.ptx")), key=len)


def check(folder: Path, shape: tuple[int, int, int], **config: str) -> None:
    """The product of small integers is float64's, rounded once, to the bit."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, k), generator=generator).float().to(torch.float8_e4m3fn) for rows in (m, n))
    d = torch.zeros(m, n, dtype=torch.bfloat16)
    program = Program(ptx_in(folder))
    filled, launch = parameters(ctypes.CDLL(str(folder / "product.so")), (a, b, d), shape, processors=4)
    print(f"{shape} {config}: {len(filled)} bytes of parameters, grid, block and shared memory {launch}", flush=True)
    grid, block = (launch[0], launch[1], launch[2]), (launch[3], launch[4], launch[5])
    program.launch(
        grid,
        block,
        [filled],
        cluster=(2, 1, 1),
        dynamic_shared=launch[6],
        memory=[a, b, d],
        **config,  # type: ignore[arg-type]
    )
    assert torch.equal(d.double(), (a.double() @ b.double().T).bfloat16().double())
    print("equal to float64's product", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--note", action="store_true", help="add the kernel's instructions to met.txt")
    given = parser.parse_args()
    for shape in ((256, 256, 512), (200, 136, 208)):
        check(given.folder, shape)
        check(given.folder, shape, schedule="reverse", copies="late")
    if given.note:
        lines = MET.read_text().splitlines() if MET.exists() else []
        met = {line for line in lines if not line.startswith("#")} | kinds(ptx_in(given.folder))
        head = f"# Instructions of CUTLASS's kernels that ran on the emulator, {date.today()}"
        MET.write_text("\n".join([head, *sorted(met), ""]))


if __name__ == "__main__":
    main()
