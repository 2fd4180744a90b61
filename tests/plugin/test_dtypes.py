"""What the plugin casts: parameters and persistent buffers, and nothing that loses its meaning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8FabricPrecision, FP8Precision, convert_module, fp8_autocast, fp8_model_init
from lightning_fp8.torchao.float8 import convert_to_float8_training
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from tests.plugin.small_model import trainer
from tests.small import mlp
from tests.tiers import every_row

transformers = pytest.importorskip("transformers")

PLUGINS = [FP8FabricPrecision, FP8Precision]
DTYPES: dict[str, dict[str, str]] = {
    "none": {},
    "bf16": {"weights_dtype": "bf16"},
    "fp16": {"weights_dtype": "fp16"},
    "fp32": {"weights_dtype": "fp32"},
    "mixed": {"weights_dtype": "fp32", "compute_dtype": "bf16"},
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
CODES = torch.arange(-8, 8).float().to(torch.float8_e4m3fn)

_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _DECODER),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "image_size": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 64, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
            "max_source_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 4, "num_heads": 2, "d_kv": 16,
            "decoder_start_token_id": 0, "dropout_rate": 0.0,
        },
    ),
}  # fmt: skip
TOKENS = {"input_ids": torch.arange(3, 19)[None] % 64, "labels": torch.arange(4, 20)[None] % 64}


def made(name: str) -> Any:
    torch.manual_seed(0)
    cls, config, options = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, cls)(getattr(transformers, config)(**options))


class Trained(LightningModule):
    def __init__(self, model: Any, batch: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**self.batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader([0])  # type: ignore[arg-type]


def assert_same_buffers(model: nn.Module, expected: nn.Module) -> None:
    buffers = dict(expected.named_buffers())
    assert {*dict(model.named_buffers())} == {*buffers}
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name


@every_row
@pytest.mark.parametrize("cls", PLUGINS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5"])
def test_buffers_that_are_not_saved_stay_what_the_constructor_made(
    name: str, dtypes: str, cls: type[FP8FabricPrecision]
) -> None:
    """None of these models has another floating-point buffer."""
    model, plugin = made(name), cls("tensorwise", **DTYPES[dtypes])
    plugin.convert_module(model)
    assert_same_buffers(model, made(name))
    assert {each.dtype for each in model.parameters()} == {plugin.weights_dtype or torch.float32}


@pytest.mark.parametrize("dtypes", DTYPES)
def test_buffers_that_are_not_saved_stay_in_training(dtypes: str) -> None:
    module = Trained(made("llama"), TOKENS)
    trainer(FP8Precision("tensorwise", **DTYPES[dtypes])).fit(module)
    assert_same_buffers(module.model, made("llama"))


def test_a_live_llama_computes_what_its_saved_copy_does(tmp_path: Path) -> None:
    """At positions where an angle of a rounded frequency is off by radians, and in what it generates."""
    dtypes: list[dict[str, str]] = [{"weights_dtype": "bf16"}, {}]
    plugins, models = [FP8FabricPrecision("tensorwise", **each) for each in dtypes], [made("llama").eval()]
    plugins[0].convert_module(models[0])
    models[0].save_pretrained(tmp_path)
    models.append(transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval())
    plugins[1].convert_module(models[1])
    positions = torch.arange(8176, 8192)[None]
    results = []
    for plugin, model in zip(plugins, models):
        with plugin.forward_context(), torch.no_grad():
            far = model(input_ids=TOKENS["input_ids"], position_ids=positions).logits
            generated = model.generate(
                TOKENS["input_ids"], max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        results.append((far, generated.sequences, *generated.logits))
    assert all(map(torch.equal, *results))
    cos, sin = models[0].model.rotary_emb(torch.ones(1, 16, 32), positions)
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    angles = (positions[0].double()[:, None] * 10000.0**-exponents).repeat(1, 2)
    torch.testing.assert_close(cos[0].double(), angles.cos(), atol=2e-3, rtol=0)  # 8191 * 2**-24 of float32
    torch.testing.assert_close(sin[0].double(), angles.sin(), atol=2e-3, rtol=0)


# --- What a model of transformers keeps in float32 --------------------------------------------------------------------


@pytest.mark.parametrize("half", HALF)
def test_wo_of_t5_stays_in_float32(half: str) -> None:
    model, plain = made("t5"), made("t5")
    expected = plain(**TOKENS).loss
    before = {name: each for name, each in plain.named_parameters() if ".wo." in name}
    plugin = FP8FabricPrecision("tensorwise", **DTYPES[half])
    plugin.convert_module(model)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in before else HALF[half]), name
        assert name not in before or torch.equal(parameter, before[name])
    with plugin.forward_context():
        loss = model(**TOKENS).loss
        loss.backward()
    assert abs(loss.item() - expected.item()) < 0.03 * expected.item()
    assert all(each.grad.dtype == each.dtype for each in model.parameters())
    assert plugin.summary is not None
    assert "encoder.block.1.layer.1.DenseReluDense.wo" in {layer.name for layer in plugin.summary.layers if layer.fp8}


def test_wo_of_t5_in_a_trainer() -> None:
    module = Trained(made("t5"), TOKENS)
    before = module.model.encoder.block[1].layer[1].DenseReluDense.wo.weight.detach().clone()
    trainer(FP8Precision("delayed"), max_epochs=2).fit(module)
    after = module.model.encoder.block[1].layer[1].DenseReluDense.wo.weight
    assert after.dtype == torch.float32
    assert not torch.equal(after, before)


def test_float32_weights_are_all_float32() -> None:
    model = made("t5").bfloat16()
    FP8FabricPrecision(weights_dtype="fp32").convert_module(model)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


class Listing(nn.Module):
    """As ``PreTrainedModel``, whose subclasses have lists or None."""

    _keep_in_fp32_modules: Any = None
    _keep_in_fp32_modules_strict: Any = None

    def __init__(self, loose: Any = None, strict: Any = None) -> None:
        super().__init__()
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = loose, strict
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(8, 8), "up": nn.Linear(8, 8)}) for _ in range(3))
        self.register_buffer("bias_of_gate", torch.ones(3) / 3)


@pytest.mark.parametrize(
    ("loose", "strict", "kept"),
    [
        (None, None, set()),
        ([], set(), set()),
        (None, ["gate.weight"], {f"layers.{i}.gate.weight" for i in range(3)}),
        ({"gate.b", "f_gate"}, None, {"bias_of_gate", *(f"layers.{i}.gate.bias" for i in range(3))}),
        (["layers.0.*bias"], {"1.up.weight"}, {"layers.0.gate.bias", "layers.0.up.bias", "layers.1.up.weight"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [0, 2])
def test_the_lists_are_searched_for_in_the_keys_of_their_model(
    loose: Any, strict: Any, kept: set[str], depth: int
) -> None:
    model = outer = Listing(loose, strict)
    for _ in range(depth):
        outer = nn.Sequential(outer)  # type: ignore[assignment]
    FP8FabricPrecision(weights_dtype="bf16").convert_module(outer)
    found = {name for name, each in model.state_dict().items() if each.dtype == torch.float32}
    assert found == kept


def test_a_shared_parameter_is_kept_under_all_its_names() -> None:
    model = Listing(strict=["layers.0.gate.weight"])
    model.layers[1]["gate"].weight = model.layers[0]["gate"].weight
    parameter = model.layers[0]["gate"].weight
    parameter.grad = torch.ones(8, 8)
    FP8FabricPrecision(weights_dtype="bf16").convert_module(model)
    assert model.layers[1]["gate"].weight is model.layers[0]["gate"].weight is parameter
    assert parameter.dtype == parameter.grad.dtype == torch.float32


# --- Codes ------------------------------------------------------------------------------------------------------------


class Odd(LightningModule):
    """Buffers of every kind, in a model and in a layer of it; notes what ``to`` is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.called: list[Any] = []
        for module in (self, self.layers[0]):
            for name, each in CODED.items():
                module.register_buffer(name, each.clone(), persistent=name.startswith("saved"))
            module.register_buffer("table", torch.linspace(0, 1, 7), persistent=False)
            module.register_buffer("mean", torch.linspace(0, 1, 7))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append((args, kwargs))
        return super().to(*args, **kwargs)


CODED = {
    f"{saved}_{str(dtype).rpartition('.')[2]}": torch.arange(16, dtype=torch.uint8).view(dtype)
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1
    for saved in ("saved", "unsaved")
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("cls", PLUGINS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_buffers_of_codes_stay(dtypes: str, cls: type[FP8FabricPrecision]) -> None:
    assert len(CODED) >= 10
    model, plugin = Odd(), cls(**DTYPES[dtypes])
    model.layers[2].double()
    plugin.convert_module(model)
    for module in (model, model.layers[0]):
        for name, each in CODED.items():
            assert module._buffers[name].dtype == each.dtype
            assert torch.equal(bits(module._buffers[name]), bits(each))
        assert torch.equal(module.table, torch.linspace(0, 1, 7))
        assert module.mean.dtype == (plugin.weights_dtype or torch.float32)
    assert model.called[-1:] == ([] if dtypes == "none" else [((), {"dtype": plugin.weights_dtype})])
    assert model.layers[2].weight.dtype == (plugin.weights_dtype or torch.float64)
    assert all("_apply" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_codes_of_a_batch_stay(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(dtype)
    plugin = FP8FabricPrecision()
    for convert in (plugin.convert_input, plugin.convert_output):
        (converted,) = convert({"x": [codes]})["x"]
        assert converted is codes


def test_fp8_weights_stay_in_fp8() -> None:
    with fp8_model_init():
        model = mlp()
        convert_module(model)
    assert sum(isinstance(each, FP8Tensor) for each in model.parameters()) == 2
    before = {name: each.dequantize() for name, each in model.named_parameters() if isinstance(each, FP8Tensor)}
    FP8FabricPrecision(weights_dtype="bf16").convert_module(model)
    for name, value in before.items():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, FP8Tensor)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.dequantize().float(), value)


# --- float8 weights ---------------------------------------------------------------------------------------------------


def with_codes(width: int = 32) -> nn.Sequential:
    """A ``FP8Linear`` of transformers in the middle, with its scales."""
    layer_of = importlib.import_module("transformers.integrations.finegrained_fp8").FP8Linear
    torch.manual_seed(0)
    layer = layer_of(width, width, (16, 16), has_bias=True)
    layer.weight = nn.Parameter(torch.randn(width, width).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.rand(2, 2) / 3)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(
        *(nn.Linear(width, width) for _ in range(2)), layer, *(nn.Linear(width, width) for _ in range(2))
    )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 32, 32).to(torch.float8_e4m3fn), requires_grad=False)
        self.gate_up_proj_scale_inv = nn.Parameter(torch.rand(2, 1, 1))


def with_experts() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)), Experts(), *(nn.Linear(32, 32) for _ in range(2)))


def with_plain_codes() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    model[2].weight = nn.Parameter(model[2].weight.detach().to(torch.float8_e5m2), requires_grad=False)
    return model


def with_a_buffer_of_codes() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    weight = model[2].weight.detach().to(torch.float8_e4m3fn)
    del model[2].weight
    model[2].register_buffer("weight", weight)
    return model


CONVERTERS: dict[str, Callable[[nn.Module], Any]] = {
    "convert_module": convert_module,
    "fabric": lambda model: FP8FabricPrecision().convert_module(model),
    "trainer": lambda model: FP8Precision().convert_module(model),
    "torchao": convert_to_float8_training,
}
CODED_MODELS = {
    "FP8Linear": with_codes, "experts": with_experts, "plain": with_plain_codes, "buffer": with_a_buffer_of_codes
}  # fmt: skip


@every_row
@pytest.mark.parametrize("make", CODED_MODELS)
@pytest.mark.parametrize("convert", CONVERTERS)
def test_float8_weights_are_refused_before_anything_changes(convert: str, make: str) -> None:
    model = CODED_MODELS[make]()
    before = [(type(each), *(parameter.dtype for parameter in each.parameters())) for each in model.modules()]
    values = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(
        TypeError, match=r"^2\..*codes that cannot be trained on.*FineGrainedFP8Config\(dequantize=True\).*skip="
    ):
        CONVERTERS[convert](model)
    assert before == [(type(each), *(parameter.dtype for parameter in each.parameters())) for each in model.modules()]
    assert all(torch.equal(bits(each), bits(values[name])) for name, each in model.state_dict().items())
    assert not model._load_state_dict_pre_hooks


def test_the_way_out_exists() -> None:
    assert transformers.FineGrainedFP8Config(dequantize=True).dequantize


@pytest.mark.parametrize("make", CODED_MODELS)
@pytest.mark.parametrize("cls", PLUGINS)
def test_a_layer_that_skip_matches_is_left_as_it_is(cls: type[FP8FabricPrecision], make: str) -> None:
    for skip in (["2"], lambda module, name: name == "2"):
        model, expected = CODED_MODELS[make](), CODED_MODELS[make]()
        torch.manual_seed(0)
        expected[2].load_state_dict(model[2].state_dict())
        plugin = cls(weights_dtype="bf16", skip=skip)  # type: ignore[arg-type]
        plugin.convert_module(model)
        assert type(model[2]) is type(expected[2])
        for name, each in model[2].state_dict().items():
            assert torch.equal(bits(each), bits(expected[2].state_dict()[name])), name
        assert plugin.summary is not None
        rows = [layer for layer in plugin.summary.layers if layer.name.startswith("2")]
        assert any("torch.float8_e" in row.reason for row in rows)
        assert model[1].weight.dtype == torch.bfloat16
        assert {layer.name for layer in plugin.summary.layers if layer.fp8} == {"1", "3"}


def test_a_skipped_layer_computes_as_before() -> None:
    """Its weight and its scales keep their bits, so what dequantizes them sees the same."""
    model, plugin = with_codes(), FP8FabricPrecision("tensorwise", weights_dtype="bf16", skip=["2"])
    scales = model[2].weight_scale_inv.detach().repeat_interleave(16, 0).repeat_interleave(16, 1)
    expected = model[2].weight.double() * scales.double()
    plugin.convert_module(model)
    scales = model[2].weight_scale_inv.detach().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(model[2].weight.double() * scales.double(), expected)


def test_torchao_leaves_what_its_filter_does_not_choose() -> None:
    model = with_codes()
    codes = model[2].weight.detach().clone()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "2")
    assert torch.equal(bits(model[2].weight), bits(codes))


# --- float8 values for weights ----------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize("layer", ["0", "2"])  # in BF16 and in FP8
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
@pytest.mark.parametrize("kind", [*CONVERTERS, "fp8_model_init"])
def test_codes_are_no_values_of_weights(kind: str, options: dict[str, bool], layer: str) -> None:
    model = mlp()
    if kind == "fp8_model_init":
        with fp8_model_init():
            convert_module(model)
    else:
        CONVERTERS[kind](model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = {name: each + 1 for name, each in before.items()}
    state[f"{layer}.weight"] = state[f"{layer}.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError, match=rf"^{layer}.weight is torch.float8_e4m3fn.*weight_scale_inv.*dequantize=True"
    ):
        model.load_state_dict(state, **options)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    if layer == "2":
        with pytest.raises(RuntimeError, match=r"^weight is torch.float8_e4m3fn"):
            model[2].load_state_dict({"weight": state["2.weight"]}, strict=False)
        assert torch.equal(model[2].state_dict()["weight"], before["2.weight"])


def test_converting_again_adds_no_hook() -> None:
    model = mlp()
    for _ in range(3):
        FP8FabricPrecision().convert_module(convert_module(model))
    assert len(model._load_state_dict_pre_hooks) == 1


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 16), batch_size=4)  # type: ignore[arg-type]


def test_codes_in_the_trainers_checkpoint(tmp_path: Path) -> None:
    module, path = Net(), tmp_path / "x.ckpt"
    running = trainer(FP8Precision())
    running.fit(module)
    running.save_checkpoint(path)
    file = torch.load(path, weights_only=True)
    file["state_dict"]["net.2.weight"] = file["state_dict"]["net.2.weight"].to(torch.float8_e4m3fn)
    torch.save(file, path)
    with pytest.raises(RuntimeError, match="net.2.weight is torch.float8_e4m3fn.*weight_scale_inv"):
        trainer(FP8Precision(), max_epochs=2).fit(module, ckpt_path=path)


def test_codes_in_fabrics_checkpoint(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[FP8FabricPrecision()])
    model = fabric.setup_module(mlp())
    path = tmp_path / "x.ckpt"
    fabric.save(path, {"model": model})
    file = torch.load(path, weights_only=True)
    file["model"]["2.weight"] = file["model"]["2.weight"].to(torch.float8_e4m3fn)
    torch.save(file, path)
    with pytest.raises(RuntimeError, match="2.weight is torch.float8_e4m3fn.*weight_scale_inv"):
        fabric.load(path, {"model": model})


def test_an_unskipped_layer_of_ours_still_runs() -> None:
    """Beside a layer that keeps its codes."""
    model = with_experts()
    convert_module(model, skip=["2"])
    x = torch.randn(4, 32)
    with fp8_autocast(fp8_recipe="tensorwise"), torch.no_grad():
        y = model[1](x)
    assert 0 < (y - nn.functional.linear(x, model[1].weight, model[1].bias)).norm() < 0.1 * y.norm()


# --- The first line of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", PLUGINS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_the_first_line_says_that_float32_weights_are_cast(
    dtypes: str, cls: type[FP8FabricPrecision], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_info", said.append)
    cls(**DTYPES[dtypes]).convert_module(mlp())
    if dtypes in HALF:
        assert f"8 float32 parameter tensors are {dtypes.upper()} from now on" in said[0]
        assert "weights_dtype=None keeps them as float32 masters" in said[0]
    cls(weights_dtype="fp32").convert_module(mlp().bfloat16())
    assert said[-1].startswith(
        "8 bfloat16 parameter tensors are FP32 from now on, because weights_dtype=torch.float32\n"
    )
    cls(weights_dtype="bf16").convert_module(mlp().bfloat16())
    assert said[-1].startswith("recipe: delayed\n")
    cls(weights_dtype="bf16").convert_module(mlp().half())
    assert "8 float16 parameter tensors are BF16 from now on" in said[-1]
    assert sum("float32 parameter tensors" in each for each in said) == (dtypes in HALF)


def test_it_counts_adapters_in_float32_and_speaks_again_of_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_info", said.append)
    model, plugin = mlp().bfloat16(), FP8Precision(weights_dtype="bf16")
    model[2].float()
    plugin.convert_module(model)
    assert "2 float32 parameter tensors are BF16" in said[0]
    model.float()
    plugin.convert_module(model)
    assert said[1:] == [next(line for line in said[0].splitlines() if "float32" in line).replace("2 f", "8 f", 1)]


@pytest.mark.parametrize("cls", PLUGINS)
def test_an_error_about_a_kept_buffer_names_it_and_the_way_out(cls: type[FP8FabricPrecision]) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.register_buffer("pe", torch.randn(16), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x + self.pe)

    plugin = cls()
    model = plugin.convert_module(Positions())
    model.layers.bfloat16()
    plugin.convert_module(model)
    with plugin.forward_context(), pytest.raises(RuntimeError, match="dtype") as plain:
        model(torch.randn(4, 16).bfloat16())
    assert "Buffers" not in str(plain.value)
    with (
        pytest.raises(RuntimeError, match=r"dtype.*: pe\. Cast their values.*weights_dtype='fp32'"),
        plugin.forward_context(),
    ):
        model(torch.randn(4, 16).bfloat16())
    for mixed in (cls(), cls(weights_dtype="fp32", compute_dtype="bf16")):
        model = mixed.convert_module(Positions())
        with mixed.forward_context():
            assert model(torch.randn(4, 16)).dtype == torch.bfloat16
