"""The emulated tests of the products would notice a broken synchronisation.

The compiler repeats statements: what a statement of the source became is removed together, where it can be told apart
by its text and by whether producer or consumers run it; other barriers and fences one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.attention_backward_cases import CASES as ATTENTION_BACKWARD
from tests.cuda_kernels.cases.attention_kernel_cases import CASES as ATTENTION
from tests.cuda_kernels.cases.attention_mma_cases import CASES as ATTENTION_MMA
from tests.cuda_kernels.cases.gemm_cases import CASES
from tests.cuda_kernels.cases.grouped_cases import CASES as GROUPED
from tests.cuda_kernels.emulated import is_noticed, kernels_of, needs_compilers, ptx_of
from tests.ptx_on_cpu.mutants import Span, with_mutants
from tests.tiers import covering

pytestmark = needs_compilers

ONE_BY_ONE = re.compile(
    r"^\s*(?:bar\.sync|bar\.arrive|bar\.warp\.sync|fence\.proxy|cp\.async\.bulk\.wait_group|cp\.async\.wait_group)[^;]*;",
    re.MULTILINE,
)
TOGETHER = (
    r"mbarrier\.init[^;]*;",
    r"mbarrier\.arrive\.shared[^;]*;",
    r"mbarrier\.arrive\.expect_tx[^;]*;",
    r"\{[^{}]*mbarrier\.try_wait[^{}]*\}",
)
WAITS_AND_ARRIVALS = re.compile(r"\{[^{}]*mbarrier\.try_wait[^{}]*\}|mbarrier\.arrive\.shared[^;]*;")
"""One by one where warpgroups take turns: a wait for the turn has the text of any other."""
TURN = re.compile(r"bar\.sync %r\d+, %r\d+;")
"""Attention's warpgroups wait for their turn to multiply: for speed alone, as no result needs it."""
ROLES = re.compile(r"setmaxnreg[^;]*;")

MUTATED = (
    "product-tensor-300x264x700-1/1/128-fast",
    "product-blocks-300x264x700-2/2/128",
    "product-row-300x392x700-2/1/192",
    "product-blocks-300x264x700-128/128",
    "grouped-block-70+133+0+1+260+64x272x208-2/2/128",
    "attention_forward-64-many keys",
    "attention_dq-64-many keys",
    "attention_dkv-64-many queries",
    "attention_dkv-256-many queries",
    "mma_attention_forward-64-many keys",
    "mma_attention_forward-256-many keys",
    "mma_attention_dq-96-many keys",
    "mma_attention_dq-256-many keys",
    "mma_attention_dkv-96-many queries",
    "mma_attention_dkv-256-many queries",
)
OF = [
    case
    for case in (*CASES, *GROUPED, *ATTENTION, *ATTENTION_BACKWARD, *ATTENTION_MMA)
    if case.name.startswith(MUTATED)
]


def mutants(ptx: str, alone: bool) -> Iterator[tuple[str, list[Span]]]:
    """What a mutant lacks, and where that stands in the PTX."""
    for pattern in (ONE_BY_ONE, WAITS_AND_ARRIVALS) if alone else (ONE_BY_ONE,):
        for found in pattern.finditer(ptx):
            line = ptx.count("\n", 0, found.end()) + 1
            yield f"{found[0].strip()} in line {line}", [found.span()]
    starts = [0, *(found.end() for found in ROLES.finditer(ptx)), len(ptx)]
    for text in TOGETHER:
        for begin, end in zip(starts, starts[1:]):
            spans = [found.span() for found in re.compile(text).finditer(ptx, begin, end)]
            if spans:
                yield f"{len(spans)} times {text} from {begin} on", spans


@pytest.mark.parametrize(
    "case",
    covering(OF, lambda case: {"product-blocks-300x264x700-128/128"} & {case.name[:34]}),
    ids=lambda case: case.name,
)
def test_every_synchronisation_is_needed(case: Case) -> None:
    *_, kernel = kernels_of(case.run)
    attention = "attention" in kernel.name
    # The wide kernel empties the places of a step together, so that of the producer's waits one implies others.
    alone = attention and "d=256" not in kernel.name
    found = list(mutants(ptx_of(kernel), alone))
    if attention:
        found = [(what, spans) for what, spans in found if not TURN.match(what)]
    assert len(found) > (12 if "smem_epilogue" in kernel.name else 1)
    ptx = with_mutants(ptx_of(kernel), [spans for _, spans in found])
    assert not is_noticed([case], kernel, ptx)
    assert not [what for number, (what, _) in enumerate(found, 1) if not is_noticed([case], kernel, ptx, number)]


def test_what_is_mutated() -> None:
    assert len(OF) == len(MUTATED)
