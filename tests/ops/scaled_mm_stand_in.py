"""``torch._scaled_mm`` as a GPU computes it, in float64: what it checks, and which scales cuBLASLt reads.

Sizes and strides are checked by torch itself, on meta tensors. The rest is by PyTorch's sources: of
``aten/src/ATen/native/cuda/ScaledBlas.cpp`` (0174dfa) ``_scaled_mm_out_cuda``, ``get_joint_scaling`` and
``_check_deepseek_support``; of ``RowwiseScaledMM.cu`` (01386a0) ``check_inputs``; of ``CUDABlas.cpp``
``get_scale_mode``. Results of row scales are bfloat16 only: other dtypes are new, or cuBLASLt's on Hopper. How cuBLASLt
lays out scales of blocks, whatever the strides, is in NVIDIA's documentation ("Scaling factors layouts") and in
PyTorch's pull request 166752. E8M0 scales are read one by one, at the address that this documentation gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Refusal = RuntimeError


def stand_in(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = BF16,
    use_fast_accum: bool = False,
) -> Tensor:
    """``a [M, K] @ b [K, N] + bias [N]``.

    Raises:
        RuntimeError, ValueError: ``torch._scaled_mm`` would refuse.
    """
    on_meta = [each.to("meta") if each.dim() < 2 else _like(each) for each in (a, b, scale_a, scale_b)]
    _scaled_mm_on_meta(*on_meta, out_dtype=out_dtype)
    if a.dtype == b.dtype == E5M2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
    if bias is not None:
        if out_dtype == FP32:
            raise Refusal("Bias is not supported when out_dtype is set to Float32")
        if bias.dtype != out_dtype or bias.numel() != b.shape[1] or not bias.is_contiguous():
            raise Refusal(f"Bias must be {out_dtype}")
    left, right = _scales(a, scale_a, scale_b, b, out_dtype, use_fast_accum)
    out = (a.double() * left) @ (b.double() * right)
    return (out if bias is None else out + bias.double()).to(out_dtype)


_scaled_mm_on_meta = torch._scaled_mm


def _like(each: Tensor) -> Tensor:
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")


def _scales(
    a: Tensor, scale_a: Tensor, scale_b: Tensor, b: Tensor, out_dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    """The factors of all elements of ``a [M, K]`` and ``b [K, N]``."""
    (m, k), n = a.shape, b.shape[1]
    if scale_a.dtype == scale_b.dtype == E8M0:
        return _e8m0_scales(scale_a, m, k), _e8m0_scales(scale_b, n, k).t()
    if scale_a.numel() == scale_b.numel() == 1:
        return scale_a.double(), scale_b.double()
    if scale_a.shape == (m, 1) and scale_b.shape == (1, n):
        if b.dtype != E4M3 or out_dtype != BF16:
            raise Refusal("Only bf16 high precision output types are supported for row-wise scaling.")
        return scale_a.double(), scale_b.double()
    if fast:
        raise Refusal("scaled_gemm doesn't support fast accum with 1x128 blockwise scaling")
    if a.dtype != E4M3 or b.dtype != E4M3 or out_dtype not in (BF16, FP32) or m % 4 or k % 128:
        raise Refusal("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")
    lines = k // 128
    if scale_a.shape != (m, lines) or scale_a.stride() != (1, m):
        raise Refusal("Invalid scaling configuration.")
    if scale_b.shape == (lines, n) and scale_b.stride() == (n, 1):
        of_b = scale_b.repeat_interleave(128, 0)
    elif scale_b.shape == (lines, -(-n // 128)) and scale_b.t().is_contiguous():
        of_lines = -(-lines // 4) * 4  # cuBLASLt's, which asks for no stride
        read = torch.as_strided(scale_b, (lines, -(-n // 128)), (1, of_lines))
        of_b = read.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
    else:
        raise Refusal("Invalid scaling configuration.")
    return scale_a.repeat_interleave(128, 1).double(), of_b.double()


def _e8m0_scales(given: Tensor, rows: int, k: int) -> Tensor:
    """The scales of 1x32 blocks of all elements ``[rows, k]``."""
    columns = -(-k // 32)
    if not given.is_contiguous() or given.numel() != -(-rows // 128) * -(-columns // 4) * 512:
        raise Refusal("Invalid scaling configuration.")
    codes = given.view(torch.uint8).tolist()
    read = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * -(-columns // 4) + column // 4
            code = codes[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
            read[row, column] = 2.0 ** (code - 127) if code != 255 else float("nan")
    return read.repeat_interleave(32, 1)[:, :k]
