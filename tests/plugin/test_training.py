"""Training under a real Trainer and under Fabric: FP8 GEMMs really run, and the loss falls."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from lightning_fp8 import DelayedScaling, FP8Callback, FP8FabricPrecision, FP8Precision, ops
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.recipes import RECIPES

WIDTH = 16
Gemms: TypeAlias = "Counter[tuple[torch.dtype, torch.dtype]]"


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """How many FP8 GEMMs ran, by the dtypes of their operands."""
    counts: Gemms = Counter()
    scaled_mm = ops.scaled_mm

    def counting(a: Any, b: Any, **options: Any) -> Tensor:
        counts[a.data.dtype, b.data.dtype] += 1
        return scaled_mm(a, b, **options)

    monkeypatch.setattr(ops, "scaled_mm", counting)
    return counts


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(x)))


class Blocks(nn.Module):
    def __init__(self, depth: int = 3, checkpointing: bool | None = None) -> None:
        """``checkpointing`` is None, or whether it is reentrant."""
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return x


class Regression(LightningModule):
    """Fits ``model`` to a fixed target; keeps its losses."""

    def __init__(
        self, model: nn.Module, lr: float = 3e-3, optimizer: type[torch.optim.Optimizer] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.optimizer_class = optimizer or torch.optim.Adam
        self.losses: list[float] = []
        self.validated: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), lr=self.lr)


def dataset(rows: int = 32, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return TensorDataset(x, torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator)))


def loader(rows: int = 32, batch_size: int = 32) -> DataLoader:
    return DataLoader(dataset(rows), batch_size=batch_size)


def fit(
    module: LightningModule,
    data: DataLoader | None = None,
    steps: int = 20,
    plugin: FP8Precision | None = None,
    callbacks: tuple[Callback, ...] = (),
    validation: DataLoader | None = None,
    **trainer: Any,
) -> FP8Precision:
    """Train in FP8 for ``steps`` optimizer steps; gives the plugin back."""
    plugin = plugin or FP8Precision()
    options = {"num_sanity_val_steps": 0, "max_epochs": -1, "max_steps": steps} | trainer
    Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        callbacks=[FP8Callback(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    ).fit(module, data or loader(), validation)
    return plugin


def fp8_modules(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, lightning_fp8.Linear) and m.fp8]


def assert_falls(losses: list[float], to: float = 0.7) -> None:
    """The end of training is better than its start by the factor ``to``."""
    assert all(map(math.isfinite, losses))
    start, end = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    assert end < to * start, f"loss {start:.4f} -> {end:.4f}"


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different


def history_of(plugin: FP8FabricPrecision) -> AmaxHistory:
    return plugin.histories["model"]


# Models


@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp_of_plain_linears(recipe: str, gemms: Gemms) -> None:
    widths = (WIDTH, 32, 32, 32, WIDTH)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    module = Regression(model)
    plugin = fit(module, steps=40, plugin=FP8Precision(recipe=recipe))
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == 2
    assert fp8_modules(module) == ["model.2", "model.4"]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    backward = torch.float8_e5m2 if recipe in ("delayed", "tensorwise") else torch.float8_e4m3fn
    e4m3 = torch.float8_e4m3fn
    expected: Gemms = Counter()
    expected[e4m3, e4m3] += 40 * 2  # fprop
    expected[backward, e4m3] += 2 * 40 * 2  # dgrad and wgrad
    assert gemms == expected
    assert_falls(module.losses)
    assert history_of(plugin).updates == (40 if recipe == "delayed" else 0)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_of_hugging_face(tied: bool, gemms: Gemms) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip

    class Llama(Regression):
        def loss(self, batch: Any) -> Tensor:
            (tokens,) = batch
            return self.model(input_ids=tokens, labels=tokens).loss

    module = Llama(transformers.LlamaForCausalLM(config))
    tokens = torch.randint(0, 128, (4, 16))
    plugin = fit(module, DataLoader(TensorDataset(tokens), batch_size=4), steps=10)
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    projections += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert fp8_modules(module) == [f"model.model.layers.{layer}.{name}" for layer in (1, 2) for name in projections]
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == 14
    assert sum(gemms.values()) == 10 * 3 * 14
    assert_falls(module.losses, to=0.8)
    head, embedding = module.model.lm_head, module.model.model.embed_tokens
    assert type(head) is nn.Linear
    assert (head.weight is embedding.weight) is tied


class TiedLanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, WIDTH)
        self.body = Blocks(4)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = F.cross_entropy(self.head(self.body(self.embedding(tokens))).float(), tokens.roll(1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_tied_embedding_stays_tied_and_its_head_in_bf16(gemms: Gemms) -> None:
    module = TiedLanguageModel()
    before = module.embedding.weight.detach().clone()
    tokens = torch.arange(24).roll(7)
    plugin = fit(module, DataLoader(TensorDataset(tokens), batch_size=24), steps=25)
    assert module.head.weight is module.embedding.weight
    assert not torch.equal(module.head.weight, before.bfloat16())
    assert type(module.head) is nn.Linear
    assert plugin.summary is not None
    assert [layer.name for layer in plugin.summary.layers if layer.fp8] == fp8_modules(module)
    assert fp8_modules(module) == [f"body.blocks.{block}.{fc}" for block in (1, 2) for fc in ("fc1", "fc2")]
    assert sum(gemms.values()) == 25 * 3 * 4
    assert_falls(module.losses)


def test_one_linear_called_twice_in_a_step(gemms: Gemms) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.shared = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)
            self.inputs: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            self.inputs.append(x.detach().abs().amax().item())
            x = F.relu(self.shared(x)) * 3
            self.inputs.append(x.detach().abs().amax().item())
            return self.last(F.relu(self.shared(x)))

    module = Regression(Twice())
    plugin = fit(module, steps=30, plugin=FP8Precision(recipe=DelayedScaling(amax_history_len=30)))
    assert fp8_modules(module) == ["model.shared"]
    assert sum(gemms.values()) == 30 * 3 * 2
    assert_falls(module.losses)
    history = history_of(plugin)
    row = history.names.index("model.shared.input")
    calls = module.model.inputs
    observed = [max(pair) for pair in zip(calls[::2], calls[1::2], strict=True)]
    assert history.amax_history[1:, row].tolist() == observed[1:]


# Activation checkpointing, accumulation, copies, averages


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_activation_checkpointing_changes_no_bit(reentrant: bool, recipe: str, gemms: Gemms) -> None:
    plain = Regression(Blocks())
    recomputed = Regression(Blocks(checkpointing=reentrant))
    recomputed.load_state_dict(plain.state_dict())
    plugins, counts = [], []
    for module in (plain, recomputed):
        gemms.clear()
        # The reentrant kind needs an input with a gradient, else it trains nothing.
        data = DataLoader(dataset(), batch_size=32, collate_fn=_collate_with_gradient)
        plugins.append(fit(module, data, steps=12, plugin=FP8Precision(recipe, first_last_layers_bf16=False)))
        counts.append(sum(gemms.values()))
    assert len(fp8_modules(recomputed)) == 6
    assert counts == [12 * 3 * 6, 12 * 4 * 6]  # the forward runs twice
    assert recomputed.losses == plain.losses
    assert_same_bits(parameters(recomputed), parameters(plain))
    histories = [history_of(plugin) for plugin in plugins]
    assert torch.equal(histories[0].amax_history, histories[1].amax_history)
    assert torch.equal(histories[0].scale, histories[1].scale)
    assert_falls(recomputed.losses)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_compiled_blocks_recomputes_in_fp8(reentrant: bool) -> None:
    torch._dynamo.reset()
    plain = Regression(Blocks())
    recomputed = Regression(Blocks(checkpointing=reentrant))
    recomputed.load_state_dict(plain.state_dict())
    for block in recomputed.model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    data = DataLoader(dataset(), batch_size=32, collate_fn=_collate_with_gradient)
    plugins = [fit(module, data, steps=5) for module in (plain, recomputed)]
    assert len(fp8_modules(recomputed)) == 2
    assert recomputed.losses == plain.losses
    assert_same_bits(parameters(recomputed), parameters(plain))
    assert torch.equal(history_of(plugins[1]).amax_history, history_of(plugins[0]).amax_history)
    assert (history_of(plugins[1]).amax_history[-5:] > 0).all()


def _collate_with_gradient(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x, y = (torch.stack(column) for column in zip(*rows))
    return [x.bfloat16().requires_grad_(), y]


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulation_over_micro_batches_equals_one_big_batch(recipe: str, gemms: Gemms) -> None:
    start = Blocks()
    steps, trained, plugins = 3, [], []
    for batch_size, accumulate in ((32, 1), (8, 4)):
        module = Regression(copy.deepcopy(start), lr=0.1, optimizer=torch.optim.SGD)
        plugin = FP8Precision(
            DelayedScaling(amax_history_len=4) if recipe == "delayed" else recipe,
            weights_dtype=torch.float32,
            first_last_layers_bf16=False,
        )
        gemms.clear()
        fit(module, loader(32, batch_size), steps, plugin, accumulate_grad_batches=accumulate)
        assert sum(gemms.values()) == steps * accumulate * (6 * 3 - 1)  # the data needs no gradient
        trained.append(parameters(module.model))
        plugins.append(plugin)
    moved = {name: trained[0][name] - value for name, value in parameters(start).items()}
    for name, delta in moved.items():
        error = (trained[1][name] - trained[0][name]).norm() / delta.norm()
        assert delta.norm() > 0
        # Both round: gradients in E5M2 by at most 2^-3, in E4M3 by 2^-4.
        assert error < 2 * (2**-3 if recipe in ("delayed", "tensorwise") else 2**-4), f"{name}: {error:.3f}"

    if recipe == "delayed":
        big, accumulated = (history_of(plugin) for plugin in plugins)
        assert big.updates == accumulated.updates == steps
        assert big.amax_history.shape == (4, 18)
        assert (big.amax_history[0] == 0).all()
        # The data is no result of FP8: its amax is the maximum over the micro-batches, to the bit.
        row = big.names.index("model.blocks.0.fc1.input")
        assert accumulated.amax_history[1:, row].tolist() == [dataset().tensors[0].abs().amax().item()] * steps
        first_weight = big.names.index("model.blocks.0.fc1.weight")
        assert torch.equal(accumulated.amax_history[1, first_weight], start.blocks[0].fc1.weight.detach().abs().amax())
        torch.testing.assert_close(accumulated.amax_history, big.amax_history, rtol=0.25, atol=0)
        torch.testing.assert_close(accumulated.scale, big.scale, rtol=0.25, atol=0)
        assert (accumulated.amax == 0).all()


def test_deepcopy_of_a_converted_model_is_independent() -> None:
    module = Regression(Blocks())
    plugin = fit(module, steps=5)
    twin = copy.deepcopy(module)
    history = history_of(plugin)
    linears = [m for m in twin.modules() if isinstance(m, lightning_fp8.Linear)]
    copied = {id(slot.history) for linear in linears for slot in linear.slots.values()}
    assert len(copied) == 1
    assert id(history) not in copied

    before, scale = parameters(module), history.scale.clone()
    losses_so_far = len(twin.losses)
    twin_plugin = fit(twin, steps=20)
    assert history_of(twin_plugin) is not history
    amax_history = history_of(twin_plugin).amax_history
    assert (amax_history[:-20] == 0).all(), "a copy starts without amaxes"
    assert (amax_history[-20:-1] > 0).any()
    assert_same_bits(parameters(module), before)
    assert torch.equal(history.scale, scale)
    assert (history.amax == 0).all()
    assert len(fp8_modules(twin)) == 2
    assert_falls([*module.losses, *twin.losses[losses_so_far:]])


class RecordWeights(Callback):
    """Every parameter after every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights.append(parameters(pl_module))


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMA callback")
def test_exponential_average_of_lightning(gemms: Gemms) -> None:
    module, record, decay = Regression(Blocks()), RecordWeights(), 0.5
    ema = lightning_callbacks.EMAWeightAveraging(decay=decay)
    plugin = FP8Precision(weights_dtype=torch.float32)
    fit(module, steps=20, plugin=plugin, callbacks=(record, ema), validation=loader(), check_val_every_n_epoch=5)
    average = record.weights[0]
    for weights in record.weights[1:]:
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    assert len(record.weights) == 20
    for name, value in parameters(module).items():
        torch.testing.assert_close(value, average[name], rtol=1e-4, atol=1e-6)
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == len(fp8_modules(module)) == 2
    assert sum(gemms.values()) == 20 * 3 * 2 + len(module.validated) * 2
    assert len(module.validated) == 4
    assert_falls(module.losses)


def test_stochastic_weight_averaging_of_lightning(gemms: Gemms) -> None:
    class RecordEpochs(Callback):
        """The weights at the start of every epoch."""

        def __init__(self) -> None:
            self.weights: list[dict[str, Tensor]] = []

        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.weights.append(parameters(pl_module))

    module, record = Regression(Blocks()), RecordEpochs()
    swa = StochasticWeightAveraging(swa_lrs=3e-3, swa_epoch_start=8, annealing_epochs=1)
    plugin = FP8Precision(weights_dtype=torch.float32)
    fit(module, plugin=plugin, callbacks=(record, swa), max_steps=-1, max_epochs=12)
    swept = record.weights[swa.swa_start :]
    assert swa.n_averaged is not None
    assert int(swa.n_averaged) == len(swept) == 5
    for name, value in parameters(module).items():
        expected = torch.stack([weights[name] for weights in swept]).mean(0)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == len(fp8_modules(module)) == 2
    assert sum(gemms.values()) == len(module.losses) * 3 * 2
    assert_falls(module.losses, to=0.9)


@pytest.mark.parametrize(
    ("backend", "recipe"), [("aot_eager", "delayed"), ("aot_eager", "blockwise"), ("inductor", "delayed")]
)
def test_compiled_block_trains_as_the_eager_one(backend: str, recipe: str) -> None:
    torch._dynamo.reset()
    eager = Regression(Blocks(), lr=0.05, optimizer=torch.optim.SGD)
    compiled = copy.deepcopy(eager)
    compiled.model.blocks[1].compile(fullgraph=True, backend=backend)
    plugins = [FP8Precision(recipe, weights_dtype=torch.float32) for _ in range(2)]
    for module, plugin in zip((eager, compiled), plugins):
        fit(module, steps=5, plugin=plugin)
    assert fp8_modules(compiled) == ["model.blocks.1.fc1", "model.blocks.1.fc2"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for name, value in parameters(compiled).items():
        torch.testing.assert_close(value, parameters(eager)[name], rtol=1e-5, atol=1e-6)
    if backend == "aot_eager":
        assert compiled.losses == eager.losses
    histories = [history_of(plugin) for plugin in plugins]
    torch.testing.assert_close(histories[1].amax_history, histories[0].amax_history, rtol=1e-5, atol=0)
    assert histories[1].updates == (5 if recipe == "delayed" else 0)
    if recipe == "delayed":
        assert (histories[1].amax_history[-5:] > 0).all()
    assert_falls(compiled.losses, to=0.95)


# Manual optimization


class Manual(Regression):
    """Steps its optimizers by hand: one for everything, or one for each half of the parameters."""

    def __init__(self, model: nn.Module, optimizers: int) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.number = optimizers

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        groups = [list(self.parameters())[index :: self.number] for index in range(self.number)]
        return [torch.optim.Adam(group, lr=3e-3) for group in groups]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers(use_pl_optimizer=True)
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization_equals_automatic(optimizers: int, gemms: Gemms) -> None:
    automatic = Regression(Blocks())
    manual = Manual(copy.deepcopy(automatic.model), optimizers)
    plugins = [fit(automatic, steps=20), fit(manual, steps=20 * optimizers)]  # Lightning counts every optimizer's step
    assert_same_bits(parameters(manual), parameters(automatic))
    assert manual.losses == automatic.losses
    histories = [history_of(plugin) for plugin in plugins]
    assert torch.equal(histories[1].amax_history, histories[0].amax_history)
    assert (histories[1].amax_history[-20:] > 0).all()
    assert sum(gemms.values()) == 2 * 20 * 3 * 2
    assert len(fp8_modules(manual)) == 2
    assert_falls(manual.losses)


def test_two_models_of_a_manual_module_step_by_turns() -> None:
    class Turns(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = Blocks(), Blocks(2)
            self.losses: dict[str, list[float]] = {"a": [], "b": []}

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(part.parameters(), lr=3e-3) for part in (self.a, self.b)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for name, optimizer in zip("ab", self.optimizers()):
                loss = F.mse_loss(getattr(self, name)(x).float(), y.float())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses[name].append(loss.item())

    module = Turns()
    plugin = FP8Precision(DelayedScaling(amax_history_len=30), first_last_layers_bf16=False)
    fit(module, steps=60, plugin=plugin)
    history = history_of(plugin)
    assert history.updates == 60
    assert len(fp8_modules(module)) == 10
    # A turn of the other part leaves window and scale of this one alone: 30 turns fill the window.
    assert (history.amax_history[1:] > 0).all()
    for part in "ab":
        assert_falls(module.losses[part])


# What must not move scales


class WatchHistory(Callback):
    """``seen`` and ``scale`` around every validation."""

    def __init__(self) -> None:
        self.before: list[tuple[Tensor, Tensor]] = []
        self.after: list[tuple[Tensor, Tensor]] = []
        self.sanity: list[bool] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before.append(self._state(trainer))
        self.sanity.append(trainer.sanity_checking)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after.append(self._state(trainer))

    @staticmethod
    def _state(trainer: Trainer) -> tuple[Tensor, Tensor]:
        history = trainer.precision_plugin.histories["model"]
        return history.amax.clone(), history.scale.clone()


@pytest.mark.parametrize("inference_mode", [False, True])
def test_validation_moves_neither_amaxes_nor_scales(inference_mode: bool, gemms: Gemms) -> None:
    module, watch = Regression(Blocks()), WatchHistory()
    loud = DataLoader(TensorDataset(1000 * torch.randn(8, WIDTH), torch.zeros(8, WIDTH)), batch_size=8)
    fit(
        module,
        loader(32, 8),
        steps=4,
        callbacks=(watch,),
        validation=loud,
        num_sanity_val_steps=1,
        val_check_interval=1,  # also between the two micro-batches of a step, when amaxes wait
        accumulate_grad_batches=2,
        inference_mode=inference_mode,
    )
    assert watch.sanity == [True] + [False] * 8
    assert sum(gemms.values()) == (9 + 3 * 8) * 2  # validation ran in FP8 too
    for (amax, scale), (seen_after, scale_after) in zip(watch.before, watch.after, strict=True):
        assert torch.equal(amax, seen_after)
        assert torch.equal(scale, scale_after)
    assert not watch.before[0][0].any()
    assert sum(bool(amax.any()) for amax, _ in watch.before) == 4
    assert sum(bool(scale.all()) for _, scale in watch.before) == 7


def test_validation_changes_no_bit_of_training() -> None:
    plain = Regression(Blocks())
    validated = copy.deepcopy(plain)
    fit(plain, steps=10)
    fit(validated, steps=10, validation=loader(), num_sanity_val_steps=2)
    assert len(validated.validated) == 11
    assert validated.losses == plain.losses
    assert_same_bits(parameters(validated), parameters(plain))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_recovers_from_a_poisoned_batch(recipe: str, poison: float) -> None:
    class Guarded(Regression):
        """Skips a step whose gradients are not finite, as mixed-precision training does."""

        skipped = 0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            gradients = [parameter.grad for parameter in self.parameters()]
            if not all(torch.isfinite(gradient).all() for gradient in gradients):
                self.skipped += 1
                for gradient in gradients:
                    gradient.zero_()

    def poisoned() -> Iterator[tuple[Tensor, Tensor]]:
        x, y = dataset().tensors
        bad = x.clone()
        bad[3, 5] = poison
        for step in range(40):
            yield (bad if step in (0, 10) else x), y

    module = Guarded(Blocks(), optimizer=torch.optim.SGD, lr=0.3)
    plugin = FP8Precision(
        DelayedScaling(amax_history_len=4) if recipe == "delayed" else recipe, first_last_layers_bf16=False
    )
    fit(module, DataLoader(list(poisoned()), batch_size=None), steps=40, plugin=plugin)
    history = history_of(plugin)
    assert module.skipped == 2
    assert not math.isfinite(module.losses[10])
    assert torch.isfinite(history.scale).all()
    assert torch.isfinite(history.amax_history).all()
    if recipe == "delayed":
        assert (history.scale > 0).all()
        assert (history.amax_history[1:] > 0).all()
    good = [loss for step, loss in enumerate(module.losses) if step not in (0, 10)]
    assert_falls(good)
    assert good[-1] < good[9]


# Fabric


def fabric_with(plugin: FP8FabricPrecision) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def fabric_steps(fabric: Fabric, model: Any, optimizer: Any, steps: int, x: Tensor, y: Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("weights_dtype", "compute_dtype"),
    [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, None)],
)
def test_fabric(weights_dtype: torch.dtype, compute_dtype: torch.dtype | None, gemms: Gemms) -> None:
    plugin = FP8FabricPrecision(
        DelayedScaling(amax_history_len=31), weights_dtype=weights_dtype, compute_dtype=compute_dtype
    )
    fabric, model = fabric_with(plugin), Blocks()
    computed: list[torch.dtype] = []
    model.blocks[1].fc1.register_forward_hook(lambda module, args, output: computed.append(output.dtype))
    before = list(model.parameters())
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    assert all(after is parameter for after, parameter in zip(model.parameters(), before, strict=True))
    history = history_of(plugin)
    x, y = dataset().tensors
    losses = []
    for step in range(1, 31):
        scale = history.scale.clone()
        losses += fabric_steps(fabric, wrapped, optimizer, 1, x, y)
        assert history.updates == step
        assert not torch.equal(history.scale, scale)
        assert (history.amax == 0).all()
    assert fp8_modules(model) == ["blocks.1.fc1", "blocks.1.fc2"]
    assert sum(gemms.values()) == 30 * 3 * 2
    assert {parameter.dtype for parameter in model.parameters()} == {weights_dtype}
    assert set(computed) == {compute_dtype or weights_dtype}
    # The window holds the amaxes of all 30 steps, and their largest makes the scale: by E4M3's and E5M2's own largest.
    largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in history.names])
    torch.testing.assert_close(history.scale, largest / history.amax_history.amax(0))
    assert_falls(losses)


def test_fabric_checkpoint_restores_scales(tmp_path: Path) -> None:
    x, y = dataset().tensors

    def start() -> tuple[Fabric, Any, Any, FP8FabricPrecision]:
        torch.manual_seed(5)
        plugin, model = FP8FabricPrecision(), Blocks()
        fabric = fabric_with(plugin)
        return fabric, *fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3)), plugin

    fabric, model, optimizer, plugin = start()
    fabric_steps(fabric, model, optimizer, 6, x, y)
    fabric.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer, "fp8": plugin})
    saved = copy.deepcopy(plugin.state_dict())
    expected = fabric_steps(fabric, model, optimizer, 6, x, y)

    fabric, other, optimizer, restored = start()
    assert not history_of(restored).scale.any()
    fabric.load(tmp_path / "x.ckpt", {"model": other, "optimizer": optimizer, "fp8": restored})
    assert torch.equal(history_of(restored).scale, saved["model"]["scale"])
    assert torch.equal(history_of(restored).amax_history, saved["model"]["amax_history"])
    assert history_of(restored).updates == 6
    assert fabric_steps(fabric, other, optimizer, 6, x, y) == expected
    assert_same_bits(parameters(other), parameters(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_under_fabric_recomputes_in_fp8(reentrant: bool, gemms: Gemms) -> None:
    start, results = Blocks(), []
    x, y = dataset().tensors
    for checkpointing in (None, reentrant):
        model = copy.deepcopy(start)
        model.checkpointing = checkpointing
        plugin = FP8FabricPrecision()
        fabric = fabric_with(plugin)
        wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
        gemms.clear()
        losses = fabric_steps(fabric, wrapped, optimizer, 8, x.clone().requires_grad_(), y)
        assert sum(gemms.values()) == 8 * 2 * (3 if checkpointing is None else 4)
        results.append((losses, parameters(model), history_of(plugin).amax_history))
    (losses, weights, amax_history), (other_losses, other_weights, other_window) = results
    assert other_losses == losses
    assert_same_bits(other_weights, weights)
    assert torch.equal(other_window, amax_history)


def test_fabric_with_a_closure_updates_scales_after_its_backward() -> None:
    plugin = FP8FabricPrecision()
    fabric, model = fabric_with(plugin), Blocks()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = dataset().tensors

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x).float(), y)
        fabric.backward(loss)
        return loss

    losses = [optimizer.step(closure=closure).item() for _ in range(10)]
    history = history_of(plugin)
    assert history.updates == 10
    assert (history.amax_history[-10:] > 0).all()
    assert_falls(losses, to=0.95)


def test_fabric_looks_after_every_model_it_sets_up() -> None:
    plugin = FP8FabricPrecision()
    fabric = fabric_with(plugin)
    x, y = dataset().tensors
    models = [fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3)) for model in (Blocks(), Blocks(4))]
    assert [len(history.names) for history in plugin.histories.values()] == [2 * 3, 4 * 3]
    for model, optimizer in models:
        assert_falls(fabric_steps(fabric, model, optimizer, 20, x, y))
    first, second = plugin.histories.values()
    # The second model's steps left the first alone.
    assert (first.amax_history[-20:] > 0).all()
    assert not first.amax_history[:-20].any()
    assert (second.amax_history[-20:] > 0).all()
    assert set(plugin.state_dict()) == {"recipe", "model", "model_1"}


def test_fabric_without_gradients_observes_nothing() -> None:
    plugin = FP8FabricPrecision()
    fabric = fabric_with(plugin)
    model: Callable[[Tensor], Tensor] = fabric.setup(Blocks())
    with torch.no_grad():
        model(dataset().tensors[0])
    assert not history_of(plugin).amax.any()
    model(dataset().tensors[0])
    input_weight_gradient = [True, True, False]  # no backward ran
    assert (history_of(plugin).amax > 0).tolist() == 2 * input_weight_gradient
