"""Layers and attention for whose sizes FP8 is slower stay in high precision, by planted rates."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    Float8CurrentScaling,
    FP8FabricPrecision,
    FP8Precision,
    convert_module,
    faster,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    update_fp8_scales,
)
from lightning_fp8.convert import choice
from lightning_fp8.convert.first_step import STEPS, conversion_summary
from lightning_fp8.convert.summary import ATTENTION
from lightning_fp8.delayed import update
from tests.convert.planted import RATES, planted
from tests.convert.zoo import DECODER, hf, tokens
from tests.small import equal_weights, quiet_trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in ("modules.record", "convert.attention_calls.owners"):
        monkeypatch.setattr(f"lightning_fp8.{module}._traced", set())
    with planted():
        yield


class Net(nn.Module):
    """``wide`` is faster in FP8 from 11 rows on, ``narrow`` never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(64, 64, bias=False), nn.Linear(64, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x))


def net(**options: Any) -> Net:
    model: Net = convert_module(Net().bfloat16(), first_last_layers_bf16=False, **options)  # type: ignore[assignment]
    return model


def step(model: nn.Module, rows: int = 16, run: Callable[..., Tensor] | None = None, recipe: str = "delayed") -> Tensor:
    """One step of SGD; the output of the forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rows)
    with fp8_autocast(fp8_recipe=recipe):
        y = (model if run is None else run)(torch.randn(rows, 64).bfloat16())
    y.float().square().mean().backward()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        optimizer.step()
    optimizer.zero_grad()
    return y.detach()


@pytest.mark.parametrize(("n", "k"), itertools.product((8, 21, 64, 300), repeat=2))
def test_fewer_rows_than_the_least_take_longer_in_fp8(n: int, k: int) -> None:
    """Against the two times, term by term."""
    rates = RATES["linear"]
    least, why = faster.least_rows(CPU, "delayed", n, k)

    def gains(m: int) -> bool:
        fp8 = 6 * m * n * k / rates["delayed"]["flops"] + 4 * (m * k + m * n + n * k) / rates["delayed"]["bytes"]
        return fp8 <= 6 * m * n * k / rates["bf16"] * (1 + 1e-12)

    assert [m >= least for m in range(1, 400)] == [gains(m) for m in range(1, 400)]
    assert (f"below {least}" if least < math.inf else "for any number of") + f" rows of {k} × {n}" in why


def test_a_layer_that_is_slower_is_bf16s_from_the_first_step_on() -> None:
    model = net()
    observed = model.narrow.slots[next(iter(model.narrow.slots))].history.amax  # type: ignore[operator,index,union-attr]
    step(model)
    assert model.narrow.record.fp8 == 1  # type: ignore[union-attr,operator]
    why = "BF16 is faster for any number of rows of 64 × 9 (delayed, cpu), and it had 16"
    assert model.narrow.slower == why
    assert not model.wide.slower
    plain = copy.deepcopy(model.narrow.weight.detach())
    x = torch.randn(5, 64).bfloat16()
    with fp8_autocast():
        assert torch.equal(model.narrow(x), nn.functional.linear(x, plain))
        assert not torch.equal(model.wide(x), nn.functional.linear(x, model.wide.weight))
    assert not observed[3:].any()
    rows = {row.name: (row.precision, row.reason) for row in conversion_summary(model).layers}
    assert rows == {"wide": ("FP8", ""), "narrow": ("BF16", model.narrow.slower)}


def test_it_is_told_once_and_nothing_is_missed_in_fp8() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with fp8_autocast():
                model(torch.randn(16, 64).bfloat16()).sum().backward()
            optimizer.step()
    (said,) = [str(each.message) for each in caught]
    assert said.startswith("1 layers stay in high precision")
    assert "where_faster=False" in said


def test_an_mlp_whose_layers_stay_in_bf16_has_their_reason_and_no_warning() -> None:
    """It runs as the model's own because this package decided so, which is nothing that went wrong."""
    model = hf("LlamaForCausalLM", "LlamaConfig", **DECODER)().bfloat16()
    convert_module(model, first_last_layers_bf16=False)
    mlp = model.model.layers[1].mlp
    mlp.down_proj.comparison = "BF16 is faster for any number of rows"
    for each in (layer for layer in model.modules() if getattr(layer, "comparison", None) is faster.AWAITED):
        each.comparison = ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            with fp8_autocast():
                loss = model(**tokens("input_ids", "labels")()).loss
            loss.backward()
            optimizer.step()
    assert mlp.down_proj.slower
    row = next(each for each in conversion_summary(model).mlps if each.name == "model.layers.1.mlp")
    assert (row.precision, row.reason) == ("BF16", "BF16 is faster for any number of rows")
    said = [str(each.message) for each in caught]
    assert sum("stay in high precision" in each for each in said) == 1
    assert not [each for each in said if "layers.1.mlp" in each]


@pytest.mark.parametrize("rows", [10, 11])
def test_the_first_training_forward_decides(rows: int) -> None:
    model = net()
    with torch.no_grad(), fp8_autocast():
        model.eval()(torch.randn(1, 64).bfloat16())
    step(model.train(), rows)
    step(model, 21 - rows)
    assert bool(model.wide.slower) is (rows == 10)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_runs_as_its_forward(reentrant: bool) -> None:
    plain, recomputed = net(), net()
    for _ in range(3):
        a = step(plain)
        b = step(recomputed, run=lambda x: checkpoint(recomputed, x.requires_grad_(), use_reentrant=reentrant))
        assert torch.equal(a, b)
    assert plain.narrow.slower == recomputed.narrow.slower != ""
    assert equal_weights(plain, recomputed)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_layers_are_not_compared(dynamic: bool | None) -> None:
    """They run in FP8, and what one compiled model did has no effect on another one."""
    torch._dynamo.reset()
    model, eager, after = net(), net(where_faster=False), net()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), fp8_autocast():
        compiled.eval()(torch.randn(512, 64).bfloat16())
    model.train()
    for _ in range(3):
        assert torch.equal(step(model, 4, run=compiled), step(eager, 4))
    assert equal_weights(model, eager)
    assert fp8_state_dict(model)["slower"] == {}
    step(after, 4)
    assert after.wide.slower.endswith("and it had 4")
    assert after.narrow.slower


def test_compiled_layers_follow_a_decision_made_before() -> None:
    torch._dynamo.reset()
    model, eager = net(), net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for each in (model, eager):
        step(each)
    assert torch.equal(step(model, run=compiled), step(eager))
    assert model.narrow.slower


@pytest.mark.parametrize("steps_before", [0, 1])
def test_copies_decide_or_keep_the_decision(steps_before: int) -> None:
    model = net()
    for _ in range(steps_before):
        step(model)
    copied = copy.deepcopy(model)
    assert fp8_state_dict(copied).get("slower") == fp8_state_dict(model).get("slower")
    step(copied, 10)
    assert bool(copied.wide.slower) is (steps_before == 0)
    assert bool(model.narrow.slower) is (steps_before == 1)
    assert fp8_state_dict(copied)["slower"].keys() == {
        each for each in ("wide", "narrow") if getattr(copied, each).slower
    }


def test_steps_without_fp8_leave_the_decision_open() -> None:
    model = net()
    with torch.no_grad(), fp8_autocast(enabled=False):
        model(torch.randn(4, 64).bfloat16())
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    step(model)
    assert model.narrow.slower


def test_the_line_has_one_example_of_each_limit() -> None:
    """As experts have other numbers of rows each."""
    said: list[str] = []
    layers: Any = nn.ModuleList(nn.Linear(64, 9, bias=False) for _ in range(3)).bfloat16()
    convert_module(layers, first_last_layers_bf16=False)
    history = layers[0].history
    history.choice = choice.Choice(layers, said.append)
    for rows, layer in enumerate(layers, 3):
        with fp8_autocast():
            layer(torch.randn(rows, 64).bfloat16()).sum().backward()
    torch.optim.SGD(layers.parameters(), lr=0.01).step()
    assert said[0].count("BF16 is faster") == 1
    assert [layer.slower.rpartition(" ")[2] for layer in layers] == ["3", "4", "5"]


def test_a_decision_for_fp8_compiles_nothing_anew() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with planted({}):
        model = net()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            step(model, run=compiled, recipe="tensorwise")
    assert fp8_state_dict(model)["slower"] == {}
    assert len(graphs) == 1


def test_the_flag_and_own_layers_run_in_fp8() -> None:
    model = net(where_faster=False)
    step(model)
    assert not model.narrow.slower
    convert_module(net_of_two := net(), first_last_layers_bf16=False)  # again, which changes nothing
    step(net_of_two)
    assert net_of_two.narrow.slower
    convert_module(net_of_two, first_last_layers_bf16=False)
    assert net_of_two.narrow.slower
    convert_module(net_of_two, first_last_layers_bf16=False, where_faster=False)
    assert not net_of_two.narrow.slower


def test_a_recipe_or_a_gpu_without_rates_runs_in_fp8() -> None:
    model = net()
    step(model, recipe="rowwise")
    assert not model.narrow.slower
    with planted({}):
        step(other := net())
    assert not other.narrow.slower


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_plain_loop_resumes_bit_for_bit(recipe: str) -> None:
    straight = net()
    for _ in range(2):
        step(straight, recipe=recipe)
    resumed = net()
    resumed.load_state_dict(straight.state_dict())
    load_fp8_state_dict(resumed, fp8_state_dict(straight))
    assert resumed.narrow.slower == straight.narrow.slower != ""
    assert torch.equal(step(straight, recipe=recipe), step(resumed, recipe=recipe))
    assert equal_weights(straight, resumed)
    with pytest.raises(ValueError, match="'slower' must be"):
        load_fp8_state_dict(resumed, {**fp8_state_dict(straight), "slower": ["narrow"]})


def test_a_state_replaces_a_decision_that_was_made_before() -> None:
    saved, model = net(), net()
    step(saved, 10)
    step(model, 16)
    assert saved.wide.slower
    assert not model.wide.slower
    before = fp8_state_dict(model)
    load_fp8_state_dict(model, fp8_state_dict(saved))
    assert model.wide.slower == saved.wide.slower
    load_fp8_state_dict(model, before)
    assert not model.wide.slower


def test_a_pickled_model_that_is_converted_again_is_compared() -> None:
    model = pickle.loads(pickle.dumps(net()))
    convert_module(model, first_last_layers_bf16=False)
    step(model)
    assert model.narrow.slower


def test_a_compiled_module_may_be_dropped() -> None:
    model = Net().bfloat16()
    convert_module(torch.compile(model), first_last_layers_bf16=False)
    gc.collect()
    step(model)
    assert model.narrow.slower


def test_ranks_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer stays in high precision if FP8 is slower on every rank that has called it."""
    others: dict[str, str] = {"wide": "", "narrow": "BF16 is faster elsewhere"}
    monkeypatch.setattr(choice, "are_several_ranks", lambda group: True)
    monkeypatch.setattr(choice, "of_all_ranks", lambda own, group: [own, (others, True)])
    model = net()
    step(model, 10)
    assert not model.wide.slower
    assert model.narrow.slower
    del others["wide"]
    step(model := net(), 10)
    assert model.wide.slower


def test_ranks_that_share_nothing_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may not train: a collective would wait for them."""

    def collective(*_: Any) -> Any:
        raise AssertionError("a collective")

    monkeypatch.setattr(choice, "are_several_ranks", lambda group: True)
    monkeypatch.setattr(choice, "of_all_ranks", collective)
    monkeypatch.setattr(update, "_region", update._Region())
    step(model := net(), recipe="tensorwise")
    assert model.narrow.slower
    with pytest.raises(AssertionError, match="a collective"):
        step(net(), recipe="delayed")


def test_a_step_before_the_first_forward_decides_nothing() -> None:
    model = net()
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))  # it steps to create the state
    step(model)
    assert model.narrow.slower


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_before_the_decision_is_recomputed_as_it_ran(reentrant: bool) -> None:
    """As that of a generator, whose backward pass follows the step of its discriminator."""
    gradients = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        model: Any = nn.ModuleDict({"g": Net(), "d": Net()}).bfloat16()
        convert_module(model, first_last_layers_bf16=False)
        of_d = torch.optim.SGD(model.d.parameters(), lr=0.1)
        torch.manual_seed(0)
        x = torch.randn(16, 64).bfloat16().requires_grad_()
        with fp8_autocast(fp8_recipe="tensorwise"):
            fake = run(model.g, x)
            loss = model.d(x.detach()).float().square().mean()
        loss.backward()
        of_d.step()
        assert model.g.narrow.slower
        fake.float().square().mean().backward()
        gradients.append((x.grad, model.g.wide.weight.grad, model.g.narrow.weight.grad))
    assert all(map(torch.equal, *gradients))


def test_states_of_parts_have_the_names_of_parts() -> None:
    whole: Any = convert_module(nn.ModuleDict({"a": Net(), "b": Net()}).bfloat16(), first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    with fp8_autocast():
        (whole.a(torch.randn(16, 64).bfloat16()).sum() + whole.b(torch.randn(4, 64).bfloat16()).sum()).backward()
    optimizer.step()
    state = fp8_state_dict(whole.a)
    assert state["slower"] == {"narrow": whole.a.narrow.slower}
    load_fp8_state_dict(alone := net(), state)
    assert alone.narrow.slower == whole.a.narrow.slower != ""
    load_fp8_state_dict(whole.b, state)  # the other part is as it was
    assert whole.a.narrow.slower
    assert whole.b.narrow.slower
    assert not whole.b.wide.slower
    assert fp8_state_dict(whole)["slower"].keys() == {"a.narrow", "b.narrow"}


def test_a_compiled_model_that_is_dropped_decides() -> None:
    model = Net().bfloat16()
    convert_module(torch.compile(model, backend="eager"), first_last_layers_bf16=False)  # type: ignore[arg-type]
    gc.collect()
    step(model)
    assert model.narrow.slower


def test_a_loop_without_optimizers_decides() -> None:
    model = net()
    with fp8_autocast():
        model(torch.randn(16, 64).bfloat16()).sum().backward()
    update_fp8_scales(model)
    assert model.narrow.slower


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).float().square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(epochs: int, path: Path | None = None) -> tuple[L.Trainer, Module]:
    L.seed_everything(1)
    model = Module()
    plugin = FP8Precision("delayed", weights_dtype="bf16", first_last_layers_bf16=False)
    trainer = quiet_trainer(plugins=[plugin], max_epochs=epochs)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(32, 64), 16), ckpt_path=path)  # type: ignore[arg-type]
    return trainer, model


def test_a_trainer_resumes_bit_for_bit_and_evaluates_alike(tmp_path: Path) -> None:
    _, straight = fit(2)
    first, half = fit(1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed = fit(2, tmp_path / "half.ckpt")
    assert half.losses + resumed.losses == straight.losses
    assert equal_weights(resumed, straight)
    assert "layers" in str(trainer.precision_plugin.summary)
    trainer.test(resumed, torch.utils.data.DataLoader(torch.randn(4, 64), 4), verbose=False)  # type: ignore[arg-type]
    assert resumed.net.narrow.slower


# --- Attention --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.q = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class Attending(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def attended(lengths: list[int], attention: Any = True, channels: int = 8, run: Any = None, **recipe: Any) -> Any:
    """Rows of the table after steps, and the plugin; Fabric."""
    plugin = FP8FabricPrecision(
        {"name": "tensorwise", **recipe}, attention=attention, where_faster=False, skip=("*.q",)
    )
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    model = Attending(channels)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if run is not None:
        run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in lengths:
            fabric.backward(model(torch.randn(2, length, 32)).float().square().mean())
            optimizer.step()
    model = model.module
    rows = {row.name: (row.precision, row.reason) for row in conversion_summary(model).layers if row.kind == ATTENTION}
    return rows["blocks.1"], model


def test_short_sequences_stay_with_sdpa() -> None:
    (precision, reason), model = attended([23, 200])
    assert (precision, reason) == ("BF16", "SDPA is faster below 24 keys of 8 channels (flash, cpu), and it had 23")
    owner = model.blocks[1]._fp8_attention
    assert (owner.record.fp8, owner.record.high_precision) == (1, 1)


def test_long_sequences_run_in_fp8() -> None:
    row, model = attended([24, 8])
    assert row == ("FP8", "")
    assert model.blocks[1]._fp8_attention.record.fp8 == 2


def test_channels_between_those_timed_are_estimated() -> None:
    """FP8 takes as long as for 16 channels, SDPA 12 / 16 of it; the break-even is at 8 / 12 of 24 + ... keys."""
    least, why = faster.least_keys(CPU, torch.bfloat16, 12, True, False)
    assert least == math.ceil((160 - 75) / (480 / 128 - 320 / 128)) == 68
    assert why == "SDPA is faster below 68 keys of 12 channels (flash, cpu)"
    assert faster.least_keys(CPU, torch.bfloat16, 17, True, False)[0] == 0


@pytest.mark.parametrize(
    ("attention", "recipe"), [("always", {}), (False, {"fp8_dpa": True}), (True, {"fp8_dpa": True})]
)
def test_always_and_the_recipes_own_flag_run_it_in_fp8(attention: Any, recipe: Any) -> None:
    row, model = attended([8, 8], attention, **recipe)
    assert row == ("FP8", "")
    assert model.blocks[1]._fp8_attention.record.fp8 == 2


def test_a_gpu_that_was_not_timed_is_named() -> None:
    with planted({}):
        row, _ = attended([8])
    assert row == ("FP8", "not compared with SDPA, which was not timed for this on cpu")


def test_compiled_attention_is_not_compared() -> None:
    torch._dynamo.reset()

    def compiled(model: Any) -> None:
        for block in model.module.blocks:
            block.compile(backend="eager", fullgraph=True)

    row, model = attended([16, 16], run=compiled)
    assert row == ("FP8", "")
    assert not model.blocks[1]._fp8_attention.slower


def test_attention_of_a_copy_decides() -> None:
    plugin = FP8FabricPrecision("tensorwise", attention=True, where_faster=False)
    model = Fabric(accelerator="cpu", plugins=[plugin]).setup(Attending()).module
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    with fp8_autocast(fp8_recipe=Float8CurrentScaling(fp8_dpa=True)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copied(torch.randn(2, 8, 32)).sum().backward()
    optimizer.step()
    assert copied.blocks[1]._fp8_attention.slower.endswith("and it had 8")
    assert not model.blocks[1]._fp8_attention.slower


@pytest.mark.parametrize("length", [8, 32])
def test_a_model_of_transformers(length: int) -> None:
    plugin = FP8FabricPrecision("tensorwise", attention=True)
    model = hf("LlamaForCausalLM", "LlamaConfig", **{**DECODER, "num_key_value_heads": 2})()
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            fabric.backward(model(**tokens("input_ids", "labels", length=length)()).loss)
            optimizer.step()
    assert plugin.summary is not None
    row = next(each for each in conversion_summary(model.module).layers if each.kind == ATTENTION and "1" in each.name)
    assert (
        (row.precision == "BF16")
        is row.reason.startswith("SDPA is faster below 24 keys of 8 channels")
        is (length == 8)
    )


def test_mlps_of_slower_layers_are_no_news() -> None:
    """The line of the choice has said it; nothing is wrong with the MLP."""
    torch.manual_seed(0)
    model = convert_module(hf("LlamaForCausalLM", "LlamaConfig", **DECODER)().bfloat16(), first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = tokens("input_ids", "labels", length=2)()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS + 1):
            with fp8_autocast(fp8_recipe="tensorwise"):
                model(**inputs).loss.backward()
            optimizer.step()
    said = [str(each.message) for each in caught]
    assert any("stay in high precision" in each for each in said)
    assert not any("multiplied nothing in FP8" in each for each in said)
    assert all(each.reason.startswith("BF16 is faster") for each in conversion_summary(model).mlps)
