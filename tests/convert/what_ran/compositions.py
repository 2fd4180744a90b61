"""Random compositions of a model, a loop, a recipe and what happens to layers when; and what is wrong with one.

``python -m tests.convert.what_ran.compositions SEED ...`` prints compositions and what is wrong with them.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import FP8FabricPrecision, FP8Precision, conversion_summary, convert_module, fp8_autocast
from tests.convert.what_ran import changes
from tests.convert.what_ran.changes import ROWS, WIDTH, Block, Site
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
    "llama": (*(f"mlp.{name}_proj" for name in ("gate", "up", "down")), *(f"self_attn.{name}_proj" for name in "qkvo")),
}
HOOKS = ("on_fit_start", "on_train_start", "on_train_batch_start")
MOMENTS = {
    "trainer": (("init", "setup", "configure_model"), (*HOOKS, *(f"callback.{name}" for name in HOOKS))),
    "fabric": (("before setup",), ("after setup", "after setup_optimizers")),
    "plain": (("before convert_module",), ("after convert_module",)),
}
"""When things happen, before and after the conversion."""


def summary_of(model: nn.Module) -> Any:
    """The table of a model in a plain loop."""
    return conversion_summary(model)


# --- Compositions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """``what`` happens, as in :class:`Site`, to layer ``path`` (``*``: all) of block ``block`` (-1: of inner ones)."""

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
    def whats(self) -> list[str]:
        return [each.what for each in self.changes]

    @property
    def needs(self) -> set[str]:
        """Packages."""
        of_model = {"transformers"} if self.model == "llama" else set()
        return of_model | {changes.QUANTIZED[what] for what in self.whats if what in changes.QUANTIZED}

    @property
    def covers(self) -> list[str]:
        return [self.loop, self.recipe, self.dtype, self.model, *self.whats, *(each.when for each in self.changes)]


def composition(seed: int) -> Composition:
    draw = random.Random(seed)
    every = changes.CHANGES
    whats = [every[seed % len(every)], *draw.choices(every, k=draw.choice((0, 0, 1, 2)))]
    loop, model = draw.choice([*MOMENTS]), draw.choice(("mlp", "mlp", "mlp", "chain", "llama"))
    if model == "chain" and changes.NOT_FOR_CHAINS & {*whats}:
        model = "mlp"
    blocks = 4 if model == "llama" else draw.randint(4, 6)
    places = draw.sample(range(1, blocks - 1), blocks - 2) + [0]  # the ends stay in high precision
    if len(whats) == 1 and whats[0] not in ("popped", "appended", "shared", "tied") and draw.random() < 0.4:
        places[0] = -1
    made = []
    for what, block in zip(whats, places):
        before, after = MOMENTS[loop]
        late = draw.random() < 0.7 and not (what == "tied" and model == "mlp")  # which makes new layers
        when, path = draw.choice(after if late else before), draw.choice(PATHS[model])
        if model == "llama" and what in changes.NOT_FOR_CHAINS and path.startswith("self_attn"):
            path = "mlp.up_proj"
        if block < 0 and what not in changes.OF_BLOCKS:
            path = "*"
        made.append(Change(what, when, block, path))
    dtype, bias = draw.choice([*DTYPES]), draw.random() < 0.5 and model != "llama"
    return Composition(seed, loop, draw.choice(RECIPES), dtype, model, blocks, bias, tuple(made))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model_and_batch(made: Composition) -> tuple[Any, Any, Tensor]:
    """A model, its blocks and a batch. No two layers of a block list of ours have the same sizes."""
    if made.model == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=90, hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="eager", use_cache=False,
        )  # fmt: skip
        llama = LlamaForCausalLM(config).train()
        return llama, llama.model.layers, torch.randint(90, (2, ROWS // 2))
    sizes = random.Random(made.seed).sample(range(WIDTH + 1, 97), made.blocks + 1)
    if made.model == "chain":
        layers = [nn.Linear(*pair, made.bias) for pair in zip(sizes, sizes[1:])]
        net = Stack([nn.Sequential(layer, nn.SiLU()) for layer in layers])
        return net, net.blocks, torch.randn(ROWS, sizes[0])
    net = Stack([Block(size, made.bias) for size in sizes[1:]])
    return net, net.blocks, torch.randn(ROWS, WIDTH)


# --- A run of two steps -----------------------------------------------------------------------------------------------


class Run:
    """A composition as it runs.

    Attributes:
        tables: the tables after each step, and after a Trainer's fit.
        root: the module that the names in a table begin at.
        planned: ``(out_features, in_features)`` of the layers that are in FP8 after the conversion.
        names: the names of living layers then.
    """

    def __init__(self, made: Composition) -> None:
        torch.manual_seed(made.seed)
        self.made, self.oracle, self.error = made, Oracle(), ""
        self.tables: list[Any] = []
        self.said: list[str] = []
        self.weights, self.compute = DTYPES[made.dtype]
        self.net, blocks, batch = model_and_batch(made)
        self.root = self.net
        self.data = torch.cat([batch, batch.flip(0)])  # of equal amaxes, or delayed scales would not fit
        if made.loop == "plain" or changes.QUANTIZED.keys() & {*made.whats}:
            self.net.to(self.weights)
        self.planned: dict[str, tuple[int, int]] = {}
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.waiting = [
            (each, Site(self.net, block, path, number, made.recipe))
            for number, each in enumerate(made.changes)
            for block in (blocks[1:-1] if each.block < 0 else [blocks[each.block]])
            for path in (PATHS[made.model] if each.path == "*" else [each.path])
        ]
        self.sites = [site for _, site in self.waiting]

    def at(self, moment: str) -> None:
        now = [each for each in self.waiting if each[0].when == moment]
        self.waiting = [each for each in self.waiting if each not in now]
        for change, site in now:
            getattr(site, change.what)()

    def layers(self) -> dict[str, nn.Linear]:
        return {name: each for name, each in self.root.named_modules() if isinstance(each, nn.Linear)}

    def converted(self) -> None:
        for name, each in self.layers().items():
            self.names[each] = name
            if getattr(each, "fp8", False):
                self.planned[name] = each.out_features, each.in_features

    def before_step(self, step: int) -> None:
        self.oracle.step = step
        for restore in [each for site in self.sites for each in site.later] if step else ():
            restore()
        for layer in [each() for site in self.sites for each in site.outside]:
            if layer is not None:
                with self.oracle.watching(in_region=False):
                    layer(torch.randn(ROWS, layer.in_features, dtype=layer.weight.dtype))

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

    def _trainer(self) -> None:
        self.plugin = FP8Precision(self.made.recipe, weights_dtype=self.weights, compute_dtype=self.compute)
        self.root = Trained(self)
        loader = DataLoader(TensorDataset(self.data), len(self.data) // 2)
        quiet_trainer(plugins=[self.plugin], callbacks=[Callback(self)]).fit(self.root, loader)
        self.tables.append(self.plugin.summary)

    def _batches(self) -> Iterator[Tensor]:
        for step, batch in enumerate(self.data.chunk(2)):
            self.before_step(step)
            yield batch

    def _fabric(self) -> None:
        plugin = FP8FabricPrecision(self.made.recipe, weights_dtype=self.weights, compute_dtype=self.compute)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        self.at("before setup")
        model = fabric.setup_module(self.net)
        self.converted()
        self.at("after setup")
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 1e-3))
        self.at("after setup_optimizers")
        for batch in self._batches():
            loss = self.loss(model, batch)
            with self.oracle.watching():
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.tables.append(plugin.summary)

    def _plain(self) -> None:
        self.at("before convert_module")
        convert_module(self.net)
        self.converted()
        self.at("after convert_module")
        optimizer = torch.optim.SGD(self.net.parameters(), 1e-3)
        for batch in self._batches():
            mixed = torch.autocast("cpu", self.compute) if self.compute != self.weights else nullcontext()
            with fp8_autocast(fp8_recipe=self.made.recipe), mixed:
                loss = self.loss(self.net, batch.to(self.weights) if batch.is_floating_point() else batch)
            with self.oracle.watching():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.tables.append(summary_of(self.net))


def _at(moment: str) -> Callable[..., None]:
    return lambda self, *_, **__: self.run.at(moment)


class Trained(L.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = run.net, run
        run.at("init")

    setup, configure_model, on_fit_start, on_train_start = map(_at, ("setup", "configure_model", *HOOKS[:2]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.run.at("on_train_batch_start")
        self.run.before_step(batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.run.loss(self.net, batch[0])

    def backward(self, loss: Tensor) -> None:
        with self.run.oracle.watching():
            loss.backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Callback(L.Callback):
    def __init__(self, run: Run) -> None:
        self.run = run

    on_train_start, on_train_batch_start = map(_at, ("callback.on_train_start", "callback.on_train_batch_start"))

    def on_fit_start(self, *_: Any) -> None:
        self.run.converted()
        self.run.at("callback.on_fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.run.tables.append(self.run.plugin.summary)


# --- What is wrong ----------------------------------------------------------------------------------------------------


def wrong_with(made: Composition) -> list[str]:
    """What is wrong with a run of ``made``; each begins with its kind and a colon."""
    run, whats = Run(made).run(), {*made.whats}
    refused = changes.MUST_BE_REFUSED | changes.MAY_BE_REFUSED
    if run.error:
        allowed = any(re.search(refused[what], run.error, re.DOTALL) for what in whats & refused.keys())
        return [] if allowed else [f"error: {run.error}"]
    if whats & changes.MUST_BE_REFUSED.keys():
        return [f"not refused: {sorted(whats & changes.MUST_BE_REFUSED.keys())}"]
    problems = [*run.oracle.verified(), *_wrong_share(run), *_unsaid(run)]
    for layer, plain in [each for site in run.sites for each in site.plain]:
        problems += run.oracle.unlike(layer(), plain)
    for index, table in enumerate(run.tables):
        problems += _wrong_rows(run, table, index)
    return [*dict.fromkeys(problems)]


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
        if any(each.fp8 for each in products_of(layer, everything, products)):
            ran |= {(row.name, row.shape) for row in rows}
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
        elif fp8 and not high and not all(each.fp8 for each in gradients_of(layer, everything, judged)):
            yield f"row: the gradient of the input of {what} was multiplied in high precision, and its rows are {said}"
    for row in table.layers:
        if row.precision == "FP8" and row.ran and (row.name, row.shape) not in ran:
            yield f"row: {row.name} {row.shape} is said to have run in FP8, and no such layer did"
    living = {run.names.get(layer) for layer in everything}
    for name, planned in run.planned.items():
        reasons = [row.reason for row in table.layers if row.name == name]  # of what replaced it, or of itself
        if name not in living and not any(reasons):
            yield f"gone: {name} {planned} was planned, is gone, and has no row with a reason"


def _wrong_share(run: Run) -> Iterator[str]:
    if any(change.what == "linear_4bit" for change in run.made.changes):
        return  # torch's counter does not know its product, as docs/limits.md says
    table = run.tables[0]
    products = [each for each in run.oracle.products if not each.step and each.in_region]
    flops, in_fp8 = (sum(each.flops for each in products if each.fp8 >= fp8) for fp8 in (False, True))
    if table.flops is None:
        if run.made.loop == "trainer":
            yield "share: the table has none"
    elif not flops or abs(table.flops_in_fp8 / table.flops - in_fp8 / flops) > 1e-6:
        yield f"share: {table.flops_in_fp8} of {table.flops} in the table, {in_fp8} of {flops} in truth"


SAID = re.compile(r"FP8.*(nothing|not run|ran in|run in|runs in|high precision|BF16|replaced|half)", re.DOTALL)


def _unsaid(run: Run) -> Iterator[str]:
    """Whether less than half of the plan ran in the first step, without a warning."""
    everything = run.layers()
    first = [each for each in run.oracle.products if not each.step and each.fp8]
    ran = {run.names.get(each) for each in everything.values() if products_of(each, [*everything.values()], first)}
    count = len(ran & run.planned.keys())
    if 2 * count < len(run.planned) and "called_later" not in run.made.whats and not any(map(SAID.search, run.said)):
        yield f"unsaid: {count} of {len(run.planned)} planned layers ran, and warnings are {run.said}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        made = composition(int(argument))
        print(made, *wrong_with(made), sep="\n  ")
