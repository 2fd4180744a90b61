"""Run by two processes: training under FSDP2 that gathers weights in FP8, beside one that gathers them in BF16.

``python -m tests.distributed.scripts.fsdp FOLDER PART [RECIPE]``; the parts ``recipe`` and ``within`` are of one.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import (
    DelayedScaling,
    FP8FabricPrecision,
    LayerNormLinear,
    LayerNormMLP,
    TransformerLayer,
    convert_module,
    fp8_autocast,
    fp8_region,
    fp8_state_dict,
    load_fp8_state_dict,
    make_recipe,
)
from lightning_fp8.convert import apply
from lightning_fp8.delayed import update
from lightning_fp8.sharding import fsdp
from tests.distributed.launch import leave
from tests.small import fp8_trainer

RECIPES = "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"


class Block(nn.Module):
    def __init__(self, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Collectives(TorchDispatchMode):
    """Counts collectives and the bytes that each gather sends, as torch.distributed starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = tree_leaves(args[1 if "gather" in name else 0])
            self.calls[name] += 1
            self.sent[name] += sum(each.numel() * each.itemsize for each in sent)
        return func(*args, **(kwargs or {}))


@contextmanager
def gathers_in_bf16(chosen: bool) -> Iterator[None]:
    """Inside, models are converted as if nothing gathered in FP8."""
    real = apply.gather_in_fp8
    if chosen:
        apply.gather_in_fp8 = lambda model: None  # type: ignore[assignment]
    try:
        yield
    finally:
        apply.gather_in_fp8 = real


def sharded(make: Callable[[], nn.Module], in_bf16: bool = False, **options: Any) -> nn.Module:
    """A model of blocks, each of which is sharded, and itself, converted then as Lightning does."""
    torch.manual_seed(0)
    model = make().to(options.pop("dtype", torch.bfloat16))
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    with gathers_in_bf16(in_bf16):
        convert_module(model, first_last_layers_bf16=False)
    return model


def blocks(**sizes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[Block(**sizes) for _ in range(2)])


def train(model: nn.Module, recipe: str, steps: int = 4, micro_batches: int = 2, counts: bool = True) -> dict[str, Any]:
    """Losses, weights, scales, and what a step sends behind the first two, if it ``counts`` them."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(steps):
        collectives = Collectives()
        with collectives if counts else nullcontext():
            for micro_batch in range(micro_batches):
                x = torch.randn(16, 256, generator=generator).bfloat16()
                model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                with fp8_autocast(fp8_recipe=recipe):
                    y = model(x)
                loss = F.mse_loss(y.float(), x.float().roll(1, 1))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    state = fp8_state_dict(model)
    return {
        "losses": losses,
        "weights": {name: value.full_tensor() for name, value in model.state_dict().items()},
        "scales": state["scale"].tolist() if "scale" in state else [],
        "calls": dict(collectives.calls),
        "sent": dict(collectives.sent),
    }


def compared(recipe: str, make: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    """FP8 gather beside BF16 gather."""
    bf16, fp8 = (train(sharded(make, in_bf16, **options), recipe) for in_bf16 in (True, False))
    return {
        "losses": fp8["losses"] == bf16["losses"],
        "falls": fp8["losses"][-1] < fp8["losses"][0],
        "weights": all(torch.equal(weight, bf16["weights"][name]) for name, weight in fp8["weights"].items()),
        "scales": fp8["scales"] == bf16["scales"],
        "bytes": fp8["sent"].get("_allgather_base_", 0) / max(1, bf16["sent"].get("_allgather_base_", 0)),
        "more_calls": {
            name: count - bf16["calls"].get(name, 0)
            for name, count in fp8["calls"].items()
            if count != bf16["calls"].get(name, 0)
        },
    }


def part_recipe() -> dict[str, Any]:
    return compared(sys.argv[3], blocks())


def part_replicas() -> dict[str, Any]:
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {recipe: compared(recipe, blocks(), mesh=mesh) for recipe in RECIPES}


def part_options() -> dict[str, Any]:
    """Other shards, other policies of FSDP2, and other layers."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False)
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    uneven = blocks(hidden=255)
    cases: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
        "uneven delayed": ("delayed", uneven, {}),
        "uneven rowwise": ("rowwise", uneven, {}),
        "no rows on a rank": ("tensorwise", lambda: nn.Sequential(nn.Linear(256, 1), nn.Linear(1, 256)), {}),
        "kept tensorwise": ("tensorwise", blocks(), {"reshard_after_forward": False}),
        "kept rowwise": ("rowwise", blocks(), {"reshard_after_forward": False}),
        "float32 shards": ("rowwise", blocks(), {"mp_policy": mixed, "dtype": torch.float32}),
        "float32 shards delayed": ("delayed", blocks(), {"mp_policy": mixed, "dtype": torch.float32}),
        "offload": ("mxfp8", blocks(), {"offload_policy": offload}),
        "hybrid": ("tensorwise", blocks(), {"mesh": hybrid}),
        "columns": ("delayed", blocks(), {"shard_placement_fn": lambda each: Shard(each.dim() - 1)}),
        "own scales": ("own", blocks(), {}),
        "one rank": ("delayed", blocks(), {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]}),
        **{f"fused {recipe}": (recipe, fused, {}) for recipe in ("delayed", "mxfp8")},
        "conv1d": ("delayed", conv1d, {}),
    }
    report = {}
    for name, (recipe, make, options) in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            given: Any = DelayedScaling(reduce_amax=False) if recipe == "own" else recipe
            report[name] = compared(given, make, **options)
        said = [str(each.message) for each in caught if "FSDP2" in str(each.message)]
        report[name]["said"] = said
    return report


def fused() -> nn.Module:
    """Blocks of all fused modules, of which the attention's has its matrix in three parameters."""
    layer = lambda: TransformerLayer(256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")  # noqa: E731
    return nn.Sequential(
        *[nn.Sequential(_Batched(layer()), LayerNormMLP(256, 512), LayerNormLinear(256, 256)) for _ in range(2)]
    )


class _Batched(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]  # type: ignore[no-any-return]


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(nn.Sequential(Conv1D(256, 256)), nn.Sequential(nn.Linear(256, 256)))


def switching(in_bf16: bool, kept: bool, wraps: bool) -> list[Any]:
    """Losses of one model in regions of several kinds."""
    model = sharded(blocks(), in_bf16, **({"reshard_after_forward": False} if kept else {}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    generator = torch.Generator().manual_seed(3)
    results: list[Any] = []

    def forward(recipe: str | None, x: Tensor, recomputes: bool = False) -> Tensor:
        with fp8_autocast(fp8_recipe=recipe) if recipe else fp8_autocast(enabled=False):
            if not recomputes:
                return model(x)  # type: ignore[no-any-return]
            if wraps:  # the sharded module is inside of what is recomputed
                for block in model:
                    x = checkpoint(block, x, use_reentrant=False)
                return x
            return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]

    state: dict[str, Any] = {}
    for recipe, how in (
        ("tensorwise", "train"), (None, "train"), ("mxfp8", "train"), ("mxfp8", "evaluate"), (None, "evaluate"),
        ("mxfp8", "recompute"), ("mxfp8", "recompute"), ("rowwise", "recompute"), ("delayed", "recompute"),
        ("delayed", "train"), ("delayed", "save"), ("rowwise", "evaluate between"), ("delayed", "both"),
        ("mxfp8", "both"), ("blockwise", "load"), ("tensorwise", "to"), ("tensorwise", "in place"),
        ("rowwise", "two recipes"), ("rowwise", "accumulate"), ("delayed", "train"),
    ):  # fmt: skip
        x = torch.randn(16, 256, generator=generator).bfloat16().requires_grad_()
        if how == "save":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            continue
        if how == "load":
            model.load_state_dict(state)
        if how == "to":
            model.to(torch.float32).to(torch.bfloat16)
        if how == "in place":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        if how == "evaluate":
            with torch.no_grad():
                results.append(forward(recipe, x).float().sum().item())
            continue
        y = forward(recipe, x, how == "recompute").float()
        if how == "evaluate between":
            with torch.no_grad():
                results.append(forward(None, x).float().sum().item())
        if how == "both":
            y = y + forward(None, x).float()
        if how == "two recipes":
            y = y + forward("tensorwise", x).float()
        loss = F.mse_loss(y, x.float().roll(1, 1))
        if how == "accumulate":
            model.set_requires_gradient_sync(False)
            loss.backward()
            model.set_requires_gradient_sync(True)
            loss = F.mse_loss(forward(None, x).float(), x.float())
        loss.backward()
        results += [loss.item(), x.grad.float().sum().item()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(value.full_tensor().float().sum().item() for value in model.state_dict().values())]


def part_switching() -> dict[str, Any]:
    report = {}
    for kept in (False, True):
        for wraps in (False, True):
            bf16, fp8 = (switching(in_bf16, kept, wraps) for in_bf16 in (True, False))
            report[f"kept={kept} wraps={wraps}"] = [
                index for index, pair in enumerate(zip(bf16, fp8)) if len(set(pair)) > 1
            ]
    return report


class Branches(nn.Module):
    """A block of which a forward runs one of two layers, and the other one in high precision unless it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.first, self.second = (nn.Linear(256, 256) for _ in range(3))
        self.runs_second = False

    def forward(self, x: Tensor) -> Tensor:
        layer, other = (self.second, self.first) if self.runs_second else (self.first, self.second)
        y = F.gelu(layer(x))
        if not torch.compiler.is_compiling():  # compiled code has only the codes
            with fp8_autocast(enabled=False):
                y = y + other(x)
        return self.down(y)  # type: ignore[no-any-return]


STEPS = (
    "delayed", "tensorwise", "tensorwise", "delayed eval", "tensorwise eval", "mxfp8", "delayed", "other delayed",
    "delayed eval", "tensorwise", "delayed+eval", "delayed+delayed", "tensorwise+delayed", "delayed+tensorwise",
    "delayed skip", "tensorwise", "high", "delayed", "delayed recompute", "tensorwise recompute", "delayed reentrant",
    "tensorwise reentrant", "delayed first second", "tensorwise second", "delayed second",
)  # fmt: skip
"""Optimizer steps, and evaluations between them, in the order in which a run of :func:`observed` takes them."""


def observed(in_bf16: bool, how: str) -> list[Any]:
    """Losses and the state of all slots at each of :data:`STEPS`."""
    options = {"reshard_after_forward": False} if how == "kept" else {}
    model: Any = sharded(lambda: nn.Sequential(Branches(), Branches()), in_bf16, **options)
    if how == "prefetched":
        model.set_modules_to_forward_prefetch([model[0]])
        model[0].set_modules_to_forward_prefetch([model[1]])
    if how == "compiled":
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        for block in model:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    recipes: dict[str, Any] = {
        "delayed": lambda: DelayedScaling(amax_history_len=64),  # a new object in each forward
        "other": lambda: DelayedScaling(amax_history_len=64, margin=1),
    }

    def forward(recipe: str, does: Any = None) -> Tensor:
        x = torch.randn(16, 256, generator=generator).bfloat16().requires_grad_()
        given = recipes.get(recipe, lambda: make_recipe(recipe))() if recipe != "high" else None
        with fp8_autocast(enabled=given is not None, fp8_recipe=given):
            if does in ("recompute", "reentrant"):
                return checkpoint(model, x, use_reentrant=does == "reentrant").float().square().mean()
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    found: list[Any] = []
    for step in STEPS[:10] if how == "few" else STEPS:
        recipe, *does = step.split()
        if how == "compiled" and {*does} & {"recompute", "reentrant"}:
            continue  # it would be recomputed in high precision
        if "skip" in does:
            model[0].down.fp8 = False
        for block in model:
            block.runs_second = "second" in does and "first" not in does
        if "eval" in does:
            with torch.no_grad():
                found.append(forward(recipe).item())
            continue
        losses = []
        for part in recipe.split("+"):
            if part == "eval":
                with torch.no_grad():
                    found.append(forward("delayed").item())
                continue
            losses.append(forward(part, *does[:1]))
            if "first" in does:
                for block in model:
                    block.runs_second = True
                losses.append(forward(part))
        sum(losses).backward()  # type: ignore[union-attr]
        found.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
        state = fp8_state_dict(model)
        found.append(
            {name: state[name].tolist() for name in ("scale", "amax_history", "seen", "counts") if name in state}
        )
        model[0].down.fp8 = True
    return found


def part_observed() -> dict[str, Any]:
    """Where a run differs from the same run with a gather in BF16."""
    bf16, fp8 = (observed(in_bf16, sys.argv[3]) for in_bf16 in (True, False))
    return {"steps": len(fp8), "differ": [index for index, pair in enumerate(zip(bf16, fp8)) if pair[0] != pair[1]]}


def part_growth() -> dict[str, Any]:
    """What a process keeps of a model, before and after conversions, recipes, evaluations, saves and loads of it."""
    model = sharded(blocks(width=32, hidden=32))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def forward(recipe: str) -> Tensor:  # by a new object each time
        with fp8_autocast(fp8_recipe=make_recipe({"name": recipe})):
            return model(torch.randn(16, 32).bfloat16()).float().square().mean()  # type: ignore[no-any-return]

    def sizes() -> dict[str, int]:
        (weights,) = {id(each): each for each in fsdp._weights_of.values()}.values()
        hooks = [value for each in model.modules() for name, value in vars(each).items() if name.endswith("_hooks")]
        tables = fsdp._weights_of, fsdp._hooked, fsdp._attached, update._compared, fp8_region.waiting
        return {
            "hooks": sum(len(each) for each in hooks if each is not None),
            "tables": sum(map(len, tables)),
            "weights": sum(map(len, (weights.params, weights.begun, weights.groups))),
            "compared": sum(map(len, update._compared.values())),
        }

    found = []
    for conversions in (1, 200):
        for _ in range(conversions):
            fsdp.gather_in_fp8(model)
        for _ in range(3):
            converted(model)
            for recipe in ("delayed", "tensorwise"):
                forward(recipe).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    forward("mxfp8")
            model.load_state_dict(model.state_dict())
            load_fp8_state_dict(model, fp8_state_dict(model))
        found.append(sizes())
    return {"before": found[0], "after": found[1]}


def frozen_between(in_bf16: bool, freezes: bool, keeps: bool, recipes: tuple[str | None, ...]) -> list[Any] | str:
    """Losses and gradients of steps that accumulate over ``recipes``.

    Before the first step, an evaluation gathers the weights of the root, and ``requires_grad`` of two of them changes.
    """
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    changed = "1.weight", "2.bias"
    for name in changed:
        model.get_parameter(name).requires_grad_(freezes)
    mesh = init_device_mesh("cpu", (2,))
    for each in (model[0], model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    with gathers_in_bf16(in_bf16):
        converted(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: list[Any] = []

    def loss(recipe: str | None) -> Tensor:
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            value = model(torch.randn(16, 64, generator=generator)).float().square().mean()
        found.append(value.item())
        return value  # type: ignore[no-any-return]

    try:
        for step in range(2):
            if not step:
                with torch.no_grad():
                    loss("tensorwise")
                for name in changed:
                    model.get_parameter(name).requires_grad_(not freezes)
            for number, recipe in enumerate(recipes, 1):
                model.set_requires_gradient_sync(number == len(recipes))
                model.set_reshard_after_backward(number == len(recipes) or not keeps)
                loss(recipe).backward()
            grads = [each.grad for each in model.parameters()]
            found.append([None if grad is None else grad.full_tensor().tolist() for grad in grads])
            optimizer.step()
            optimizer.zero_grad()
    except AssertionError as error:  # torch's, if a parameter has a gradient in some of the micro-batches only
        return str(error)
    return [*found, [each.requires_grad for each in model.parameters()]]


def part_frozen_between() -> dict[str, Any]:
    report = {}
    for recipes in (("tensorwise", None), ("delayed", "delayed"), (None, None), ("tensorwise", "rowwise")):
        for freezes, keeps in ((True, True), (True, False), (False, True)):
            bf16, fp8 = (frozen_between(in_bf16, freezes, keeps, recipes) for in_bf16 in (True, False))
            report[f"{recipes} {freezes} {keeps}"] = {
                "equal": fp8 == bf16,
                "error": fp8 if isinstance(fp8, str) else "",
            }
    return report


class WithinRegion(nn.Module):
    """A block that runs a layer outside of FP8, one by another recipe, and reads a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.other, self.read = (nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with fp8_autocast(enabled=False):
            x = self.router(x)
        with fp8_autocast(fp8_recipe="rowwise"):
            x = self.other(x)
        return self.read(x) + F.linear(x, self.read.weight)


def part_within() -> dict[str, Any]:
    return compared(sys.argv[3], lambda: nn.Sequential(WithinRegion(), WithinRegion()))


def part_unlike() -> dict[str, Any]:
    model = sharded(blocks())
    recipe = "delayed" if dist.get_rank() == 0 else "mxfp8"
    try:
        with fp8_autocast(fp8_recipe=recipe):
            model(torch.randn(32, 256).bfloat16())
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


def fabric_run(recipe: str, in_bf16: bool) -> dict[str, Any]:
    """Fabric converts a model before it is sharded."""

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    plugin = FP8FabricPrecision(recipe, first_last_layers_bf16=False)
    strategy = FabricStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    torch.manual_seed(0)
    with gathers_in_bf16(in_bf16):
        model = fabric.setup_module(nn.Sequential(*[Block() for _ in range(2)], Block(hidden=258)))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-3))
        generator = torch.Generator().manual_seed(7 + fabric.global_rank)
        losses = []
        for _ in range(3):
            with Collectives() as collectives:
                x = torch.randn(32, 256, generator=generator)
                loss = F.mse_loss(model(x).float(), x.roll(1, 1))
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    reasons = {layer.name: layer.reason for layer in plugin.summary.layers}
    return {"losses": losses, "sent": collectives.sent["_allgather_base_"], "reasons": reasons}


def part_fabric() -> dict[str, Any]:
    bf16, fp8 = (fabric_run("blockwise", in_bf16) for in_bf16 in (True, False))
    return {
        "losses": bf16["losses"] == fp8["losses"],
        "bytes": fp8["sent"] / bf16["sent"],
        "reasons": fp8["reasons"],
    }


class Sharded(L.LightningModule):
    """Trained by the Trainer, which converts a model after it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[Block(64, 128) for _ in range(3)])
        self.losses: list[float] = []

    def configure_model(self) -> None:
        for block in self.net:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]).float(), batch[0].float().roll(1, 1))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trainer_run(
    recipe: str, in_bf16: bool, epochs: int, file: Path | None, save: Path | None, in_shards: bool
) -> dict[str, Any]:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size() if dist.is_initialized() else 2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=in_shards,
    )
    trainer = fp8_trainer(
        recipe, fp8={"first_last_layers_bf16": False}, strategy=strategy, devices=2, max_epochs=epochs,
        accumulate_grad_batches=2,
    )  # fmt: skip
    model = Sharded()
    data = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with gathers_in_bf16(in_bf16), Collectives() as collectives:
        trainer.fit(model, DataLoader(TensorDataset(data), 8), ckpt_path=file)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {"losses": model.losses, "weights": weights, "sent": collectives.sent["_allgather_base_"]}


def part_trainer() -> dict[str, Any]:
    report = {}
    for recipe, in_shards in (("tensorwise", True), ("mxfp8", False), ("delayed", True)):
        file = Path(sys.argv[1]) / f"{recipe}.ckpt"
        bf16 = trainer_run(recipe, True, 2, None, None, in_shards)
        straight = trainer_run(recipe, False, 2, None, None, in_shards)
        half = trainer_run(recipe, False, 1, None, file, in_shards)
        resumed = trainer_run(recipe, False, 2, file, None, in_shards)
        report[recipe] = {
            "losses": straight["losses"] == bf16["losses"],
            "resumed": half["losses"] + resumed["losses"] == straight["losses"],
            "weights": all(
                torch.equal(weight, other["weights"][name])
                for other in (bf16, resumed)
                for name, weight in straight["weights"].items()
            ),
            "bytes": straight["sent"] / bf16["sent"],
        }
    return report


def llama_run(recipe: str, in_bf16: bool) -> dict[str, Any]:
    """Two layers of Hugging Face's Llama, whose norms and MLPs cast for the layers behind them, with FP8 attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).bfloat16()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with gathers_in_bf16(in_bf16):
        convert_module(model, first_last_layers_bf16=False, fuse=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    given = replace(make_recipe(recipe), fp8_dpa=True)
    for _ in range(3):
        with Collectives() as collectives:
            with fp8_autocast(fp8_recipe=given):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "sent": collectives.sent["_allgather_base_"]}


def part_llama() -> dict[str, Any]:
    report = {}
    for recipe in ("delayed", "mxfp8"):
        bf16, fp8 = (llama_run(recipe, in_bf16) for in_bf16 in (True, False))
        weights = all(torch.equal(weight, bf16["weights"][name]) for name, weight in fp8["weights"].items())
        report[recipe] = {
            "losses": fp8["losses"] == bf16["losses"],
            "weights": weights,
            "bytes": fp8["sent"] / bf16["sent"],
        }
    return report


def part_other_torch() -> dict[str, Any]:
    """As with a torch whose FSDP2 has other names."""
    fsdp._missing.append("renamed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = compared("tensorwise", blocks())
        run(sharded(blocks()))
    return {**report, "said": [str(each.message) for each in caught if "FSDP2" in str(each.message)]}


def in_fp8(model: nn.Module) -> int:
    """How many of the weights were gathered in FP8 last."""
    params = [each for _, state in fsdp._sharded_modules(model) for group in fsdp._groups(state)
              for each in group.fsdp_params]  # fmt: skip
    return sum(isinstance(each, fsdp.GatheredParam) and each.recipe is not None for each in params)


def converted(model: nn.Module) -> nn.Module:
    return convert_module(model, first_last_layers_bf16=False)


def shard(model: nn.Module, root: bool = True) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)


def new() -> nn.Module:
    return blocks()().bfloat16()


def run(model: nn.Module, recipe: str = "tensorwise", **region: Any) -> None:
    with fp8_autocast(fp8_recipe=recipe, **region):
        model(torch.randn(32, 256).bfloat16()).float().square().mean().backward()


def part_orders() -> dict[str, Any]:
    """Weights that are gathered in FP8, of 4, by programs in which conversion and sharding come in several orders."""
    report: dict[str, Any] = {}

    model = converted(new())
    run(model)
    shard(model)
    run(model)
    report["a forward between"] = in_fp8(model)

    first, second = converted(new()), converted(new())
    for each in (second, first):
        shard(each)
        run(each)
    report["the second model first"] = min(map(in_fp8, (first, second)))

    model = nn.Sequential(*new(), nn.Linear(256, 256).bfloat16())
    shard(model[:2], root=False)
    converted(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run(model)
    report["the root behind the conversion, of 5"] = in_fp8(model)

    model = converted(new())
    if dist.get_rank() == 0:
        run(model)
    shard(model)
    if dist.get_rank() == 0:
        run(converted(new()))
    run(model)
    report["other work on one rank"] = in_fp8(model)

    model = new()
    shard(model)
    run(converted(model), "delayed", fp8_group=dist.new_group([0, 1]))
    report["fp8_group of all ranks"] = in_fp8(model)
    return report


def part_orders_of_compiled_code() -> dict[str, Any]:
    """The same of programs that compile."""
    report: dict[str, Any] = {}

    model = new()
    converted(torch.compile(model))  # type: ignore[arg-type]
    shard(model)
    run(model)
    report["a wrapper that is dropped"] = in_fp8(model)

    model = converted(new())
    shard(model)
    if dist.get_rank() == 0:
        run(torch.compile(converted(new()), backend="aot_eager"), "mxfp8")
    run(model, "mxfp8")
    report["other work on one rank"] = in_fp8(model)

    model = converted(new())
    shard(model)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe="tensorwise"):
            return model(x)  # type: ignore[no-any-return]

    step(torch.randn(32, 256).bfloat16()).float().square().mean().backward()
    report["a region inside of compiled code"] = in_fp8(model)
    return report


def compiled_run(recipe: str) -> dict[str, Any]:
    """Training of a model of blocks that are compiled, with their graphs, and why these end where a block goes on.

    Nothing counts collectives: Dynamo does not compile where a dispatch mode is active.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    model = sharded(attention_blocks)
    for block in model:
        block.compile(backend=backend)
    found = train(model, recipe, counts=False)
    return {
        **found,
        "graphs": len(graphs),
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "gathered in fp8": in_fp8(model),
    }


def part_compiled() -> dict[str, Any]:
    """Compiled blocks whose weights are gathered in FP8, beside blocks in eager mode whose weights are in BF16."""
    report = {}
    for recipe in RECIPES:
        eager, compiled = train(sharded(attention_blocks, True), recipe, counts=False), compiled_run(recipe)
        report[recipe] = {
            **{part: compiled[part] for part in ("graphs", "breaks", "gathered in fp8")},
            "losses": compiled["losses"] == eager["losses"],
            "weights": all(torch.equal(weight, eager["weights"][key]) for key, weight in compiled["weights"].items()),
            "scales": compiled["scales"] == eager["scales"],
        }
    return report


def attention_blocks() -> nn.Module:
    return nn.Sequential(*[AttentionBlock() for _ in range(2)])


class AttentionBlock(nn.Module):
    """A norm, attention, and linear layers around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 64)).transpose(0, 1) for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if sys.argv[2] not in ("fabric", "trainer"):
        dist.init_process_group("gloo")
    report = globals()[f"part_{sys.argv[2]}"]()
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
