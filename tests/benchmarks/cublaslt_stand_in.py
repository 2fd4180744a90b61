"""A cuBLASLt that runs on the CPU, in place of NVIDIA's bindings: it takes what the library's documentation takes.

Numbers are those of the library's headers (cublasLt.h and cublas_api.h of 13.10, library_types.h of 13.3). Sizes of
attributes, forms, leading dimensions, alignments and pairs of scale modes are checked as the documentation of
``cublasLtMatmul`` and of its narrow precisions (3.1.4) demands on Hopper; scales are read where it says they lie.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

ComputeType = IntEnum("ComputeType", {"COMPUTE_32F": 68, "COMPUTE_32F_FAST_TF32": 77, "COMPUTE_16F": 64})
Operation = IntEnum("Operation", {"N": 0, "T": 1, "C": 2})
MatmulMatrixScale = IntEnum(
    "MatmulMatrixScale",
    {"SCALAR_32F": 0, "VEC16_UE4M3": 1, "VEC32_UE8M0": 2, "OUTER_VEC_32F": 3, "VEC128_32F": 4, "BLK128x128_32F": 5},
)
MatmulDescAttribute = IntEnum(
    "MatmulDescAttribute",
    {
        **{"COMPUTE_TYPE": 0, "SCALE_TYPE": 1, "POINTER_MODE": 2, "TRANSA": 3, "TRANSB": 4},
        **{"A_SCALE_POINTER": 17, "B_SCALE_POINTER": 18, "FAST_ACCUM": 25, "A_SCALE_MODE": 31, "B_SCALE_MODE": 32},
    },
)
MatmulPreferenceAttribute = IntEnum(
    "MatmulPreferenceAttribute",
    {
        **{"SEARCH_MODE": 0, "MAX_WORKSPACE_BYTES": 1, "MIN_ALIGNMENT_A_BYTES": 5, "MIN_ALIGNMENT_B_BYTES": 6},
        **{"MIN_ALIGNMENT_C_BYTES": 7, "MIN_ALIGNMENT_D_BYTES": 8},
    },
)


class cudaDataType:
    """Like the bindings' own, names no member by subscript."""

    CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2 = 0, 2, 14, 28, 29


HEURISTIC_RESULT = np.dtype(
    [("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"),
     ("reserved", "<i4", (4,))]
)  # fmt: skip
"""cublasLtMatmulHeuristicResult_t."""

SIZES = {"TRANSA": "i4", "TRANSB": "i4", "FAST_ACCUM": "i1", "A_SCALE_MODE": "i4", "B_SCALE_MODE": "i4",
         "A_SCALE_POINTER": "i8", "B_SCALE_POINTER": "i8"}  # fmt: skip
"""Of attributes, as cublasLt.h words them."""
PREFERENCES = {"MAX_WORKSPACE_BYTES": "u8", **{f"MIN_ALIGNMENT_{letter}_BYTES": "u4" for letter in "ABCD"}}

DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
WORKSPACES = (0, 1 << 20, 1 << 26)
"""Of the algorithms that there are."""
NOT_SUPPORTED = 15


class Refused(Exception):
    """As the bindings raise the library's status."""


def refuse(unless: object, why: str) -> None:
    if not unless:
        raise Refused(why)


@dataclass
class Layout:
    """A matrix in columns."""

    dtype: torch.dtype
    rows: int
    columns: int
    pitch: int

    def at(self, address: int) -> Tensor:
        """``[columns, rows]``, the matrix's memory."""
        refuse(address % 16 == 0, f"a matrix at {address:#x} is not aligned to 16 bytes")
        size = ((self.columns - 1) * self.pitch + self.rows) * self.dtype.itemsize
        flat = memory(address, size).view(self.dtype)
        return flat.as_strided((self.columns, self.rows), (self.pitch, 1))


def memory(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def floats(address: int, *shape: int) -> Tensor:
    refuse(address and address % 16 == 0, f"scales at {address:#x} are not aligned to 16 bytes")
    return memory(address, 4 * int(np.prod(shape))).view(torch.float32).view(shape).double()


@dataclass(eq=False)
class CublasLt:
    """``nvmath.bindings.cublasLt``.

    Attributes:
        ran: number of the algorithm, and whether it was fast, of each product.
        enums: a module whose enumerations to use.
    """

    enums: Any = None
    ran: list[tuple[int, bool]] = field(default_factory=list)
    matmul_heuristic_result_dtype = HEURISTIC_RESULT

    def __post_init__(self) -> None:
        for mine in (MatmulMatrixScale, MatmulDescAttribute, MatmulPreferenceAttribute):
            setattr(self, mine.__name__, getattr(self.enums, mine.__name__, mine))
        self._handles, self._made = itertools.count(0x1000, 0x10), {}

    def _keep(self, made: Any) -> int:
        handle = next(self._handles)
        self._made[handle] = made
        return handle

    def _kept(self, handle: int, kind: type) -> Any:
        refuse(isinstance(self._made.get(handle), kind), f"{handle:#x} is no {kind.__name__}")
        return self._made[handle]

    def create(self) -> int:
        return self._keep("handle")

    def get_version(self) -> int:
        return 130100

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        refuse(compute == ComputeType.COMPUTE_32F and scale == cudaDataType.CUDA_R_32F, "FP8 computes in 32F")
        return self._keep({"TRANSA": 0, "TRANSB": 0, "FAST_ACCUM": 0, "A_SCALE_MODE": 0, "B_SCALE_MODE": 0})

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> Any:
        return np.dtype(SIZES[MatmulDescAttribute(attribute).name]).type

    def matmul_desc_set_attribute(self, operation: int, attribute: int, address: int, size: int) -> None:
        name = MatmulDescAttribute(attribute).name
        self._kept(operation, dict)[name] = value(address, size, SIZES[name])

    def matmul_preference_create(self) -> int:
        return self._keep({"MAX_WORKSPACE_BYTES": 0, **{f"MIN_ALIGNMENT_{letter}_BYTES": 256 for letter in "ABCD"}})

    def get_matmul_preference_attribute_dtype(self, attribute: int) -> Any:
        return np.dtype(PREFERENCES[MatmulPreferenceAttribute(attribute).name]).type

    def matmul_preference_set_attribute(self, preference: int, attribute: int, address: int, size: int) -> None:
        name = MatmulPreferenceAttribute(attribute).name
        self._kept(preference, dict)[name] = value(address, size, PREFERENCES[name])

    def matmul_preference_destroy(self, preference: int) -> None:
        del self._made[preference]

    def matrix_layout_create(self, kind: int, rows: int, columns: int, pitch: int) -> int:
        refuse(kind in DTYPES, f"type {kind}")
        refuse(pitch >= rows, f"columns of {rows} elements do not fit into a leading dimension of {pitch}")
        refuse(pitch * DTYPES[kind].itemsize % 16 == 0, f"a leading dimension of {pitch} is not aligned to 16 bytes")
        return self._keep(Layout(DTYPES[kind], rows, columns, pitch))

    def matmul_algo_get_heuristic(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, preference: int, asked: int, results: int,
        count: int,
    ) -> None:  # fmt: skip
        refuse(self._made.get(handle) == "handle", "no handle")
        self._sizes(operation, a, b, c, d)
        limit = self._kept(preference, dict)["MAX_WORKSPACE_BYTES"]
        found = np.zeros(asked, HEURISTIC_RESULT)
        usable = [number for number, needed in enumerate(WORKSPACES) if needed <= limit]
        for place, number in enumerate(usable):
            found[place]["algo"]["data_"][:] = 0xC0DE + number
            found[place]["workspace_size"] = WORKSPACES[number]
        found[len(usable)]["state"] = NOT_SUPPORTED
        ctypes.memmove(results, found.ctypes.data, found.nbytes)
        ctypes.c_int.from_address(count).value = len(usable) + 1

    def matmul(
        self, handle: int, operation: int, alpha: int, a: int, of_a: int, b: int, of_b: int, beta: int, c: int,
        of_c: int, d: int, of_d: int, algorithm: int, workspace: int, workspace_size: int, stream: int,
    ) -> None:  # fmt: skip
        refuse(self._made.get(handle) == "handle", "no handle")
        m, n, k = self._sizes(operation, of_a, of_b, of_c, of_d)
        codes = (ctypes.c_uint64 * 8).from_address(algorithm)
        number = codes[0] - 0xC0DE
        refuse(set(codes) == {codes[0]} and 0 <= number < len(WORKSPACES), "no algorithm of the heuristics")
        refuse(WORKSPACES[number] <= workspace_size and (workspace or not workspace_size), "the workspace is too small")
        wanted = self._kept(operation, dict)
        values = [
            self._kept(layout, Layout).at(address).double()
            * scales(wanted[f"{letter}_SCALE_MODE"], wanted[f"{letter}_SCALE_POINTER"], rows, k)
            for letter, layout, address, rows in (("A", of_a, a, m), ("B", of_b, b, n))
        ]
        factors = [ctypes.c_float.from_address(address).value for address in (alpha, beta)]
        result = factors[0] * values[1] @ values[0].t()  # [n, m] in memory: m × n in columns
        if factors[1]:
            result += factors[1] * self._kept(of_c, Layout).at(c).double()
        out = self._kept(of_d, Layout).at(d)
        out.copy_(result)
        self.ran.append((number, bool(wanted["FAST_ACCUM"])))

    def _sizes(self, operation: int, *layouts: int) -> tuple[int, int, int]:
        """m, n and k of what may be multiplied."""
        wanted = self._kept(operation, dict)
        a, b, c, d = (self._kept(layout, Layout) for layout in layouts)
        refuse((wanted["TRANSA"], wanted["TRANSB"]) == (Operation.T, Operation.N), "FP8 is multiplied as TN alone")
        refuse({a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2}, "A and B are not FP8")
        refuse(not a.dtype == b.dtype == torch.float8_e5m2, "there is no E5M2 by E5M2")
        refuse(d.dtype in (torch.bfloat16, torch.float16, torch.float32) and c.dtype == d.dtype, "types of C and D")
        m, n, k = a.columns, b.columns, a.rows
        refuse(b.rows == k and (d.rows, d.columns) == (c.rows, c.columns) == (m, n), "sizes do not fit")
        refuse(m % 16 == n % 16 == k % 16 == 0, f"{m}, {n} and {k} are no multiples of 16")
        modes = wanted["A_SCALE_MODE"], wanted["B_SCALE_MODE"]
        refuse(modes in PAIRS, f"scale modes {modes}")
        return m, n, k


PAIRS = {(0, 0), (3, 3), (4, 4), (4, 5), (5, 4)}
"""Scale modes of A and B that Hopper has."""


def value(address: int, size: int, kind: str) -> int:
    dtype = np.dtype(kind)
    refuse(size == dtype.itemsize, f"an attribute of {size} bytes, not {dtype.itemsize}")
    return int(np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)[0])


def scales(mode: int, address: int, rows: int, k: int) -> Tensor:
    """Of ``rows`` of k elements, each: what the mode finds at ``address``."""
    blocks = -(-k // 128)
    if mode == MatmulMatrixScale.SCALAR_32F:
        return floats(address, 1).expand(rows, k)
    if mode == MatmulMatrixScale.OUTER_VEC_32F:
        return floats(address, rows, 1).expand(rows, k)
    if mode == MatmulMatrixScale.VEC128_32F:
        return floats(address, blocks, rows).t().repeat_interleave(128, 1)[:, :k]
    across = floats(address, -(-rows // 128), -(-blocks // 4) * 4)[:, :blocks]
    return across.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]


def stand_in(enums: Any = None) -> SimpleNamespace:
    """What :func:`benchmarks.contenders.cublaslt.bindings` gives; ``enums``: the same of the real package."""
    cublas = SimpleNamespace(ComputeType=ComputeType, Operation=Operation) if enums is None else enums.cublas
    types = cudaDataType if enums is None else enums.cudaDataType
    return SimpleNamespace(cublas=cublas, cublasLt=CublasLt(enums and enums.cublasLt), cudaDataType=types)
