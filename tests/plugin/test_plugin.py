"""The plugin's contract with Trainer and Fabric: what they refuse, what they call, what a checkpoint holds."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import UserList
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from lightning_fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    fp8_autocast,
    make_recipe,
)
from lightning_fp8.convert.policy import Policy
from lightning_fp8.recipes import RECIPES
from lightning_fp8.scaled import Role
from tests.small import Regression, fp8_trainer, regression_data


class Mlp(LightningModule):
    """Four linear layers, of which two run in FP8."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))
        self.steps = 0
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(x.dtype)
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        (x,) = batch
        return F.mse_loss(self(x), x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(16, 16, generator=generator)), batch_size=8)


def trainer(*plugins: Any, callbacks: tuple[Callback, ...] | None = None, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        plugins=list(plugins) or None,
        callbacks=list((FP8Callback(),) if callbacks is None else callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "num_sanity_val_steps": 0} | options),
    )


def slots(module: Mlp, layer: int = 1) -> Any:
    linear = module.layers[layer]
    assert isinstance(linear, lightning_fp8.Linear)
    return linear.slots


# Refused before training


@pytest.mark.parametrize("takes_them", [lightning_fp8.convert_module, FP8Precision, FP8FabricPrecision])
def test_the_policys_defaults_are_the_same_wherever_it_is_given(takes_them: Any) -> None:
    parameters = inspect.signature(takes_them).parameters
    for option in dataclasses.fields(Policy):
        assert parameters[option.name].default == option.default, option.name


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_trainer_without_the_callback(stage: str) -> None:
    module = Mlp()
    with pytest.raises(MisconfigurationException, match=r"needs FP8Callback.*callbacks=\[FP8Callback\(\)\]"):
        getattr(trainer(FP8Precision(), callbacks=()), stage)(module, loader())
    assert module.steps == 0
    assert not any(isinstance(layer, lightning_fp8.Linear) for layer in module.layers)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_callback_without_the_plugin(stage: str) -> None:
    module = Mlp()
    with pytest.raises(MisconfigurationException, match=r"FP8Callback needs FP8Precision.*plugins=\[FP8Precision"):
        getattr(trainer(), stage)(module, loader())
    assert module.steps == 0


def test_callback_with_another_precision_names_it() -> None:
    with pytest.raises(MisconfigurationException, match="but the Trainer's precision is HalfPrecision"):
        trainer(precision="bf16-true").fit(Mlp(), loader())


def test_precision_beside_the_plugin_is_lightnings_own_error() -> None:
    with pytest.raises(ValueError, match="precision"):
        trainer(FP8Precision(), precision="bf16-true")


def test_trainers_plugin_in_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision()])
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = wrapped(torch.randn(8, 16)).sum()
    with pytest.raises(MisconfigurationException, match="is for the Trainer; give Fabric FP8FabricPrecision"):
        fabric.backward(loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before))


def test_fabrics_plugin_in_the_trainer_is_lightnings_own_error() -> None:
    with pytest.raises(MisconfigurationException, match="FP8FabricPrecision"):
        trainer(FP8FabricPrecision())


def test_the_callback_of_an_earlier_trainer_does_not_count() -> None:
    plugin = FP8Precision()
    trainer(plugin).fit(Mlp(), loader())
    with pytest.raises(MisconfigurationException, match="needs FP8Callback"):
        trainer(plugin, callbacks=()).fit(Mlp(), loader())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_without_fp8_layers_warns_and_trains(depth: int) -> None:
    module, plugin = Mlp(depth), FP8Precision()
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8.*first_last_layers_bf16=False"):
        trainer(plugin).fit(module, loader())
    assert module.steps == 2
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == 0


def test_a_model_with_fp8_layers_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(FP8Precision()).fit(Mlp(), loader())
    assert not [warning for warning in caught if "FP8" in str(warning.message)]


@pytest.mark.parametrize("name", ["weights_dtype", "compute_dtype"])
def test_dtypes_must_be_of_high_precision(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=torch.float64 is not supported; use one of torch.bfloat16"):
        FP8Precision(**{name: torch.float64})


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16])
def test_only_float32_weights_compute_in_another_dtype(weights_dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"pass weights_dtype=torch\.float32 or leave compute_dtype out"):
        FP8Precision(weights_dtype=weights_dtype, compute_dtype=torch.float32)


def test_policy_and_recipe_errors_come_from_the_constructor() -> None:
    with pytest.raises(ValueError, match="num_layers_at_start_in_bf16=-1"):
        FP8Precision(num_layers_at_start_in_bf16=-1)
    with pytest.raises(TypeError, match="skip="):
        FP8FabricPrecision(skip="*.head")
    with pytest.raises(ValueError, match="'blockwise'"):
        FP8Precision(recipe="block")  # type: ignore[arg-type]


# What the plugin says and does


@pytest.mark.parametrize(
    ("weights_dtype", "compute_dtype", "precision"),
    [
        (torch.bfloat16, None, "bf16-true"),
        (torch.bfloat16, torch.bfloat16, "bf16-true"),
        (torch.float16, None, "16-true"),
        (torch.float32, None, "32-true"),
        (torch.float32, torch.float32, "32-true"),
        (torch.float32, torch.bfloat16, "bf16-mixed"),
        (torch.float32, torch.float16, "16-mixed"),
    ],
)
@pytest.mark.parametrize("cls", [FP8Precision, FP8FabricPrecision])
def test_precision_strings_are_lightnings(
    cls: type[FP8FabricPrecision], weights_dtype: torch.dtype, compute_dtype: torch.dtype | None, precision: str
) -> None:
    plugin = cls(weights_dtype=weights_dtype, compute_dtype=compute_dtype)
    assert plugin.precision == precision
    if cls is FP8Precision:
        assert trainer(plugin).precision == precision
    Trainer(accelerator="cpu", logger=False, precision=precision)  # a name that Lightning knows


@pytest.mark.parametrize(
    ("weights_dtype", "compute_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.float32, torch.bfloat16)],
)
def test_the_table_says_what_layers_outside_of_fp8_compute_in(
    weights_dtype: torch.dtype, compute_dtype: torch.dtype | None
) -> None:
    plugin = FP8FabricPrecision(weights_dtype=weights_dtype, compute_dtype=compute_dtype, skip=["1"])
    model = plugin.convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    with plugin.forward_context():
        computed = model[1](torch.ones(16, 16, dtype=weights_dtype)).dtype
    bits = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
    assert plugin.summary is not None
    table = {line.split()[0]: line.split()[4] for line in str(plugin.summary).splitlines()[2:-1]}
    assert table == {"0": bits[computed], "1": bits[computed], "2": "FP8", "3": bits[computed]}


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_convert_input_casts_floats_only(weights_dtype: torch.dtype) -> None:
    data = {
        "x": torch.randn(2, dtype=torch.float64),
        "same": torch.randn(2, dtype=weights_dtype),
        "tokens": torch.arange(3),
        "mask": torch.tensor([True]),
        "complex": torch.zeros(1, dtype=torch.complex64),
        "nested": [torch.zeros(1), ("text", 3, None)],
    }
    converted = FP8FabricPrecision(weights_dtype=weights_dtype).convert_input(data)
    assert converted["x"].dtype == weights_dtype
    assert torch.equal(converted["x"], data["x"].to(weights_dtype))
    assert converted["same"] is data["same"]
    for name in ("tokens", "mask", "complex"):
        assert converted[name] is data[name]
    assert converted["nested"][0].dtype == weights_dtype
    assert converted["nested"][1] == ("text", 3, None)


@pytest.mark.parametrize("cls", [FP8Precision, FP8FabricPrecision])
def test_contexts_set_the_default_dtype_and_give_it_back(cls: type[FP8FabricPrecision]) -> None:
    plugin = cls()
    for context in (plugin.tensor_init_context, plugin.module_init_context, plugin.forward_context):
        with context():
            assert torch.zeros(1).dtype == torch.bfloat16
        assert torch.zeros(1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="inside"), context():
            raise RuntimeError("inside")
        assert torch.get_default_dtype() == torch.float32


def test_parameters_and_floating_point_buffers_are_cast_in_place() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    parameters = list(model.parameters())
    FP8FabricPrecision().convert_module(model)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_inputs_reach_the_module_in_the_weights_dtype() -> None:
    module = Mlp()
    trainer(FP8Precision()).fit(module, loader())
    assert module.dtypes == {torch.bfloat16}


# Stages


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stages_without_training(stage: str) -> None:
    module, plugin = Mlp(), FP8Precision()
    result = getattr(trainer(plugin), stage)(module, loader())
    assert [type(layer) is lightning_fp8.Linear for layer in module.layers] == [False, True, True, False]
    history = plugin.histories["model"]
    assert not history.amax.any()
    assert not history.scale.any()
    if stage == "predict":
        assert [batch.dtype for batch in result] == [torch.bfloat16] * 2
        x = loader().dataset.tensors[0]
        with torch.no_grad():
            exact = module.layers(x.bfloat16())  # outside a region the layers run in high precision
        error = (torch.cat(result) - exact).norm() / exact.norm()
        assert 0 < error < 0.1


def test_stages_after_training_keep_conversion_and_scales() -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    history, layers = plugin.histories["model"], list(module.layers)
    state = history.state_dict()
    assert (state["scale"] > 0).all()
    assert state["updates"] == 2
    for stage in ("validate", "test", "predict"):
        getattr(run, stage)(module, loader())
        assert plugin.histories == {"model": history}
        assert all(new is old for new, old in zip(module.layers, layers))
        assert slots(module)[Role.INPUT].history is history
        after = history.state_dict()
        assert torch.equal(after["scale"], state["scale"])
        assert torch.equal(after["amax_history"], state["amax_history"])
        assert after["updates"] == 2


def test_training_again_goes_on_with_the_same_scales() -> None:
    module, plugin = Mlp(), FP8Precision()
    trainer(plugin).fit(module, loader())
    amax_history = plugin.histories["model"].amax_history.clone()
    trainer(plugin).fit(module, loader())
    history = plugin.histories["model"]
    assert history.updates == 4
    assert torch.equal(history.amax_history[:-2], amax_history[2:])
    assert (history.amax_history[-2:] > 0).all()


def test_another_plugin_takes_the_model_with_its_scales() -> None:
    module = Mlp()
    first, second = FP8Precision(), FP8Precision(num_layers_at_end_in_bf16=0)
    trainer(first).fit(module, loader())
    known = first.histories["model"].amax_history[-2:].clone()
    trainer(second).fit(module, loader())
    history = second.histories["model"]
    assert history.names[:6] == first.histories["model"].names
    assert len(history.names) == 9
    assert torch.equal(history.amax_history[-4:-2, :6], known)
    assert not history.amax_history[-4:-2, 6:].any()
    assert (history.amax_history[-2:] > 0).all()


def test_one_plugin_for_another_model_starts_over() -> None:
    first, second, plugin = Mlp(), Mlp(5), FP8Precision()
    trainer(plugin).fit(first, loader())
    old = plugin.histories["model"]
    kept = old.state_dict()
    trainer(plugin).fit(second, loader())
    new = plugin.histories["model"]
    assert new is not old
    assert list(plugin.histories) == ["model"]
    assert len(new.names) == 9
    assert new.updates == 2
    assert (new.amax_history[-2:] > 0).all()
    assert not new.amax_history[:-2].any()
    assert old.updates == 2
    assert torch.equal(old.scale, kept["scale"])
    assert torch.equal(old.amax_history, kept["amax_history"])


# Checkpoints


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_checkpoint_holds_the_state_and_loads_with_weights_only(recipe: Any, tmp_path: Path) -> None:
    module, plugin = Mlp(), FP8Precision(recipe)
    run = trainer(plugin)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Mlp().state_dict())
    state = checkpoint["FP8Precision"]
    assert set(state) == {"recipe", "model"}
    assert make_recipe(state["recipe"]) == make_recipe(recipe)
    expected = plugin.histories["model"]
    assert state["model"]["names"] == expected.names
    assert torch.equal(state["model"]["scale"], expected.scale)
    assert torch.equal(state["model"]["amax_history"], expected.amax_history)
    assert state["model"]["updates"] == (2 if recipe == "delayed" else 0)
    for key in ("scale", "amax_history"):
        assert state["model"][key].dtype == torch.float32
    if recipe == "delayed":
        assert state["model"]["amax_history"].shape == (1024, 6)
        assert (state["model"]["scale"] > 0).all()


def test_state_is_a_copy() -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    state = plugin.state_dict()
    scale = state["model"]["scale"].clone()
    plugin.histories["model"].scale.zero_()
    plugin.histories["model"].amax_history.zero_()
    assert torch.equal(state["model"]["scale"], scale)
    assert state["model"]["amax_history"].any()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_every_stage_takes_the_scales_of_a_checkpoint(stage: str, tmp_path: Path) -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    restored = FP8Precision()
    getattr(trainer(restored), stage)(Mlp(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(restored.histories["model"].scale, plugin.histories["model"].scale)
    assert torch.equal(restored.histories["model"].amax_history, plugin.histories["model"].amax_history)


def test_state_before_conversion_waits_for_it() -> None:
    plugin = FP8FabricPrecision()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    names = ["1.input", "1.weight", "1.grad_output"]
    state = {"model": {"names": names, "scale": torch.arange(1.0, 4), "amax_history": torch.ones(2, 3), "updates": 7}}
    plugin.load_state_dict(state)
    assert not plugin.histories
    plugin.convert_module(model)
    history = plugin.histories["model"]
    assert history.scale.tolist() == [1, 2, 3]
    assert history.updates == 7
    history.scale.fill_(9)
    plugin.convert_module(model)  # waits no longer
    assert history.scale.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model": {"names": []}}, "lacks"),
        ({"model": 3}, "must be a dictionary"),
        (
            {"model": {"names": ["a"], "scale": torch.zeros(2), "amax_history": torch.zeros(1, 1), "updates": 0}},
            r"'scale' has shape \(2,\) for 1 names",
        ),
        (
            {"model": {"names": ["a"], "scale": torch.ones(1), "amax_history": -torch.ones(1, 1), "updates": 0}},
            "damaged",
        ),
    ],
)
def test_malformed_state_changes_nothing(broken: dict[str, Any], message: str) -> None:
    plugin = FP8FabricPrecision()
    with pytest.raises(ValueError, match=message):
        plugin.load_state_dict(broken)
    plugin.convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    history = plugin.histories["model"]
    history.scale.fill_(2)
    with pytest.raises(ValueError, match=message):
        plugin.load_state_dict(broken)
    assert history.scale.tolist() == [2, 2, 2]


def test_float16_has_no_loss_scaler_and_says_so() -> None:
    with pytest.warns(UserWarning, match="without a loss scaler"):
        FP8Precision(weights_dtype=torch.float32, compute_dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FP8Precision(weights_dtype=torch.float32, compute_dtype=torch.bfloat16)
        FP8Precision(weights_dtype=torch.float16)


def test_values_that_mean_the_same_are_taken() -> None:
    plugin = FP8Precision(
        DelayedScaling(margin=np.int32(1), amax_history_len=np.int64(16), reduce_amax=np.bool_(False)),
        weights_dtype="float32",
        compute_dtype="torch.bfloat16",
        first_last_layers_bf16=np.bool_(True),
        num_layers_at_start_in_bf16=np.int64(2),
        skip=UserList(["*.head"]),
    )
    assert plugin.recipe == DelayedScaling(margin=1, amax_history_len=16, reduce_amax=False)
    assert (type(plugin.recipe.margin), type(plugin.recipe.reduce_amax)) == (int, bool)
    assert (plugin.weights_dtype, plugin.compute_dtype) == (torch.float32, torch.bfloat16)
    assert plugin.policy == Policy(True, 2, skip=("*.head",))
    assert type(plugin.policy.num_layers_at_start_in_bf16) is int
    assert FP8Precision(skip={"*.head": 1}.keys()).policy.skip == ("*.head",)
    assert Float8CurrentScaling(amax_epsilon=np.float32(0.5)).amax_epsilon == 0.5
    assert fp8_autocast(enabled=np.bool_(False)).context.enabled is False


@pytest.mark.parametrize(("skip", "is_said"), [((), True), (("*",), False)])
def test_training_on_the_cpu_says_once_that_fp8_is_emulated(
    skip: tuple[str, ...], is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.callbacks.fp8.rank_zero_info", said.append)
    fp8_trainer(fp8={"skip": skip}, max_epochs=2).fit(Regression(), regression_data())
    assert sum("emulated on the CPU" in line for line in said) == is_said
