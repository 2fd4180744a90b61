"""Models with experts, converted: recomputed, compiled, copied, accumulated, calibrated, evaluated, under Fabric."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_fp8 import (
    FP8FabricPrecision,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
)
from lightning_fp8.modules.experts import Experts
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.ops.grouped import quantize_experts_op
from tests.convert.test_zoo import Fit, animal
from tests.convert.zoo import ZOO
from tests.op_sides import note_calls
from tests.small import equal_weights, fp8_trainer
from tests.tiers import thorough

MODELS = "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"


def chosen(rows: Iterable[str], *default: str) -> list[Any]:
    """``rows``, of which the default run takes these."""
    return [row if row in default else pytest.param(row, marks=thorough) for row in rows]


MODEL = pytest.mark.parametrize("name", MODELS)
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
FEW_MODELS = pytest.mark.parametrize("name", chosen(MODELS, "mixtral", "gpt_oss"))
FEW_RECIPES = pytest.mark.parametrize("recipe", chosen(RECIPES, "delayed", "blockwise"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    model = animal(name).make().to(dtype).train()
    return convert_module(model, first_last_layers_bf16=False, **options)


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def step(model: nn.Module, recipe: str | None, name: str, run: Any = None, **region: Any) -> dict[str, Tensor]:
    """The loss and all gradients of one batch. ``recipe`` None enters no region."""
    model.zero_grad()
    batch = ZOO[name].batch()
    with fp8_autocast(fp8_recipe=recipe or "delayed", enabled=recipe is not None, **region):
        loss = (model if run is None else run)(**batch, use_cache=False).loss
    loss.backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []


def amaxes(model: nn.Module) -> list[float]:
    return [float(slot.amax) for module in experts_of(model) for of in module.ensure_slots() for slot in of.values()]


@pytest.mark.parametrize("use_reentrant", [True, False])
@RECIPE
@MODEL
def test_recomputation_changes_no_bit(name: str, recipe: str, use_reentrant: bool) -> None:
    model, other = model_of(name), model_of(name)
    other.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(step(other, recipe, name), step(model, recipe, name))
    assert amaxes(other) == amaxes(model)
    assert all(module.record.fp8 == 1 for module in experts_of(other))


@RECIPE
@MODEL
def test_copies(name: str, recipe: str) -> None:
    """A deep copy and a pickle compute alike, and have states of their own; a second conversion changes nothing."""
    model = model_of(name)
    made, seen = step(model, recipe, name), amaxes(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal_weights(other, model)
        assert [type(module) for module in experts_of(other)] == [type(module) for module in experts_of(model)]
        assert_equal(step(other, recipe, name), made)
        with torch.no_grad():
            experts_of(other)[0].down_proj.mul_(100)
        step(other, recipe, name)
    assert amaxes(model) == seen
    parameters = [id(each) for each in model.parameters()]
    convert_module(model, first_last_layers_bf16=False)
    assert [id(each) for each in model.parameters()] == parameters
    assert len(type(experts_of(model)[0]).__mro__) == len(type(experts_of(other)[0]).__mro__)
    assert_equal(step(model, recipe, name), made)


@MODEL
def test_parameters_and_keys_stay(name: str, tmp_path: Path) -> None:
    """``save_pretrained`` gives the same file as the model before, which a plain model loads."""
    torch.manual_seed(0)
    plain = animal(name).make()
    parameters, keys = [id(each) for each in plain.parameters()], list(plain.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    config = plain.config.to_dict()
    model = convert_module(plain, first_last_layers_bf16=False)
    assert experts_of(model)
    assert [id(each) for each in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    model.save_pretrained(tmp_path / "converted")
    one, other = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("plain", "converted"))
    assert one == other
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = animal(name).make()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert equal_weights(again, model)


@RECIPE
@MODEL
def test_fp8_state_resumes_to_the_bit(name: str, recipe: str) -> None:
    def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
        made = []
        for _ in range(steps):
            made.append(step(model, recipe, name)["loss"])
            optimizer.step()
        return made

    model = model_of(name)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), fp8_state_dict(model)))
    expected = train(model, optimizer, 2)

    other = model_of(name)
    optimizer = torch.optim.Adam(other.parameters(), 1e-3)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    load_fp8_state_dict(other, saved[2])
    assert train(other, optimizer, 2) == expected
    assert equal_weights(other, model)
    one, two = fp8_state_dict(other), fp8_state_dict(model)
    assert torch.equal(one["scale"], two["scale"])
    assert torch.equal(one["amax_history"], two["amax_history"])
    names = [each for each in two["names"] if "experts.gate_up_proj" in each and ".1." in each]
    assert [each.rpartition(".")[2] for each in names] == ["input", "weight", "grad_output"]
    if recipe == "delayed":
        assert all(float(scale) > 0 for each, scale in zip(two["names"], two["scale"]) if each in names)


@FEW_RECIPES
@FEW_MODELS
def test_compiled_experts_are_equal_to_the_bit(name: str, recipe: str) -> None:
    model = model_of(name)
    module = experts_of(model)[0]
    width = module.in_features
    h, w, dy = torch.randn(24, width).bfloat16(), torch.rand(24, 2).bfloat16(), torch.randn(24, width).bfloat16()
    index = torch.randint(0, module.num_experts, (24, 2))

    def run(call: Any) -> list[Tensor]:
        module.zero_grad()
        given = h.clone().requires_grad_(), w.clone().requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = call(given[0], index, given[1])
        y.backward(dy)
        return [y.detach(), *(each.grad for each in given), *(each.grad.clone() for each in module.parameters())]  # type: ignore[misc]

    run(module)
    expected, seen = run(module), amaxes(model)
    for slots in module.ensure_slots():
        for slot in slots.values():
            slot.amax.zero_()
    made = run(torch.compile(module, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, made, expected))
    if recipe == "delayed":
        assert amaxes(model)[:6] == pytest.approx(seen[:6])


@thorough
@pytest.mark.parametrize(("name", "recipe"), [("mixtral", "delayed"), ("gpt_oss", "blockwise")])
def test_compiled_models(name: str, recipe: str) -> None:
    """In one graph, where the former model compiles into one."""
    plain = animal(name).make().train()
    try:
        torch.compile(plain, fullgraph=True, backend="aot_eager")(**ZOO[name].batch(), use_cache=False)
    except Exception as error:
        pytest.skip(f"transformers' own does not compile: {type(error).__name__}")
    torch._dynamo.reset()
    model = model_of(name, torch.float32)
    expected = step(model, recipe, name)
    made = step(model, recipe, name, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert float(made["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-3)


@thorough
@pytest.mark.parametrize("recipe", ["delayed"])
def test_inductor(recipe: str) -> None:
    model = model_of("mixtral", torch.float32)
    expected = step(model, recipe, "mixtral")
    made = step(model, recipe, "mixtral", torch.compile(model, fullgraph=True))
    assert float(made["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-3)
    for module in experts_of(model):
        assert all(each.grad is not None for each in module.parameters())


@FEW_RECIPES
@FEW_MODELS
def test_accumulation_casts_experts_once_a_step(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also transposed ones; with the same results to the bit."""
    cast: list[int] = []
    note_calls(monkeypatch, quantize_experts_op, lambda w, *others: cast.append(w.data_ptr()))
    results = []
    for keep in (None, False):
        cast.clear()
        module = Fit(animal(name))
        module.train_dataloader = lambda: torch.utils.data.DataLoader([0, 0, 0, 0])  # type: ignore[method-assign]
        trainer = fp8_trainer(
            recipe, fp8={"cache_fp8_weights": keep}, max_epochs=2, accumulate_grad_batches=4, num_sanity_val_steps=0
        )
        trainer.fit(module)
        gemms = 2 * sum(each.fp8 for each in experts_of(module))
        assert gemms
        assert len(cast) == gemms * 2 * (1 if keep is None else 4 * 2)  # steps; micro-batches, forward and backward
        results.append((module, trainer.precision_plugin.state_dict()["model"]))
    (one, state), (other, of_other) = results
    assert one.losses == other.losses
    assert equal_weights(one, other)
    assert torch.equal(state["scale"], of_other["scale"])
    assert torch.equal(state["amax_history"], of_other["amax_history"])


@FEW_RECIPES
@FEW_MODELS
def test_fabric(name: str, recipe: str) -> None:
    plugin = FP8FabricPrecision(recipe, first_last_layers_bf16=False)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    torch.manual_seed(0)
    model = animal(name).make().bfloat16().train()
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 3e-3))
    losses = []
    for _ in range(3):
        loss = wrapped(**ZOO[name].batch(), use_cache=False).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {module.record.fp8 for module in experts_of(model)} == {3}
    assert plugin.summary is not None
    assert {layer.fp8 for layer in plugin.summary.layers if ".experts." in layer.name} == {True}


@FEW_RECIPES
@FEW_MODELS
def test_a_recipe_of_the_model(name: str, recipe: str) -> None:
    """``convert_module(recipe=)``: no region is entered."""
    pinned, other = model_of(name, recipe=recipe), model_of(name)
    loss = pinned(**ZOO[name].batch(), use_cache=False).loss
    loss.backward()
    made = {key: each.grad for key, each in pinned.named_parameters() if each.grad is not None}
    assert_equal({"loss": loss.detach(), **made}, step(other, recipe, name))


@RECIPE
@MODEL
def test_evaluation(name: str, recipe: str) -> None:
    """It observes nothing, in inference mode, too, and gives the results of training."""
    model = model_of(name)
    step(model, recipe, name)
    before = amaxes(model)
    expected = step(model, recipe, name)["loss"]
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), fp8_autocast(fp8_recipe=recipe):
            loss = model(**ZOO[name].batch(), use_cache=False).loss
        assert torch.equal(loss, expected)
    assert amaxes(model) == before
    assert all(module.record.evaluations_in_fp8 == 2 for module in experts_of(model))


@MODEL
def test_calibration_gives_scales_and_changes_no_loss(name: str) -> None:
    model, plain = model_of(name), animal(name).make
    torch.manual_seed(0)
    plain_model = plain().bfloat16().eval()
    model.eval()
    batch = ZOO[name].batch()
    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True):
        loss = model(**batch, use_cache=False).loss
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(plain_model(**batch, use_cache=False).loss), rel=0.01)
    for module in experts_of(model):
        for slots in module.ensure_slots():
            of = {role.value: float(slot.scale) for role, slot in slots.items()}
            assert of["input"] > 0
            assert of["weight"] > 0
            weights = [getattr(module, each) for each in module.weight_names]
        for slots, weight in zip(module.ensure_slots(), weights):
            scale = next(slot.scale for role, slot in slots.items() if role.value == "weight")
            assert float(scale) == pytest.approx(448 / float(weight.abs().max()), rel=1e-5)


@pytest.mark.parametrize("name", chosen(MODELS, "gpt_oss"))
def test_callback_of_transformers_trainer(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    transformers = importlib.import_module("transformers")
    from lightning_fp8 import FP8TrainerCallback

    tokens = ZOO[name].batch()["input_ids"]
    data = [{"input_ids": tokens[0], "labels": tokens[0]}, {"input_ids": tokens[1], "labels": tokens[1]}] * 8

    def trained(resume: bool) -> Any:
        torch.manual_seed(0)
        model = convert_module(animal(name).make(), recipe="delayed", first_last_layers_bf16=False)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, bf16=True, use_cpu=True,
            save_steps=2, disable_tqdm=True, report_to=[], seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[FP8TrainerCallback()])
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        return model

    whole = trained(False)
    assert all(module.record.fp8 for module in experts_of(whole))
    resumed = trained(True)
    assert fp8_state_dict(resumed)["names"] == fp8_state_dict(whole)["names"]
    if name == "gpt_oss":  # that Trainer saves other models' experts one by one, and resumes without them, in BF16, too
        assert equal_weights(whole, resumed)
        assert torch.equal(fp8_state_dict(whole)["scale"], fp8_state_dict(resumed)["scale"])


def test_routers_stay_in_high_precision() -> None:
    for name in MODELS:
        model = model_of(name)
        routers = [each for key, each in model.named_modules() if key.endswith((".gate", ".router"))]
        assert routers
        assert not any(hasattr(each, "record") for each in routers)
