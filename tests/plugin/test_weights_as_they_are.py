"""``weights_dtype=None``: a model trains in the dtypes that it has, as with Lightning's plugins where FP8 is off."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_fp8 import FP8FabricPrecision, FP8Precision
from tests.convert import zoo
from tests.plugin.small_model import Mlp, loader, trainer
from tests.small import mlp
from tests.tiers import every_row

transformers = pytest.importorskip("transformers")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PLUGINS = [FP8FabricPrecision, FP8Precision]
LIGHTNINGS = {F32: "bf16-mixed", BF16: "bf16-true"}
TOKENS = torch.arange(3, 19)[None] % 64


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def with_adapters() -> Any:
    """LoRA in float32 on a base in BF16, whose rank is too small for FP8."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(llama().bfloat16(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


class Trained(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(self.model, nn.Sequential):
            loss = self.model(batch[0]).float().square().mean()
        else:
            loss = self.model(input_ids=TOKENS, labels=TOKENS + batch_idx).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-3)


def small() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


MODELS: dict[str, Callable[[], Any]] = {"mlp": small, "llama": llama, "adapters": with_adapters}


def fitted(
    model: nn.Module, epochs: int = 2, ckpt_path: Path | None = None, fp8: FP8Precision | None = None, **options: Any
) -> tuple[Trained, Any]:
    L.seed_everything(1)
    plugins = () if fp8 is None else (fp8,)
    module, running = Trained(model), trainer(*plugins, max_epochs=epochs, **options)
    running.fit(module, loader(), ckpt_path=ckpt_path)
    return module, running


def moments(running: Any) -> list[Tensor]:
    return [each for state in running.optimizers[0].state.values() for each in state.values()]


def assert_same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    expected = other.state_dict()
    for name, each in one.state_dict().items():
        assert each.dtype == expected[name].dtype, name
        assert torch.equal(each, expected[name]), name


# --- As Lightning's own ---------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp", F32), ("mlp", BF16), ("llama", F32), ("llama", BF16), ("adapters", F32)]
)
def test_without_fp8_it_is_lightnings_own_plugin(name: str, dtype: torch.dtype) -> None:
    """Losses, weights and optimizer states are equal to the bit. A model with adapters is as in ``bf16-mixed``."""
    model = MODELS[name]() if name == "adapters" else MODELS[name]().to(dtype)
    expected, theirs = fitted(copy.deepcopy(model), precision=LIGHTNINGS[dtype])
    plugin = FP8Precision(skip=["*"])
    module, ours = fitted(model, fp8=plugin)
    assert_same(module, expected)
    assert len(moments(ours)) == len(moments(theirs)) > 0
    for one, other in zip(moments(ours), moments(theirs)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert ours.precision == plugin.precision == theirs.precision
    assert repr(plugin) == "FP8Precision(recipe=DelayedScaling(), skip=('*',))"


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMA callback")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_averages_are_lightnings_own(dtype: torch.dtype) -> None:
    averages, start = [], small().to(dtype)
    own: list[dict[str, Any]] = [{"precision": LIGHTNINGS[dtype]}, {"fp8": FP8Precision(skip=["*"])}]
    for options in own:
        ema = lightning_callbacks.EMAWeightAveraging(decay=0.5)
        module, _ = fitted(copy.deepcopy(start), callbacks=(ema,), **options)
        averages.append([each.detach() for each in module.parameters()])  # at the end they are the model's
    assert {each.dtype for each in averages[1]} == {dtype}
    assert all(map(torch.equal, *averages))
    assert not any(map(torch.equal, averages[1], start.parameters()))


def test_a_step_inside_of_a_training_step_changes_what_follows() -> None:
    """Weights that layers outside of FP8 cast are those of now, as in Lightning's ``bf16-mixed``."""

    class Repeated(Trained):
        def __init__(self) -> None:
            super().__init__(small())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            for _ in range(3):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    modules = [Repeated() for _ in range(2)]
    trainer(precision="bf16-mixed").fit(modules[0], loader())
    trainer(FP8Precision(skip=["*"])).fit(modules[1], loader())
    assert len(set(modules[0].losses)) == 6
    assert_same(*modules)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_new_models_are_lightnings_own(precision: Any) -> None:
    """``init_module`` makes what the rest of the program does: BF16 only if that is asked for."""
    dtype = BF16 if precision == "bf16-true" else None
    made = []
    for options in ({"precision": precision}, {"plugins": [FP8FabricPrecision(weights_dtype=dtype)]}):
        fabric = Fabric(accelerator="cpu", devices=1, **options)
        with fabric.init_module(empty_init=False):
            made.append(nn.Linear(4, 4).weight.dtype)
        with fabric.init_tensor():
            made.append(torch.ones(1).dtype)
    assert made == 4 * [dtype or F32]


def test_a_default_of_the_program_stays() -> None:
    plugin = FP8Precision()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with plugin.module_init_context(), plugin.tensor_init_context():
            assert torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(previous)


# --- What a model's dtypes are --------------------------------------------------------------------------------------


def half_of(dtype: torch.dtype, rest: torch.dtype, layer: int = 0) -> nn.Module:
    model = mlp().to(dtype)
    model[layer].to(rest)
    return model


@every_row
@pytest.mark.parametrize("cls", PLUGINS)
@pytest.mark.parametrize(
    ("make", "compute", "precision", "inputs", "said"),
    [
        (mlp, None, "bf16-mixed", F32, "stay float32, .* BF16 under torch.autocast.*weights_dtype= would cast"),
        (mlp, F32, "32-true", F32, r"stay float32, .* computes in FP32 \("),
        (mlp, BF16, "bf16-mixed", F32, "stay float32, .* BF16 under torch.autocast"),
        (lambda: mlp().bfloat16(), None, "bf16-true", BF16, r"stay bfloat16, .* BF16 \(bf16-true"),
        (lambda: mlp().bfloat16(), BF16, "bf16-true", BF16, r"stay bfloat16, .* BF16 \("),
        (lambda: mlp().half(), None, "16-true", F16, r"stay float16, .* FP16 \("),
        (lambda: half_of(BF16, F32), None, "bf16-mixed", BF16, "stay bfloat16 and float32, .* BF16 under torch.autoc"),
        (lambda: half_of(F32, BF16), None, "bf16-mixed", F32, "stay float32 and bfloat16, .* BF16 under torch.autoca"),
        (lambda: half_of(F32, F16), None, "16-mixed", F32, "stay float32 and float16, .* FP16 under torch.autocast"),
        (with_adapters, None, "bf16-mixed", BF16, "stay bfloat16 and float32, .* BF16 under torch.autocast"),
        (lambda: nn.Sequential(nn.ReLU()), None, "bf16-mixed", F32, "stay float32"),
    ],
)
@pytest.mark.filterwarnings("ignore:weights_dtype=torch.float16", "ignore:no layer")
def test_the_dtypes_of_a_model(
    make: Any, compute: Any, precision: str, inputs: torch.dtype, said: str, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of both dtypes are taken, what does not run in FP8 computes in the dtype that the line says."""
    lines: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_info", lines.append)
    model, plugin = make(), cls("tensorwise", compute_dtype=compute)
    before = {name: (each.dtype, each.data_ptr()) for name, each in model.named_parameters()}
    plugin.convert_module(model)
    plugin.convert_module(model)
    assert before == {name: (each.dtype, each.data_ptr()) for name, each in model.named_parameters()}
    assert plugin.precision == precision
    assert plugin.weights_dtype is None
    (line,) = [line for each in lines for line in each.splitlines() if line.startswith("Weights")]
    assert precision in line
    assert re.search(said, line), line
    for given in (F32, BF16, F16, torch.float64):
        assert plugin.convert_input([torch.ones(2, dtype=given), TOKENS])[0].dtype == inputs
    with plugin.forward_context():
        assert torch.ones(1).dtype == inputs
        assert torch.is_autocast_enabled("cpu") == ("mixed" in precision)
        if isinstance(model, nn.Sequential) and len(model) > 1:
            y = model(plugin.convert_input(torch.randn(4, 16)))
            assert y.dtype == {"bf16": BF16, "16": F16, "32": F32}[precision.split("-")[0]]


@pytest.mark.parametrize("cls", PLUGINS)
def test_a_compute_dtype_that_weights_cannot_have_is_refused(cls: Any) -> None:
    for model, compute in ((mlp().bfloat16(), F32), (half_of(F32, BF16), F16), (mlp().half(), BF16)):
        with pytest.raises(ValueError, match=rf"compute_dtype={compute} with weights in .*leave compute_dtype out"):
            cls(compute_dtype=compute).convert_module(model)


def test_float16_weights_have_no_loss_scaler() -> None:
    with pytest.warns(UserWarning, match="weights_dtype=torch.float16 runs without a loss scaler"):
        FP8FabricPrecision().convert_module(mlp().half())


def test_from_pretrained_trains_in_the_dtype_that_it_loads(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    for dtype, expected in (("auto", BF16), (F32, F32)):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        model.train()
        _, running = fitted(model, fp8=FP8Precision())
        assert {each.dtype for each in model.parameters()} == {expected}
        assert running.precision == LIGHTNINGS[expected]
        assert {each.dtype for each in moments(running) if each.dim()} == {expected}
        assert running.precision_plugin.summary.num_fp8 == 2 * 7


def test_what_a_model_keeps_in_float32_is_its_own_affair() -> None:
    """T5 in half precision has ``wo`` in float32 and casts for it: without FP8 it computes what it does alone."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_ff=64, num_layers=4, num_heads=2, d_kv=16, decoder_start_token_id=0, dropout_rate=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).bfloat16()
    for name, each in model.named_modules():
        each.to(F32 if name.endswith(".wo") else None)
    models = [copy.deepcopy(model), model]
    plugin = FP8FabricPrecision(skip=["*"])
    plugin.convert_module(models[0])
    assert {each.dtype for each in models[0].parameters()} == {BF16, F32}
    assert plugin.precision == "bf16-true"
    with plugin.forward_context():
        loss = models[0](input_ids=TOKENS, labels=TOKENS).loss
    expected = models[1](input_ids=TOKENS, labels=TOKENS).loss
    for each in (loss, expected):
        each.backward()
    assert torch.equal(loss, expected)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "swinv2_cr_tiny_ns_224",
            {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
        ),
        (
            "swinv2_tiny_window8_256",
            {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)},
        ),
        (
            "eva02_tiny_patch14_224",
            {"img_size": 28, "embed_dim": 32, "depth": 3, "num_heads": 2},
        ),
    ],
)
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")
@pytest.mark.parametrize("whole", [False, True], ids=["buffers in float32", "all in BF16"])
def test_buffers_in_float32_do_what_they_do_alone(name: str, sizes: dict[str, Any], whole: bool) -> None:
    """A model in BF16 computes the same, or has the same error, if only its parameters are BF16 and if all of it is."""
    torch.manual_seed(0)
    model = zoo.timm(name, **sizes)()
    for each in (*model.parameters(), *(model.buffers() if whole else ())):
        each.data = each.data.to(BF16) if each.is_floating_point() else each.data
    assert whole or any(each.dtype == F32 for each in model.buffers())
    models = [copy.deepcopy(model), model]
    plugin = FP8FabricPrecision(skip=["*"])
    plugin.convert_module(model)
    x, found = torch.randn(2, 3, sizes["img_size"], sizes["img_size"]).bfloat16(), list[Any]()
    for each in models:
        try:
            with plugin.forward_context() if each is model else torch.no_grad():
                found.append(each.eval()(x).detach())
        except RuntimeError as error:
            found.append(str(error))
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[1].startswith(f"{found[0]}. Buffers that are not saved keep their dtypes: ")
    else:
        assert found[0].dtype == found[1].dtype
        assert torch.equal(found[0], found[1])


# --- Two models of one plugin ---------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = mlp().to(dtype)
        self.seen: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((x.dtype, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
        return self.layers(x)  # type: ignore[no-any-return]


def steps(dtypes: list[torch.dtype], order: list[int], **options: Any) -> list[list[float]]:
    """The losses of models of ``dtypes`` that one plugin trains in turns; ``order`` is that of their set-up."""
    plugin = FP8FabricPrecision("delayed", **options)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    models = {index: Noting(dtypes[index]) for index in order}
    made = {i: fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3)) for i, model in models.items()}
    losses: list[list[float]] = [[] for _ in dtypes]
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        for index, (model, optimizer) in made.items():
            loss = model(x).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[index].append(loss.item())
            assert not torch.is_autocast_enabled("cpu")
            assert torch.get_default_dtype() == F32
    for index, model in models.items():
        assert model.seen == {(dtypes[index], dtypes[index], dtypes[index] == F32)}
        assert plugin.summary is not None
        assert plugin.summary.num_fp8 == (0 if options else 2)
        assert len(plugin.histories) == len(models)
    return losses


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("options", [{}, {"skip": ["*"]}], ids=["FP8", "BF16"])
def test_each_of_two_models_has_its_own_dtypes(order: list[int], options: Any) -> None:
    alone = [steps([F32, BF16], [index], **options)[index] for index in range(2)]
    assert steps([F32, BF16], order, **options) == alone


def test_a_third_model_and_one_that_is_gone() -> None:
    plugin = FP8FabricPrecision("tensorwise")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    models = [Noting(dtype) for dtype in (F32, BF16, F32)]
    wrapped = [fabric.setup_module(model) for model in models]
    for each in wrapped:
        each(torch.randn(4, 16))
        each(torch.randn(4, 16).bfloat16())
    assert [model.seen for model in models] == [{(F32, F32, True)}, {(BF16, BF16, False)}, {(F32, F32, True)}]
    assert all(len(model._forward_pre_hooks) == 1 for model in models)
    copied = copy.deepcopy(models[0])
    assert copied(torch.randn(4, 16)).dtype == F32  # outside of the plugin
    with pytest.raises(RuntimeError, match="dtype"):
        models[1](torch.randn(4, 16))
    del wrapped[1:], models[1:], each
    wrapped[0](torch.randn(4, 16))
    assert models[0].seen == {(F32, F32, True)}


def test_a_trainer_that_trains_another_model_takes_its_dtypes() -> None:
    plugin, models = FP8Precision(), [Mlp(), Mlp().bfloat16(), Mlp()]
    for model, expected in zip(models, (F32, BF16, F32)):
        trainer(plugin).fit(model, loader())
        assert model.dtypes == {expected}
        assert plugin.precision == LIGHTNINGS[expected]
        assert not model._forward_pre_hooks


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@every_row
@pytest.mark.parametrize(("name", "dtype"), [("llama", F32), ("llama", BF16), ("adapters", None)])
def test_training_resumes_to_the_bit(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    make = lambda: MODELS[name]() if dtype is None else MODELS[name]().to(dtype)  # noqa: E731
    straight, _ = fitted(make(), 4, fp8=FP8Precision())
    first, running = fitted(make(), 2, fp8=FP8Precision())
    running.save_checkpoint(tmp_path / "half.ckpt")
    rest, running = fitted(make(), 4, tmp_path / "half.ckpt", fp8=FP8Precision())
    assert running.precision_plugin.summary.num_fp8 > 0
    rest.losses = first.losses + rest.losses
    assert_same(rest, straight)


@pytest.mark.parametrize("again", ["weights_dtype='bf16'", "a model in BF16"])
def test_a_run_that_was_cast_to_bf16_goes_on_to_the_bit(again: str, tmp_path: Path) -> None:
    straight, _ = fitted(small(), 4, fp8=FP8Precision(weights_dtype="bf16"))
    first, running = fitted(small(), 2, fp8=FP8Precision(weights_dtype="bf16"))
    running.save_checkpoint(tmp_path / "half.ckpt")
    model, given = (small().bfloat16(), {}) if "model" in again else (small(), {"weights_dtype": BF16})
    rest, _ = fitted(model, 4, tmp_path / "half.ckpt", fp8=FP8Precision(**given))
    rest.losses = first.losses + rest.losses
    assert_same(rest, straight)


def test_a_run_that_was_cast_to_bf16_goes_on_with_masters(tmp_path: Path) -> None:
    """Into a model in float32: from the values of the file, with states in float32, and with its scales."""
    _, running = fitted(small(), 2, fp8=FP8Precision(weights_dtype="bf16"))
    running.save_checkpoint(tmp_path / "half.ckpt")
    history = running.precision_plugin.histories["model"]
    rest, running = fitted(small(), 3, tmp_path / "half.ckpt", fp8=FP8Precision())
    assert {each.dtype for each in moments(running)} == {each.dtype for each in rest.parameters()} == {F32}
    assert running.precision_plugin.histories["model"].updates == history.updates + 2
    expected, _ = fitted(small(), 3, tmp_path / "half.ckpt", fp8=FP8Precision(weights_dtype="bf16"))
    assert rest.losses == pytest.approx(expected.losses, rel=0.01)
    for one, other in zip(rest.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.bfloat16(), other, atol=1e-3, rtol=2**-7)  # a step, and a last bit


def test_models_of_different_dtypes_are_pickled_and_copies_are_set_up() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FP8FabricPrecision())
    models = [
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(each) for each in (torch.bfloat16, torch.float32)
    ]
    for model in models:
        fabric.setup(model)
    for made in (pickle.loads(pickle.dumps(models[0])), copy.deepcopy(models[0])):
        assert fabric.setup(made)(torch.randn(32, 64)).isfinite().all()  # whose input is cast to its dtype


class _Asks(nn.Module):
    """Layers that note the dtypes around an ``inner`` model."""

    def __init__(self, inner: Any = None, raises: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.inner, self.raises = inner, raises
        self.seen: list[Any] = []

    def _note(self) -> None:
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        self._note()
        if self.raises:
            raise ValueError("inner")
        y: Tensor = self.layers(x)
        if self.inner is not None:
            with contextlib.suppress(ValueError):
                y = y + self.inner[0](y)
            self._note()
        return y


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("half_is_inner", [False, True])
def test_the_dtypes_of_an_inner_model_end_with_its_forward(half_is_inner: bool, raises: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FP8FabricPrecision())
    inner = _Asks(raises=raises)
    outer = _Asks([inner])  # no child
    (inner if half_is_inner else outer).bfloat16()
    run = fabric.setup(outer)
    fabric.setup(inner)
    for _ in range(2):
        assert run(torch.randn(8, 64)).isfinite().all()
    half, masters = (False, torch.bfloat16), (True, torch.float32)
    assert inner.seen == [(True, torch.bfloat16) if half_is_inner else masters] * 2  # in the other's autocast
    assert outer.seen == [masters if half_is_inner else half] * 4
    assert (torch.is_autocast_enabled("cpu"), torch.get_default_dtype()) == (False, torch.float32)
