"""Steps under a planted flag of a capture: nothing is read on the host or cached, and what is unsafe is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import DelayedScaling, convert_module, fp8_autocast, optimizer_steps, reset_fp8_scales
from lightning_fp8.delayed import update
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.modules.linear import Linear
from lightning_fp8.numerics.recipes import Recipe, make_recipe
from lightning_fp8.ops import plans
from lightning_fp8.ops.grouped import ends_of
from lightning_fp8.ops.linear import Pass
from lightning_fp8.threads import thread
from lightning_fp8.transformer_engine import pytorch as te
from tests.captures import NothingIsRead, capture

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def _no_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "are_captured", False)


class Block(nn.Module):
    """Two layers that read one input, one that reads their sum, and one that does not run: its scales stay 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.idle = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) + self.up(x))  # type: ignore[no-any-return]


def trained(recipe: Recipe = RECIPE, steps: int = 3) -> tuple[Block, Callable[[], None]]:
    """A block after ``steps`` steps, and its step."""
    torch.manual_seed(0)
    model = Block()
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(8, 16)

    def step() -> None:
        optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(steps):
        step()
    return model, step


def history_of(model: Block) -> AmaxHistory:
    assert isinstance(model.gate, Linear)
    assert model.gate.history is not None
    return model.gate.history


# --- A whole step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RECIPE, make_recipe("tensorwise"), make_recipe("blockwise")], ids=lambda r: r.name)
def test_a_captured_step_reads_nothing_on_the_host_and_equals_an_eager_one(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, eager_step = trained(recipe)
    model, step = trained(recipe)
    eager_step()
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("tolist"))
    with capture(), NothingIsRead(), warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    for (name, one), (_, other) in zip(model.named_parameters(), eager.named_parameters()):
        assert torch.equal(one, other), name
        if not name.startswith("idle"):
            assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    for name in ("scale", "amax_history", "amax", "num_observed"):
        assert torch.equal(getattr(history_of(model), name), getattr(history_of(eager), name)), name


def test_a_captured_step_allocates_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = trained()
    history = history_of(model)
    before = {name: id(value) for name, value in vars(history).items() if isinstance(value, Tensor)}
    fp8_max = history.fp8_max
    monkeypatch.setattr(history, "updates", 99)  # the next one looks for tensors without an optimizer
    with capture():
        step()
    assert {name: id(value) for name, value in vars(history).items() if isinstance(value, Tensor)} == before
    assert history.fp8_max is fp8_max
    assert not thread.casts


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_capture_after_too_few_steps_is_refused(steps: int) -> None:
    _, step = trained(steps=steps)
    said = rf"after {steps} steps with DelayedScaling\(.*run at least 3 training steps, with torch.cuda.synchronize"
    with capture(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=said):
            step()


def test_steps_with_another_recipe_do_not_count() -> None:
    model, _ = trained()
    with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=8)):
        model(torch.randn(8, 16)).sum().backward()
    with capture(), pytest.raises(RuntimeError, match="after 0 steps"):
        update.update([history_of(model)])
    assert len(history_of(model).amax_history) == 4


def test_scales_that_may_be_0_are_told() -> None:
    model = Block()
    convert_module(model, first_last_layers_bf16=False)
    with capture(), fp8_autocast(), pytest.warns(UserWarning, match="whose scales may be 0.*run at least 3"):
        model(torch.randn(8, 16))


def test_a_monitor_is_not_called_in_a_capture() -> None:
    model, step = trained()
    called: list[AmaxHistory] = []
    history_of(model).before_update = called.append
    with capture():
        step()
    assert not called
    step()
    assert called == [history_of(model)]


@pytest.mark.parametrize(
    "change",
    [
        reset_fp8_scales,
        lambda model: lightning_fp8.load_fp8_state_dict(model, lightning_fp8.fp8_state_dict(model)),
        lambda model: history_of(model).resize(7),
    ],
    ids=["reset", "load", "resize"],
)
def test_state_that_changes_after_a_capture_is_told(change: Callable[[Block], object]) -> None:
    model, step = trained()
    with capture():
        step()
    with pytest.warns(UserWarning, match="do not replay CUDA graphs captured before, run at least 3"):
        change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change(model)


def test_an_op_of_a_new_shape_is_refused() -> None:
    planner = plans.planned(lambda x: x, name="cast")(lambda device, rows: lambda x: -x)
    device = torch.device("cpu")
    assert planner(device, False, 3)(1) == -1
    with capture():
        assert planner(device, False, 3)(1) == -1
        with pytest.raises(RuntimeError, match="a CUDA graph captures cast of a new shape: run the step before"):
            planner(device, False, 4)


# --- Shared casts -----------------------------------------------------------------------------------------------------


def _casts_of_input(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> int:
    count = 0
    original = Pass.run

    def counting(self: Pass, *args: Any) -> Any:
        nonlocal count
        count += self.is_forward and self.a_cast is not None
        return original(self, *args)

    monkeypatch.setattr(Pass, "run", counting)
    run()
    return count


def test_a_region_inside_a_capture_shares_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = trained()
    with capture():
        assert _casts_of_input(monkeypatch, step) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_in_a_capture_repeats_the_forward(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    model, _ = trained()
    x = torch.randn(8, 16, requires_grad=True)

    def forward_and_backward() -> None:
        with fp8_autocast(fp8_recipe=RECIPE):
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()

    with capture():
        assert _casts_of_input(monkeypatch, forward_and_backward) == 4


def test_a_region_around_captures_does_not_share_their_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    x = torch.randn(8, 16)
    with fp8_autocast(fp8_recipe=RECIPE):

        def two_captures() -> None:
            for layer in (model.gate, model.up):
                with capture():
                    layer(x)

        assert _casts_of_input(monkeypatch, two_captures) == 2


# --- Cached weights ---------------------------------------------------------------------------------------------------


def _evaluated(model: Block, x: Tensor, **how: Any) -> Tensor:
    """An evaluation in Fabric with ``cache_fp8_weights=True``, whose period never ends."""
    with torch.no_grad(), fp8_context(FP8Context(RECIPE, weight_period=0)):
        return model.gate(x, **how)  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [None, False])
def test_an_evaluation_after_a_replay_casts_the_new_weights(first: bool | None) -> None:
    model, step = trained()
    x = torch.randn(8, 16)
    evaluate = partial(_evaluated, model, x, is_first_microbatch=first)
    with capture():
        step()
    with pytest.warns(UserWarning, match="not cached in a CUDA graph, nor after it captured an optimizer step"):
        evaluate()
    assert not model.gate._weight_cache  # type: ignore[operator]
    with torch.no_grad():
        version = model.gate.weight._version
        model.gate.weight.data.mul_(2)  # as a replay does, without a trace
    assert model.gate.weight._version == version
    with torch.no_grad(), fp8_autocast(fp8_recipe=RECIPE):  # caches nothing
        right = model.gate(x)
    assert torch.equal(evaluate(), right)


@pytest.mark.parametrize("first", [None, True, False])
def test_nothing_is_cached_or_taken_from_the_cache_in_a_capture(first: bool | None) -> None:
    model, _ = trained()
    x = torch.randn(8, 16)
    _evaluated(model, x, is_first_microbatch=first)
    assert model.gate._weight_cache
    with capture():
        with pytest.warns(UserWarning, match="not cached in a CUDA graph"):
            _evaluated(model, x, is_first_microbatch=first)
        assert not model.gate._weight_cache


# --- make_graphed_callables -------------------------------------------------------------------------------------------


def _graphed_as_torch_does(modules: Any, sample_args: Any, warmups: int, unused: bool, pool: Any) -> Any:
    """Warm-up, captures, and a forward that replays them: gradients are in memory that each replay overwrites."""
    for module in modules:
        parameters = [*module.parameters()]

        def run(*args: Tensor, module: Any = module, parameters: Any = parameters, huge: float = 1e30) -> Any:
            y = module(*args)
            return y, torch.autograd.grad(y, parameters, torch.full_like(y, huge), allow_unused=unused)

        for _ in range(warmups):
            run(*sample_args[0])
        with capture():
            run(*sample_args[0])
        static = [torch.zeros_like(parameter) for parameter in parameters]
        module.forward = _replaying(module, parameters, static, module.forward)
    return modules


def _replaying(module: nn.Module, parameters: list[Tensor], static: list[Tensor], own: Any) -> Any:
    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.x = x
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> Any:
            for each in static:
                each.fill_(ctx.x.sum())
            return None, *(each.detach() for each in static)

    return lambda x: Graphed.apply(x, *parameters) if module.training else own(x)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", _graphed_as_torch_does)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("options", [{"fp8_enabled": True, "fp8_recipe": RECIPE}, {"enabled": True, "recipe": RECIPE}])
def test_modules_are_graphed_in_fp8_and_keep_their_amaxes(options: dict[str, Any]) -> None:
    model, _ = trained()
    assert isinstance(model.gate, Linear)
    record = model.gate.record
    record.clear()
    amax = history_of(model).amax.fill_(0.25).clone()
    x = torch.randn(8, 16)
    (made,) = te.make_graphed_callables((model,), ((x,),), allow_unused_input=True, fp8_weight_caching=False, **options)
    assert made is model
    assert record.fp8 == 4
    assert torch.equal(history_of(model).amax, amax)
    model.eval()
    model(x)  # outside every region
    assert (record.evaluations, record.evaluations_in_fp8) == (1, 0)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "options", [{"enabled": (True,)}, {"fp8_enabled": (True,), "enabled": True, "sample_kwargs": ({},)}]
)
@pytest.mark.parametrize("kwargs", [{}, ()])
def test_what_names_no_other_setting_is_taken(options: dict[str, Any], kwargs: Any) -> None:
    model, _ = trained()
    assert isinstance(model.gate, Linear)
    model.gate.record.clear()
    options = {"sample_kwargs": kwargs, **options, "recipe": RECIPE}
    te.make_graphed_callables((model,), ((torch.randn(8, 16),),), allow_unused_input=True, **options)
    assert model.gate.record.fp8 == 4


def test_amaxes_of_a_warm_up_are_dropped_if_the_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    amax = history_of(model).amax.fill_(0.25).clone()

    def fail(modules: Any, sample_args: Any, *_: Any) -> Any:
        modules(*sample_args).sum().backward()
        assert not torch.equal(history_of(model).amax, amax)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    with pytest.raises(RuntimeError, match="not permitted"):
        te.make_graphed_callables(model, (torch.randn(8, 16),), enabled=True, recipe=RECIPE)
    assert torch.equal(history_of(model).amax, amax)


@pytest.mark.usefixtures("graphs")
def test_gradients_of_graphed_modules_accumulate() -> None:
    model = nn.Linear(2, 2)
    te.make_graphed_callables((model,), ((torch.ones(1, 2),),))
    for value in (1.0, 10.0):
        model(torch.full((1, 1), value)).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 11.0))


@pytest.mark.usefixtures("graphs")
def test_modules_that_are_graphed_again_copy_gradients_once() -> None:
    model = nn.Linear(2, 2)
    for _ in range(3):
        te.make_graphed_callables((model,), ((torch.ones(1, 2),),))
    assert len(model.weight._backward_hooks) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"fp8_weight_caching": True}, NotImplementedError, "fp8_weight_caching of .*each replay casts the weights"),
        ({"sample_kwargs": {"mask": 1}}, NotImplementedError, "sample_kwargs of .*pass all tensors in sample_args"),
        ({"_order": [1, -1]}, NotImplementedError, "_order"),
        ({"enabled": 3}, TypeError, "enabled=3"),
        ({"recipe": "float8"}, ValueError, "recipe 'float8' is unknown"),
        ({"enabled": (True, False)}, ValueError, "enabled is True and False; pass one value"),
        ({"fp8_enabled": True, "enabled": False}, ValueError, "enabled is True and False; pass one value"),
        ({"recipe": "delayed", "fp8_recipe": "mxfp8"}, ValueError, "recipe is 'delayed' and 'mxfp8'; pass one"),
        ({"sample_kwargs": ({"mask": 1},)}, NotImplementedError, "sample_kwargs of .*pass all tensors in sample_args"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=said):
        te.make_graphed_callables(model, (torch.ones(1, 2),), **options)
    assert model._compiled_call_impl is None
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not builtin_function_or_method"):
        te.make_graphed_callables(torch.sin, (torch.ones(1, 2),))


# --- torch.compile(mode="reduce-overhead") ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_inductor_finds_all_tensors_that_a_compiled_step_writes_static() -> None:
    """If not, ``mode="reduce-overhead"`` would run without CUDA graphs: "skipping cudagraphs due to mutated inputs"."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cudagraph_utils import check_for_mutation_ignore_cuda_graph_managed_tensor as why_not

    written = []

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled: Any = compile_fx_inner(graph, inputs, **options)
        mutated = compiled.mutated_inputs, compiled.mutated_input_idxs
        assert not why_not(graph, *mutated, [*options["static_input_idxs"]])
        written.append(len(compiled.mutated_input_idxs))
        return compiled

    model, _ = trained()
    compiled = torch.compile(model, backend=partial(compile_fx, inner_compile=inner))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        with fp8_autocast(fp8_recipe=RECIPE):
            loss = compiled(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
    assert sum(written) == 9  # amaxes of three roles of three layers, and no second trace


def test_a_loop_over_experts_is_refused() -> None:
    offs = torch.tensor([2, 3], dtype=torch.int32)
    with capture(), pytest.raises(RuntimeError, match=r"reads on the host where their tokens end: skip="):
        ends_of(offs)
    assert ends_of(offs) == [2, 3]
