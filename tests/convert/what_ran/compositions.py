"""Random compositions of a model, a loop, a recipe and what happens to layers when; and what is wrong with one.

``python -m tests.convert.what_ran.compositions SEED ...`` prints compositions and what is wrong with them.
"""

from __future__ import annotations

import copy
import importlib
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import FP8FabricPrecision, FP8Precision, convert_module, fp8_autocast
from tests.convert.what_ran.changes import (
    BY_NAME,
    MUST_BE_REFUSED,
    NEEDS,
    NOT_FOR_CHAINS,
    REFUSED,
    ROWS,
    WIDTH,
    Block,
    Site,
)
from tests.convert.what_ran.oracle import Oracle, gradients_of, products_of
from tests.small import quiet_trainer

SEEDS = 560
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32, computes in bf16": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
}
PATHS = {
    "mlp": ("fc1", "fc2"),
    "chain": ("0",),
    "llama": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj"),
}
MOMENTS = {
    "trainer": (
        ("init", "setup", "configure_model"),
        (
            "callback.on_fit_start", "on_fit_start", "callback.on_train_start", "on_train_start",
            "callback.on_train_batch_start", "on_train_batch_start",
        ),
    ),
    "fabric": (("before setup",), ("after setup", "after setup_optimizers")),
    "plain": (("before convert_module",), ("after convert_module",)),
}  # fmt: skip
"""When things happen, before and after the conversion."""

QUANTIZED = {"weight_subclass", "int8_weight_only", "float8_weight_only", "linear_8bit", "linear_4bit", "fp8_linear"}
IN_EVERY_BLOCK = [*BY_NAME.keys() - {"popped", "appended", "shared", "tied"}]


def summary_of(model: nn.Module) -> Any:
    """The table of a model in a plain loop."""
    return importlib.import_module("lightning_fp8.convert").conversion_summary(model)


@dataclass(frozen=True)
class Change:
    """``what`` happens, as in :mod:`.changes`, to the layer ``path`` of block ``block``; of all inner ones where -1."""

    what: str
    when: str
    block: int
    path: str


@dataclass(frozen=True)
class Composition:
    seed: int
    loop: str
    recipe: str
    dtype: str
    model: str
    blocks: int
    bias: bool
    changes: tuple[Change, ...]

    @property
    def needs(self) -> set[str]:
        """Packages."""
        return {NEEDS[each.what] for each in self.changes if each.what in NEEDS} | (
            {"transformers"} if self.model == "llama" else set()
        )

    @property
    def covers(self) -> list[str]:
        whats = (each.what for each in self.changes)
        return [self.loop, self.recipe, self.dtype, self.model, *whats, *(each.when for each in self.changes)]


def composition(seed: int) -> Composition:
    draw = random.Random(seed)
    names = sorted(BY_NAME)
    whats = [names[seed % len(names)], *draw.choices(names, k=draw.choice((0, 0, 1, 2)))]
    loop, model = draw.choice([*MOMENTS]), draw.choice(("mlp", "mlp", "mlp", "chain", "llama"))
    if model == "chain" and NOT_FOR_CHAINS & {*whats}:
        model = "mlp"
    blocks = 4 if model == "llama" else draw.randint(4, 6)
    places = draw.sample(range(1, blocks - 1), blocks - 2) + [0, blocks - 1]  # the ends stay in BF16
    everywhere = len(whats) == 1 and whats[0] in IN_EVERY_BLOCK and draw.random() < 0.4
    changes = []
    for what, block in zip(whats, places):
        before, after = MOMENTS[loop]
        late = draw.random() < 0.7 and not (what == "tied" and model == "mlp")
        when, path = draw.choice(after if late else before), draw.choice(PATHS[model])
        if what in ("skipped", "called_outside", "called_later") and model == "llama":
            path = "mlp.up_proj"
        changes.append(Change(what, when, -1 if everywhere else block, path))
    dtype, bias = draw.choice([*DTYPES]), draw.random() < 0.5 and model != "llama"
    return Composition(seed, loop, draw.choice(RECIPES), dtype, model, blocks, bias, tuple(changes))


# --- A run of two steps -----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Run:
    """A composition as it runs; see :attr:`tables`, after each step, and :attr:`oracle`."""

    def __init__(self, made: Composition) -> None:
        torch.manual_seed(made.seed)
        self.made, self.oracle = made, Oracle()
        self.tables: list[Any] = []
        self.error = ""
        self.said: list[str] = []
        self.weights, self.compute = DTYPES[made.dtype]
        self.net, batch = self._model()
        self.data = torch.cat([batch, batch.flip(0)])  # of equal amaxes, or delayed scales would not fit
        if made.loop == "plain" or QUANTIZED & {each.what for each in made.changes}:
            self.net.to(self.weights)
        self.root: nn.Module = self.net
        self.planned: dict[str, tuple[int, int]] = {}
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        """Of layers when the model was converted."""
        self.sites = [(each, self._sites(each, number)) for number, each in enumerate(made.changes)]

    def _model(self) -> tuple[nn.Module, Tensor]:
        made = self.made
        sizes = random.Random(made.seed).sample(range(WIDTH + 1, 97), made.blocks + 1)
        if made.model == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                vocab_size=90, hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, attn_implementation="eager", use_cache=False,
            )  # fmt: skip
            return LlamaForCausalLM(config).train(), torch.randint(90, (2, ROWS // 2))
        if made.model == "chain":
            pairs = zip(sizes, sizes[1:])
            blocks: list[nn.Module] = [nn.Sequential(nn.Linear(*pair, made.bias), nn.SiLU()) for pair in pairs]
            return Stack(blocks), torch.randn(ROWS, sizes[0])
        return Stack([Block(size, made.bias) for size in sizes[1:]]), torch.randn(ROWS, WIDTH)

    def _sites(self, change: Change, number: int) -> list[Site]:
        blocks = self.net.model.layers if self.made.model == "llama" else self.net.blocks
        chosen = blocks[1:-1] if change.block < 0 else [blocks[change.block]]
        return [Site(self.net, ref(block), change.path, number, self.made.recipe) for block in chosen]

    def at(self, moment: str) -> None:
        for change, sites in self.sites:
            for site in sites if change.when == moment else ():
                BY_NAME[change.what](site)

    def converted(self) -> None:
        self.names = WeakKeyDictionary({each: name for name, each in self.layers().items()})
        fp8 = {name: each for name, each in self.layers().items() if getattr(each, "fp8", False)}
        self.planned = {name: (each.out_features, each.in_features) for name, each in fp8.items()}

    def layers(self) -> dict[str, nn.Linear]:
        return {name: each for name, each in self.root.named_modules() if isinstance(each, nn.Linear)}

    def before_step(self, step: int) -> None:
        self.oracle.step = step
        sites = [each for _, sites in self.sites for each in sites]
        for restore in [each for site in sites for each in site.later] if step == 1 else ():
            restore()
        for module in [each() for site in sites for each in site.outside if each() is not None]:
            with self.oracle.watching(in_region=False):
                module(torch.randn(ROWS, module.in_features, dtype=module.weight.dtype))

    def loss(self, forward: Any, batch: Tensor) -> Tensor:
        with self.oracle.watching():
            y = forward(batch)
            return getattr(y, "logits", y).float().square().mean()

    def run(self) -> Run:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                {"trainer": self._trainer, "fabric": self._fabric, "plain": self._plain}[self.made.loop]()
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
        self.said = [str(each.message) for each in caught]
        return self

    def _plugin(self, cls: type) -> Any:
        return cls(self.made.recipe, weights_dtype=self.weights, compute_dtype=self.compute)

    def _trainer(self) -> None:
        plugin = self._plugin(FP8Precision)
        self.root = module = Trained(self)
        trainer = quiet_trainer(plugins=[plugin], callbacks=[Calls(self, plugin)])
        trainer.fit(module, DataLoader(TensorDataset(self.data), len(self.data) // 2))
        self.tables.append(plugin.summary)  # which knows of layers that the first step did not call

    def _batches(self) -> Iterator[Tensor]:
        for step, batch in enumerate(self.data.chunk(2)):
            self.before_step(step)
            yield batch

    def _fabric(self) -> None:
        plugin = self._plugin(FP8FabricPrecision)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        self.at("before setup")
        model = fabric.setup_module(self.net)
        self.converted()
        self.at("after setup")
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.01))
        self.at("after setup_optimizers")
        for batch in self._batches():
            loss = self.loss(model, batch)
            with self.oracle.watching():
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.tables.append(copy.copy(plugin.summary))

    def _plain(self) -> None:
        self.at("before convert_module")
        convert_module(self.net)
        self.converted()
        self.at("after convert_module")
        optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        mixed = torch.autocast("cpu", self.compute) if self.compute != self.weights else nullcontext()
        for batch in self._batches():
            with fp8_autocast(fp8_recipe=self.made.recipe), mixed:
                loss = self.loss(self.net, batch.to(self.weights) if batch.is_floating_point() else batch)
            with self.oracle.watching():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            try:
                self.tables.append(summary_of(self.net))
            except AttributeError:
                self.oracle.problems.append("no table: conversion_summary is missing")
                return


class Trained(L.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = run.net, run
        run.at("init")

    def setup(self, stage: str) -> None:
        self.run.at("setup")

    def configure_model(self) -> None:
        self.run.at("configure_model")

    def on_fit_start(self) -> None:
        self.run.at("on_fit_start")

    def on_train_start(self) -> None:
        self.run.at("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.run.at("on_train_batch_start")
        self.run.before_step(batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.run.loss(self.net, batch[0])

    def backward(self, loss: Tensor) -> None:
        with self.run.oracle.watching():
            loss.backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Calls(L.Callback):
    def __init__(self, run: Run, plugin: FP8Precision) -> None:
        self.run, self.plugin = run, plugin

    def on_fit_start(self, *_: Any) -> None:
        self.run.converted()
        self.run.at("callback.on_fit_start")

    def on_train_start(self, *_: Any) -> None:
        self.run.at("callback.on_train_start")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.run.at("callback.on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.run.tables.append(self.plugin.summary)


# --- What is wrong ----------------------------------------------------------------------------------------------------


def wrong_with(made: Composition) -> list[str]:
    """What is wrong with a run of ``made``; each begins with its kind and a colon."""
    run = Run(made).run()
    whats = {each.what for each in made.changes}
    if run.error:
        allowed = [REFUSED[what] for what in whats & REFUSED.keys()]
        return [] if any(re.search(each, run.error, re.DOTALL) for each in allowed) else [f"error: {run.error}"]
    if whats & MUST_BE_REFUSED:
        return [f"not refused: {sorted(whats & MUST_BE_REFUSED)}"]
    problems = run.oracle.verified()
    for site in (site for _, sites in run.sites for site in sites):
        for layer, plain in site.plain:
            problems += run.oracle.unlike(layer(), plain) if layer() is not None else ()
    for index, table in enumerate(run.tables):
        problems += _wrong_rows(run, table, index)
    if run.tables:
        problems += _wrong_share(run)
    return [*dict.fromkeys([*problems, *_unsaid(run)])]


def _wrong_rows(run: Run, table: Any, steps: int) -> Iterator[str]:
    """What ``table``, of the end of step ``steps``, 2 being after the fit, does not say of the model as it is now."""
    layers = run.layers()
    everything = [*layers.values()]
    products = [each for each in run.oracle.products if each.step <= steps]
    judged = products if steps == 2 else [each for each in products if not each.step]
    ran: set[tuple[str, tuple[int, ...]]] = set()
    for name, layer in layers.items():
        shape = layer.out_features, layer.in_features
        names = {name, run.names.get(layer, name)}
        rows = [row for row in table.layers if row.name in names and row.shape == shape]
        ran |= {
            (row.name, row.shape) for row in rows if any(each.fp8 for each in products_of(layer, everything, products))
        }
        forwards = products_of(layer, everything, judged)
        fp8, high = any(each.fp8 for each in forwards), any(not each.fp8 for each in forwards)
        what = f"{name} {shape} of {type(layer).__name__}"
        said = [(row.precision, row.ran, row.reason) for row in rows]
        if not rows:
            yield f"no row: {what}"
        elif fp8 and not any(row.precision == "FP8" for row in rows):
            yield f"row: {what} multiplied in FP8, and its rows are {said}"
        elif high and not any(row.reason and (fp8 or row.precision != "FP8") for row in rows):
            yield f"row: {what} multiplied in high precision{' and FP8' * fp8}, and its rows are {said}"
        elif not high and not all(each.fp8 for each in gradients_of(layer, everything, judged)):
            yield f"row: the gradient of the input of {what} was multiplied in high precision, and its rows are {said}"
    for row in table.layers:
        if row.precision == "FP8" and row.ran and (row.name, row.shape) not in ran:
            yield f"row: {row.name} {row.shape} is said to have run in FP8, and no such layer did"
    living = {run.names.get(layer) for layer in everything}
    for name, shape in run.planned.items():
        if name not in living and not any(
            (row.name, row.shape) == (name, shape) and row.reason for row in table.layers
        ):
            yield f"gone: {name} {shape} was planned, is gone, and has no row with a reason"


def _wrong_share(run: Run) -> Iterator[str]:
    table = run.tables[0]
    products = [each for each in run.oracle.products if not each.step and each.in_region]
    flops, in_fp8 = (sum(each.flops for each in products if each.fp8 >= fp8) for fp8 in (False, True))
    if table.flops is not None and flops and abs(table.flops_in_fp8 / table.flops - in_fp8 / flops) > 1e-6:
        yield f"share: {table.flops_in_fp8} of {table.flops} in the table, {in_fp8} of {flops} in truth"
    forwards = [each for each in products if not each.backward and each.fp8]
    layers = [layer for layer in run.layers().values() if products_of(layer, [layer], forwards)]
    if layers and table.flops is None and run.made.loop == "trainer":
        yield "share: the table has none"


SAID = re.compile(r"FP8.*(nothing|not run|ran in|run in|runs in|high precision|BF16|replaced|half)", re.DOTALL)


def _unsaid(run: Run) -> Iterator[str]:
    """Whether less than half of the plan ran, without a warning."""
    layers = {run.names.get(layer): layer for layer in run.layers().values()}
    first = [each for each in run.oracle.products if not each.step and each.fp8]
    everything = [*run.layers().values()]
    ran = [name for name in run.planned if name in layers and products_of(layers[name], everything, first)]
    half = len(run.planned) / 2
    later = any(each.what == "called_later" for each in run.made.changes)
    if len(ran) < half and not later and not any(SAID.search(text) for text in run.said):
        yield f"unsaid: {len(ran)} of {len(run.planned)} planned layers ran, and warnings are {run.said}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        made = composition(int(argument))
        print(made, *wrong_with(made), sep="\n  ")
