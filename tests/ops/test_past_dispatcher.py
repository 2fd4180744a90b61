"""The package calls its ops past torch's dispatcher only where that would do nothing but call the implementation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import op as op_module
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.op import op, past_dispatcher
from tests.modules.contexts.test_threads import in_a_thread

NAMESPACE = "lightning_fp8_test_calls"
checked: list[tuple[Any, ...]] = []

with patch.multiple(
    op_module, NAMESPACE=NAMESPACE, _vmap_refusals=(KEPT := torch.library.Library(NAMESPACE, "FRAGMENT"))
):

    @op("double", check=lambda *args: checked.append(args))
    def double_op(x: Tensor, y: Tensor | None, text: str) -> Tensor:
        return torch.empty_like(x)

    double_op.implement("cpu", lambda x, y, text: 2 * x)
    double_op.implement("cuda", lambda x, y, text: 2 * x)


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A tensor whose operations are done on ``inner``, as those of DTensor are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*tree_map(lambda each: each.inner if isinstance(each, cls) else each, args)))


def paths_taken(run: Callable[[Callable[..., Any]], object]) -> list[str]:
    """How the op was called while ``run`` used it: by the "dispatcher", or "past" it."""
    taken: list[str] = []
    through_dispatcher = double_op.through_dispatcher()

    def noted(*args: Any) -> Any:
        taken.append("dispatcher")
        return through_dispatcher(*args)

    def computed(x: Tensor, *args: Any) -> Tensor:
        taken.append("past" if not taken else "computed")
        return 2 * x

    with patch.object(double_op, "through_dispatcher", lambda: noted):
        call = past_dispatcher(double_op)
    with patch.dict(double_op.implementations, cpu=computed, cuda=computed):
        run(lambda x, y=None, text="": call(x, y, text))
    return taken[:1]


@pytest.mark.parametrize("arguments", [(), (None, "text"), (torch.ones(2), "")], ids=str)
def test_without_gradients_the_implementation_is_called_past_the_dispatcher(arguments: tuple[Any, ...]) -> None:
    with torch.no_grad():
        assert paths_taken(lambda call: call(torch.nn.Parameter(torch.ones(2)), *arguments)) == ["past"]


@pytest.mark.parametrize(
    "context",
    [torch.enable_grad, Dispatch, Function, torch.profiler.profile, lambda: torch.device("cpu"), FakeTensorMode],
    ids=["gradients", "dispatch mode", "function mode", "profiler", "device", "fake tensors"],
)
def test_what_watches_the_dispatcher_sees_the_op(context: Callable[[], AbstractContextManager[object]]) -> None:
    with torch.no_grad(), context():
        x = torch.ones(2)
        assert paths_taken(lambda call: call(x)) == ["dispatcher"]


def test_a_profiler_of_all_threads_sees_the_op() -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config):
        taken = in_a_thread(lambda: [paths_taken(torch.no_grad()(lambda call: call(torch.ones(2))))])
    assert taken == [["dispatcher"]]


@pytest.mark.parametrize("arguments", [(1.0, None), (torch.ones(2), 1.0)], ids=str)
def test_arguments_of_other_types_are_refused_as_the_schema_says(arguments: tuple[Any, ...]) -> None:
    def run(call: Callable[..., Any]) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="Expected a value of type"):
            call(*arguments)

    assert paths_taken(run) == ["dispatcher"]


@pytest.mark.parametrize("position", [0, 1])
def test_a_subclass_of_tensor_sees_the_op_wherever_it_stands(position: int) -> None:
    args = [torch.ones(2), torch.ones(2)]
    args[position] = Wrapped(args[position])
    with torch.no_grad():
        results: list[Any] = []
        assert paths_taken(lambda call: results.append(call(*args))) == ["dispatcher"]
    assert type(results[0]) is Wrapped


@pytest.mark.parametrize(
    ("transform", "refused"),
    [
        (torch.func.grad, False),
        (torch.vmap, True),
        (lambda f: torch.jit.trace(f, torch.ones(2), check_trace=False), False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_transforms_and_tracers_see_the_op(transform: Callable[..., Any], refused: bool) -> None:
    def run(call: Callable[..., Any]) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="under vmap") if refused else nullcontext():
            transform(lambda x: call(x.detach()).sum() + x.sum())(torch.ones(2))

    assert paths_taken(run) == ["dispatcher"]


def test_batched_gradients_are_left_to_the_dispatcher() -> None:
    """Their tensors are plain ones of another vmap than ``torch.func``'s."""

    def run(call: Callable[..., Any]) -> None:
        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                result: Tensor = call(dy)
                return result

        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="do not run under vmap, is_grads_batched=True"):
            torch.autograd.grad(Identity.apply(x), x, torch.eye(3), is_grads_batched=True)

    assert paths_taken(run) == ["dispatcher"]


def test_torch_compile_sees_the_op() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def run(call: Callable[..., Any]) -> None:
        with torch.no_grad():
            torch.compile(lambda x: call(x) + 1, backend=backend, fullgraph=True)(torch.ones(2))

    assert paths_taken(run) == ["dispatcher"]
    assert any(f"{NAMESPACE}.double" in target for target in seen)


def test_a_negated_view_is_left_to_the_dispatcher() -> None:
    x = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    results: list[Tensor] = []
    with torch.no_grad():
        assert paths_taken(lambda call: results.append(call(x))) == ["dispatcher"]
    assert results[0].tolist() == [-4.0, -8.0]


def test_other_devices_are_left_to_the_dispatcher() -> None:
    with torch.no_grad():
        assert paths_taken(lambda call: call(torch.ones(2, device="meta"))) == ["dispatcher"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_arguments_are_checked_once(context: Callable[[], AbstractContextManager[object]]) -> None:
    x, y = torch.ones(2), torch.ones(2)
    checked.clear()
    with context():
        assert double_op(x, y, "text").tolist() == [2, 2]
    ((of_x, of_y, text),) = checked
    assert of_x is x
    assert of_y is y
    assert text == "text"


@pytest.mark.parametrize(("observed", "name"), [(False, "quantize_unobserved"), (True, "quantize")])
def test_the_dispatcher_gets_the_op_that_writes_only_where_it_does(observed: bool, name: str) -> None:
    seen: list[str] = []

    class Noted(Dispatch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    scale = torch.ones(())
    with Noted():
        data, *_ = quantize_op(
            torch.ones(2, 2), Cast(E4M3, Layout.TENSOR), scale, torch.zeros(()) if observed else None
        )
    assert data.float().tolist() == [[1, 1], [1, 1]]
    assert [each for each in seen if "lightning_fp8" in each] == [f"lightning_fp8::{name}"]


def test_versions_advance_of_what_is_written_and_of_nothing_else() -> None:
    x, cast = torch.randn(4, 16), Cast(E4M3, Layout.TENSOR)
    amax, scale = torch.zeros(()), torch.ones(())
    with torch.no_grad():
        ops.observe(x, amax)
        observed = amax._version
        ops.quantize(x, cast, scale=scale, amax=amax)
    assert 0 < observed < amax._version
    assert (x._version, scale._version) == (0, 0)


def test_a_tensor_that_backward_needs_is_not_written_unnoticed() -> None:
    out = torch.zeros(16, 16)
    loss = (torch.ones(16, 16, requires_grad=True) * out).sum()
    with torch.no_grad():
        operand = ops.quantize(torch.randn(16, 16), Cast(E4M3, Layout.TENSOR)).rowwise
        assert operand is not None
        ops.scaled_mm_accumulate(out, operand, operand)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
