"""Samples of casts in fused modules, shared casts, compiled and recomputed code, equal those of plain layers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lightning_fp8
from lightning_fp8 import LayerNormLinear, LayerNormMLP, convert_module, fp8_autocast, update_fp8_scales
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.monitor.casts import Casts, Sampler, StepTrace
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.sample import COUNTS
from tests.tiers import covering, thorough

RECIPE_NAMES = tuple(RECIPES)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(
    model: nn.Module, recipe: str, run: Callable[[Tensor], Tensor] | None = None, what_if: bool = False
) -> dict[str, dict[str, float]]:
    """The counts of each cast in the second of two passes of ``model``, forward and backward."""
    run = run or model
    torch.manual_seed(1)
    batches = [torch.randn(40, 32).bfloat16().requires_grad_() for _ in range(2)]
    casts: Casts | None = None
    sampler: Sampler | None = None
    for x in batches:
        with fp8_autocast(fp8_recipe=recipe):
            y = run(x)
            y.float().square().sum().backward()
        update_fp8_scales(model)
        if casts is None:
            casts = Casts.of(model)
            sampler = Sampler(casts.slots)
            sampler.begin(what_if)
    assert casts is not None
    assert sampler is not None
    sampler.end()
    counts, losses, exponents = sampler.read()
    if what_if:
        assert losses[:, :, 0].all()
        assert (exponents.sum(1) == counts[:, COUNTS.index("elements")]).all()
    return {name: dict(zip(COUNTS, row)) for name, row in zip(casts.names, counts)}


class Marked(Tensor):
    """A tensor of a subclass, such as an image of torchvision, which behaves as a plain one."""


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_inputs_of_a_subclass_of_tensors_are_sampled(recipe: str) -> None:
    torch.manual_seed(0)
    model = convert_module(nn.Sequential(nn.Linear(32, 48)).bfloat16(), first_last_layers_bf16=False)
    marked = counted(model, recipe, lambda x: model(x.as_subclass(Marked)))
    assert marked["0.input"]["casts"] == 1
    assert marked["0.input"]["elements"] == 40 * 32
    assert marked["0.weight"]["elements"] == 32 * 48


def assert_near(found: dict[str, dict[str, float]], wanted: dict[str, dict[str, float]]) -> None:
    """The same but for some values that compiled code rounds in another order."""
    assert found.keys() == wanted.keys()
    for name, figures in wanted.items():
        assert figures["casts"] == found[name]["casts"] == 1, name
        for key, value in figures.items():
            assert found[name][key] == pytest.approx(value, rel=0.01, abs=3), (name, key)


def linears(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(depth) for each in (lightning_fp8.Linear(32, 32), nn.SiLU())]
    return nn.Sequential(*layers).bfloat16()


@pytest.mark.parametrize(
    ("recipe", "what_if"),
    covering(
        [(recipe, what_if) for recipe in RECIPE_NAMES for what_if in (False, True)],
        lambda row: {row} & {("delayed", False), ("blockwise", True)},
    ),
)
def test_compiled_layers_count_what_eager_ones_do(recipe: str, what_if: bool) -> None:
    eager, compiled = linears(), linears()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert_near(counted(compiled, recipe, run, what_if), counted(eager, recipe, what_if=what_if))


def test_compiled_blocks_share_the_code_that_samples() -> None:
    """Eight blocks that are compiled one by one: one graph that samples, and one that does not."""
    model = nn.Sequential(*(linears(1) for _ in range(8)))
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model:
        block.compile(fullgraph=True, backend=backend)
    found = counted(model, "tensorwise")
    assert all(figures["casts"] == 1 for figures in found.values())
    assert len(graphs) == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_recomputed_layers_have_the_same_shares(recipe: str, reentrant: bool) -> None:
    """A forward that runs again counts again, in numerators and denominators."""
    plain, recomputed = linears(), linears()
    wanted = counted(plain, recipe)
    found = counted(recomputed, recipe, lambda x: checkpoint(recomputed, x, use_reentrant=reentrant))
    for name, figures in wanted.items():
        times = found[name]["casts"]
        assert times in (1, 2)
        for key, value in figures.items():
            assert found[name][key] == pytest.approx(times * value), (name, key)


class Unfused(nn.Module):
    """LayerNormMLP in parts."""

    def __init__(self, fused: LayerNormMLP) -> None:
        super().__init__()
        state = fused.state_dict()
        self.norm = nn.LayerNorm(32)
        self.fc1, self.fc2 = lightning_fp8.Linear(32, 64), lightning_fp8.Linear(64, 32)
        self.norm.load_state_dict({"weight": state["layer_norm_weight"], "bias": state["layer_norm_bias"]})
        self.fc1.load_state_dict({"weight": state["fc1_weight"], "bias": state["fc1_bias"]})
        self.fc2.load_state_dict({"weight": state["fc2_weight"], "bias": state["fc2_bias"]})
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(self.norm(x)), approximate="tanh"))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_fused_modules_are_sampled_as_their_parts(recipe: str) -> None:
    """Their norm and activation reach the cast in float32, and are rounded to BF16 first in the parts: nearly equal."""
    torch.manual_seed(0)
    fused = LayerNormMLP(32, 64).bfloat16()
    with torch.no_grad():
        fused.layer_norm_weight.uniform_(0.5, 2)
    parts = Unfused(fused)
    found, wanted = counted(fused, recipe, what_if=True), counted(parts, recipe)
    assert set(found) == set(wanted)
    for name, figures in wanted.items():
        assert found[name]["casts"] == 1
        assert found[name]["elements"] == figures["elements"]
        assert found[name]["signal"] == pytest.approx(figures["signal"], rel=0.02)
        assert found[name]["noise"] == pytest.approx(figures["noise"], rel=0.15)
        assert abs(found[name]["flushed"] - figures["flushed"]) <= 0.01 * figures["elements"]


def test_a_norm_and_a_linear_layer_are_sampled() -> None:
    torch.manual_seed(0)
    found = counted(LayerNormLinear(32, 32).bfloat16(), "delayed")
    assert [figures["casts"] for figures in found.values()] == [1, 1, 1]


@pytest.mark.parametrize("recipe", covering(RECIPE_NAMES, lambda recipe: {recipe} & {"delayed", "blockwise"}))
def test_layers_that_share_a_cast_each_count_it(recipe: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = (lightning_fp8.Linear(32, 32) for _ in range(3))
            self.bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    found = counted(Shared(), recipe)
    of_inputs = [found[f"{name}.input"] for name in "qkv"]
    assert of_inputs[0] == of_inputs[1] == of_inputs[2]
    assert of_inputs[0]["casts"] == 1
    assert of_inputs[0]["elements"] == 40 * 32


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_fused_models_of_hugging_face_are_sampled(recipe: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=40
    )
    tokens = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(0))

    def of_llama(fuse: bool) -> dict[str, dict[str, float]]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).bfloat16()
        convert_module(model, fuse=fuse)
        return counted(model, recipe, lambda x: model(tokens, labels=tokens).loss[None])

    plain, fused = of_llama(False), of_llama(True)
    assert plain.keys() == fused.keys()
    for name, figures in plain.items():
        assert fused[name]["casts"] == figures["casts"] == 1, name
        assert fused[name]["elements"] == figures["elements"]
        assert fused[name]["signal"] == pytest.approx(figures["signal"], rel=0.05), name


def test_evaluation_is_not_sampled() -> None:
    model = linears()
    counted(model, "tensorwise")
    casts = Casts.of(model)
    sampler = Sampler(casts.slots)
    sampler.begin(what_if=True)
    with fp8_autocast(fp8_recipe="tensorwise"), torch.no_grad():
        model(torch.randn(8, 32).bfloat16())
    model.eval()
    with fp8_autocast(fp8_recipe="tensorwise"):
        model(torch.randn(8, 32).bfloat16().requires_grad_()).sum().backward()
    counts, _, _ = sampler.read()
    assert not np.any(counts)


# --- The part that runs in every step ---------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_a_gpu_between_reports() -> None:
    """On fake CUDA tensors: no operation asks for a value, copies to the host, or has a shape that values decide."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        history = AmaxHistory([("a.input", Role.INPUT), ("a.weight", Role.WEIGHT)], "cuda")
        trace = StepTrace([history.slot(0), history.slot(1)], 10)
        with Calls() as calls:
            for row in range(3):
                trace.row = row
                assert history.before_update is not None
                history.before_update(history)
    names = list(dict.fromkeys(name.split(".")[1] for name in calls.names))
    assert len(calls.names) <= 3 * 8 + 2
    waiting = {"_local_scalar_dense", "item", "nonzero", "_to_copy", "is_nonzero", "unique_dim", "masked_select"}
    assert "maximum" in names
    assert not waiting & set(names)
    del history, trace
    gc.collect()  # tests of calibration and of exports read all histories, and this one has no values
