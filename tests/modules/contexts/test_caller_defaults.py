"""Nothing depends on the caller's default dtype, default device or grad mode, nor on there being any rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_fp8 as fp8
from lightning_fp8.delayed.update import reduce_and_update
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.cast import operands_of, quantize_op
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.proofs.comparing import reference_of
from tests.small import default_device, fp8_trainer, quiet_trainer

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "device meta": lambda: torch.device("meta"),
}


def model_and_batches() -> tuple[nn.Sequential, list[Tensor]]:
    """The second of three batches is empty."""
    model = nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 24)).bfloat16()
    return model, [torch.randn(rows, 40, dtype=torch.bfloat16) for rows in (6, 0, 5)]


def trained(recipe: str, model: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """Every number that conversion, three steps and both kinds of checkpoint give."""
    numbers: list[Tensor] = []
    fp8.convert_module(model, first_last_layers_bf16=False)
    for x in batches:
        x = x.clone().requires_grad_()
        with fp8.fp8_autocast(fp8_recipe=recipe):
            y = model(x)
        y.square().sum().backward()
        assert x.grad is not None
        numbers += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    state = fp8.fp8_state_dict(model)
    again = copy.deepcopy(model)
    fp8.load_fp8_state_dict(again, state)
    delayed = fp8.DelayedScaling(amax_history_len=4)
    written = fp8.export_te_state_dict(again, "1.8", delayed)
    fp8.load_te_state_dict(again, written)
    after = fp8.fp8_state_dict(again)
    numbers += [state["scale"], state["amax_history"], after["scale"], after["amax_history"]]
    return numbers


@RECIPE
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_training_and_checkpoints_depend_on_no_default(recipe: str, surroundings: str) -> None:
    model, batches = model_and_batches()
    expected = trained(recipe, copy.deepcopy(model), batches)
    with SURROUNDINGS[surroundings]():
        found = trained(recipe, model, batches)
    assert len(found) == len(expected) > 20
    for ours, theirs in zip(found, expected):
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        assert torch.equal(ours, theirs)


@RECIPE
def test_a_layer_without_rows_learns_nothing_and_loses_nothing(recipe: str) -> None:
    """An expert that got no token: under the plugin, whose default dtype is BF16 inside a step."""
    plugin = fp8.FP8FabricPrecision(recipe, first_last_layers_bf16=False)
    model, batches = model_and_batches()
    plugin.convert_module(model)
    for leading in [(0,), (2, 0)]:
        x = torch.empty(*leading, 40, dtype=torch.bfloat16, requires_grad=True)
        with plugin.forward_context():
            y = model(x)
        y.sum().backward()
        plugin.update_scales()
        assert y.shape == (*leading, 24)
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert all(not p.grad.any() and p.grad.shape == p.shape for p in model.parameters())  # type: ignore[union-attr]
    history = plugin.histories["model"]
    ran = torch.tensor([role is Role.WEIGHT for role in history.roles])
    assert torch.equal(history.scale > 0, ran if recipe == "delayed" else torch.zeros_like(ran))
    with plugin.forward_context():
        y = model(batches[0]).detach()
    exact = batches[0].double()
    for layer in model:
        exact = (
            F.linear(exact, layer.weight.detach().double(), layer.bias.detach().double())
            if hasattr(layer, "weight")
            else layer(exact)
        )
    assert float((y.double() - exact).norm() / exact.norm()) < 0.1


class Experts(nn.Module):
    """Rows with a positive first value go to one expert, the others to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = ((x[:, 0] > 0) == bool(index)).nonzero()[:, 0]
            y = y.index_add(0, chosen, expert(x[chosen]))
        return y


@RECIPE
def test_an_expert_without_tokens_trains_under_the_trainer(recipe: str) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel
    from torch.utils.data import DataLoader

    class Mixture(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer, self.losses = Experts(), []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = (self.layer(batch) - batch).float().square().mean()
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self) -> Any:
            rows = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
            rows[:, 0] = rows[:, 0].abs()
            rows[16:, 0] *= -1  # the last batch is the first expert's alone, the others the second's
            return DataLoader(rows, batch_size=8)  # type: ignore[arg-type]

    losses = []
    for trainer in (
        fp8_trainer(recipe, fp8={"weights_dtype": "bf16", "first_last_layers_bf16": False}, limit_val_batches=0),
        quiet_trainer(precision="bf16-true", limit_val_batches=0),
    ):
        model = Mixture()
        trainer.fit(model)
        losses.append(torch.tensor(model.losses))
        assert len(losses[-1]) == 3
    torch.testing.assert_close(*losses, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("what", ["conversion", "loading", "a Transformer Engine file", "an update", "a first forward"])
def test_what_happens_without_gradients_can_be_trained_with_them(mode: Callable[[], Any], what: str) -> None:
    """Tensors that inference mode makes cannot be changed outside it."""
    recipe = fp8.DelayedScaling(amax_history_len=4)
    model, (x, *_) = model_and_batches()
    model = model.float()
    source, x = fp8.convert_module(copy.deepcopy(model), first_last_layers_bf16=False), x.float()
    for history in {id(m.history): m.history for m in source.modules() if isinstance(m, fp8.Linear)}.values():
        history.amax.uniform_(1.0, 2.0)  # type: ignore[union-attr]
        reduce_and_update({history: recipe})  # type: ignore[union-attr]
    state, written = fp8.fp8_state_dict(source), fp8.export_te_state_dict(source, "1.8", recipe)
    twin = copy.deepcopy(model)

    def happens(model: nn.Module) -> None:
        if what == "conversion":
            fp8.convert_module(model, first_last_layers_bf16=False)
        elif what == "loading":
            fp8.load_fp8_state_dict(model, state)
        elif what == "a Transformer Engine file":
            fp8.load_te_state_dict(model, written)
        elif what == "an update":
            model[0].history.amax.fill_(3.0)  # type: ignore[index, union-attr]
            reduce_and_update({model[0].history: recipe})  # type: ignore[index, union-attr]
        else:
            for module in (module for module in model.modules() if isinstance(module, fp8.Linear)):
                module._slots = None  # as an nn.Linear has none that was retyped by hand
            with fp8.fp8_autocast(fp8_recipe=recipe):
                model(x)

    results = []
    for each, within in ((model, mode), (twin, contextlib.nullcontext)):
        if what != "conversion":
            fp8.convert_module(each, first_last_layers_bf16=False)
        with within():
            if within is mode or what != "a first forward":
                happens(each)
        for _ in range(2):
            with fp8.fp8_autocast(fp8_recipe=recipe):
                y = each(x)
            y.square().sum().backward()
        results.append([y, fp8.fp8_state_dict(each)["scale"], *(p.grad for p in each.parameters())])
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


class OnACard(Tensor):
    """Says that it lies on a card, so that the reference takes its branches for one and waits for no value."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@RECIPE
@pytest.mark.parametrize("kind", [Tensor, OnACard])
def test_the_reference_multiplies_no_rows(recipe: str, kind: type[Tensor]) -> None:
    """The three products of a layer that got none, where no kernel runs: it is asked for them on a card too."""
    roles = (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)
    shapes = ((0, 40), (24, 40), (0, 24))
    operands = []
    for role, shape in zip(roles, shapes):
        cast, x = (
            make_recipe(recipe).cast(role).usage(True, True),
            torch.ones(shape, dtype=torch.bfloat16).as_subclass(kind),
        )
        scale, amax = (torch.zeros(()).as_subclass(kind) for _ in range(2)) if recipe == "delayed" else (None, None)
        row, column = operands_of(reference_of(quantize_op)(x, cast, scale, amax), cast, True, True)
        assert row is not None
        assert column is not None
        operands.append((row, column))
    (x8, x8_t), (w8, w8_t), (dy8, dy8_t) = operands
    bias = torch.ones(24).as_subclass(kind)
    for a, b, added, shape in (
        (x8, w8, bias, (0, 24)),
        (dy8, w8_t, None, (0, 40)),
        (dy8_t, x8_t, torch.ones(40).as_subclass(kind), (24, 40)),
    ):
        gemm = Gemm(a.layout, b.layout, torch.bfloat16)
        result = reference_of(scaled_mm_op)(a.data, a.scale_inv, b.data, b.scale_inv, gemm, added)
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, torch.zeros(shape, dtype=torch.bfloat16) + (0 if added is None else added))
