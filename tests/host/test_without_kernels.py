"""Cards, kernels and calls that cannot be served, and what serves instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cuda_kernels.casts.amax import amax_kernel
from cuda_kernels.device.tile import tensor_loader
from cuda_kernels.gemm import wgmma
from cuda_kernels.gemm.spec import GemmConfig, GemmSpec, Scaling
from cuda_kernels.host import compile_cache, launch
from cuda_kernels.host.launch import Launch, NoKernels, executing
from cuda_kernels.kernel import Kernel, KernelError, compute_capability
from cuda_kernels.lowering import compiler, entry
from lightning_fp8.attention.ops import missing_kernel
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import observe_op, quantize_op, transposed_operand
from lightning_fp8.ops.gemm_cuda import aligned_operand
from lightning_fp8.ops.grouped import quantize_experts_op
from lightning_fp8.ops.memory import operand_allocations
from lightning_fp8.proofs.comparing import assert_same, kernels_of, reference_of
from lightning_fp8.proofs.drawing import sample
from tests.cuda_kernels.cases.kernel_cases import BF16
from tests.host.card import Card


def test_an_old_card_is_refused_by_name(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, kernel = Card(monkeypatch, capability=(8, 0)), amax_kernel(tensor_loader("float16", 1), True)
    with pytest.raises(NoKernels, match=r"A Card has compute capability 8\.0; .* 8\.9"):
        Launch(kernel, 1, (1, 1), card.device)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100"), ((10, 3), "100"), ((12, 0), "120"), ((12, 1), "120")],
)
def test_architectures(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, capability)
    assert launch.architecture(0) == arch
    assert compute_capability("90a") == (9, 0, "a")
    assert compute_capability("120") == (12, 0)


@pytest.mark.parametrize("capability", [(8, 6), (8, 0), (9, 1), (11, 0), (13, 0)])
def test_a_card_without_kernels(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code for Hopper's own features runs on nothing later."""
    Card(monkeypatch, capability)
    with pytest.raises(NoKernels, match=f"compute capability {capability[0]}\\.{capability[1]}"):
        launch.architecture(0)
    # Attention of unchanged models, and ours without FP8, ask for a reason on every card.
    assert f"compute capability {capability[0]}.{capability[1]}; there are" in missing_kernel(Card.device, 64)


def test_a_kernel_is_for_its_architectures(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for Hopper is not compiled for Ada; that it is missing there switches no other kernel off."""
    card = Card(monkeypatch, (8, 9))
    hoppers = Kernel("only for Hopper", lambda: None, {}, 32, architectures=("90a",))
    with pytest.raises(KernelError, match="only for Hopper is for sm_90a, not for sm_89") as caught:
        Launch(hoppers, 1, (), card.device)
    assert not isinstance(caught.value, NoKernels)


def test_one_variant_that_cannot_be_made_switches_off_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @plans.planned(lambda x: -x)
    def plan(device: torch.device, size: int) -> Callable[[int], int]:
        if size == 2:
            raise KernelError("no registers are left")
        return lambda x: x * size

    plans.clear_plan_cache()
    cpu = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [plan(cpu, False, size)(5) for size in (1, 2, 3, 2)] == [5, -5, 15, -5]
    assert plans.runs_kernels(cpu)
    assert ["no registers are left" in str(each.message) for each in caught] == [True]
    plans.clear_plan_cache()


def test_a_kernel_that_copies_its_tensor_maps_is_refused(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotation that maps lie in the parameters is lost: what a change of Numba's calling convention would do."""
    product = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", promote=False)
    kernel = wgmma.gemm_kernel(product, GemmConfig(1, 1, 128, 4))
    monkeypatch.setattr(entry, "get_or_insert_named_metadata", lambda *args: set())
    compiler._made.cache_clear()
    entry.grid_constant_params.cache_clear()
    with pytest.raises(KernelError, match="does not read its tensor maps in place"):
        compile_cache.cubin(kernel, "90a")
    compiler._made.cache_clear()
    entry.grid_constant_params.cache_clear()


def test_a_kernel_that_spills_is_used(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of the assembler spill a few registers of a kernel that others do not."""
    product = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", promote=False)
    kernel = wgmma.gemm_kernel(product, GemmConfig(1, 1, 128, 4))
    report = "ptxas . 144 bytes stack frame, 360 bytes spill stores, 400 bytes spill loads"
    monkeypatch.setattr(compiler, "link", lambda *args: (b"code", report))
    assert compile_cache.cubin(kernel, "90a") == b"code"


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("columnwise", [True, False])
def test_without_kernels_experts_are_in_the_memory_that_kernels_write(layout: Layout, columnwise: bool) -> None:
    """Each is an operand that a GEMM reads in place."""
    w, cast = sample(262, 203, BF16).unflatten(0, (2, 131)), Cast(E4M3, layout).usage(not columnwise, columnwise)
    plans.clear_plan_cache()
    with pytest.warns(RuntimeWarning, match="kernels are not supported on cpu"):
        actual = kernels_of(quantize_experts_op)(w, cast)
    plans.clear_plan_cache()
    for a, b in zip(actual, reference_of(quantize_experts_op)(w, cast)):
        assert_same(a, b, layout.value)
    data, scale_inv = transposed_operand(actual, cast) if columnwise else actual[:2]
    for expert in range(2):
        operand = data[expert], scale_inv if layout.has_one_scale else scale_inv[expert]
        assert aligned_operand(*operand, layout)[0] is operand[0]


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_without_kernels_the_reference_serves_with_one_warning(layout: Layout) -> None:
    x, cast = sample(131, 203, BF16), Cast(E4M3, layout, columnwise=True)
    plans.clear_plan_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            actual = kernels_of(quantize_op)(x, cast)
    assert not plans.runs_kernels(x.device)
    plans.clear_plan_cache()
    assert ["kernels are not supported on cpu" in str(w.message) for w in caught] == [True]
    promised = (
        *(each.empty(x.device) for each in operand_allocations(layout, E4M3.dtype, 131, 203)),
        *(each.empty(x.device) for each in operand_allocations(layout, E4M3.dtype, 203, 131)),
    )
    for a, b, c in zip(actual, reference_of(quantize_op)(x, cast), promised):
        assert_same(a, b, layout.value)
        assert not a.numel() or a.stride() == c.stride()


def test_what_lies_on_another_card_is_served_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """That card is the current one while memory is taken and kernels start, and while they are made."""
    current, planned_on = [0], []

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        before, current[0] = current[0], other.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)

    @plans.planned(lambda x: pytest.fail("the reference serves"))
    def plan(device: torch.device, size: int) -> Callable[[int], tuple[int, int]]:
        planned_on.append(current[0])
        return lambda x: (x * size, current[0])

    for card in (torch.device("cuda", 1), torch.device("cuda", 0)):
        for _ in range(2):
            assert plan(card, current[0], 7)(6) == (42, card.index)
    assert current == [0]
    assert planned_on == [1, 0]


def test_an_error_of_the_caller_is_not_taken_for_a_missing_kernel() -> None:
    """Neither what is said when the arguments are read, nor by a planner."""
    x, on_cuda = sample(4, 4, BF16), quantize_op.implementations["cuda"]
    with executing(lambda *args: None), patch.dict(quantize_op.implementations, cpu=on_cuda):
        with pytest.raises(ValueError, match="'2x2' is not a valid Layout"):
            torch.ops.lightning_fp8.quantize(x, E4M3.dtype, "2x2", False, 0.0, True, False, False)
        with pytest.raises(ValueError, match="scale must be None"):
            torch.ops.lightning_fp8.quantize(x, *Cast(E4M3, Layout.ROW).flat, torch.tensor(1.0))
    codes, amax = x.to(E4M3.dtype), torch.zeros(())
    with executing(lambda *args: None), pytest.raises(TypeError, match=r"cannot observe torch\.float8_e4m3fn"):
        kernels_of(observe_op)(codes, amax)
