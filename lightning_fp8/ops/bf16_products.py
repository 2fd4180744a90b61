"""GEMMs on the CPU whose operands are BF16 values: those with float32 results, and those on CPUs with slow BF16."""

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
    """Let float32 GEMMs multiply in BF16 and accumulate in float32, which is exact for operands that are BF16 values.

    This is the only way to get a float32 result of a BF16 GEMM on the CPU. Processors without BF16 ignore it. The
    setting is global to the process: with concurrent threads, the first sets it and the last restores it.
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


_matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # before 2.9, torch has one setting for all backends


def _float32_precision() -> str:
    return torch.get_float32_matmul_precision() if _matmul is None else _matmul.fp32_precision


def _set_float32_precision(precision: str) -> None:
    if _matmul is None:
        torch.set_float32_matmul_precision(precision)
    else:
        _matmul.fp32_precision = precision


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies BF16 on this processor. If not, torch's own BF16 loop is slower than float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
