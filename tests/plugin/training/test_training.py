"""Training under a real Trainer: FP8 GEMMs really run, the loss falls, and nothing but training moves scales."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import DelayedScaling, FP8Precision
from lightning_fp8.numerics.recipes import RECIPES
from tests.plugin.training.conftest import Gemms
from tests.plugin.training.models import (
    WIDTH,
    Blocks,
    Regression,
    assert_falls,
    assert_same_bits,
    dataset,
    fit,
    fp8_modules,
    history_of,
    loader,
    parameters,
)
from tests.tiers import covering

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
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
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


@pytest.mark.parametrize(
    ("recipe", "poison"),
    covering(
        itertools.product(RECIPES, (math.nan, math.inf)),
        lambda row: {row} & {("delayed", math.nan), ("mxfp8", math.inf)},
    ),
)
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
