"""The op ``transpose``: FP8 codes ``[R, C]`` to the contiguous rows of ``[C, R]``, as a GEMM reads them."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.formats import FORMATS
from lightning_fp8.ops.memory import code_allocation, copy_bits
from lightning_fp8.ops.op import op

_DTYPES = tuple(each.dtype for each in FORMATS.values())


def transpose(codes: Tensor) -> Tensor:
    """Transpose FP8 codes, in memory of their own.

    Args:
        codes: ``[R, C]`` in an FP8 dtype, any strides; fastest where each row begins at a multiple of 4 bytes.

    Returns:
        ``[C, R]``; on a GPU each row begins at a multiple of 16 bytes, as our casts write the operands of a GEMM.

    Raises:
        TypeError: ``codes`` is not a 2-D tensor in an FP8 dtype.
    """
    return _transpose(codes)  # type: ignore[no-any-return]


def _check(codes: Tensor) -> None:
    if codes.dtype not in _DTYPES or codes.dim() != 2:
        raise TypeError(
            f"transpose takes a 2-D tensor in {' or '.join(map(str, _DTYPES))}, "
            f"not {codes.dtype} of shape {tuple(codes.shape)}"
        )


def _empty(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    return code_allocation(codes.device, codes.dtype, columns, rows).empty(codes.device)


@op("transpose", check=_check)
def transpose_op(codes: Tensor) -> Tensor:
    return _empty(codes)


_transpose = transpose_op.call


def reference_transpose(codes: Tensor) -> Tensor:
    """The specification in plain torch."""
    out = _empty(codes)
    copy_bits(codes.t(), out)
    return out


transpose_op.implement("cpu", reference_transpose)
