"""GEMMs whose operands are BF16 values, on the CPU: with float32 results, and where BF16 ones are slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_lock = threading.Lock()
_num_multiplying = 0
_precision_outside: Any = None


@contextmanager
def bf16_products() -> Iterator[None]:
    """Let float32 GEMMs multiply in BF16 and accumulate in float32: exact for operands that are BF16 values.

    The only way to a float32 result of a BF16 GEMM on the CPU; processors without BF16 ignore it. The setting is the
    process's: of threads that multiply at a time the first sets it, and the last puts back what was there.
    """
    global _num_multiplying, _precision_outside
    with _lock:
        if not _num_multiplying:
            _precision_outside = _float32_precision()
            _set_float32_precision("medium" if _matmul is None else "bf16")
        _num_multiplying += 1
    try:
        yield
    finally:
        with _lock:
            _num_multiplying -= 1
            if not _num_multiplying:
                _set_float32_precision(_precision_outside)


_matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch before 2.9 has one setting for all backends


def _float32_precision() -> str:
    return torch.get_float32_matmul_precision() if _matmul is None else _matmul.fp32_precision


def _set_float32_precision(precision: str) -> None:
    if _matmul is None:
        torch.set_float32_matmul_precision(precision)
    else:
        _matmul.fp32_precision = precision


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies BF16 on this processor; elsewhere torch's own loop is slower than float32's."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
