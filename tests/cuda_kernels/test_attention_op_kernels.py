"""Attention's ops as a card runs them: which kernels start, in which order, and what they give together."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_fp8.ops.attention import AttentionCall, attention_config, cpu, cuda
from lightning_fp8.ops.core.dispatch import clear_plan_cache
from tests.cuda_kernels.attention_op_cases import CASES, KERNELS, drawn
from tests.cuda_kernels.emulated import Emulator, executing, needs_compilers
from tests.cuda_kernels.kernel_cases import Case


@needs_compilers
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.run("cpu")
    assert [kernel.function.__name__ for kernel in emulator.launched] == KERNELS


def test_a_plan_serves_all_calls_of_its_key() -> None:
    """Kernels are bound once; what a uniform batch's blocks visit is made once, too."""
    tables: list[int] = []

    def note(kernel: object, blocks: int, args: tuple[object, ...]) -> None:
        tables.extend(id(arg) for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)

    q, other = (drawn((2, 150), 2, 64, seed) for seed in range(2))
    call = AttentionCall(attention_config("bshd"))
    clear_plan_cache()
    with executing(note):
        cuda.attention_forward(q, q, q, call)
        once = list(tables)
        cuda.attention_forward(other, other, q, call)
    clear_plan_cache()
    assert set(tables) == set(once)


@pytest.mark.parametrize(("rows", "batch"), [((0, 5), 1), ((5, 0), 1), ((5, 5), 0)])
def test_nothing_to_attend(rows: tuple[int, int], batch: int, emulator: Emulator) -> None:
    q, k = (torch.randn(batch, each, 2, 64).bfloat16() for each in rows)
    call = AttentionCall(attention_config("bshd"))
    clear_plan_cache()
    o, kept = cuda.attention_forward(q, k, k, call)
    gradients = cuda.attention_backward(q, o, kept, rows[1], call)
    clear_plan_cache()
    assert [x.shape for x in (o, *gradients)] == [q.shape, q.shape, k.shape, k.shape]
    assert not any(x.any() for x in (o, *gradients))
    assert not emulator.launched


def test_heads_that_no_kernel_is_for_say_so(emulator: Emulator) -> None:
    q, call = drawn((1, 20), 1, 80, 0), AttentionCall(attention_config("bshd"))
    clear_plan_cache()
    with pytest.warns(RuntimeWarning, match=r"forward pass has no kernel for heads of 80 channels.*fp8_dpa=False"):
        o, _ = cuda.attention_forward(q, q, q, call)
    clear_plan_cache()
    assert torch.equal(o, cpu.attention_forward(q, q, q, call)[0])
    assert not emulator.launched
