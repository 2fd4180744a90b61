"""Layers that were replaced, moved, added or bypassed after the conversion have rows of what they did."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    FP8FabricPrecision,
    FP8Precision,
    LayerNormMLP,
    conversion_summary,
    convert_module,
    fp8_autocast,
)
from lightning_fp8.convert.summary import ConversionSummary
from tests.convert.first_step.watched import Block, Trained, decision, fit


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Bypassed(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


def linear_like(layer: nn.Module) -> nn.Linear:
    return nn.Linear(16, 16, dtype=layer.weight.dtype)


def replace_one(model: Any) -> None:
    model.blocks[1].fc = linear_like(model.blocks[1].fc)


def replace_all(model: Any) -> None:
    for block in model.blocks:
        block.fc, block.out = linear_like(block.fc), linear_like(block.out)


def replace_by_no_linear(model: Any) -> None:
    model.blocks[1].fc = nn.Identity()


def remove(model: Any) -> None:
    del model.blocks[1]


def append(model: Any) -> None:
    dtype = model.blocks[0].fc.weight.dtype
    model.blocks.extend([Block().to(dtype), Block().to(dtype)])


def wrap(model: Any) -> None:
    model.blocks[1].fc = Wrapped(model.blocks[1].fc)


def bypass(model: Any) -> None:
    model.blocks[1].fc = Bypassed(model.blocks[1].fc)


def bypass_frozen(model: Any) -> None:
    model.blocks[1].fc = Bypassed(model.blocks[1].fc.requires_grad_(False))


def share(model: Any) -> None:
    model.blocks[2].fc = model.blocks[1].fc


def change_class(model: Any) -> None:
    model.blocks[1].fc.__class__ = nn.Linear


def replace_by_ours(model: Any) -> None:
    model.blocks[1].fc = copy.deepcopy(model.blocks[2].fc)


REPLACED = "it was replaced by an instance of Linear after the conversion"
ADDED = "it was added after the conversion"
EXPECTED: dict[Callable[[Any], None], dict[str, tuple[str, str]]] = {
    replace_one: {"blocks.1.fc": ("BF16", REPLACED)},
    replace_all: {f"blocks.{i}.{name}": ("BF16", REPLACED) for i in (1, 2) for name in ("fc", "out")},
    replace_by_no_linear: {"blocks.1.fc": ("-", "it was replaced by an instance of Identity after the conversion")},
    append: {
        "blocks.4.fc": ("BF16", ADDED),
        "blocks.4.out": ("BF16", ADDED),
        "blocks.5.fc": ("BF16", "in layer 5 of 6, one of the last 1"),
    },
    wrap: {"blocks.1.fc.inner": ("FP8", "")},
    bypass: {
        "blocks.1.fc.inner": ("BF16", "Bypassed read its weight and did not call it in the first training step"),
    },
    bypass_frozen: {
        "blocks.1.fc.inner": (
            "BF16",
            "it is frozen and was not called; code that reads its weight multiplies in high precision",
        )
    },
    share: {"blocks.1.fc": ("FP8", ""), "blocks.2.fc": ("FP8", "it was replaced by blocks.1.fc after the conversion")},
    change_class: {"blocks.1.fc": ("BF16", "it was changed to the class Linear after the conversion")},
    replace_by_ours: {"blocks.1.fc": ("FP8", REPLACED)},
}
SILENT = {wrap, share, replace_by_ours, bypass_frozen}
"""Changes after which everything that is multiplied runs in FP8, or of which a frozen layer's row tells."""


def in_trainer(change: Callable[[Any], None], hook: str) -> tuple[ConversionSummary, list[str]]:
    class Changed(Trained):
        pass

    setattr(Changed, hook, lambda self, *_: self.current_epoch or getattr(self, "done", None) or self.changed())
    Changed.changed = lambda self: (change(self), setattr(self, "done", True))[0]
    module, plugin = Changed(), FP8Precision("tensorwise")
    said = fit(module, plugin)
    assert plugin.summary is not None
    return plugin.summary, said


def in_fabric(change: Callable[[Any], None]) -> tuple[ConversionSummary, list[str]]:
    plugin = FP8FabricPrecision("tensorwise")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = Trained()
    model = fabric.setup(module)
    change(module)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), 1e-3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fabric.backward(model(torch.randn(4, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert plugin.summary is not None
    return plugin.summary, [str(each.message) for each in caught if "first training step" in str(each.message)]


def in_plain_loop(change: Callable[[Any], None]) -> tuple[ConversionSummary, list[str]]:
    model = convert_module(Trained().bfloat16())
    assert " planned " in str(conversion_summary(model)).splitlines()[0]
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with fp8_autocast(fp8_recipe="tensorwise"):
                loss = model(torch.randn(4, 16).bfloat16()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return conversion_summary(model), [
        str(each.message) for each in caught if "first training step" in str(each.message)
    ]


LOOPS: dict[str, Callable[[Callable[[Any], None]], tuple[ConversionSummary, list[str]]]] = {
    "on_fit_start": lambda change: in_trainer(change, "on_fit_start"),
    "on_train_start": lambda change: in_trainer(change, "on_train_start"),
    "on_train_batch_start": lambda change: in_trainer(change, "on_train_batch_start"),
    "fabric": in_fabric,
    "plain": in_plain_loop,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("change", EXPECTED, ids=lambda change: change.__name__)
def test_the_table_is_of_the_model_that_ran(change: Callable[[Any], None], loop: str) -> None:
    summary, said = LOOPS[loop](change)
    for name, expected in EXPECTED[change].items():
        row = decision(summary, name)
        assert (row.precision, row.reason) == expected
        assert row.ran in ((row.precision == "FP8"), None) or not row.fp8
    assert "of 8 linear layers" in str(summary) or change in (append, share, replace_by_no_linear)
    changed = {name for name in EXPECTED[change] if decision(summary, name).fp8}
    untouched: list[Any] = [layer for layer in summary.layers if layer.fp8 and layer.name not in changed]
    assert all(layer.ran for layer in untouched)
    if change in SILENT:
        assert not said
    else:
        (message,) = said
        assert all(name in message for name in changed)


def test_a_removed_layer_has_a_row() -> None:
    summary, (said,) = in_fabric(remove)
    assert {layer.name: layer.reason for layer in summary.idle} == {
        "blocks.1.fc": "it was removed from the model after the conversion",
        "blocks.1.out": "it was removed from the model after the conversion",
    }
    assert "removed" in said


def share_with_the_first(model: Any) -> None:
    model.blocks[1] = model.blocks[2] = model.blocks[0]


@pytest.mark.parametrize("loop", [in_fabric, in_plain_loop, LOOPS["on_fit_start"]])
def test_layers_that_share_one_in_high_precision(loop: Any) -> None:
    summary, (said,) = loop(share_with_the_first)
    assert (summary.num_fp8, {layer.precision for layer in summary.layers}) == (0, {"BF16", "-"})
    assert "0 of 4 linear layers ran in FP8" in str(summary)
    assert "blocks.1.fc, blocks.2.fc: it was replaced by blocks.0.fc after the conversion" in said


def test_a_module_of_two_products_that_a_layer_replaces() -> None:
    def replace_modules(model: Any) -> None:
        for block in model.blocks:
            block.fc = linear_like(block.out)

    class Normed(Trained):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.fc = LayerNormMLP(16, 32, device="cpu")

        def on_fit_start(self) -> None:
            replace_modules(self)

    module, plugin = Normed(), FP8Precision("tensorwise")
    (said,) = fit(module, plugin)
    rows = {layer.name: (layer.precision, layer.reason) for layer in plugin.summary.layers}
    assert rows["blocks.1.fc.fc1"] == rows["blocks.1.fc.fc2"] == ("-", REPLACED)
    assert rows["blocks.1.fc"] == ("BF16", ADDED)
    assert "2 of 8 linear layers ran in FP8" in str(plugin.summary)
    assert "blocks.1.fc.fc1" in said


def test_a_layer_that_moves_has_run_from_the_first_step_on() -> None:
    def insert(model: Any) -> None:
        model.blocks.insert(1, Block().to(model.blocks[0].fc.weight.dtype))

    summary, (said,) = in_fabric(insert)
    assert decision(summary, "blocks.2.fc").reason == decision(summary, "blocks.3.fc").reason == ""
    assert "blocks.1.fc, blocks.1.out: it was added after the conversion" in said


def test_layers_of_sizes_that_another_model_has_compiled() -> None:
    other = convert_module(Trained().bfloat16())
    with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"):
        torch.compile(other, backend="eager")(torch.randn(4, 16).bfloat16())

    class Reads(Trained):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = F.linear(x, block.fc.weight) @ block.out.weight
            return x

    module, plugin = Reads(), FP8Precision("tensorwise")
    (said,) = fit(module, plugin)
    assert "Block read its weight" in said
    assert plugin.summary.num_fp8 == 0


def test_layers_that_are_replaced_in_a_later_epoch() -> None:
    class Later(Trained):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                replace_one(self)

    module, plugin = Later(), FP8Precision("tensorwise")
    (said,) = fit(module, plugin, epochs=2)
    assert f"blocks.1.fc: {REPLACED}" in said
    assert decision(plugin.summary, "blocks.1.fc").precision == "BF16"


def test_less_than_half_is_said_at_once() -> None:
    module, plugin = Trained(*(Block() for _ in range(6))), FP8Precision("tensorwise")
    module.used = lambda index: index in (0, 1, 7)
    (said,) = fit(module, plugin)
    assert "it was not called in the first training step" in said
    module, plugin = Trained(*(Block() for _ in range(6))), FP8Precision("tensorwise")
    module.used = lambda index: index not in (1, 2)
    (said,) = fit(module, plugin)
    assert "it was not called in the first 2 training steps" in said  # the first alone says nothing


class Regions(Trained):
    """Runs a block in a region of its own."""

    region: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 1:
                with self.region():
                    x = block(x)
            else:
                x = block(x)
        return x


def test_other_regions_are_named() -> None:
    module, plugin = Regions(), FP8Precision("tensorwise")
    module.region = lambda: fp8_autocast(enabled=False)
    (said,) = fit(module, plugin)
    assert "blocks.1.fc, blocks.1.out: it was called inside fp8_autocast(enabled=False)" in said
    assert decision(plugin.summary, "blocks.1.fc").precision == "BF16"
    module.region = lambda: fp8_autocast(fp8_recipe="rowwise")
    assert not fit(module, plugin)
    row = decision(plugin.summary, "blocks.1.fc")
    assert (row.precision, row.reason) == ("FP8", "by recipe='rowwise' of an fp8_autocast inside the plugin's forward")


def test_a_layer_that_ran_in_both_precisions() -> None:
    class Twice(Trained):
        def forward(self, x: Tensor) -> Tensor:
            with fp8_autocast(enabled=False):
                x = self.blocks[1](x)
            return super().forward(x)

    module, plugin = Twice(), FP8Precision("tensorwise")
    assert not fit(module, plugin)
    row = decision(plugin.summary, "blocks.1.fc")
    assert (row.precision, row.ran) == ("FP8", True)
    assert "forwards ran in high precision" in row.reason


def test_a_plain_loop_whose_optimizer_steps_in_the_backward_pass() -> None:
    model = convert_module(Trained().bfloat16())
    replace_one(model)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-3)
        parameter.register_post_accumulate_grad_hook(lambda _, each=optimizer: (each.step(), each.zero_grad())[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with fp8_autocast(fp8_recipe="tensorwise"):
                loss = model(torch.randn(4, 16).bfloat16()).square().mean()
            loss.backward()
    assert sum("blocks.1.fc: it was replaced" in str(each.message) for each in caught) == 1
    in_fp8 = [layer.name for layer in conversion_summary(model).layers if layer.precision == "FP8"]
    assert in_fp8 == ["blocks.1.out", "blocks.2.fc", "blocks.2.out"]


def test_steps_in_a_backward_pass_that_recomputes_regions() -> None:
    """A region of a recomputed forward begins in the backward pass whose gradients are stepped one by one."""
    model = convert_module(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), first_last_layers_bf16=False)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-3)
        parameter.register_post_accumulate_grad_hook(lambda _, each=optimizer: (each.step(), each.zero_grad())[0])

    def part(layer: nn.Module, x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe="tensorwise"):
            return layer(x)  # type: ignore[no-any-return]

    for _ in range(2):
        x = torch.randn(4, 32)
        for layer in model:
            x = checkpoint(part, layer, x, use_reentrant=False)
        x.square().mean().backward()
    assert [layer.ran for layer in conversion_summary(model).layers] == [True] * 3


def test_a_skip_that_does_not_know_new_layers_does_not_stop_training() -> None:
    model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    known = {name: False for name, _ in model.named_modules()}
    convert_module(model, first_last_layers_bf16=False, skip=lambda _, name: known[name])
    model.append(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8_autocast(fp8_recipe="tensorwise"):
        loss = model(torch.randn(4, 32)).square().mean()
    loss.backward()
    with pytest.warns(UserWarning, match="no rows of those that were added .* skip raises KeyError: '3'"):
        optimizer.step()
    assert [layer.ran for layer in conversion_summary(model).layers] == [True] * 3  # said once


def test_a_compiled_model_has_the_table_of_what_it_wraps() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    compiled: Any = torch.compile(model, backend="eager")
    convert_module(compiled, first_last_layers_bf16=False)
    assert conversion_summary(compiled) == conversion_summary(model)
    del compiled
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with fp8_autocast(fp8_recipe="tensorwise"):
        loss = model(torch.randn(4, 32)).square().mean()
    loss.backward()
    optimizer.step()
    assert [layer.ran for layer in conversion_summary(model).layers] == [True] * 3


def test_a_model_that_is_not_converted_has_no_table() -> None:
    with pytest.raises(ValueError, match="this Linear is not a model that convert_module converted"):
        conversion_summary(nn.Linear(2, 2))
