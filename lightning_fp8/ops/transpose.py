"""The op ``transpose``: FP8 codes ``[R, C]``, or of each expert, to contiguous rows ``[C, R]``, which a GEMM reads."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.numerics.formats import FORMATS
from lightning_fp8.ops.memory import code_allocation, copy_bits
from lightning_fp8.ops.op import op

_DTYPES = tuple(each.dtype for each in FORMATS.values())


def transpose(codes: Tensor) -> Tensor:
    """Transpose FP8 codes to new memory.

    Args:
        codes: ``[R, C]`` or ``[E, R, C]`` in an FP8 dtype, with any strides. It is fastest if each row is aligned to 4
            bytes.

    Returns:
        ``[C, R]`` or ``[E, C, R]``. On a GPU each row is aligned to 16 bytes, as in a GEMM operand.

    Raises:
        TypeError: If ``codes`` is not a 2-D or 3-D tensor in an FP8 dtype.
    """
    return transpose_op.call(codes)  # type: ignore[no-any-return]


def _check(codes: Tensor) -> None:
    if codes.dtype not in _DTYPES or codes.dim() not in (2, 3):
        raise TypeError(
            f"transpose takes a 2-D or 3-D tensor in {' or '.join(map(str, _DTYPES))}, "
            f"not {codes.dtype} of shape {tuple(codes.shape)}"
        )


def _empty(codes: Tensor) -> Tensor:
    experts, (rows, columns) = len(codes) if codes.dim() == 3 else None, codes.shape[-2:]
    return code_allocation(codes.device, codes.dtype, columns, rows).stacked(experts).empty(codes.device)


@op("transpose", check=_check)
def transpose_op(codes: Tensor) -> Tensor:
    return _empty(codes)


def reference_transpose(codes: Tensor) -> Tensor:
    """The specification in plain torch."""
    out = _empty(codes)
    copy_bits(codes.mT, out)
    return out


transpose_op.implement("cpu", reference_transpose)
