"""Which layers are converted."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import lightning_fp8
from lightning_fp8 import convert_module
from lightning_fp8.convert.plan import plan_conversion, reason_ineligible
from lightning_fp8.convert.policy import Policy
from tests.convert.models import Block, LanguageModel, fp8_names, mlp, reasons

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
    assert set(found.values()) == {""}  # proj lies outside the blocks, but is no head
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


@pytest.mark.parametrize(
    ("out_features", "in_features", "narrow"),
    [
        (8, 4096, True),
        (4096, 64, True),  # the largest rank
        (65, 4096, False),
        (64, 768, True),
        (1024, 16384, False),  # keys and values of Llama 3.1 405B
        (128, 16, False),  # a small model's MLP: 8 times its width
        (129, 16, True),
        (16, 16, False),
    ],
)
def test_layers_that_are_narrow_beside_their_length_stay_in_bf16(
    out_features: int, in_features: int, narrow: bool
) -> None:
    with torch.device("meta"):
        layer, ours = nn.Linear(in_features, out_features), lightning_fp8.Linear(in_features, out_features)
    model = nn.Module()
    model.fc, model.asked_for = layer, ours
    found = reasons(model, first_last_layers_bf16=False)
    small, large = sorted((in_features, out_features))
    said = f"narrow: to cast {large} features takes longer than FP8 saves in a product with {small}"
    assert found == {"fc": said if narrow else "", "asked_for": ""}
    assert fp8_names(model, first_last_layers_bf16=False) == ["asked_for"] if narrow else ["fc", "asked_for"]


def test_adapters_stay_in_bf16_at_any_rank() -> None:
    """As peft wraps layers; what a model calls ``base_layer`` without wrapping it makes no adapter of others."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(3))
    for block in model.blocks:
        block.q_proj = nn.Module()
        block.q_proj.base_layer = nn.Linear(16, 16)
        block.q_proj.lora_A = nn.ModuleDict({"default": nn.Linear(16, 12, bias=False)})
        block.q_proj.lora_B = nn.ModuleDict({"default": nn.Linear(12, 16, bias=False)})
        block.fc = nn.Linear(16, 16)
    assert fp8_names(model) == ["blocks.1.q_proj.base_layer", "blocks.1.fc"]
    assert reasons(model)["blocks.1.q_proj.lora_B.default"] == "an adapter (LoRA) of another layer"


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


class Wrapper(nn.Module):
    """As peft's of a layer, or of one parameter of a module (``target_parameters``), nested for several."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": nn.Linear(64, 64)}) for _ in range(2))


def test_adapters_of_modules_that_are_no_linear_layers() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Parameter(torch.randn(4, 64, 64)), nn.Linear(64, 64)

    model = nn.ModuleList([Wrapper(Wrapper(Experts()))])
    rows = {layer.name: layer for layer in plan_conversion(model, Policy(first_last_layers_bf16=False)).summary.layers}
    adapters = {name for name in rows if "lora" in name}
    assert len(adapters) == 4
    assert {rows[name].reason for name in adapters} == {"an adapter (LoRA) of another layer"}
    assert rows["0.base_layer.base_layer.gate"].fp8
