"""Attention of models that know nothing of FP8: where it runs, what it costs, and that nothing of it stays."""

from __future__ import annotations

import copy
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import FP8Callback, FP8FabricPrecision, FP8Precision, Linear, convert_module, fp8_autocast
from lightning_fp8.attention.owners import owner_of
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary
from tests.convert.test_zoo import Fit, SaveEarly, animal, bf16_losses, in_model
from tests.small import equal_weights, quiet_trainer

TORCH_SDPA = F.scaled_dot_product_attention
LENGTH, WIDTH, HEADS = 24, 32, 4


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lightning_fp8.attention.owners._traced", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """As people write it."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self._attend(q, k, v).transpose(1, 2).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Blocks, recomputed in the backward pass or not."""

    def __init__(self, depth: int = 4, reentrant: bool | None = None, inner: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.reentrant, self.inner = reentrant, inner

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            elif self.inner:
                x = x + checkpoint(block.attention, block.norm(x), use_reentrant=self.reentrant)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Regression(L.LightningModule):
    def __init__(self, model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.run = run or (lambda model, x: model(x))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.run(self.model, batch) - batch.flip(1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)

    def train_dataloader(self) -> Any:
        x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(x, 2)  # type: ignore[arg-type]


def trained(module: L.LightningModule, **options: Any) -> FP8Precision:
    plugin = FP8Precision(**{"recipe": "tensorwise", "attention": True, **options})
    quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()]).fit(module)
    return plugin


def attentions(summary: ConversionSummary | None) -> dict[str, str]:
    assert summary is not None
    return {layer.name: layer.precision for layer in summary.layers if layer.kind == ATTENTION}


def why(summary: ConversionSummary | None, name: str) -> str:
    assert summary is not None
    return next(layer.reason for layer in summary.layers if layer.name == name)


# Of each animal of the zoo the attention that runs in FP8, and the one that stays in BF16 by its place.
ZOO = {
    "llama": ("model.layers.1.self_attn", "model.layers.{0,2}.self_attn"),
    "qwen3": ("model.layers.1.self_attn", "model.layers.{0,2}.self_attn"),
    "bert": ("bert.encoder.layer.1.attention.self", "bert.encoder.layer.{0,2}.attention.self"),
}


@pytest.mark.parametrize("name", ZOO)
def test_models_of_transformers_train(name: str, tmp_path: Any) -> None:
    fp8, bf16 = map(in_model, ZOO[name])
    module = Fit(animal(name))
    former = module.model.config._attn_implementation
    plugin = FP8Precision("tensorwise", attention=True)
    callbacks = [FP8Callback(), SaveEarly(tmp_path / "x.ckpt")]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*high precision.*")
        quiet_trainer(max_epochs=3, plugins=[plugin], callbacks=callbacks).fit(module)
    assert attentions(plugin.summary) == {**dict.fromkeys(fp8, "FP8"), **dict.fromkeys(bf16, "BF16")}
    assert {layer.name for layer in plugin.summary.layers if layer.kind == ATTENTION and layer.ran} == fp8
    assert f"{len(fp8)} of {len(fp8 | bf16)} attentions" in plugin.summary.verdict()
    for loss, exact in zip(module.losses, bf16_losses(name), strict=True):
        assert loss == pytest.approx(exact, rel=0.02)
    assert module.losses[-1] < module.losses[0]
    assert module.model.config._attn_implementation == former
    assert F.scaled_dot_product_attention is TORCH_SDPA

    resumed = Fit(animal(name))
    again = FP8Precision("tensorwise", attention=True)
    trainer = quiet_trainer(max_epochs=3, plugins=[again], callbacks=[FP8Callback()])
    trainer.fit(resumed, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.losses == module.losses[-1:]
    assert equal_weights(resumed, module)


def test_a_hand_written_model_trains() -> None:
    torch.manual_seed(0)
    module = Regression(Model())
    twin = copy.deepcopy(module)
    plugin = trained(module)
    assert attentions(plugin.summary) == {
        f"model.blocks.{i}.attention": "FP8" if i in (1, 2) else "BF16" for i in range(4)
    }
    quiet_trainer(precision="bf16-true").fit(twin)
    assert module.losses == pytest.approx(twin.losses, rel=0.02)
    assert module.losses != twin.losses
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert {type(m) for m in module.model.modules()} - {Linear} == {type(m) for m in twin.model.modules()}
    assert not any(owner_of(m) for m in module.modules())


@pytest.mark.parametrize("inner", [False, True], ids=["blocks", "attention"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["trainer", "fabric", "plain"])
def test_recomputation_changes_nothing(where: str, reentrant: bool, inner: bool) -> None:
    torch.manual_seed(0)
    template = Model().bfloat16()
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    found = []
    for recompute in (None, reentrant):
        model = copy.deepcopy(template)
        model.reentrant, model.inner = recompute, inner
        gradients(model, x.clone().requires_grad_(), where)
        found.append([p.grad for p in model.parameters()])
    exact = copy.deepcopy(template)
    exact(x).square().mean().backward()
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    differs = [not torch.equal(one, p.grad) for one, p in zip(found[0], exact.parameters())]
    assert any(differs)


def gradients(model: nn.Module, x: Tensor, where: str) -> None:
    if where == "plain":
        convert_module(model, skip=("*.qkv", "*.out"))
        with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
            y = model(x)
        y.square().mean().backward()
        return
    if where == "fabric":
        plugin = FP8FabricPrecision("tensorwise", attention=True, skip=("*.qkv", "*.out"))
        fabric = Fabric(accelerator="cpu", plugins=[plugin])
        wrapped = fabric.setup(model)
        fabric.backward(wrapped(x).square().mean())
        plugin.teardown()
        return

    class Once(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.0)

        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    plugin = FP8Precision("tensorwise", attention=True, skip=("*.qkv", "*.out"))
    trainer = quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()], limit_train_batches=1)
    trainer.fit(Once(model))


@pytest.mark.parametrize("what", ["whole", "blocks", "attention"])
def test_compiled_as_it_runs(what: str) -> None:
    torch.manual_seed(0)
    template = Model(depth=10)
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template))
        parts = {
            "whole": [module.model],
            "blocks": module.model.blocks,
            "attention": [b.attention for b in module.model.blocks],
        }
        for part in parts[what] if compiled else ():
            part.compile(fullgraph=True, backend="aot_eager")
        plugin = trained(module)
        if compiled:
            assert {layer.ran for layer in plugin.summary.layers} == {None}
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_are_recomputed(reentrant: bool) -> None:
    torch.manual_seed(0)
    template = Model(reentrant=reentrant)
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template), lambda model, x: model(x.requires_grad_()))
        for block in module.model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        trained(module)
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


class Torch(nn.Module):
    """torch's own modules."""

    def __init__(self, part: nn.Module, **options: Any) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, x: Tensor) -> Tensor:
        inputs = 3 if isinstance(self.part, nn.MultiheadAttention) else 2
        y = self.part(*[x] * inputs, **self.options)
        return y[0] if isinstance(y, tuple) else y


def test_modules_of_torch() -> None:
    module = Regression(Torch(nn.Transformer(WIDTH, HEADS, 3, 3, 64, dropout=0.0, batch_first=True)))
    plugin = trained(module)
    fp8 = {name for name, precision in attentions(plugin.summary).items() if precision == "FP8"}
    assert fp8 == in_model("part.encoder.layers.1.self_attn") | in_model(
        "part.decoder.layers.1.{self_attn,multihead_attn}"
    )

    module = Regression(Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights=False))
    assert attentions(trained(module).summary) == {"model.part": "FP8"}

    module = Regression(Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))
    with pytest.warns(UserWarning, match="model.part: need_weights=True"):
        plugin = trained(module)
    assert attentions(plugin.summary) == {"model.part": "BF16"}


def test_what_does_not_run_in_fp8_is_named() -> None:
    def dropout(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    def mask(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool))

    for attend, reason in ((dropout, "dropout_p=0.1"), (mask, "an attn_mask")):
        cls = type("Mine", (Attention,), {"_attend": attend})
        model = Model()
        for block in model.blocks:
            block.attention = cls()
        with pytest.warns(UserWarning, match=f"model.blocks.1.attention, model.blocks.2.attention: .*{reason}"):
            plugin = trained(Regression(model))
        assert set(attentions(plugin.summary).values()) == {"BF16"}
        assert reason in why(plugin.summary, "model.blocks.1.attention")


def test_skip_and_replace_layers() -> None:
    plugin = trained(Regression(Model()), skip=("*.1.attention",))
    assert attentions(plugin.summary)["model.blocks.1.attention"] == "BF16"
    assert attentions(plugin.summary)["model.blocks.2.attention"] == "FP8"
    assert why(plugin.summary, "model.blocks.1.attention") == "skip='*.1.attention'"
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8"):
        plugin = trained(Regression(Model()), replace_layers=False)
    assert set(attentions(plugin.summary).values()) == {"BF16"}


def test_without_the_flag_nothing_is_touched() -> None:
    seen: list[bool] = []
    module = Regression(
        Model(), lambda model, x: (seen.append(F.scaled_dot_product_attention is TORCH_SDPA), model(x))[1]
    )
    plugin = trained(module, attention=False)
    assert not attentions(plugin.summary)
    assert seen == [True, True]


def test_a_recipe_says_the_same() -> None:
    plugin = FP8Precision({"name": "tensorwise", "fp8_dpa": True})
    assert plugin.recipe == FP8Precision("tensorwise", attention=True).recipe
    with pytest.raises(TypeError, match="attention='yes' must be True or False"):
        FP8Precision(attention="yes")  # type: ignore[arg-type]


def test_evaluation_runs_in_fp8_and_a_failed_run_restores() -> None:
    class Failing(Regression):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            y = self.model(batch)
            assert not torch.equal(y, plain(batch))
            raise ArithmeticError

        val_dataloader = Regression.train_dataloader

    torch.manual_seed(0)
    module = Failing(Model())
    plain = copy.deepcopy(module.model).bfloat16()
    with pytest.raises(ArithmeticError):
        trained(module, skip=("*.qkv", "*.out"))
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert {type(m) for m in module.model.modules()} == {
        Model,
        nn.ModuleList,
        Block,
        nn.LayerNorm,
        Attention,
        nn.Linear,
    }


def test_two_plugins_and_threads() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    one, other = (Model().bfloat16() for _ in range(2))
    exact = [copy.deepcopy(model)(x) for model in (one, other)]
    skip = ("*.qkv", "*.out")
    first = FP8FabricPrecision("tensorwise", attention=True, skip=skip)
    second = FP8FabricPrecision("tensorwise", attention=True, skip=(*skip, "*.attention"))
    first.convert_module(one)
    second.convert_module(other)
    with first.forward_context():
        found = one(x)
        outside: list[Tensor] = []
        thread = threading.Thread(target=lambda: outside.append(one(x)))
        thread.start()
        thread.join()
    with second.forward_context():
        assert torch.equal(other(x), exact[1])
    assert not torch.equal(found, exact[0])
    assert torch.equal(outside[0], exact[0])
    first.detach_attention()
    assert F.scaled_dot_product_attention is not TORCH_SDPA
    second.detach_attention()
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_the_wrapper_goes_with_the_last_model() -> None:
    import gc

    model = convert_module(Model().bfloat16())
    assert F.scaled_dot_product_attention is TORCH_SDPA
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        model(torch.randn(2, LENGTH, WIDTH).bfloat16())
    assert F.scaled_dot_product_attention is not TORCH_SDPA
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_somebody_elses_wrapper_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ours it is what ours stands in front of; around ours it calls ours, which is not put around it again."""

    def wrapping(function: Any) -> Any:
        return lambda *args, **options: function(*args, **options)

    before = wrapping(TORCH_SDPA)
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)
    x = torch.randn(2, LENGTH, WIDTH).bfloat16()
    plugins: list[FP8FabricPrecision] = []
    models = [Model().bfloat16() for _ in range(2)]
    exact = [copy.deepcopy(model)(x) for model in models]
    for model in models:
        plugins.append(FP8FabricPrecision("tensorwise", attention=True, skip=("*.qkv", "*.out")))
        plugins[-1].convert_module(model)
        ours = F.scaled_dot_product_attention
        assert ours is not before
        monkeypatch.setattr(F, "scaled_dot_product_attention", wrapping(ours))
    for plugin, model, right in zip(plugins, models, exact):
        assert torch.equal(model(x), right)
        with plugin.forward_context():
            assert not torch.equal(model(x), right)
        plugin.detach_attention()
        assert torch.equal(model(x), right)
    monkeypatch.undo()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    trained(Regression(Model()))
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_what_transformers_saves_does_not_name_us(tmp_path: Any) -> None:
    animal("llama")
    module = Fit(animal("llama"))

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert pl_module.model.config._attn_implementation == "lightning_fp8"  # type: ignore[union-attr]
            pl_module.model.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]

    plugin = FP8Precision("tensorwise", attention=True)
    quiet_trainer(plugins=[plugin], callbacks=[FP8Callback(), Save()]).fit(module)
    assert "lightning_fp8" not in (tmp_path / "config.json").read_text()
    transformers = importlib.import_module("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
