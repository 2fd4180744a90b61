"""First and last blocks of each tower, and which linear layers are heads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


class Tower(nn.Module):
    def __init__(self, depth: int = 3, classes: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        if classes:
            self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


class Pair(nn.Module):
    def __init__(self, first: str, second: str, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.add_module(first, one)
        self.add_module(second, two)


def network(depth: int, classes: int = 16) -> nn.Sequential:
    """Linear layers and activations by turns: no list of blocks. Its linear layers are 0, 2, 4, ..."""
    layers = [layer for _ in range(depth - 1) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, classes))


def fp8_names(model: nn.Module, **policy: object) -> list[str]:
    return [layer.name for layer in plan_conversion(model, Policy(**policy)).summary.layers if layer.fp8]


def reason(model: nn.Module, name: str, **policy: object) -> str:
    return {layer.name: layer.reason for layer in plan_conversion(model, Policy(**policy)).summary.layers}[name]


# Towers


@pytest.mark.parametrize("names", [("encoder", "decoder"), ("teacher", "student")])
def test_each_tower_has_a_first_and_a_last_block(names: tuple[str, str]) -> None:
    first, second = names
    model = Pair(first, second, Tower(3), Tower(4))
    assert fp8_names(model) == [f"{first}.blocks.1.fc", f"{second}.blocks.1.fc", f"{second}.blocks.2.fc"]
    assert reason(model, f"{first}.blocks.0.fc") == f"in layer 0 of 3 of {first}.blocks, one of the first 1"
    assert reason(model, f"{second}.blocks.3.fc") == f"in layer 3 of 4 of {second}.blocks, one of the last 1"


def test_a_copy_of_a_model_is_a_tower_of_its_own() -> None:
    student = Tower(3)
    model = Pair("student", "average", student, copy.deepcopy(student))
    assert fp8_names(model) == ["student.blocks.1.fc", "average.blocks.1.fc"]


def test_the_blocks_of_stages_are_one_tower() -> None:
    class Stage(Tower):
        def __init__(self, depth: int) -> None:
            super().__init__(depth)
            self.downsample = nn.Linear(16, 16)

    model = nn.Module()
    model.stages = nn.Sequential(Stage(1), Stage(2), Stage(1))
    assert fp8_names(model) == [
        "stages.0.downsample",
        "stages.1.blocks.0.fc",
        "stages.1.blocks.1.fc",
        "stages.1.downsample",
    ]
    assert reason(model, "stages.2.blocks.0.fc") == "in layer 3 of 4, one of the last 1"
    assert reason(model, "stages.2.downsample") == "output head: the last linear layer, after the blocks"


def test_blocks_of_two_classes_by_turns_are_one_tower() -> None:
    class Other(Block):
        pass

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Other(), Other(), Block()])
    assert fp8_names(model) == ["layers.1.fc", "layers.2.fc"]
    model.layers = nn.ModuleList([nn.ModuleList([Block(), Other()]) for _ in range(3)])
    assert fp8_names(model) == ["layers.1.0.fc", "layers.1.1.fc"]


def test_a_part_of_a_part_has_no_head() -> None:
    model = Pair("encoder", "decoder", Tower(3), Pair("transformer", "masks", Tower(3, 16), Tower(3)))
    model.decoder.scores = nn.Linear(16, 4)
    names = fp8_names(model, first_last_layers_bf16=False)
    assert "decoder.transformer.head" in names
    assert "decoder.scores" not in names


def test_networks_without_blocks_have_first_and_last_layers_of_their_own() -> None:
    model = Pair("generator", "discriminator", network(4), network(3, 1))
    assert fp8_names(model) == ["generator.2", "generator.4", "discriminator.2"]
    wrapped = nn.Module()
    wrapped.model = model
    assert fp8_names(wrapped) == ["model.generator.2", "model.generator.4", "model.discriminator.2"]


def test_one_network_beside_small_ones_is_one_network() -> None:
    model = Pair("embed", "body", nn.Sequential(nn.Linear(16, 16)), network(4))
    assert fp8_names(model) == ["body.0", "body.2", "body.4"]


def test_short_lists_of_bare_layers_beside_blocks_are_no_towers() -> None:
    model = Pair("tower", "adapters", Tower(4), nn.ModuleList(nn.Linear(16, 16) for _ in range(6)))
    model.out = nn.Linear(16, 4)
    assert fp8_names(model) == ["tower.blocks.1.fc", "tower.blocks.2.fc", *(f"adapters.{i}" for i in range(6))]


class Chain(nn.Module):
    """A network whose layers are a bare list."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))


def test_each_network_of_a_bare_list_has_first_and_last_layers() -> None:
    model = Pair("generator", "critic", Chain(8, 64, 64, 32), Chain(32, 64, 64, 64, 1))
    assert fp8_names(model) == ["generator.layers.1", "critic.layers.1", "critic.layers.2"]
    model.critic.more = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    assert fp8_names(model)[:3] == ["generator.layers.1", "critic.layers.1", "critic.layers.2"]


def test_a_list_of_heads_beside_a_trunk_is_no_tower() -> None:
    model = nn.Module()
    model.fc1, model.fc2, model.fc3 = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    model.heads = nn.ModuleList(nn.Linear(64, 5) for _ in range(5))
    assert fp8_names(model)[:2] == ["fc2", "fc3"]
    assert reason(model, "fc1") == "in layer 0 of 8, one of the first 1"


# Heads


class Positions(nn.Module):
    """A position table as long as the model is wide, which made every layer a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.tower = Tower(3)
        self.between = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)


def test_a_table_as_long_as_the_model_is_wide_makes_no_heads() -> None:
    model = Positions()
    assert fp8_names(model, first_last_layers_bf16=False) == [f"tower.blocks.{i}.fc" for i in range(3)] + ["between"]
    assert reason(model, "head") == "output head: the last linear layer, out_features=40 is the vocabulary"


def test_a_tied_head_is_named_with_its_embedding() -> None:
    model = Positions()
    model.head.weight = model.tokens.weight
    assert reason(model, "head") == "output head: shares its weight with tokens"


def test_the_models_own_word_counts_wherever_the_head_is_registered() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Linear(16, 40)
            self.tower = Tower(3)
            self.after = nn.Linear(16, 16)

        def get_output_embeddings(self) -> nn.Module:
            return self.classes

    model = Early()
    assert reason(model, "classes") == "output head: the model's get_output_embeddings()"
    assert fp8_names(model) == ["tower.blocks.1.fc", "after"]


class Adapted(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, layer.out_features, bias=False)})


def test_every_layer_of_a_wrapped_head_is_the_head() -> None:
    class Speaking(Tower):
        def get_output_embeddings(self) -> nn.Module:
            return self.head

    for cls in (Tower, Speaking):
        model = cls(3, 10)
        model.head = Adapted(model.head)
        assert fp8_names(model) == ["blocks.1.fc"]
        assert reason(model, "head.base_layer").startswith("output head")
    model = Tower(3, 10)
    model.head = nn.ModuleDict({"original_module": model.head, "modules_to_save": nn.Sequential(nn.Linear(16, 10))})
    assert fp8_names(model) == ["blocks.1.fc"]


def test_second_heads() -> None:
    class Pretraining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Tower(3)
            self.body.pooler = nn.Linear(16, 8)
            self.scores = Pair("words", "follows", nn.Linear(16, 40), nn.Linear(16, 2))
            self.boxes = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

        def get_output_embeddings(self) -> nn.Module:
            return self.scores.words

    assert fp8_names(Pretraining()) == ["body.blocks.1.fc", "body.pooler", "boxes.0"]


def test_a_layer_of_the_loss_is_not_the_last() -> None:
    model = Pair("net", "loss", Tower(3, 10), nn.Sequential(nn.Linear(10, 10)))
    assert reason(model, "net.head") == "output head: the last linear layer, after the blocks"


def test_a_get_output_embeddings_that_takes_arguments() -> None:
    class Other(Tower):
        def get_output_embeddings(self, ids: Tensor) -> Tensor:
            return ids

    assert fp8_names(Other()) == ["blocks.1.fc"]


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])
def test_a_model_that_has_no_word_for_it(error: type[Exception]) -> None:
    class Refusing(Tower):
        def get_output_embeddings(self) -> nn.Module:
            raise error

    assert fp8_names(Refusing()) == ["blocks.1.fc"]


def test_a_classifier_behind_the_blocks_is_a_head() -> None:
    model = Tower(3, classes=10)
    assert fp8_names(model, first_last_layers_bf16=False) == [f"blocks.{i}.fc" for i in range(3)]
    assert reason(model, "head") == "output head: the last linear layer, after the blocks"


def test_teacher_and_student_each_have_a_head() -> None:
    model = Pair("teacher", "student", Tower(3, 10), Tower(3, 10))
    assert fp8_names(model) == ["teacher.blocks.1.fc", "student.blocks.1.fc"]


def test_a_head_that_was_asked_for_in_fp8_and_the_policys_order() -> None:
    model = Tower(3, 10)
    assert reason(model, "head", skip=("head",)) == "skip='head'"
    convert_module(model)
    with fp8_autocast(fp8_recipe="tensorwise"):
        assert torch.isfinite(model(torch.randn(2, 16))).all()
