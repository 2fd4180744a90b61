"""The emulated tests would notice a missing synchronisation: each one, removed from a kernel's PTX, is caught."""

from __future__ import annotations

import re

import pytest

from cuda_kernels.kernel import Kernel
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels import test_mutated_products
from tests.cuda_kernels.cases import attention_backward_cases, attention_kernel_cases, fused_cases
from tests.cuda_kernels.cases.all_cases import kernels_of_case
from tests.cuda_kernels.cases.kernel_cases import CASES
from tests.cuda_kernels.emulated import builders, is_noticed, needs_compilers, ptx_of
from tests.ptx_on_cpu.mutants import Span, with_mutants
from tests.tiers import covering, thorough

pytestmark = needs_compilers

SYNCHRONISATION = re.compile(
    r"^\s*(?:bar\.sync|barrier\.|bar\.warp\.sync|fence\.|mbarrier\.|membar)[^;]*;", re.MULTILINE
)

FUSED = (
    "norm-rms-bf16-given",
    "norm-rms-bf16-scale=0",
    "norm-rms-bf16-long-both-known",
    "norm-layer-bf16-1x128",
    "norm-layer-fp16-ragged-rows",
    "norm-layer-bf16-long-128x128",
    "rms_norm-bf16-centered",
    "norm_backward-rms-bf16-long",
    "norm_backward-layer-bf16-long",
    "norm_backward-layer-fp32-ragged",
    "swiglu_backward-bf16-given-bias",
    "swiglu_backward-bf16-scale=0-bias",
)

MUTATED = [
    *(case for case in CASES if re.fullmatch(r"quantize-[^-]*-bfloat16-e4m3fn-140x264-?", case.name)),
    *(
        case
        for case in CASES
        if case.name.startswith(
            ("given-bfloat16-e4m3fn-140x264-scale=3.7", "given-bfloat16-e4m3fn-140x264-scale=0.0", "observe-bf16")
        )
    ),
    *(
        case
        for case in CASES
        if case.name in ("update_scales-1024x70", "update_scales-257x9", "transpose-e4m3fn-140x264")
    ),
    *(case for case in fused_cases.CASES if case.name in FUSED),
    *(case for case in attention_backward_cases.CASES if "delta-64" in case.name),
    *(
        case
        for case in attention_kernel_cases.CASES
        if case.name in ("cast_heads-float32-128-lengths=[200,131]-centered=True-special=True", "transpose_heads-96")
    ),
]

CASES_OF: dict[Kernel, list[Case]] = {}
for _case in MUTATED:
    for _kernel in kernels_of_case(_case):
        CASES_OF.setdefault(_kernel, []).append(_case)


def synchronisations(ptx: str) -> list[Span]:
    """Where they stand in the PTX; a mutant lacks one of them."""
    return [found.span() for found in SYNCHRONISATION.finditer(ptx)]


@pytest.mark.parametrize(
    "kernel",
    covering(CASES_OF, lambda kernel: {"update_scales"} & {kernel.function.__name__}),
    ids=lambda kernel: kernel.name,
)
def test_every_synchronisation_is_needed(kernel: Kernel) -> None:
    cases, spans = CASES_OF[kernel], synchronisations(ptx_of(kernel))
    ptx = with_mutants(ptx_of(kernel), [[span] for span in spans])
    assert not is_noticed(cases, kernel, ptx), "it is wrong as it is"
    lines = [ptx_of(kernel).count("\n", 0, end) + 1 for _, end in spans]
    unnoticed = [line for number, line in enumerate(lines, 1) if not is_noticed(cases, kernel, ptx, number)]
    assert not unnoticed, f"removing the synchronisation of PTX line {unnoticed} changes nothing"


ALONE = {"quantize_columns"}
"""In all variants each warp works alone, and shuffles are all that its lanes do together."""


@thorough
def test_every_kernel_is_mutated() -> None:
    """But for variants in which each warp works alone, in one variant at least."""
    products = {kernel.function.__name__ for case in test_mutated_products.OF for kernel in kernels_of_case(case)}
    mutated = {kernel.function.__name__ for kernel in CASES_OF if synchronisations(ptx_of(kernel))}
    assert mutated | products | ALONE == builders()
