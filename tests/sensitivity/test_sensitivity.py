"""Sensitivity: against brute force without this package's layers, and what it leaves alone."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import Linear
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.sensitivity import Row, Sensitivity, measure_sensitivity
from lightning_fp8.sensitivity.result import Check
from tests.tiers import covering

WIDTH, DEPTH = 64, 12


class Chain(nn.Module):
    """Twelve linear layers with activations between them, and values of unlike magnitudes."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        for index, layer in enumerate(self.layers):
            with torch.no_grad():  # outliers of unlike size in the layers
                layer.weight[index % 7] *= 1.5 ** (index * 5 % 11)
                layer.weight.div_(layer.weight.norm() / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def batches(number: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(48, WIDTH, generator=generator) for _ in range(number)]


# --- Brute force ------------------------------------------------------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of x in FP8, with a scale of the tensor's own amax, in float64."""
    largest = torch.finfo(dtype).max
    scale = largest / x.float().abs().max()
    return (x.float() * scale).clamp(-largest, largest).to(dtype).double() / scale.double()


class RoundedProduct(torch.autograd.Function):
    """``x wᵀ`` of rounded operands, E4M3 forward and E5M2 of the gradient, multiplied in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, w8 = rounded(x, torch.float8_e4m3fn), rounded(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return (x8 @ w8.t()).float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x8, w8 = ctx.saved_tensors
        dy8 = rounded(dy, torch.float8_e5m2)
        return (dy8 @ w8).float(), (dy8.t() @ x8).float()


def brute_force(model: Chain, in_fp8: set[int]) -> Tensor:
    """The gradient of the mean loss with these layers rounded."""
    parameters = [each.detach().clone().requires_grad_() for each in model.parameters()]
    total = torch.zeros(())
    for x in batches():
        for index in range(len(model.layers)):
            w, b = parameters[2 * index : 2 * index + 2]
            x = x + torch.tanh(RoundedProduct.apply(x, w) + b if index in in_fp8 else x @ w.t() + b)
        total = total + (x - 1).square().mean() / 2
    return torch.cat([each.double().flatten() for each in torch.autograd.grad(total, parameters)])


def test_the_ranking_is_that_of_brute_force() -> None:
    model = Chain()
    found = measure_sensitivity(model, batches(), loss, recipe="tensorwise", progress=False)
    reference = brute_force(model, set())
    errors = {
        f"layers.{index}": float((brute_force(model, {index}) - reference).norm() / reference.norm())
        for index in range(DEPTH)
    }
    ranked = sorted(errors, key=lambda name: -errors[name])
    assert [row.name for row in found.rows][:3] == ranked[:3]
    for row in found.rows:
        assert row.error == pytest.approx(errors[row.name], rel=0.02)
    everything = brute_force(model, set(range(DEPTH)))
    assert found.all_error == pytest.approx(float((everything - reference).norm() / reference.norm()), rel=0.02)
    default = brute_force(model, set(range(1, DEPTH - 1)))
    assert found.default_skip == ("layers.0", "layers.11")
    assert found.default_error == pytest.approx(float((default - reference).norm() / reference.norm()), rel=0.02)
    assert [row.flops for row in found.rows] == pytest.approx([1 / DEPTH] * DEPTH)


# --- What it leaves alone ---------------------------------------------------------------------------------------------


class Busy(Chain):
    """Has dropout, a batch norm and a counter."""

    def __init__(self) -> None:
        super().__init__(4)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().forward(self.norm(x) + self.calls)
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("recipe", covering(tuple(RECIPES), lambda name: {name} & {"delayed", "mxfp8"}))
def test_the_model_stays_as_it_was(recipe: str) -> None:
    model = Busy().eval()
    model.layers[1].weight.grad = torch.ones(WIDTH, WIDTH)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = measure_sensitivity(model, batches(), loss, recipe=recipe, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.layers[1].weight.grad.eq(1).all()
    assert model.layers[0].weight.grad is None
    assert not any(each.training for each in model.modules())
    assert [type(each) for each in model.layers] == [nn.Linear] * 4
    # the same masks and statistics in all passes: what differs is FP8 alone
    assert 0 < found.rows[-1].error <= found.rows[0].error < 0.3
    again = measure_sensitivity(model, batches(), loss, recipe=recipe, progress=False)
    assert again == found


def test_random_numbers_of_numpy_and_python_are_the_same_in_all_passes() -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*batch.shape) > 0.1).to(batch.dtype)
        return loss(model, batch * mask * random.uniform(0.5, 2.0))

    before = random.getstate(), np.random.get_state()[1].tolist()
    first, again = (measure_sensitivity(Chain(), batches(), masked, progress=False) for _ in range(2))
    assert first == again
    assert first.all_error < 0.3
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_loss_that_changes_in_each_pass_warns() -> None:
    counter = itertools.count(1)
    with pytest.warns(UserWarning, match=r"the loss is not deterministic.* changes by [\d.]+%"):
        measure_sensitivity(Chain(), batches(), lambda model, batch: loss(model, batch * next(counter)), progress=False)


def test_modules_in_eval_mode_stay_in_it() -> None:
    model, modes = Busy().train(), set[bool]()
    model.norm.eval()
    model.norm.register_forward_hook(lambda module, *_: modes.add(module.training))
    measure_sensitivity(model, batches(), loss, progress=False)
    assert modes == {False}


def test_an_infinite_error_is_saved_as_json(tmp_path: Path) -> None:
    found = Sensitivity(
        "delayed", (Row("a", ("a",), math.inf, 1.0),), math.inf, 0.5, (), 3, Check(0.1, (), 0.1, math.inf)
    )
    found.save(tmp_path / "found.json")
    json.loads((tmp_path / "found.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert Sensitivity.load(tmp_path / "found.json") == found
    found.save(str(tmp_path / "again.json"))
    assert Sensitivity.load(str(tmp_path / "again.json")) == found
    with pytest.raises(IsADirectoryError, match="it is a folder; name a file in it"):
        found.save(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"found.json", "again.json"}
    assert not [*tmp_path.parent.glob(f".{tmp_path.name}.*")]


def test_delayed_scales_are_those_of_the_batches() -> None:
    """Of one batch with all layers in FP8, which observed it: each tensor's own, as with current scaling."""
    one = batches(1)
    delayed = measure_sensitivity(Chain(), one, loss, recipe="delayed", progress=False)
    current = measure_sensitivity(Chain(), one, loss, recipe="tensorwise", progress=False)
    assert delayed.all_error == pytest.approx(current.all_error, rel=1e-9)


# --- Choices ----------------------------------------------------------------------------------------------------------


def result(*errors: float, flops: tuple[float, ...] | None = None) -> Sensitivity:
    shares = flops or (1 / len(errors),) * len(errors)
    rows = [Row(f"l{index}", (f"l{index}",), error, share) for index, (error, share) in enumerate(zip(errors, shares))]
    return Sensitivity("tensorwise", tuple(rows), 0.05, 0.02, ("l0",), 10)


def test_layers_are_kept_until_the_budget_holds() -> None:
    found = result(0.04, 0.03, 0.0)
    assert found.predicted(()) == pytest.approx(0.05)
    assert found.predicted(("l0",)) == pytest.approx(0.03)
    assert found.skip(0.05) == ()
    assert found.skip(0.03) == ("l0",)
    assert found.skip(0.02) == ("l0", "l1")
    assert found.flops_in_fp8(("l0",)) == pytest.approx(2 / 3)
    dear = result(0.04, 0.039, flops=(0.9, 0.1))
    assert dear.skip(0.041) == ("l1",)  # as good, and it costs less
    with pytest.raises(ValueError, match="budget=0 must be a positive number"):
        found.skip(0)


def test_a_budget_is_measured() -> None:
    found = measure_sensitivity(Chain(), batches(), loss, recipe="tensorwise", budget=0.02, progress=False)
    check = found.check
    assert check is not None
    assert check.skip == found.skip(0.02)
    assert check.predicted <= 0.02 < found.all_error
    assert check.measured == pytest.approx(check.predicted, rel=0.4)
    left = {index for index in range(DEPTH) if f"layers.{index}" not in check.skip}
    reference = brute_force(Chain(), set())
    error = float((brute_force(Chain(), left) - reference).norm() / reference.norm())
    assert check.measured == pytest.approx(error, rel=0.02)


def test_blocks_are_measured_together() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    found = measure_sensitivity(model, batches(), loss, group="block", progress=False)
    assert sorted(row.name for row in found.rows) == ["0", "1", "2", "3"]
    assert next(row for row in found.rows if row.name == "2").layers == ("2.up", "2.down")
    assert found.passes == 2 * (4 + 5)


def test_the_number_of_passes_is_said_beforehand_and_made(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def counted(model: nn.Module, batch: Tensor) -> Tensor:
        if not calls:
            calls.append(capsys.readouterr().err)
        calls.append("")
        return loss(model, batch)

    found = measure_sensitivity(Chain(4), batches(), counted, recipe="delayed", budget=0.01)
    assert "10 configurations × 2 batches = 20 forward and backward passes" in calls[0]
    assert len(calls) - 1 == found.passes == 20


def test_losses_are_found() -> None:
    class Lit(Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            return {"loss": loss(self, batch)}

    class HuggingFace(Chain):
        def forward(self, inputs: Tensor) -> Any:  # type: ignore[override]
            return SimpleNamespace(loss=(super().forward(inputs) - 1).square().mean())

    own = measure_sensitivity(Chain(), batches(), loss, recipe="tensorwise", progress=False)
    assert measure_sensitivity(Lit(), batches(), recipe="tensorwise", progress=False) == own
    named = [{"inputs": batch} for batch in batches()]
    assert measure_sensitivity(HuggingFace(), named, recipe="tensorwise", progress=False) == own


def test_results_are_saved_and_shown(tmp_path: Path) -> None:
    found = measure_sensitivity(Chain(), batches(), loss, budget=0.02, progress=False)
    found.save(tmp_path / "found.json")
    assert Sensitivity.load(tmp_path / "found.json") == found
    lines = str(found).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("skip="))
    assert lines[1].startswith(found.rows[0].name)
    assert f"{found.rows[0].error:.3%}" in lines[1]
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="not a result of measure_sensitivity: it lacks 'version'"):
        Sensitivity.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("model", "data", "options", "error", "message"),
    [
        (Chain(), [], {}, ValueError, "at least one batch"),
        (Chain(), batches(), {"group": "row"}, ValueError, "group='row' is unknown; use 'layer' or 'block'"),
        (Chain(), batches(), {"budget": -1}, ValueError, "budget=-1 must be a positive number"),
        (Chain(), batches(), {"recipe": "fp4"}, ValueError, "fp4"),
        (nn.Conv2d(3, 3, 3), batches(), {}, ValueError, "no layer of the model runs in FP8"),
        (Chain(), batches(), {"loss": lambda model, batch: loss(model, batch) * math.nan}, ValueError, "is nan; pass"),
        (Chain(), batches(), {"loss": None}, TypeError, "the model returned .*, not a scalar loss"),
        ("model", batches(), {}, TypeError, "measure_sensitivity"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    model: Any, data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        measure_sensitivity(model, data, **{"loss": loss, "progress": False} | options)


def test_layers_of_this_package_are_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear(WIDTH, WIDTH) for _ in range(3)))
    found = measure_sensitivity(model, batches(), loss, recipe="rowwise", progress=False)
    assert len(found.rows) == 3
    assert all(each.fp8 for each in model)


class Keywords(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(input=x))
        return x


def test_many_passes_with_inputs_by_keyword() -> None:
    """Constant scales are intended, and no warning."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 64) for _ in range(210)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure_sensitivity(
            Keywords(), batches, lambda model, x: model(x).square().mean(), progress=False, budget=0.5
        )
    assert found.passes > 1000
    assert [row.flops for row in found.rows] == pytest.approx([1 / 3] * 3)


def test_a_loss_that_calls_no_layer_is_refused() -> None:
    model = Keywords()
    model.scale = nn.Parameter(torch.ones(64))
    with pytest.raises(ValueError, match="called no layer that can run in FP8"):
        measure_sensitivity(model, [torch.ones(2, 64)], lambda model, x: (x * model.scale).sum(), progress=False)
