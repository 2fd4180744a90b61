"""cuBLASLt called directly, through NVIDIA's Python bindings (``nvmath-python``), for the library's own performance.

The library is column-major. Rows of ``k`` codes are its matrix ``k × rows``, and the result ``[m, n]`` is its
``n × m``: its A is the right operand, transposed, and its B is the left operand. On Hopper, FP8 supports only this form
("TN"). Modes and layouts of scales: cuBLAS documentation, 3.1.4 "Narrow Precision Data Types Usage".
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_fp8.numerics.scaled import Layout, ScaledTensor

WORKSPACE = 32 << 20
"""Bytes; as recommended by the documentation for Hopper, and used by torch there."""
MOST_CANDIDATES = 16

_TYPES = {
    torch.float8_e4m3fn: "CUDA_R_8F_E4M3",
    torch.float8_e5m2: "CUDA_R_8F_E5M2",
    torch.bfloat16: "CUDA_R_16BF",
    torch.float16: "CUDA_R_16F",
    torch.float32: "CUDA_R_32F",
}
_SCALE_MODES = {
    Layout.TENSOR: "SCALAR_32F",
    Layout.ROW: "OUTER_VEC_32F",
    Layout.BLOCK_1X128: "VEC128_32F",
    Layout.BLOCK_128X128: "BLK128x128_32F",
}


def bindings(device: torch.device) -> Any:
    """``cublas``, ``cublasLt`` and ``cudaDataType`` of NVIDIA's bindings.

    Raises:
        ImportError: nvmath-python is not installed.
        RuntimeError: ``device`` is not a CUDA device.
    """
    if device.type != "cuda":
        raise RuntimeError(f"cuBLASLt needs a CUDA device, not {device}")
    from cuda.bindings.runtime import cudaDataType
    from nvmath.bindings import cublas, cublasLt

    return SimpleNamespace(cublas=cublas, cublasLt=cublasLt, cudaDataType=cudaDataType)


class Matmul:
    """``out [m, n] = left [m, k] right [n, k]ᵀ + beta * out``, planned for these tensors and the current stream.

    ``fast``: without promotion of partial sums to float32. Its length is the number of candidates from the library's
    heuristics, best guess first; calling it with an index runs that candidate.

    Raises:
        ImportError: nvmath-python is not installed.
        RuntimeError: the library does not support this product.
    """

    def __init__(self, left: ScaledTensor, right: ScaledTensor, out: Tensor, *, fast: bool, beta: float = 0.0) -> None:
        device = out.device
        self._api = api = bindings(device)
        self._lt, self._out = api.cublasLt, out
        self._handle, self._workspace = _context(device, self._lt)
        self._stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self._factors = np.array([1.0, beta], np.float32)
        self._held = left.data, right.data, *map(scales_where_read, (left, right))
        self._operation = self._described(left.layout, right.layout, fast)
        self._layouts = [self._laid_out(tensor) for tensor in (right.data, left.data, out)]
        self._found = self._candidates()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def version(self) -> str:
        """Version of the loaded library, such as ``13.1.0``."""
        number = self._lt.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def __call__(self, candidate: int = 0) -> Tensor:
        of_a, of_b, of_d = self._layouts
        alpha = self._factors.ctypes.data
        left, right, *_ = self._held
        d = self._out.data_ptr()
        self._lt.matmul(
            self._handle, self._operation, alpha, right.data_ptr(), of_a, left.data_ptr(), of_b, alpha + 4, d, of_d,
            d, of_d, self._found[candidate:].ctypes.data, self._workspace.data_ptr(), WORKSPACE, self._stream,
        )  # fmt: skip
        return self._out

    def _described(self, left: Layout, right: Layout, fast: bool) -> int:
        """The operation's descriptor; A is the right operand."""
        lt, cublas, names = self._lt, self._api.cublas, self._api.cublasLt.MatmulDescAttribute
        operation = lt.matmul_desc_create(cublas.ComputeType.COMPUTE_32F, int(self._api.cudaDataType.CUDA_R_32F))
        _, _, scale_left, scale_right = self._held
        wanted = {
            names.TRANSA: cublas.Operation.T,
            names.TRANSB: cublas.Operation.N,
            names.FAST_ACCUM: fast,
            names.A_SCALE_POINTER: scale_right.data_ptr(),
            names.B_SCALE_POINTER: scale_left.data_ptr(),
        }
        if (left, right) != (Layout.TENSOR, Layout.TENSOR):  # versions before 12.8 have no scale modes
            wanted[names.A_SCALE_MODE] = getattr(lt.MatmulMatrixScale, _SCALE_MODES[right])
            wanted[names.B_SCALE_MODE] = getattr(lt.MatmulMatrixScale, _SCALE_MODES[left])
        for attribute, value in wanted.items():
            buffer = np.array([value], lt.get_matmul_desc_attribute_dtype(attribute))
            lt.matmul_desc_set_attribute(operation, attribute, buffer.ctypes.data, buffer.nbytes)
        return int(operation)

    def _laid_out(self, tensor: Tensor) -> int:
        """The layout of ``tensor [rows, columns]``, whose rows are the library's columns."""
        rows, columns = tensor.shape
        kind = int(getattr(self._api.cudaDataType, _TYPES[tensor.dtype]))
        return int(self._lt.matrix_layout_create(kind, columns, rows, tensor.stride(0)))

    def _candidates(self) -> Any:
        """The results of the heuristics, a ``cublasLtMatmulHeuristicResult_t`` each."""
        lt, names = self._lt, self._lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        wanted = {names.MAX_WORKSPACE_BYTES: WORKSPACE}
        for letter, tensor in zip("ABCD", (self._held[1], self._held[0], self._out, self._out)):
            address = tensor.data_ptr()
            wanted[getattr(names, f"MIN_ALIGNMENT_{letter}_BYTES")] = min(256, address & -address)
        for attribute, value in wanted.items():
            buffer = np.array([value], lt.get_matmul_preference_attribute_dtype(attribute))
            lt.matmul_preference_set_attribute(preference, attribute, buffer.ctypes.data, buffer.nbytes)
        found, count = np.zeros(MOST_CANDIDATES, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        of_a, of_b, of_d = self._layouts
        lt.matmul_algo_get_heuristic(
            self._handle, self._operation, of_a, of_b, of_d, of_d, preference, MOST_CANDIDATES, found.ctypes.data,
            count.ctypes.data,
        )  # fmt: skip
        lt.matmul_preference_destroy(preference)
        usable = found[: count[0]][found[: count[0]]["state"] == 0]
        if not len(usable):
            raise RuntimeError("cuBLASLt's heuristics return no algorithm")
        return usable


@cache
def _context(device: torch.device, lt: Any) -> tuple[int, Tensor]:
    return lt.create(), torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def scales_where_read(operand: ScaledTensor) -> Tensor:
    """The operand's scales in the layout that the library, and torch, which passes them on, require.

    Scales of 1 × 128 are contiguous along the operand's rows; for 128 × 128, each row of blocks starts at a multiple
    of 4.
    """
    scale = operand.scale_inv
    if operand.layout is Layout.BLOCK_1X128:
        return scale.t().contiguous().t()
    if operand.layout is Layout.BLOCK_128X128:
        return pad(scale, (0, -scale.shape[1] % 4)).contiguous()[:, : scale.shape[1]]
    return scale.contiguous()
