"""``torch._scaled_mm``: its requirements, the changes of GEMMs that meet them, and its errors for unsupported GEMMs.

The requirements on a GEMM ``[M, K] x [N, K]ᵀ`` are those of PyTorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``
(0174dfa), ``RowwiseScaledMM.cu`` (01386a0), ``aten/src/ATen/cuda/CUDABlas.cpp`` and ``torch/_meta_registrations.py``
(2.13). If a GEMM does not meet them, :func:`multiply` changes it:

- N and K must be multiples of 16. Codes are padded with zeros, which do not change sums.
- A bias must have the result's dtype, and the result must not be float32. The bias is rounded, as ``F.linear`` does
  under autocast, or added to a float32 result afterwards.
- With one scale for each row, B must be E4M3 and the result bfloat16. Other GEMMs are multiplied with a single scale of
  1 and a float32 result, which is then multiplied by the scales.
- Scales of 1x128 by 128x128 and by 1x128 are supported on Hopper from CUDA 12.9 on, for E4M3, without the fast
  accumulator, with results in bfloat16 or float32. cuBLASLt requires that lines of M scales of A are aligned to 16
  bytes, and that lines of ``K / 128`` scales of 128x128 blocks are padded to multiples of 4; otherwise its results are
  silently wrong (PyTorch's pull request 166752). So M is padded to a multiple of 4 and K to a multiple of 512 or 128.
  K has at least two blocks, because one block would be taken for a single scale of a row.
- E8M0 scales of 1x32 blocks (MXFP8) are supported on Blackwell from CUDA 12.8 on. cuBLASLt requires its own order of
  these scales (:func:`in_tiles`).
- Two operands in E5M2 are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.numerics.formats import E8M0_DTYPE
from lightning_fp8.numerics.scaled import Layout

SIZE_MULTIPLE = 16
"""``torch._scaled_mm`` requires that N and K are multiples of this."""
_ROWS_MULTIPLE = 4
"""The number of float32 scales in 16 bytes."""
_BLOCK_K = {Layout.BLOCK_1X128: 128, Layout.BLOCK_128X128: 4 * 128}
"""The multiple that K is padded to, by the layout of B's blocks. K-major scales are also padded to whole 16 bytes."""
_LEAST_K = 2 * 128
_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""The tiles of cuBLASLt's E8M0 scales."""


def multiplies_blocks(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` supports scales of 1x128 and 128x128 blocks on ``device``.

    It does on Hopper with cuBLASLt of CUDA 12.9, from PyTorch 2.9 on (pull request 158037).
    """
    has_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return has_hopper and _cuda_version() >= (12, 9) and torch.__version__ >= (2, 9)  # type: ignore[operator]


def multiplies_mx_blocks(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` supports E8M0 scales of 1x32 blocks on ``device``.

    It does on GPUs with MX tensor cores, which PyTorch's tests take to be those of compute capability 10.0 and later
    (``PLATFORM_SUPPORTS_MX_GEMM``), with cuBLASLt of CUDA 12.8.
    """
    has_mx = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    return has_mx and _cuda_version() >= (12, 8)


def _cuda_version() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))


class Fit(NamedTuple):
    """A call of ``torch._scaled_mm`` for a GEMM.

    Attributes:
        layout_a, layout_b: the layouts of the scales that are passed to it.
        m, n, k: the sizes that operands are padded to.
        out_dtype: the dtype of the result of the call.
        takes_bias: True passes the bias, in ``out_dtype``; False adds it afterwards.
        scales_afterwards: True passes scales of 1, and multiplies the result by the scales of rows.
        fast_accum: whether the accumulator of lower precision is allowed.
    """

    layout_a: Layout
    layout_b: Layout
    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    takes_bias: bool
    scales_afterwards: bool
    fast_accum: bool


def ways_to_fit(
    layouts: tuple[Layout, Layout],
    sizes: tuple[int, int, int],
    dtype_b: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool,
    fast_accum: bool,
) -> list[Fit]:
    """The calls that can compute a GEMM of ``sizes`` m, n and k, fastest first."""
    m, n, k = sizes
    has_mx_blocks = layouts[0] is Layout.MX_1X32
    if layouts[0].scales_along_k and not has_mx_blocks:
        m, n = _round_up(m, _ROWS_MULTIPLE), _round_up(n, SIZE_MULTIPLE)
        k = max(_round_up(k, _BLOCK_K[layouts[1]]), _LEAST_K)
        exact = torch.float32 if has_bias or out_dtype == torch.float16 else out_dtype
        return [Fit(*layouts, m, n, k, exact, takes_bias=False, scales_afterwards=False, fast_accum=False)]
    n, k = _round_up(n, SIZE_MULTIPLE), _round_up(k, SIZE_MULTIPLE)
    takes_bias = out_dtype != torch.float32
    fast_accum = fast_accum and not has_mx_blocks
    whole = Fit(*layouts, m, n, k, out_dtype, takes_bias, scales_afterwards=False, fast_accum=fast_accum)
    if layouts[0].has_one_scale or has_mx_blocks:
        return [whole]
    one = Layout.TENSOR
    parts = Fit(one, one, m, n, k, torch.float32, takes_bias=False, scales_afterwards=True, fast_accum=fast_accum)
    return [whole, parts] if out_dtype == torch.bfloat16 and dtype_b == torch.float8_e4m3fn else [parts]


def multiply(
    fit: Fit, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``a [M, K] @ bᵀ [K, N] + bias [N]`` in ``out_dtype``, contiguous, by one call of ``torch._scaled_mm``.

    Raises:
        RuntimeError, ValueError: If ``torch._scaled_mm`` raises; see :func:`is_refusal`.
    """
    m, n = len(a), len(b)
    given_a, given_b = (scale_a.new_ones(()),) * 2 if fit.scales_afterwards else (scale_a, scale_b)
    codes_a, given_a = _fitted(a, given_a, fit.layout_a, fit.m, fit.k)
    codes_b, given_b = _fitted(b, given_b, fit.layout_b, fit.n, fit.k)
    added = functional.pad(bias.to(fit.out_dtype), (0, fit.n - n)) if bias is not None and fit.takes_bias else None

    def call() -> Tensor:
        return torch._scaled_mm(
            codes_a,
            codes_b.t(),
            scale_a=given_a,
            scale_b=given_b.t() if given_b.dim() == 2 else given_b,
            bias=added,
            out_dtype=fit.out_dtype,
            use_fast_accum=fit.fast_accum,
        )

    result = _retried(call)
    if (fit.m, fit.n) != (m, n):
        result = result[:m, :n]
    if fit.scales_afterwards:
        result = result.mul_(scale_a).mul_(scale_b.t())
    if bias is not None and added is None:
        result = result.add_(bias)
    return result.to(out_dtype).contiguous()


def in_tiles(scale_inv: Tensor) -> Tensor:
    """E8M0 scales ``[R, S]`` in the order that cuBLASLt reads, flat.

    It reads tiles of 128 rows by 4 scales, along S first, and in each tile the scales of row r at byte
    ``16 * (r % 32) + 4 * (r // 32)``. Incomplete tiles are padded with zeros. Source: "1D block scaling factors layout"
    in NVIDIA's documentation of cuBLAS.
    """
    rows, columns = scale_inv.shape
    codes = scale_inv.view(torch.uint8)
    if rows % _TILE_ROWS or columns % _TILE_COLUMNS:
        codes = functional.pad(codes, (0, -columns % _TILE_COLUMNS, 0, -rows % _TILE_ROWS))
    tiles = codes.unflatten(1, (-1, _TILE_COLUMNS)).unflatten(0, (-1, 4, 32))  # [R / 128, 4, 32, S / 4, 4]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(E8M0_DTYPE)


def is_refusal(error: Exception) -> bool:
    """Whether ``error`` means that ``torch._scaled_mm`` does not support such operands, and not that a call failed.

    An ``AcceleratorError`` is not a refusal, since it may be the error of an earlier kernel.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    refusals = "NOT_SUPPORTED", "INVALID_VALUE", "ARCH_MISMATCH"
    return "CUDA error" not in str(error) or any(f"CUBLAS_STATUS_{status}" in str(error) for status in refusals)


def _retried(call: Callable[[], Tensor]) -> Tensor:
    """Empty torch's memory cache and call again if cuBLAS could not allocate its handle or workspace."""
    try:
        return call()
    except RuntimeError as error:
        if not any(status in str(error) for status in ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")):
            raise
    torch.cuda.empty_cache()
    return call()


def _fitted(data: Tensor, scale_inv: Tensor, layout: Layout, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """An operand ``[R, K]`` padded with zeros to ``rows`` and ``k``, and its scales.

    It is only copied if necessary, except E8M0 scales.
    """
    if layout is Layout.MX_1X32:
        scale_inv = in_tiles(scale_inv)
    if data.shape == (rows, k):
        return data, scale_inv
    missing = 0, k - data.shape[1], 0, rows - data.shape[0]
    codes = functional.pad(data.view(torch.uint8), missing).view(data.dtype)
    if scale_inv.dim() < 2:
        return codes, scale_inv
    scale_rows, scale_columns = layout.scale_shape(rows, k)
    more_rows, more_columns = scale_rows - scale_inv.shape[0], scale_columns - scale_inv.shape[1]
    if layout.scale_major == "mn":
        return codes, functional.pad(scale_inv.t(), (0, more_rows, 0, more_columns)).t()
    return codes, functional.pad(scale_inv, (0, more_columns, 0, more_rows))


def _round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
