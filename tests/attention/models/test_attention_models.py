"""Attention of models that know nothing of FP8: where it runs, what it costs, and that nothing of it stays."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import FP8Callback, FP8FabricPrecision, FP8Precision, Linear, convert_module, fp8_autocast
from lightning_fp8.convert.attention_calls import sdpa
from lightning_fp8.convert.attention_calls.owners import owner_of
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary
from lightning_fp8.delayed import history as histories
from tests.convert.test_zoo import in_model
from tests.convert.zoo import DECODER, VOCABULARY, hf
from tests.small import quiet_trainer

TORCH_SDPA = F.scaled_dot_product_attention
LENGTH, WIDTH, HEADS = 24, 32, 4


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


@pytest.mark.usefixtures("no_other_models")
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
    names = in_model("part.encoder.layers.{0,1,2}.self_attn") | in_model(
        "part.decoder.layers.{0,1,2}.{self_attn,multihead_attn}"
    )
    assert attentions(plugin.summary) == dict.fromkeys(names, "BF16")
    assert "nn.MultiheadAttention does not run in FP8" in why(plugin.summary, "model.part.encoder.layers.1.self_attn")


def test_a_model_of_any_transformers() -> None:
    """One that knows no mask functions gives a dense mask where there is padding, and its attention says so."""
    for padding in (False, True):
        module = Regression(hf("LlamaForCausalLM", "LlamaConfig", **DECODER)(), partial(next_token, padding))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plugin = trained(module)
        in_fp8 = {name: precision == "FP8" for name, precision in attentions(plugin.summary).items()}
        name = "model.model.layers.1.self_attn"
        assert in_fp8.keys() == {name, "model.model.layers.0.self_attn", "model.model.layers.2.self_attn"}
        assert sum(in_fp8.values()) == in_fp8[name]
        assert in_fp8[name] or (padding and "got an attn_mask" in why(plugin.summary, name))


def next_token(padding: bool, model: nn.Module, batch: Tensor) -> Tensor:
    """A loss in the form that Regression takes."""
    ids = torch.arange(2 * 12).view(2, 12) * 7 % VOCABULARY
    seen = torch.arange(12) < torch.tensor([[12], [9 if padding else 12]])
    return model(input_ids=ids, labels=ids, attention_mask=seen.long() if padding else None).loss + batch.flip(1)


def test_what_does_not_run_in_fp8_is_named() -> None:
    def dropout(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    def mask(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool))

    def scale(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=-0.5)

    def tensor(model: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=torch.tensor(0.5))  # type: ignore[arg-type]

    for attend, reason in (
        (dropout, "dropout_p=0.1"),
        (mask, "an attn_mask"),
        (scale, "its scale is -0.5, not a finite number above 0"),
        (tensor, "its scale is a Tensor; make it a float"),
    ):
        cls = type("Mine", (Attention,), {"_attend": attend})
        model = Model()
        for block in model.blocks:
            block.attention = cls()
        with pytest.warns(UserWarning, match=f"model.blocks.1.attention, model.blocks.2.attention: .*{reason}"):
            plugin = trained(Regression(model))
        assert set(attentions(plugin.summary).values()) == {"BF16"}
        assert reason in why(plugin.summary, "model.blocks.1.attention")


def test_a_kernel_that_cannot_be_made_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the forward pass of FP8 attention does not run on A Card: no registers are left"
    monkeypatch.setattr(sdpa, "why_not_fp8", lambda *qkv, **options: reason)
    module = Regression(Model())
    twin = copy.deepcopy(module)
    with pytest.warns(UserWarning, match=f"model.blocks.1.attention, model.blocks.2.attention: {reason}"):
        plugin = trained(module)
    assert set(attentions(plugin.summary).values()) == {"BF16"}
    assert why(plugin.summary, "model.blocks.2.attention") == reason
    trained(twin, attention=False)
    assert module.losses == twin.losses


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
    before = F.scaled_dot_product_attention  # ours, where another test's model lives that wants it
    module = Regression(Model(), lambda model, x: (seen.append(F.scaled_dot_product_attention is before), model(x))[1])
    plugin = trained(module, attention=False)
    assert not attentions(plugin.summary)
    assert seen == [True, True]


def test_a_recipe_says_the_same() -> None:
    plugin = FP8Precision({"name": "tensorwise", "fp8_dpa": True})
    assert plugin.recipe == FP8Precision("tensorwise", attention=True).recipe
    with pytest.raises(TypeError, match="attention='yes' must be True, False or 'always'"):
        FP8Precision(attention="yes")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_other_models")
def test_attention_alone_is_not_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose linear layers all stay in BF16."""
    monkeypatch.setattr(histories, "_references", [])  # other tests' models may still be there
    model, x = Attention(), torch.randn(2, LENGTH, WIDTH)
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8"):
        convert_module(model, first_last_layers_bf16=False, skip=("qkv", "out"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
            model(x)
    owner = owner_of(model)
    assert owner is not None
    assert owner.record.fp8 == 1
    with pytest.warns(UserWarning, match="ran nothing in FP8"), fp8_autocast(fp8_recipe="tensorwise"):
        model(x)
