"""A tiny Qwen3 and Qwen3-MoE in the format of published FP8 checkpoints: transformers loads them, peft trains them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import FP8FabricPrecision, conversion_summary, convert_module, fp8_autocast
from lightning_fp8.sensitivity import measure_sensitivity
from tests.convert.codes.made import copied, load_qwen, same_bits, save_moe, save_qwen
from tests.tiers import thorough

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen")
    save_qwen(made)
    return made


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("moe")
    save_moe(made)
    return made


def adapted(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(**{"target_modules": "all-linear", "r": 8, "lora_alpha": 16, **options})
    )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def batch() -> Tensor:
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    ids[:, 1::2] = ids[:, 0::2]
    return ids


def train(model: Any, optimizer: Any, steps: int, recipe: str | None) -> list[float]:
    losses, ids = [], batch()
    model.train()
    for _ in range(steps):
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_saved_folder_has_all_bits_and_loads_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_qwen(folder, monkeypatch)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"
    before = copied(model.state_dict())
    convert_module(model, first_last_layers_bf16=False)
    assert [row.name for row in conversion_summary(model).layers if not row.fp8] == ["lm_head"]
    assert same_bits(model.state_dict(), before)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    again = load_qwen(tmp_path, monkeypatch)
    assert type(again.model.layers[0].mlp.up_proj).__name__ == "FP8Linear"
    assert same_bits(again.state_dict(), before)


def test_outputs_are_near_those_of_the_dequantized_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load_qwen(folder, monkeypatch, dequantize=True)
    model = convert_module(load_qwen(folder, monkeypatch), first_last_layers_bf16=False)
    with torch.no_grad():
        expected = reference(batch()).logits
        assert torch.equal(model(batch()).logits, expected)  # in high precision
        with fp8_autocast(fp8_recipe="blockwise"):
            logits = model(batch()).logits
    assert 0 < float((logits - expected).norm() / expected.norm()) < 0.08


RECIPES = ["blockwise", *(pytest.param(each, marks=thorough) for each in ("delayed", "tensorwise", "rowwise", "mxfp8"))]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:norms and MLPs that")
@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_trains_as_on_the_dequantized_model(folder: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {}
    for dequantize in (True, False):
        base = load_qwen(folder, monkeypatch, dequantize)
        if not dequantize:
            convert_module(base, first_last_layers_bf16=False)
            before = copied(base.state_dict())
        model = adapted(base)
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        losses[dequantize] = train(model, optimizer, 6, None if dequantize else recipe)
    assert losses[False][-1] < losses[False][0] - 0.3
    assert losses[False] == pytest.approx(losses[True], abs=0.01)
    after = {name.replace(".base_layer", ""): each for name, each in base.state_dict().items() if "lora" not in name}
    assert same_bits(after, before)
    assert len(optimizer.state) == 2 * 14  # the adapters alone


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:norms and MLPs that")
def test_adapted_first_then_converted_resumes_to_the_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[Any, Any]:
        model = adapted(load_qwen(folder, monkeypatch))
        convert_module(model, first_last_layers_bf16=False)
        return model, torch.optim.AdamW(model.parameters(), 5e-3)

    model, optimizer = made()
    train(model, optimizer, 2, "blockwise")
    state, of_optimizer = copied(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 2, "blockwise")
    resumed, other = made()
    resumed.load_state_dict(state)
    other.load_state_dict(of_optimizer)
    assert train(resumed, other, 2, "blockwise") == expected


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_merging_rounds_once_more_and_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.weights.fp8_tensor._said", {})
    model = adapted(convert_module(load_qwen(folder, monkeypatch), first_last_layers_bf16=False))
    for name, each in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, std=0.02)
    expected = model(batch()).logits
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        merged = model.merge_and_unload()
    assert sum("merging an adapter" in str(each.message) for each in said) == 1
    merged.save_pretrained(tmp_path)
    assert same_bits(load_qwen(tmp_path, monkeypatch).state_dict(), merged.state_dict())
    difference = (merged(batch()).logits - expected).detach().norm() / expected.detach().norm()
    assert 0 < float(difference) < 0.1


@pytest.mark.parametrize("weights_dtype", [None, "fp16"])
def test_the_plugin_takes_codes_before_it_casts(
    folder: Path, weights_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_qwen(folder, monkeypatch)
    before = {name: each for name, each in copied(model.state_dict()).items() if "proj" in name}
    plugin = FP8FabricPrecision("blockwise", weights_dtype=weights_dtype, first_last_layers_bf16=False)
    plugin.convert_module(model)
    after = model.state_dict()
    assert same_bits({name: after[name] for name in before}, before)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == (torch.float16 if weights_dtype else torch.bfloat16)
    assert model.lm_head.weight.dtype == (torch.float16 if weights_dtype else torch.bfloat16)


# --- Experts ----------------------------------------------------------------------------------------------------------


def test_a_saved_folder_of_experts_has_all_bits_and_loads_again(
    of_experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pytest.importorskip("safetensors.torch")
    model = load_qwen(of_experts, monkeypatch)
    assert type(model.model.layers[0].mlp.experts).__name__ == "FP8Experts"
    before = copied(model.state_dict())
    convert_module(model, first_last_layers_bf16=False)
    kept = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "lm_head"]
    assert [row.name for row in conversion_summary(model).layers if not row.fp8] == kept
    assert same_bits(model.state_dict(), before)
    model.save_pretrained(tmp_path)
    saved, published = (files.load_file(each / "model.safetensors") for each in (tmp_path, of_experts))
    assert same_bits(saved, published)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv" in saved
    assert same_bits(load_qwen(tmp_path, monkeypatch).state_dict(), before)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:norms and MLPs that")
@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_trains_on_experts_as_on_the_dequantized_model(
    of_experts: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    for dequantize in (True, False):
        base = load_qwen(of_experts, monkeypatch, dequantize)
        if not dequantize:
            convert_module(base, first_last_layers_bf16=False)
            before = copied(base.state_dict())
        model = adapted(base, target_modules=ATTENTION)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 5e-3)
        losses[dequantize] = train(model, optimizer, 6, None if dequantize else recipe)
    assert losses[False][-1] < losses[False][0] - 0.3
    assert losses[False] == pytest.approx(losses[True], abs=0.03)
    after = {name.replace(".base_layer", ""): each for name, each in base.state_dict().items() if "lora" not in name}
    assert same_bits(after, before)
    assert base.model.layers[0].mlp.experts.record.fp8 == 6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:norms and MLPs that")
def test_adapted_experts_resume_to_the_bit(of_experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[Any, Any]:
        model = adapted(load_qwen(of_experts, monkeypatch), target_modules=ATTENTION)
        convert_module(model, first_last_layers_bf16=False)
        model.gradient_checkpointing_enable()
        return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 5e-3)

    model, optimizer = made()
    train(model, optimizer, 2, "blockwise")
    state, of_optimizer = copied(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 2, "blockwise")
    resumed, other = made()
    resumed.load_state_dict(state)
    other.load_state_dict(of_optimizer)
    assert train(resumed, other, 2, "blockwise") == expected


PARAMETERS = {"target_modules": ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj"]}


@pytest.mark.parametrize(("options", "converted_first"), [({}, True), (PARAMETERS, True), (PARAMETERS, False)])
def test_adapters_of_codes_of_experts_are_refused(
    of_experts: Path, options: dict[str, Any], converted_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft adds what they compute to the values of the weight, in each forward."""
    model = load_qwen(of_experts, monkeypatch)
    if converted_first:
        convert_module(model, first_last_layers_bf16=False)
    model = adapted(model, **options)
    if not converted_first:
        convert_module(model, first_last_layers_bf16=False)
    with pytest.raises(NotImplementedError, match=r"gate_up_proj of experts.*target_modules.*dequantize=True"):
        model(batch())


def test_3d_codes_of_other_modules_are_refused_with_the_way_out() -> None:
    class FP8Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(2, 8, 8).to(torch.float8_e4m3fn), requires_grad=False)
            self.down_proj_scale_inv = nn.Parameter(torch.ones(2, 1, 1))

    with pytest.raises(TypeError, match=r"0\.down_proj of Sequential.*FP8Experts is neither.*dequantize=True"):
        convert_module(nn.Sequential(FP8Experts(), nn.Linear(8, 8)))
    blocks = nn.ModuleList(nn.ModuleDict({"experts": FP8Experts(), "up": nn.Linear(8, 8)}) for _ in range(3))
    with pytest.raises(TypeError, match=r"2 more modules are refused.*skip=\('\*\.experts',\)"):
        convert_module(blocks)
    convert_module(blocks, skip=("*.experts",), first_last_layers_bf16=False)


@thorough
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_sensitivity_of_an_adapted_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(load_qwen(folder, monkeypatch))
    found = measure_sensitivity(
        model, [batch()], lambda model, ids: model(input_ids=ids, labels=ids).loss, recipe="blockwise", group="block",
        progress=False,
    )  # fmt: skip
    assert len(found.rows) == 2
    assert all(0 < row.error < 0.3 for row in found.rows)
