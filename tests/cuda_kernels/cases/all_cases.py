"""The launches that the tests make of every kernel."""

from __future__ import annotations

from tests.cuda_kernels.cases import (
    attention_backward_cases,
    attention_kernel_cases,
    attention_mma_cases,
    fused_cases,
    gemm_cases,
    kernel_cases,
)
from tests.cuda_kernels.cases.kernel_cases import Case

ATTENTION = [*attention_kernel_cases.CASES, *attention_backward_cases.CASES, *attention_mma_cases.CASES]
CASES: list[Case] = [*kernel_cases.CASES, *fused_cases.CASES, *gemm_cases.CASES, *ATTENTION]
