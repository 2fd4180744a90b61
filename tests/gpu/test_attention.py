"""Attention's kernels on a card: the cases that are emulated."""

from __future__ import annotations

import pytest
import torch

from cuda_kernels.host.launch import architecture_of
from tests.cuda_kernels import attention_backward_cases, attention_kernel_cases, attention_mma_cases
from tests.cuda_kernels.kernel_cases import Case
from tests.cuda_kernels.run_case import fits

CASES = [*attention_kernel_cases.CASES, *attention_backward_cases.CASES, *attention_mma_cases.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    if not fits(case.name, architecture_of(torch.device("cuda", 0))):
        pytest.skip("for other cards")
    case.run("cuda")
