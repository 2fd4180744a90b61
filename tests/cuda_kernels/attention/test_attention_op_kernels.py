"""Attention's ops as a card runs them: which kernels start, in which order, and what they give together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cuda_kernels.attention.host.backward import BackwardLaunch, Operands
from cuda_kernels.attention.host.forward import AttentionProblem, ForwardLaunch, PackedCodes
from cuda_kernels.attention.host.tiles import RowSpace, Visible
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host import launch, tensor_maps
from cuda_kernels.host.launch import executing
from cuda_kernels.kernel import Kernel, KernelError
from lightning_fp8.attention.ops import Attention, AttentionCall, cuda, failing_kernel, missing_kernel
from lightning_fp8.attention.ops.attention import attention_forward_op, reference_attention_forward
from lightning_fp8.attention.ops.cuda import attention_backward_on_cuda, attention_forward_on_cuda
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.attention import Problem, drawn
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.attention_op_cases import CASES, KERNELS, PROBLEMS, check_ops, run_ops
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import thorough


@needs_compilers
@pytest.mark.parametrize("case", tiered(CASES), ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.run("cpu")
    assert [kernel.function.__name__ for kernel in emulator.launched] == KERNELS


@thorough
@needs_compilers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_caller_changes_nothing(dtype: torch.dtype, emulator: Emulator) -> None:
    """The Trainer runs a training step under the dtype of the weights."""
    torch.set_default_dtype(dtype)
    try:
        check_ops(PROBLEMS["bshd grouped bottom right"], "cpu")
    finally:
        torch.set_default_dtype(torch.float32)


def test_operands_of_other_shapes_have_tensor_maps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's allocator gives the memory of one operand to another one later."""
    shapes: list[Any] = []
    monkeypatch.setattr(tensor_maps, "is_cuda_device", lambda device: True)
    monkeypatch.setattr(tensor_maps, "_encoded", lambda tensor, box: tuple(tensor.shape))
    monkeypatch.setattr(launch.Launch, "run", lambda self, *arguments: shapes.append(arguments))
    problem = AttentionProblem(
        AttentionSpec(64, "bfloat16"), (4, 2), RowSpace(1, 128, False), RowSpace(1, 256, False), Visible(), 0.1
    )
    strides = 8192, 64, 0
    with executing(lambda *launched: None):
        forward = ForwardLaunch(problem, strides, torch.device("cpu"))
        backward = BackwardLaunch(problem, strides, strides, torch.device("cpu"))
    memory = torch.zeros(4 * 256 * 64, dtype=torch.uint8)

    def codes(heads: int, rows: int) -> PackedCodes:
        here = memory[: heads * rows * 64]
        return PackedCodes(here.view(heads, rows, 64), here.view(heads, 64, rows), torch.ones(heads, rows // 128))

    of_queries, of_keys = codes(4, 128), codes(2, 256)
    some = torch.zeros(4, 5, 128)
    forward.run(some, of_queries, of_keys, of_keys, some, some, some)
    operands = Operands(of_queries, of_queries, of_keys, of_keys)
    backward.run_dq(some, operands, some, some)
    backward.run_dkv(some, operands, some, some, some)
    q, k, q_t, k_t = (512, 64), (512, 64), (256, 128), (128, 256)
    assert [call[:count] for call, count in zip(shapes, (3, 5, 6))] == [
        (q, k, k_t),
        (q, q, k, k, k_t),
        (k, k, q, q, q_t, q_t),
    ]


def checked(*arguments: Any) -> None:
    """The op as the dispatcher calls it for a card."""
    attention_forward_op.check(*arguments)
    attention_forward_on_cuda(*arguments)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.update(q=drawn((2, 20), 3, 64, 0)),
            "3 query heads cannot share 2 heads",
        ),
        (lambda x: x.update(q=drawn((1, 20), 4, 64, 0)), "as many sequences as queries"),
        (lambda x: x.update(v=drawn((2, 21), 2, 64, 0)), "need equal shapes"),
        (lambda x: x.update(v=drawn((2, 20), 2, 128, 0)), "the same dtype and number of channels"),
        (lambda x: x.update(k=x["k"].float()), "need the same dtype"),
        (lambda x: x.update(k=x["k"].to("meta")), "move them to one device"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: Change, message: str) -> None:
    given = {"q": drawn((2, 20), 4, 64, 0), "k": drawn((2, 20), 2, 64, 1), "v": drawn((2, 20), 2, 64, 2)}
    change(given)
    with pytest.raises(ValueError, match=message):
        checked(*given.values(), AttentionCall(Attention("bshd")))


def test_lengths_of_queries_alone_are_refused() -> None:
    q = drawn((2, 20), 2, 64, 0)
    with pytest.raises(ValueError, match="come together"):
        checked(q, q, q, AttentionCall(Attention("bshd"), None, torch.tensor([0, 5, 9])))


@pytest.mark.parametrize(
    ("architecture", "head_dim", "message"),
    [
        ("90a", 128, None),
        ("90a", 256, None),
        ("90a", 80, "has no kernel for heads of 80 channels"),
        ("89", 64, None),
        ("120", 128, None),
        ("120", 256, None),
        ("100", 128, "has no kernel for heads of 128 channels"),
    ],
)
def test_a_card_without_kernels_of_both_passes_is_named(
    architecture: str, head_dim: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "architecture_of", lambda device: architecture)
    reason = missing_kernel(torch.device("cpu"), head_dim)
    assert bool(reason) == bool(message)
    assert (message or "") in reason


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes the kernels of a name fail to load, on a device that otherwise has all."""
    bound: list[str] = []

    def fail(name: str) -> None:
        def init(self: launch.Launch, kernel: Kernel, *args: Any) -> None:
            if kernel.function.__name__ == name:
                raise KernelError(f"{kernel.name} has no registers left")
            right(self, kernel, *args)

        right = launch.Launch.__init__
        monkeypatch.setattr(launch.Launch, "__init__", init)

    clear_plan_cache()
    with executing(lambda *launched: bound.append(launched[0].name)):
        yield fail
    clear_plan_cache()
    assert not bound  # asking starts nothing


CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", sorted(set(KERNELS)))
def test_a_kernel_that_cannot_be_loaded_is_named_before_any_runs(kernel: str, failing: Callable[[str], None]) -> None:
    failing(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the layer that does without warns
        reasons = [failing_kernel(CPU, torch.bfloat16, 64) for _ in range(2)]
        without_mean = failing_kernel(CPU, torch.bfloat16, 64, center_keys=False)
    is_backward = kernel in ("transpose_heads", "quantize_gradients", "attention_dq", "attention_dkv")
    assert reasons[0].startswith(f"the {'backward' if is_backward else 'forward'} pass of FP8 attention does not run")
    assert f"{kernel}" in reasons[0].replace("(", "_")
    assert "has no registers left" in reasons[0]
    assert reasons[1] == reasons[0]
    assert bool(without_mean) == (kernel not in ("sum_heads", "mean_heads"))


def test_the_cast_of_gathered_keys_is_asked_for(
    failing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not failing_kernel(CPU, torch.bfloat16, 64, of_codes=True)
    monkeypatch.setattr(cuda.Heads, "cast", _no_float32(cuda.Heads.cast))
    clear_plan_cache()
    assert "cast of keys of FP8 attention" in failing_kernel(CPU, torch.bfloat16, 64, of_codes=True)
    assert not failing_kernel(CPU, torch.bfloat16, 64, of_codes=True, center_keys=False)
    assert not failing_kernel(CPU, torch.bfloat16, 64)


def _no_float32(right: Callable[..., Any]) -> Callable[..., Any]:
    def cast(heads: cuda.Heads, *args: Any) -> Any:
        if heads.dtype == "float32":
            raise KernelError("no registers are left")
        return right(heads, *args)

    return cast


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_what_was_asked_for_is_all_that_a_call_starts(problem: Problem) -> None:
    """Whatever the format, mask, lengths and heads."""
    started: set[str] = set()
    with executing(lambda kernel, *rest: started.add(kernel.name)):
        run_ops(problem, "cpu")
    asked: set[str] = set()
    right = launch.Launch.__init__

    def init(self: launch.Launch, kernel: Kernel, *args: Any) -> None:
        asked.add(kernel.name)
        right(self, kernel, *args)

    clear_plan_cache()
    with executing(lambda *launched: None), patch.object(launch.Launch, "__init__", init):
        assert not failing_kernel(CPU, problem.tensors("cpu")[0].dtype, problem.channels)
    clear_plan_cache()
    assert started
    assert started <= asked


def test_compiled_code_asks_while_it_is_traced(failing: Callable[[str], None]) -> None:
    failing("attention_dq")
    clear_plan_cache()

    def asks(x: Tensor) -> Tensor:
        return x * 2 if failing_kernel(x.device, x.dtype, x.shape[-1]) else x

    x = torch.ones(3, 64, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(asks, fullgraph=True, backend="eager")(x), x * 2)


def test_a_plan_serves_all_calls_of_its_key() -> None:
    """Kernels are bound once; what a uniform batch's blocks visit is made once, too."""
    tables: list[int] = []

    def note(kernel: object, blocks: int, args: tuple[object, ...]) -> None:
        tables.extend(id(arg) for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)

    q, other = (drawn((2, 150), 2, 64, seed) for seed in range(2))
    call = AttentionCall(Attention("bshd"))
    clear_plan_cache()
    with executing(note):
        attention_forward_on_cuda(q, q, q, call)
        once = list(tables)
        attention_forward_on_cuda(other, other, q, call)
    clear_plan_cache()
    assert set(tables) == set(once)


@pytest.mark.parametrize(("rows", "batch"), [((0, 5), 1), ((5, 0), 1), ((5, 5), 0)])
def test_nothing_to_attend(rows: tuple[int, int], batch: int, emulator: Emulator) -> None:
    q, k = (torch.randn(batch, each, 2, 64).bfloat16() for each in rows)
    call = AttentionCall(Attention("bshd"))
    clear_plan_cache()
    o, kept = attention_forward_on_cuda(q, k, k, call)
    gradients = attention_backward_on_cuda(q, o, kept, rows[1], call)
    clear_plan_cache()
    assert [x.shape for x in (o, *gradients)] == [q.shape, q.shape, k.shape, k.shape]
    assert not any(x.any() for x in (o, *gradients))
    assert not emulator.launched


def test_heads_that_no_kernel_is_for_say_so(emulator: Emulator) -> None:
    q, call = drawn((1, 20), 1, 80, 0), AttentionCall(Attention("bshd"))
    clear_plan_cache()
    with pytest.warns(RuntimeWarning, match=r"has no kernel for heads of 80 channels.*fp8_dpa=False"):
        o, _ = attention_forward_on_cuda(q, q, q, call)
    clear_plan_cache()
    assert torch.equal(o, reference_attention_forward(q, q, q, call)[0])
    assert not emulator.launched
