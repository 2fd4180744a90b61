"""The plugin's contract with Trainer and Fabric: what they refuse, what they call."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import UserList
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_fp8
from lightning_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    Linear,
    fp8_autocast,
)
from lightning_fp8.convert.policy import Policy
from lightning_fp8.parallel.pieces import Cut
from tests.plugin.small_model import Mlp, loader, trainer
from tests.small import Regression, fp8_trainer, regression_data

# Refused before training


@pytest.mark.parametrize("takes_them", [lightning_fp8.convert_module, FP8Precision, FP8FabricPrecision])
def test_the_policys_defaults_are_the_same_wherever_it_is_given(takes_them: Any) -> None:
    parameters = inspect.signature(takes_them).parameters
    for option in dataclasses.fields(Policy):
        assert parameters[option.name].default == option.default, option.name


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_callback_without_the_plugin(stage: str) -> None:
    module = Mlp()
    with pytest.raises(MisconfigurationException, match=r"FP8Callback needs FP8Precision.*plugins=\[FP8Precision"):
        getattr(trainer(callbacks=(FP8Callback(),)), stage)(module, loader())
    assert module.steps == 0


def test_callback_with_another_precision_names_it() -> None:
    with pytest.raises(MisconfigurationException, match="but the Trainer's precision is HalfPrecision"):
        trainer(callbacks=(FP8Callback(),), precision="bf16-true").fit(Mlp(), loader())


def test_precision_beside_the_plugin_is_lightnings_own_error() -> None:
    with pytest.raises(ValueError, match="precision"):
        trainer(FP8Precision(), precision="bf16-true")


def test_trainers_plugin_in_fabric() -> None:
    """The first forward says so, of models that were set up, and the first backward of others."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision()])
    models = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))) for _ in range(3)]
    alone, (beside, _) = (
        fabric.setup_module(models[0]),
        fabric.setup(models[1], torch.optim.SGD(models[1].parameters())),
    )
    told = "is for the Trainer; pass FP8FabricPrecision to Fabric"
    for model in (alone, beside):
        with pytest.raises(MisconfigurationException, match=told):
            model(torch.randn(8, 16))
    loss = models[2](torch.randn(8, 16)).sum()
    with pytest.raises(MisconfigurationException, match=told):
        fabric.backward(loss)
    assert all(parameter.grad is None for parameter in models[2].parameters())


FROM_LIGHTNING = "Import both from lightning, not from pytorch_lightning or lightning_fabric"
SHARD = "shard with ModelParallelStrategy, not FSDPStrategy or DeepSpeedStrategy"


@pytest.mark.parametrize("plugin", [FP8Precision(), FP8FabricPrecision()])
def test_errors_of_others_that_print_the_plugin_say_where_it_is_supported(plugin: FP8FabricPrecision) -> None:
    """As ``Found invalid type for plugin {plugin}`` of pytorch_lightning, whose classes are not those of lightning."""
    assert FROM_LIGHTNING in f"{plugin}"
    assert "leave precision= out" in f"{plugin}"
    assert SHARD in f"{plugin}"
    assert FROM_LIGHTNING not in repr(plugin)


def test_fsdp1_and_deepspeed_are_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=f"found FP8Precision.*{SHARD}"):
        FSDPStrategy(precision_plugin=FP8Precision())
    model = Mlp()
    engine: Any = object.__new__(DeepSpeedStrategy)  # deepspeed is not installed
    model._trainer = SimpleNamespace(strategy=engine, callbacks=[])  # type: ignore[assignment]
    with pytest.raises(MisconfigurationException, match="does not support DeepSpeedStrategy.*ModelParallelStrategy"):
        FP8Precision().convert_module(model)
    assert not any(isinstance(each, Linear) for each in model.modules())


def test_a_run_begins_with_the_recipe_and_what_is_not_its_default(caplog: pytest.LogCaptureFixture) -> None:
    wanted = {
        "delayed": "recipe: delayed\n",
        DelayedScaling(margin=1, fp8_format=Format.E4M3): "recipe: delayed, margin=1, fp8_format=E4M3\n",
        Float8BlockScaling(power_2_scale=False): "recipe: blockwise, power_2_scale=False\n",
    }
    for recipe, line in wanted.items():
        caplog.clear()
        with caplog.at_level("INFO"):
            FP8FabricPrecision(recipe).convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
        assert line in caplog.text


def test_fabrics_plugin_in_the_trainer_is_lightnings_own_error() -> None:
    message = r"FP8FabricPrecision\(recipe=DelayedScaling\(\)\) \(for Fabric; the Trainer takes FP8Precision\. "
    with pytest.raises(MisconfigurationException, match=message):
        trainer(FP8FabricPrecision())


WRITTEN: dict[str, dict[str, Any]] = {
    "recipe=DelayedScaling()": {},
    "recipe=Float8CurrentScaling()": {"recipe": "tensorwise"},
    "recipe=DelayedScaling(fp8_dpa=True, margin=2)": {
        "recipe": {"name": "delayed", "margin": 2},
        "attention": "always",
    },
    "recipe=DelayedScaling(margin=2), attention=True": {
        "recipe": {"name": "delayed", "margin": 2},
        "attention": True,
    },
    "recipe=DelayedScaling(fp8_format=Format.E4M3), weights_dtype=torch.float32, num_layers_at_end_in_bf16=3": {
        "recipe": {"fp8": "e4m3"},
        "weights_dtype": torch.float32,
        "num_layers_at_end_in_bf16": 3,
    },
    "recipe=DelayedScaling(), weights_dtype=torch.float32, compute_dtype=torch.bfloat16, cache_fp8_weights=False, "
    "skip=('*.router',)": {
        "weights_dtype": "float32",
        "compute_dtype": "bf16",
        "cache_fp8_weights": False,
        "skip": ["*.router"],
    },
}


@pytest.mark.parametrize("cls", [FP8Precision, FP8FabricPrecision])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_plugin_is_written_as_it_is_made(cls: type[FP8FabricPrecision], written: str) -> None:
    text = repr(cls(**WRITTEN[written]))
    assert text == f"{cls.__name__}({written})"
    names = {name: getattr(lightning_fp8, name) for name in lightning_fp8.__all__}
    assert repr(eval(text, {"torch": torch, **names})) == text


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_training_is_the_same_with_the_callback_and_without(recipe: str) -> None:
    """To the bit, of weights and scales, over two fits; the user's callbacks are what they were."""
    trained = []
    for callbacks in ((), (FP8Callback(),)):
        torch.manual_seed(0)
        module, plugin = Mlp(), FP8Precision(recipe)
        for _ in range(2):
            running = trainer(plugin, callbacks=callbacks, accumulate_grad_batches=2, max_epochs=3)
            before = list(running.callbacks)
            running.fit(module, loader(), loader())
            running.validate(module, loader(), verbose=False)
            assert running.callbacks == before
        assert plugin.summary is not None
        assert plugin.summary.layers[1].ran
        scales = [history.scale.clone() for history in plugin.histories.values()]
        trained.append([*(weight.detach().clone() for weight in module.parameters()), *scales])
    assert len(trained[0]) == 8 + 1
    assert all(map(torch.equal, *trained))


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("bfloat16", torch.bfloat16), ("torch.bfloat16", torch.bfloat16), ("bf16", torch.bfloat16)),
        *(("float16", torch.float16), ("half", torch.float16), ("fp16", torch.float16)),
        *(("float32", torch.float32), ("fp32", torch.float32)),
    ],
)
@pytest.mark.parametrize("cls", [FP8Precision, FP8FabricPrecision])
def test_a_dtype_may_be_named(cls: type[FP8FabricPrecision], name: str, dtype: torch.dtype) -> None:
    plugin = cls(weights_dtype=name, compute_dtype=name)
    assert (plugin.weights_dtype, plugin.compute_dtype) == (dtype, dtype)


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
        (None, None, "bf16-mixed"),
        (None, torch.float32, "32-true"),
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
    cls: type[FP8FabricPrecision], weights_dtype: torch.dtype | None, compute_dtype: torch.dtype | None, precision: str
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


class Rotary(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        angles = torch.outer(torch.arange(8.0), 1e4 ** (-torch.arange(8.0) / 8))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("scale", torch.ones(1))
        self.rotation = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.layers(x).float().unflatten(-1, (8, 2)))
        return torch.view_as_real(pairs * self.freqs_cis * self.rotation).flatten(-2) * self.scale


@pytest.mark.parametrize("cls", [FP8Precision, FP8FabricPrecision])
def test_complex_tensors_stay_complex(cls: type[FP8FabricPrecision]) -> None:
    model, x = Rotary(), torch.randn(2, 8, 16)
    names, before, parameter = [*model.state_dict()], model.freqs_cis, model.rotation
    expected = model(x)
    plugin = cls("tensorwise", "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.convert_module(model)
    assert model.freqs_cis is before
    assert model.rotation is parameter
    assert model.rotation.dtype == torch.complex64
    assert model.scale.dtype == model.layers[0].weight.dtype == model.dtype == torch.bfloat16
    assert [*model.state_dict()] == names
    with plugin.forward_context():
        actual = model(x.bfloat16())
    assert (actual - expected).norm() < 0.1 * expected.norm()


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
    plugin = cls(weights_dtype="bf16")
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
    FP8FabricPrecision(weights_dtype="bf16").convert_module(model)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert model[1].running_mean.dtype == torch.bfloat16
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_inputs_reach_the_module_in_the_weights_dtype() -> None:
    module = Mlp()
    trainer(FP8Precision(weights_dtype="bf16")).fit(module, loader())
    assert module.dtypes == {torch.bfloat16}


def test_float16_has_no_loss_scaler_and_says_so() -> None:
    with pytest.warns(UserWarning, match="^compute_dtype=torch.float16 runs without a loss scaler"):
        FP8Precision(weights_dtype=torch.float32, compute_dtype=torch.float16)
    with pytest.warns(UserWarning, match="^weights_dtype=torch.float16 runs without a loss scaler"):
        FP8Precision(weights_dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FP8Precision(weights_dtype=torch.float32, compute_dtype=torch.bfloat16)


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
    monkeypatch.setattr("lightning_fp8.plugin.precision.rank_zero_info", said.append)
    fp8_trainer(fp8={"skip": skip}, max_epochs=2).fit(Regression(), regression_data())
    assert sum("emulated on the CPU" in line for line in said) == is_said


def test_ddp_of_tensor_parallel_pieces_is_refused() -> None:
    """It would send rank 0's pieces to all ranks; any other strategy is warned of its checkpoints."""
    model = Regression()
    layer = model.net[0] = lightning_fp8.Linear(16, 8)
    layer.cuts = {"weight": Cut(0)}
    with pytest.warns(UserWarning, match="saves only the shards of rank 0"):
        FP8Precision().convert_module(model)
    try:
        with pytest.raises(MisconfigurationException, match="DDP would copy the shards of rank 0 to all ranks"):
            fp8_trainer(strategy="ddp", devices=1).fit(model, regression_data())
    finally:
        dist.destroy_process_group()  # the Trainer leaves it until the process ends
