"""``fuse=True``: after the first step, the table says which norms and MLPs took fewer passes, and why not."""

from __future__ import annotations

import copy
import gc
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_fp8 import FP8Precision, fp8_autocast
from lightning_fp8.convert.first_step import FirstStep, idle_layers
from lightning_fp8.convert.plan import Plan, plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary, LayerDecision
from tests.convert.fuse.runs import TOKENS, converted, llama, step
from tests.tiers import thorough

transformers = pytest.importorskip("transformers")

NORM, MLP = "model.layers.0.input_layernorm", "model.layers.0.mlp"


class Foreign(nn.Module):
    """Another package's norm or MLP, with the parameters of the one that it replaces."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(copy.copy(vars(replaced)))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "down_proj"):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)  # type: ignore[arg-type]


class Plain(Foreign):
    def __init__(self, replaced: nn.Module) -> None:
        nn.Module.__init__(self)
        self.inner = (replaced,)  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        return Foreign.forward(self.inner[0], x)  # type: ignore[arg-type]


def forward_replaced(model: Any, name: str) -> None:
    """As Liger's patch of an instance does."""
    module = model.get_submodule(name)
    module.forward = MethodType(Foreign.forward, module)


def class_replaced(model: Any, name: str) -> None:
    model.get_submodule(name).__class__ = Foreign


def module_replaced(model: Any, name: str) -> None:
    model.set_submodule(name, Plain(model.get_submodule(name)))


def module_replaced_and_dropped(model: Any, name: str) -> None:
    foreign = llama().get_submodule(name)
    model.set_submodule(name, foreign.bfloat16())


def wrapped(model: Any, name: str) -> None:
    """As accelerate's hooks do: the wrapper calls the forward that was there."""
    module = model.get_submodule(name)
    own = module.forward
    module.forward = lambda x: own(x)


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)  # type: ignore[no-any-return]


def wrapped_by_a_module(model: Any, name: str) -> None:
    model.set_submodule(name, Adapter(model.get_submodule(name)))


def plan() -> Plan:
    return plan_conversion(llama(), Policy(first_last_layers_bf16=False, fuse=True))


def rows(summary: ConversionSummary) -> dict[str, LayerDecision]:
    return {row.name: row for row in (*summary.norms, *summary.mlps) if row.fp8}


@pytest.mark.parametrize("name", [NORM, MLP])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forward_replaced, "its forward was replaced on the instance after the conversion"),
        (class_replaced, "its class was replaced after the conversion"),
        (module_replaced, "it was replaced by another module"),
        (module_replaced_and_dropped, "it was replaced by another module"),
        (wrapped, ""),
        (wrapped_by_a_module, ""),
    ],
)
def test_what_was_replaced_ran_as_its_own(change: Any, reason: str, before: bool, name: str) -> None:
    """Before the observation begins and after."""
    model = converted(True)
    watch = FirstStep(model, plan(), begins=not before)
    change(model, name)
    if before:
        watch.begin()
    step(model)
    found = watch.finish()
    for row in rows(found).values():
        if row.name == name and reason:
            assert (row.precision, row.ran, row.reason) == ("BF16", False, reason)
        else:
            assert (row.precision, row.ran) == ("BF16" if row.kind == "norm" else "FP8", True)
    sentences = list(idle_layers(row for row in found.idle if row in (*found.norms, *found.mlps)))
    assert not reason or (len(sentences) == 1 and reason in sentences[0] and "fuse=False" in sentences[0])
    layers = [f"{MLP}.{layer}" for layer in ("gate_proj", "up_proj", "down_proj")]
    taken = name == MLP and change in (module_replaced, module_replaced_and_dropped)  # its layers, with it
    assert [row.name for row in found.layers if row in found.idle] == (layers if taken else [])
    assert reason in found.table(verbose=True)


def test_what_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step may call it."""
    monkeypatch.setattr("lightning_fp8.traced._traced", set())  # by other tests
    model = converted(True)
    model.config.num_hidden_layers = 0
    watch = FirstStep(model, plan())
    step_of_the_rest(model)
    first = watch.finish()
    uncalled = [row for name, row in rows(first).items() if "layers" in name]
    assert rows(first)["model.norm"].ran is True
    assert {row.ran for row in uncalled} == {False}
    assert all("not called in the first training step" in row.reason for row in uncalled)
    model.config.num_hidden_layers = 1
    step_of_the_rest(model)
    watch.steps = 2
    settled = watch.settle()
    assert settled is not None
    assert (rows(settled)[NORM].ran, rows(settled)[MLP].ran) == (True, True)
    assert rows(settled)[MLP.replace("0", "1")].reason == "it was not called in the first 2 training steps"
    assert len(list(idle_layers(settled.idle))) == 1


def test_what_was_removed() -> None:
    model = converted(True)
    watch = FirstStep(model, plan())
    model.model.layers = model.model.layers[:1]
    gc.collect()
    step(model)
    reasons = [row.reason for name, row in rows(watch.finish()).items() if "layers.1" in name]
    assert reasons == ["it was removed from the model"] * 3


def step_of_the_rest(model: Any) -> None:
    with fp8_autocast(fp8_recipe="delayed"):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()


@thorough
def test_what_is_unknown_stays_so() -> None:
    """In evaluation mode, outside FP8, and in compiled code."""
    model = converted(True)
    watch = FirstStep(model, plan())
    step(model.eval())
    step(model.train(), enabled=False)
    assert {row.ran for row in rows(watch.finish()).values()} == {None}
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            setattr(layer, name, torch.compile(getattr(layer, name), backend="eager"))
    watch = FirstStep(model, plan())
    step(model)
    assert {name: row.ran for name, row in rows(watch.finish()).items() if row.ran is not None} == {"model.norm": True}


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=TOKENS, labels=TOKENS).loss  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        return [0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def on_fit_start(self) -> None:
        for name, _ in [*self.model.named_modules()]:
            if name.endswith(("layernorm", "mlp")):
                forward_replaced(self.model, name)


def test_a_trainer_says_so() -> None:
    plugin = FP8Precision(fuse=True, first_last_layers_bf16=False)
    trainer = Trainer(
        plugins=[plugin], max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="its forward was replaced on the instance after the conversion"):
        trainer.fit(Training())
    assert plugin.summary is not None
    assert {row.precision for row in rows(plugin.summary).values()} == {"BF16"}
    assert plugin.summary.num_fp8 == 14
