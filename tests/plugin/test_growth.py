"""What a process repeats does not pile up: sizes of the package's tables, hooks, objects, and calls of a region."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from lightning_fp8 import (
    FP8FabricPrecision,
    FP8Precision,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    make_recipe,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.torchao.float8 import convert_to_float8_training
from tests.convert.first_step.watched import Trained
from tests.small import quiet_trainer
from tests.tiers import thorough

_SIZED = (list, dict, set, deque, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def tables() -> dict[str, int]:
    """The size of each container and cache at the top level of the package's modules and classes."""
    sizes = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("lightning_fp8", "cuda_kernels") or module is None:
            continue
        owned = {name: vars(module)} | {
            f"{name}.{cls}": vars(value)
            for cls, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == name
        }
        for owner, attributes in owned.items():
            for key, value in list(attributes.items()):
                if isinstance(value, _SIZED) and not key.startswith("__"):
                    sizes[f"{owner}.{key}"] = len(value)
                elif hasattr(value, "cache_info") and not isinstance(value, type):
                    sizes[f"{owner}.{key}()"] = value.cache_info().currsize
    return sizes


def hooks(*owners: Any) -> dict[str, int]:
    """The numbers of hooks of modules and optimizers, and of those for all of them."""
    found: Counter[str] = Counter()
    everything = [part for owner in owners for part in (owner.modules() if isinstance(owner, nn.Module) else [owner])]
    for holder in (*everything, torch_module, torch_optimizer):
        for key, value in vars(holder).items():
            if "hook" in key and isinstance(value, Mapping):
                found[f"{type(holder).__name__}.{key}"] += len(value)
    return dict(found)


def objects() -> Counter[str]:
    """The living objects by type, of the package's types and of tensors and modules."""
    gc.collect()
    return Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if type(each).__module__.startswith(("lightning_fp8", "torch.nn", "weakref"))
        or isinstance(each, (torch.Tensor, weakref.ref, partial))
    )


def calls(function: Callable[[], Any]) -> int:
    """The number of Python and C functions that ``function`` calls: its host time without a clock."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


Repeated = Iterator[tuple[Any, ...]]
"""After each repetition, what hooks may be on."""


def regions(folder: Path) -> Repeated:
    model = convert_module(Trained().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    while True:
        for name in RECIPES:
            with fp8_autocast(fp8_recipe=make_recipe(name)):
                loss = model(torch.randn(2, 16).bfloat16()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield model, optimizer


def conversions(folder: Path) -> Repeated:
    model = Trained().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    plugin = FP8FabricPrecision()
    while True:
        convert_module(model)
        convert_module(model, fuse=False)
        convert_to_float8_training(model, module_filter_fn=lambda module, name: "blocks.1" in name)
        plugin.convert_module(model)
        FP8FabricPrecision("tensorwise", attention=True).convert_module(model)
        yield model, optimizer


def models(folder: Path) -> Repeated:
    """A new model each time, as in a search of hyperparameters."""
    while True:
        model = convert_module(Trained().bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with fp8_autocast():
            loss = model(torch.randn(2, 16).bfloat16()).square().mean()
        loss.backward()
        optimizer.step()
        yield ()


def evaluations(folder: Path) -> Repeated:
    module, plugin = Trained(), FP8Precision()
    module.predict_step = lambda batch, batch_idx: module(batch)
    trainer = quiet_trainer(plugins=[plugin])
    data = DataLoader(torch.randn(2, 16))
    while True:
        trainer.validate(module, data, verbose=False)
        trainer.predict(module, data)
        yield (module,)


def fits(folder: Path) -> Repeated:
    module, plugin = Trained(), FP8Precision()
    data = DataLoader(torch.randn(4, 16), 2)
    while True:
        quiet_trainer(plugins=[plugin], max_epochs=1).fit(module, data)
        yield (module,)


def saves_and_loads(folder: Path) -> Repeated:
    plugin = FP8FabricPrecision()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    module = Trained()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 1e-3))
    state = {"model": model, "optimizer": optimizer, "fp8": plugin}
    while True:
        fabric.backward(model(torch.randn(2, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(folder / "last.ckpt", state)
        fabric.load(folder / "last.ckpt", state)
        load_fp8_state_dict(module, fp8_state_dict(module))
        module.load_state_dict(module.state_dict())
        yield module, optimizer.optimizer


WORK = (regions, conversions, models, evaluations, fits, saves_and_loads)


@pytest.mark.parametrize("times", [8, pytest.param(334, marks=thorough)])  # repeated three times
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.filterwarnings("ignore")
def test_nothing_grows(work: Callable[[Path], Repeated], times: int, tmp_path: Path) -> None:
    repeated = work(tmp_path)
    model = convert_module(Trained().bfloat16())

    def region() -> None:
        with fp8_autocast(), torch.no_grad():
            model(torch.ones(1, 16).bfloat16())

    def state() -> tuple[dict[str, int], dict[str, int], Counter[str], int]:
        for _ in range(times):
            owners = next(repeated)
        region()
        gc.collect()
        return tables(), hooks(*owners), objects(), calls(region)

    state()
    first, then = state(), state()
    # Tables may shrink: a model that nobody trains is not watched for ever.
    for before, after, slack in zip(first[:3], then[:3], (0, 0, times // 4)):
        assert not {name: (before.get(name, 0), n) for name, n in after.items() if n > before.get(name, 0) + slack}
    assert then[3] <= first[3]
