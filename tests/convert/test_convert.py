"""Which layers are converted, how, and what the summary says about them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import FP8Precision, convert_module
from lightning_fp8.convert.conversion import ConversionSummary, plan_conversion, reason_ineligible
from lightning_fp8.convert.policy import Policy
from lightning_fp8.scaled import LINEAR_ROLES, Role


class Block(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class LanguageModel(nn.Module):
    """Embedding, blocks, head; the vocabulary is 40."""

    def __init__(self, blocks: int = 4, hidden: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(blocks))
        self.proj = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.proj(x))


def mlp(depth: int) -> nn.Sequential:
    """Linears and ReLUs by turns: no list of same-class blocks. Linears are named 0, 2, 4, ..."""
    return nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(16, 16), nn.ReLU())))


def fp8_names(model: nn.Module, **policy: object) -> list[str]:
    return [layer.name for layer in plan_conversion(model, Policy(**policy)).layers if layer.fp8]


def reasons(model: nn.Module, **policy: object) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan_conversion(model, Policy(**policy)).layers}


# Which layers


def test_layers_are_the_elements_of_lists_of_blocks() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Longer, but no two of its neighbours are of one class / none holds a Linear.
            self.mixed = mlp(6)
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(9))
            self.short = nn.ModuleList(Block() for _ in range(3))
            self.long = nn.Sequential(*(Block() for _ in range(5)))

    expected_bf16 = {f"{block}.{fc}" for block in ("short.0", "short.2", "long.0", "long.4") for fc in ("fc1", "fc2")}
    model = TwoTowers()
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(fp8_names(model)) == names - expected_bf16
    assert len(names) == 16 + 6


def test_experts_inside_blocks_are_no_layers() -> None:
    class MoEBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    model = nn.Module()
    model.blocks = nn.ModuleList(MoEBlock() for _ in range(3))
    assert fp8_names(model) == [f"blocks.1.experts.{expert}" for expert in range(8)]


def test_a_prefix_of_a_name_is_not_its_layer() -> None:
    model = nn.Sequential(OrderedDict((name, Block()) for name in ("ab", "a", "c")))
    assert fp8_names(model) == ["a.fc1", "a.fc2"]


def test_without_blocks_layers_are_linears_in_registration_order() -> None:
    assert fp8_names(mlp(5)) == ["2", "4", "6"]


@pytest.mark.parametrize(
    ("start", "end", "kept"),
    [(1, 1, range(1, 4)), (0, 0, range(5)), (2, 0, range(2, 5)), (0, 3, range(2)), (5, 0, range(0)), (9, 9, range(0))],
)
def test_counts_of_first_and_last_layers(start: int, end: int, kept: range) -> None:
    counts = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
    assert fp8_names(mlp(5), **counts) == [str(2 * index) for index in kept]
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(5))
    assert fp8_names(model, **counts) == [f"blocks.{index}.{fc}" for index in kept for fc in ("fc1", "fc2")]


def test_first_last_layers_bf16_false_ignores_the_counts() -> None:
    assert fp8_names(mlp(3), first_last_layers_bf16=False, num_layers_at_start_in_bf16=2) == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        (("blocks.1.fc1",), {"blocks.1.fc1"}),
        (("*.fc2",), {f"blocks.{index}.fc2" for index in range(4)}),
        (("blocks.[01].*", "proj"), {"blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "proj"}),
        (("fc1", "BLOCKS.*"), set()),  # a glob matches whole names, and case counts
    ],
)
def test_skip_globs(skip: tuple[str, ...], skipped: set[str]) -> None:
    model = LanguageModel()
    everything = set(fp8_names(model, first_last_layers_bf16=False))
    assert len(everything) == 9
    assert set(fp8_names(model, first_last_layers_bf16=False, skip=skip)) == everything - skipped
    for name in skipped:
        assert reasons(model, first_last_layers_bf16=False, skip=skip)[name].startswith("skip=")


def test_output_head_stays_in_bf16() -> None:
    model = LanguageModel()
    found = reasons(model, first_last_layers_bf16=False)
    assert "vocabulary" in found.pop("head")
    assert set(found.values()) == {"eligible"}  # proj lies outside the blocks, but is no head
    assert "proj" in fp8_names(model)


def test_output_head_without_blocks_is_the_last_linear_only() -> None:
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16), nn.Linear(16, 40))
    assert fp8_names(model, first_last_layers_bf16=False) == ["1", "3"]


def test_linear_of_the_vocabularys_size_inside_a_block_is_converted() -> None:
    model = LanguageModel(hidden=40)
    assert fp8_names(model) == ["blocks.1.fc1", "blocks.1.fc2", "blocks.2.fc1", "blocks.2.fc2", "proj"]


def test_tied_head_stays_in_bf16_and_tied() -> None:
    model = LanguageModel(tied=True)
    convert_module(model, first_last_layers_bf16=False)
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embedding.weight


def test_tied_linear_stays_in_bf16_wherever_it_is() -> None:
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    assert fp8_names(model, first_last_layers_bf16=False) == []
    model[3] = nn.Linear(16, 20)
    assert fp8_names(model, first_last_layers_bf16=False) == ["3"]


def test_head_made_of_our_linear_runs_in_fp8() -> None:
    model = LanguageModel()
    model.head = lightning_fp8.Linear(16, 40, bias=False)
    assert fp8_names(model)[-1] == "head"


def test_models_made_of_our_linear_get_the_bf16_override() -> None:
    model = nn.Sequential(*(lightning_fp8.Linear(16, 16) for _ in range(4)))
    convert_module(model)
    assert [layer.fp8 for layer in model] == [False, True, True, False]
    assert [layer.fp8 for layer in convert_module(model, first_last_layers_bf16=False)] == [True] * 4


def test_subclasses_are_left_alone() -> None:
    class LoraLinear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(*(LoraLinear(16, 16) if index == 2 else nn.Linear(16, 16) for index in range(5)))
    assert "LoraLinear" in reasons(model)["2"]
    convert_module(model)
    assert type(model[2]) is LoraLinear
    assert [type(model[index]) for index in (1, 3)] == [lightning_fp8.Linear] * 2


def test_out_proj_of_torchs_attention_is_reported_and_left() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
    before = [layer.self_attn.out_proj.__class__ for layer in model.layers]
    found = reasons(model)
    assert "MultiheadAttention" in found["layers.1.self_attn.out_proj"]
    assert fp8_names(model) == ["layers.1.linear1", "layers.1.linear2"]
    convert_module(model)
    assert [layer.self_attn.out_proj.__class__ for layer in model.layers] == before


def test_replace_layers_false_runs_only_our_linear_in_fp8() -> None:
    model = nn.Sequential(*(lightning_fp8.Linear(16, 16) if index == 2 else nn.Linear(16, 16) for index in range(5)))
    convert_module(model, replace_layers=False)
    assert [type(layer) is lightning_fp8.Linear for layer in model] == [index == 2 for index in range(5)]
    assert model[2].fp8
    assert "replace_layers=False" in reason_ineligible(model[1], replace_layers=False)
    assert not reason_ineligible(model[1])


def test_a_weight_that_is_no_floating_point_tensor_is_left() -> None:
    model = mlp(3)
    model[2].weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    assert "torch.int8" in reasons(model)["2"]


@pytest.mark.parametrize("count", [-1, 1.0, True, "1"])
def test_counts_must_be_integers_of_at_least_zero(count: object) -> None:
    with pytest.raises(ValueError, match=r"num_layers_at_end_in_bf16=.* must be an integer of at least 0"):
        convert_module(mlp(3), num_layers_at_end_in_bf16=count)


@pytest.mark.parametrize("skip", ["*.head", (1,)])
def test_skip_must_be_a_sequence_of_globs(skip: object) -> None:
    with pytest.raises(TypeError, match="must be a sequence of module-name globs"):
        convert_module(mlp(3), skip=skip)


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
    summary = plan_conversion(LanguageModel(blocks=3), Policy(skip=("*.1.fc2",)))
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
    summary = plan_conversion(model, Policy())
    lines = str(summary).splitlines()
    assert lines[0].split("  ")[0].strip() == "layer"
    assert " to run in " in lines[0]
    assert set(lines[1]) == {"-"}
    for line, layer in zip(lines[2:-1], summary.layers, strict=True):
        assert line.startswith(layer.name)
        assert f" {layer.precision} " in line
        assert "{} × {}".format(*layer.shape) in line
        assert line.endswith(layer.reason)
    # Of 3 x 2 x 16 x 32, 16 x 16 and 40 x 16 elements, 2 x 16 x 32 and 16 x 16.
    assert lines[-1] == "3 of 8 linear layers run in FP8: 32.3 % of the parameters of all matrices"
    assert summary.share_of_parameters == 1280 / 3968
    assert str(ConversionSummary(())).endswith("0 of 0 linear layers run in FP8")


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
    assert plugin.summary == plan_conversion(model, Policy()).with_high_precision("FP32")
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
