"""How layers are converted, and what the summary says about them."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_fp8
from lightning_fp8 import FP8FabricPrecision, FP8Precision, convert_module, fp8_autocast
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Role
from tests.convert.models import LanguageModel, mlp

# In place


def test_conversion_is_in_place() -> None:
    model = LanguageModel()
    model.blocks[1].fc1.weight.requires_grad_(False)
    model.blocks[1].fc1.note = "mine"
    called: list[str] = []
    model.blocks[1].fc1.register_forward_hook(lambda *_: called.append("hook"))
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    state = {key: value.clone() for key, value in model.state_dict().items()}

    assert convert_module(model) is model

    assert dict(model.named_modules()).keys() == modules.keys()
    for name, module in model.named_modules():
        assert module is modules[name]
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert type(model.blocks[1].fc1) is lightning_fp8.Linear
    assert type(model.blocks[0].fc1) is nn.Linear
    assert not model.blocks[1].fc1.weight.requires_grad
    assert model.blocks[1].fc1.note == "mine"
    model(torch.arange(6))
    assert called == ["hook"]


def test_converted_model_outside_a_region_computes_as_before() -> None:
    model, tokens = LanguageModel(), torch.arange(12)
    before = model(tokens)
    assert torch.equal(convert_module(model)(tokens), before)


def test_conversion_is_idempotent() -> None:
    model = convert_module(LanguageModel())
    converted = [module for module in model.modules() if isinstance(module, lightning_fp8.Linear)]
    assert len(converted) == 5
    history = converted[0].slots[Role.INPUT].history
    history.scale.fill_(3.0)
    convert_module(model)
    assert [module for module in model.modules() if isinstance(module, lightning_fp8.Linear)] == converted
    for module in converted:
        assert all(slot.history is history for slot in module.slots.values())
    assert history.scale.tolist() == [3.0] * 15


def test_one_history_names_the_rows_of_every_fp8_layer() -> None:
    model = convert_module(mlp(4))
    history = model[2].slots[Role.INPUT].history
    roles = ("input", "weight", "grad_output")
    assert history.names == [f"{layer}.{role}" for layer in (2, 4) for role in roles]
    for layer in (2, 4):
        assert [slot.name for slot in model[layer].slots.values()] == [f"{layer}.{role}" for role in roles]


def test_another_policy_keeps_what_the_history_knew() -> None:
    model = convert_module(mlp(5))
    history = model[4].slots[Role.INPUT].history
    history.scale.copy_(torch.arange(1.0, 10.0))
    expected = {f"4.{role.value}": model[4].slots[role].scale.item() for role in LINEAR_ROLES}
    convert_module(model, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=0)
    new = model[4].slots[Role.INPUT].history
    assert [name.split(".")[0] for name in new.names] == ["4"] * 3 + ["6"] * 3 + ["8"] * 3
    assert not model[2].fp8
    assert {f"4.{role.value}": model[4].slots[role].scale.item() for role in LINEAR_ROLES} == expected
    assert [model[8].slots[role].scale.item() for role in LINEAR_ROLES] == [0.0] * 3


# The summary


def test_summary_as_data() -> None:
    summary = plan_conversion(LanguageModel(blocks=3), Policy(skip=("*.1.fc2",))).summary
    rows = [(layer.name, layer.shape, layer.precision) for layer in summary.layers]
    assert rows == [
        ("blocks.0.fc1", (32, 16), "BF16"),
        ("blocks.0.fc2", (16, 32), "BF16"),
        ("blocks.1.fc1", (32, 16), "FP8"),
        ("blocks.1.fc2", (16, 32), "BF16"),
        ("blocks.2.fc1", (32, 16), "BF16"),
        ("blocks.2.fc2", (16, 32), "BF16"),
        ("proj", (16, 16), "FP8"),
        ("head", (40, 16), "BF16"),
    ]
    assert summary.num_fp8 == 2
    assert summary.layers[0].reason == "in layer 0 of 3, one of the first 1"
    assert summary.layers[4].reason == "in layer 2 of 3, one of the last 1"


def test_summary_as_a_table() -> None:
    model = LanguageModel(blocks=3)
    summary = plan_conversion(model, Policy()).summary
    lines = summary.table(verbose=True).splitlines()
    assert lines[0].split("  ")[0].strip() == "layer"
    assert " planned " in lines[0]
    assert set(lines[1]) == {"-"}
    for line, layer in zip(lines[2:-1], summary.layers, strict=True):
        assert line.startswith(layer.name)
        assert f" {layer.precision} " in f"{line} "
        assert "{} × {}".format(*layer.shape) in line
        assert line.endswith(layer.reason)
    # Of 3 x 2 x 16 x 32, 16 x 16 and 40 x 16 elements, 2 x 16 x 32 and 16 x 16.
    assert lines[-1] == "3 of 8 linear layers planned in FP8: 32.3 % of the parameters of all matrices"
    assert summary.share_of_parameters == 1280 / 3968
    assert str(ConversionSummary(())).endswith("0 of 0 linear layers planned in FP8")


def test_planning_changes_nothing() -> None:
    model = LanguageModel()
    plan_conversion(model, Policy())
    assert not any(isinstance(module, lightning_fp8.Linear) for module in model.modules())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What rank zero says."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = rank_zero.log, Collect(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_plugin_prints_the_summary_once(messages: list[str]) -> None:
    plugin, model = FP8Precision(weights_dtype=torch.float32), LanguageModel()
    for _ in range(3):
        plugin.convert_module(model)
    assert plugin.summary == plan_conversion(model, Policy()).summary.with_high_precision("FP32")
    assert [message for message in messages if str(plugin.summary) in message] == messages
    assert len(messages) == 1


def test_other_ranks_print_nothing(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero.rank_zero_only, "rank", 1)
    plugin = FP8Precision(weights_dtype=torch.float32)
    plugin.convert_module(LanguageModel())
    assert plugin.summary is not None
    assert not messages


class Renamed(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("model", "policy", "hint"),
    [
        (nn.Conv2d(3, 3, 3), {}, "it has no linear layer"),
        (nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), {}, "first_last_layers_bf16=False"),
        (nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), {"skip": ["*"]}, "skip="),
        (nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), {"replace_layers": False}, "replace_layers=True"),
        (nn.Sequential(*(Renamed(16, 16) for _ in range(4))), {}, "Renamed is a subclass of nn.Linear"),
    ],
)
def test_the_way_out_where_nothing_runs_in_fp8_fits_the_reasons(
    model: nn.Module, policy: dict[str, Any], hint: str
) -> None:
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8") as caught:
        convert_module(model, **policy)
    said = str(caught[0].message).splitlines()[0]
    assert hint in said
    assert ("first_last" in said) == ("first_last" in hint)


Region = Callable[[], AbstractContextManager[Any]]


def trained(model: nn.Module, region: Region, steps: int = 4) -> list[str]:
    """The warnings of a loop that evaluates outside ``region``, too."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with region():
                loss = model(torch.randn(16, 16)).sum()
            with torch.no_grad():
                model.eval()(torch.randn(16, 16))
            model.train()
            loss.backward()
            optimizer.step()
    return [str(each.message) for each in caught]


def converted() -> nn.Module:
    return convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))


def test_training_outside_every_region_warns_once() -> None:
    model = converted()
    (said,) = trained(convert_module(model), nullcontext)
    assert said.startswith("a layer of Sequential, a model of convert_module, ran 3 times outside every fp8_autocast")
    assert "Call convert_module(model, recipe='delayed'), or run training inside `with fp8_autocast():`" in said
    assert not trained(model, nullcontext)
    assert not trained(converted(), fp8_autocast)
    assert not trained(converted(), partial(fp8_autocast, enabled=False)), "a baseline in high precision"
    plugin = FP8FabricPrecision("tensorwise", weights_dtype=torch.float32)
    assert not trained(convert_module(plugin.convert_module(converted())), plugin.forward_context)


def test_forwards_outside_a_region_that_train_nothing() -> None:
    teacher, student, looked_at = converted(), converted(), converted().eval()
    with torch.no_grad():
        for _ in range(5):
            teacher(torch.randn(16, 16))
            student(torch.randn(16, 16))
    looked_at(torch.randn(16, 16))
    assert not trained(student, fp8_autocast)
    assert not trained(looked_at, fp8_autocast)


def frozen_with_adapter(model: nn.Module) -> nn.Module:
    return nn.Sequential(model.requires_grad_(False), nn.Linear(16, 16))


def after_a_look_in_fp8(model: nn.Module) -> nn.Module:
    with torch.no_grad(), fp8_autocast():
        model(torch.randn(16, 16))
    return model


def converted_again(model: nn.Module) -> nn.Module:
    return convert_module(nn.Sequential(*model.requires_grad_(False), *(nn.Linear(16, 16) for _ in range(4))))


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("of", [copy.deepcopy, frozen_with_adapter, after_a_look_in_fp8, converted_again, Checkpointed])
def test_usual_ways_to_train_outside_every_region(of: Callable[[nn.Module], nn.Module]) -> None:
    (said,) = trained(of(converted()), nullcontext)
    assert "outside every fp8_autocast" in said


def test_training_in_eval_mode_outside_every_region() -> None:
    model = converted().eval()
    for _ in range(2):
        model(torch.randn(16, 16)).sum().backward()
    with pytest.warns(UserWarning, match="outside every fp8_autocast"):
        model(torch.randn(16, 16))


def copied(model: nn.Module, folder: Path) -> nn.Module:
    return copy.deepcopy(model)


def saved_and_loaded(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    loaded: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return loaded


@pytest.mark.parametrize("again", [copied, saved_and_loaded])
def test_a_copy_of_a_model_that_trained_in_fp8(again: Callable[[nn.Module, Path], nn.Module], tmp_path: Path) -> None:
    model = converted()
    assert not trained(model, fp8_autocast)
    (said,) = trained(again(model, tmp_path), nullcontext)
    assert "outside every fp8_autocast" in said
    assert not trained(model, nullcontext)


def test_attention_where_there_is_none() -> None:
    with pytest.warns(UserWarning, match="attention=True: no module of Sequential was found that computes attention"):
        FP8FabricPrecision("tensorwise", attention=True).convert_module(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        )


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is (deprecated|not supported)")
def test_layers_of_torchscript_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 64), torch.jit.script(Scripted()), nn.Linear(64, 64))
    kept = model[1]
    convert_module(model, first_last_layers_bf16=False)
    assert model[1] is kept
    summary = plan_conversion(model, Policy(first_last_layers_bf16=False)).summary
    assert {layer.name: layer.fp8 for layer in summary.layers} == {"0": True, "1.linear.weight": False, "2": True}
    with fp8_autocast(fp8_recipe="tensorwise"):
        model(torch.randn(16, 64)).sum().backward()
    assert kept.linear.weight.grad is not None
