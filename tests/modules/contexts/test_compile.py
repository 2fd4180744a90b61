"""torch.compile of a model, of each block and of each layer, against eager: outputs, gradients, scales and amaxes."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fp8 import FP8FabricPrecision, Linear, convert_module, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from tests.small import fp8_trainer
from tests.tiers import covering, thorough

DEPTH = 10
"""More blocks than torch compiles variants of one function: what it compiled for a block has to serve the others."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, depth: int, recompute: bool) -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block() for _ in range(depth)), recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def parts_of(model: Model, what: str) -> list[nn.Module]:
    if what == "model":
        return [model]
    return list(model.blocks) if what == "block" else [layer for block in model.blocks for layer in block.children()]


def once(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.square().mean().backward()
    return y


def stepped(
    model: Model, plugin: FP8FabricPrecision, batches: list[Tensor], step: Callable[[nn.Module, Tensor], Tensor]
) -> list[Tensor]:
    """Every number of a few steps."""
    numbers = []
    for x in batches:
        x = x.clone().requires_grad_()
        with plugin.forward_context():  # recomputation of what is compiled reads the current setting
            y = step(model, x)
        plugin.update_scales()
        assert x.grad is not None
        numbers += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    history = plugin.histories["model"]
    return [*numbers, history.scale, history.amax_history]


def compare(
    recipe: str,
    what: str,
    dynamic: bool | None = False,
    recompute: bool = False,
    depth: int = 2,
    backend: str = "aot_eager",
    step: Callable[[nn.Module, Tensor], Tensor] = once,
    rows: tuple[int, ...] = (8, 12, 20),
    tolerance: float = 0.0,
) -> None:
    model = Model(depth, recompute).bfloat16()
    batches = [torch.randn(rows[0] if dynamic is False else n, 16).bfloat16() for n in rows]
    numbers = []
    for compiled in (True, False):
        plugin = FP8FabricPrecision(recipe, first_last_layers_bf16=False)
        mine = copy.deepcopy(model)
        plugin.convert_module(mine)
        for part in parts_of(mine, what) if compiled else ():
            part.compile(fullgraph=True, dynamic=dynamic, backend=backend)
        numbers.append(stepped(mine, plugin, batches, step))
    for found, exact in zip(*numbers):
        assert torch.equal(found, exact) or (found - exact).float().norm() < tolerance * exact.float().norm()


@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("what", ["model", "block", "layer"])
def test_delayed_scaling_compiles_as_it_runs(what: str, dynamic: bool, recompute: bool) -> None:
    compare("delayed", what, dynamic, recompute, depth=2 if what == "model" else DEPTH)


@pytest.mark.parametrize(
    ("recipe", "what", "dynamic", "recompute"),
    covering(
        [
            (recipe, *how)
            for recipe in RECIPES
            if recipe != "delayed"
            for how in (("model", None, False), ("block", False, True), ("layer", True, False))
        ],
        lambda row: {row[:2]} & {("mxfp8", "block"), ("rowwise", "layer")},
    ),
)
def test_every_recipe_compiles_as_it_runs(recipe: str, what: str, dynamic: bool | None, recompute: bool) -> None:
    if TORCH < (2, 11) and (recipe, dynamic) == ("tensorwise", True):
        pytest.skip("torch takes amax_epsilon for a number that varies")
    compare(recipe, what, dynamic, recompute)


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_inductor_takes_state_and_blocks(recipe: str) -> None:
    """The ops are opaque to it: what it sees is whether they write to what they are given, and the shapes of scales."""
    compare(recipe, "model", depth=1, backend="inductor", tolerance=0.02)  # keeps float32 inside of what it fuses


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """Weights that two places share."""
    return once(lambda x: model(model(x)), x)  # type: ignore[arg-type]


def two_batches_one_backward(model: nn.Module, x: Tensor) -> Tensor:
    """A discriminator's step."""
    real, fake = model(x), model(2 * x)
    (real.square().mean() - fake.abs().mean()).backward()
    return fake


def two_backwards_in_their_forwards_order(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(2 * x)
    first.square().mean().backward()
    second.square().mean().backward()
    return second


@pytest.mark.skipif(TORCH < (2, 11), reason="a graph may write in its backward pass once in a step only")
@pytest.mark.parametrize(
    "step",
    covering([twice, two_batches_one_backward, two_backwards_in_their_forwards_order], lambda step: {twice} & {step}),
)
def test_compiled_blocks_may_run_more_than_once_in_a_step(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    compare("delayed", "block", step=step, tolerance=0.01)  # gradients may be added up in another order


@pytest.mark.parametrize(
    ("recipe", "dynamic"),
    covering(itertools.product(RECIPES, (False, None)), lambda row: {row} & {("delayed", False)}),
)
def test_compiled_layers_may_get_no_rows(recipe: str, dynamic: bool | None) -> None:
    compare(recipe, "block", dynamic, rows=(0, 0) if dynamic is False else (8, 0))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_compiled_graph_refuses_to_be_derived_twice(recipe: str) -> None:
    linear, x = torch.compile(Linear(16, 16), backend="aot_eager"), torch.randn(8, 16, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x)

    def twice_derived() -> None:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.mean() + dx.square().sum()).backward()

    with pytest.raises(RuntimeError, match="double backward|create_graph=True"):
        twice_derived()


@thorough
def test_an_evaluation_between_steps_moves_nothing() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            model(100 * x)
        y = once(model, x)
        with torch.no_grad():
            model(100 * x)
        return y

    compare("delayed", "block", step=step)


class Trained(L.LightningModule):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.model(batch) - batch.flip(1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


@thorough
def test_compiled_blocks_that_are_recomputed_outside_of_a_region_warn() -> None:
    """Reentrant checkpointing, which compares nothing, would give gradients of other values in silence."""
    block = Block()
    convert_module(block, first_last_layers_bf16=False)
    block.compile(backend="eager")
    for inside in (True, False):
        x = torch.randn(16, 16, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fp8_autocast(fp8_recipe="tensorwise"):
                y = checkpoint(block, x, use_reentrant=True)
                if inside:
                    y.sum().backward()
            if not inside:
                y.sum().backward()
        said = [str(each.message) for each in caught]
        said = [each for each in said if "recomputed in high precision in the backward pass" in each]
        assert bool(said) != inside


@thorough
def test_compiled_and_checkpointed_under_the_trainer() -> None:
    template, rows = Model(2, recompute=True), torch.randn(24, 16)
    found = []
    for compiled in (True, False):
        module = Trained(copy.deepcopy(template))
        for part in parts_of(module.model, "block") if compiled else ():
            part.compile(fullgraph=True, backend="aot_eager")
        trainer = fp8_trainer(fp8={"first_last_layers_bf16": False}, limit_val_batches=0)
        trainer.fit(module, DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
        history = trainer.precision_plugin.histories["model"]  # type: ignore[attr-defined]
        assert (history.scale > 0).all()
        found.append([torch.tensor(module.losses), history.scale, history.amax_history, *module.parameters()])
    for ours, eager in zip(*found):
        assert torch.equal(ours, eager)
