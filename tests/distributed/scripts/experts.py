"""Run by two or four processes: experts of transformers' models under FSDP2 that gathers their weights in FP8.

``python -m tests.distributed.scripts.experts FOLDER PART [RECIPE]``; the parts ``recipe``, ``alone`` and ``compiled``
are of one. transformers is imported by what makes a model, as not all of the tests' environments have it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import convert_module, fp8_autocast, fp8_state_dict, make_recipe
from lightning_fp8.sharding import fsdp
from tests.convert.codes.made import experts_with_codes
from tests.distributed.launch import leave
from tests.distributed.scripts.fsdp import RECIPES, Collectives, compared, in_fp8, sharded, train
from tests.small import Regression, fp8_trainer, regression_data

WIDTH = 256  # that of the batches of ``train``


class Block(nn.Module):
    """A norm, a router, and experts: those of Mixtral, or of gpt-oss, whose weights are ``[E, K, N]`` with biases."""

    def __init__(self, experts: int = 4, kind: str = "mixtral", hidden: int = 256, width: int = WIDTH) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": hidden, "num_local_experts": experts}
        if kind == "gpt_oss":
            from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

            self.experts = GptOssExperts(GptOssConfig(**sizes))
        else:
            from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

            self.experts = MixtralExperts(MixtralConfig(**sizes))
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.05)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Parameter(torch.randn(experts, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights, index = (normed @ self.router.t()).float().softmax(-1).topk(min(2, len(self.router)))
        return x + self.experts(normed, index, weights.to(x.dtype))  # type: ignore[no-any-return]


class WithinRegion(Block):
    """A block whose experts run outside of FP8, too."""

    def forward(self, x: Tensor) -> Tensor:
        with fp8_autocast(enabled=False):
            x = super().forward(x)
        return super().forward(x)


def blocks(cls: type = Block, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[cls(**options) for _ in range(2)])


def part_recipe() -> dict[str, Any]:
    """Beside a gather in BF16."""
    return {kind: compared(sys.argv[3], blocks(kind=kind)) for kind in ("mixtral", "gpt_oss")}


def part_replicas() -> dict[str, Any]:
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {recipe: compared(recipe, blocks(), mesh=mesh) for recipe in RECIPES}


def part_options() -> dict[str, Any]:
    """Experts that do not divide, sizes that no block divides, and weights that stay gathered or are offloaded."""
    kept, offload = {"reshard_after_forward": False}, CPUOffloadPolicy(pin_memory=False)
    cases: dict[str, tuple[str, Callable[[], nn.Module], dict[str, Any]]] = {
        **{f"5 experts, {recipe}": (recipe, blocks(experts=5, hidden=64), {}) for recipe in RECIPES},
        **{f"sizes, {recipe}": (recipe, blocks(hidden=176), {}) for recipe in ("rowwise", "blockwise", "mxfp8")},
        "one expert each": ("tensorwise", blocks(experts=2, hidden=176), {}),
        **{f"kept {recipe}": (recipe, blocks(kind="gpt_oss"), kept) for recipe in ("tensorwise", "blockwise", "mxfp8")},
        "offload": ("mxfp8", blocks(kind="gpt_oss"), {"offload_policy": offload}),
        "within": ("mxfp8", blocks(WithinRegion), {}),
        "within gpt_oss": ("mxfp8", blocks(WithinRegion, kind="gpt_oss"), {}),
    }
    report = {}
    for name, (recipe, make, options) in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report[name] = compared(recipe, make, **options)
        report[name]["said"] = [str(each.message) for each in caught if "FSDP2" in str(each.message)]
    report["5 experts, mxfp8"]["table"] = fsdp.reasons_for_high_precision(
        sharded(blocks(experts=5, hidden=64)), make_recipe({"name": "mxfp8"})
    )
    return report


def part_unlike() -> dict[str, Any]:
    """A rank has no expert, or ranks have tokens for other experts and read the weights in high precision, too."""
    return {
        "one": compared("delayed", blocks(experts=1, hidden=64)),
        "within": compared("delayed", blocks(WithinRegion, experts=32, hidden=64)),
    }


def steps(model: nn.Module, recipe: str, recomputes: bool = False) -> dict[str, Any]:
    """Losses, weights and scales of a training by the same batches on all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(4):
        x = torch.randn(16, WIDTH, generator=generator).bfloat16()
        with fp8_autocast(fp8_recipe=recipe):
            y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        loss = F.mse_loss(y.float(), x.float().roll(1, 1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = {key: each for key, each in model.state_dict().items() if each.itemsize > 1 and "scale_inv" not in key}
    return {
        "losses": losses,
        "weights": {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in state.items()},
        "scales": fp8_state_dict(model).get("scale", torch.empty(0)).tolist(),
    }


def new(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return blocks(kind=kind)().bfloat16()


def shard(model: nn.Module, parts: bool = False) -> nn.Module:
    """``parts``: experts are units of their own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if parts:
            fully_shard(block.experts, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def converted(model: nn.Module) -> nn.Module:
    return convert_module(model, first_last_layers_bf16=False)


def converted_between(model: nn.Module) -> nn.Module:
    """Blocks are sharded before the conversion, and the model behind it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(converted(model), mesh=mesh)


def part_alone() -> dict[str, Any]:
    """Beside one process, whose model is not sharded, for several orders of conversion."""
    orders: dict[str, Callable[[nn.Module], nn.Module]] = {
        "converted, then sharded": lambda model: shard(converted(model)),
        "sharded, then converted": lambda model: converted(shard(model)),
        "converted between": converted_between,
        "experts are units": lambda model: converted(shard(model, parts=True)),
    }
    report = {}
    for kind in ("mixtral", "gpt_oss"):
        expected = steps(converted(new(kind)), sys.argv[3])
        for name, order in orders.items():
            model = order(new(kind))
            found = steps(model, sys.argv[3], recomputes=name == "sharded, then converted")
            report[f"{kind}, {name}"] = {
                "losses": found["losses"] == expected["losses"],
                "weights": all(torch.equal(each, expected["weights"][key]) for key, each in found["weights"].items()),
                "scales": found["scales"] == expected["scales"],
                "gathered": in_fp8(model),
            }
    return report


def part_compiled() -> dict[str, Any]:
    """Compiled blocks, beside blocks in eager mode whose weights are gathered in BF16."""
    report = {}
    for kind in ("mixtral", "gpt_oss"):
        for recipe in sys.argv[3].split(","):
            eager = train(sharded(blocks(kind=kind), True), recipe, counts=False)
            torch._dynamo.reset()
            model = sharded(blocks(kind=kind))
            for block in model:
                block.compile(backend="aot_eager")
            found = train(model, recipe, counts=False)
            report[f"{kind}, {recipe}"] = {
                "losses": found["losses"] == eager["losses"],
                "weights": all(map(torch.equal, found["weights"].values(), eager["weights"].values())),
                "gathered": in_fp8(model),
            }
    return report


class Adapted(Block):
    """A block whose experts are the codes of a checkpoint, and whose router and norm are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16().experts = experts_with_codes(width=WIDTH)


def part_codes() -> dict[str, Any]:
    """Outputs and trained parameters beside those of one process, and the bytes that a step sends of experts."""
    report = {}
    for recipe, options in (("blockwise", {}), ("blockwise", {"reshard_after_forward": False}), ("tensorwise", {})):
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), Adapted())
        expected = steps(converted(deepcopy(model)), recipe)
        converted(model)
        own = {name: each.detach().clone() for name, each in model.state_dict().items() if "experts" in name}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for each in (*(block.experts for block in model), *model, model):
            fully_shard(each, mesh=mesh, **options)
        with Collectives() as sent:
            found = steps(model, recipe)
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        shards = {name: each.to_local() for name, each in model.state_dict().items() if "experts" in name}
        report[f"{recipe} {options}"] = {
            "losses": found["losses"] == expected["losses"],
            "weights": all(torch.equal(found["weights"][name], expected["weights"][name]) for name in trained),
            "trained": len(trained),
            "sent": sent.sent["_allgather_base_"],
            "kept": all(same_bytes(each, own[name].chunk(2)[dist.get_rank()]) for name, each in shards.items()),
        }
    return report


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Sharded(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[Block(width=16, hidden=32) for _ in range(2)], nn.Linear(16, 4))

    def configure_model(self) -> None:
        for module in self.net:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fitted(epochs: int, in_folder: bool, ckpt_path: Path | None = None) -> tuple[L.Trainer, Any]:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=in_folder)
    trainer = fp8_trainer(sys.argv[3], strategy=strategy, devices=2, max_epochs=epochs)
    model = Sharded()
    trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
    return trainer, model


def part_trainer() -> dict[str, Any]:
    """A run that is saved and resumed beside one that is not, for a checkpoint in a file and in a folder."""
    report = {}
    for in_folder in (False, True):
        trainer, straight = fitted(2, in_folder)
        first, half = fitted(1, in_folder)
        path = Path(sys.argv[1]) / f"{in_folder}.ckpt"
        first.save_checkpoint(path)
        second, resumed = fitted(2, in_folder, path)
        pairs = zip(straight.state_dict().values(), resumed.state_dict().values())
        report[str(in_folder)] = {
            "losses": half.losses + resumed.losses == straight.losses,
            "weights": all(torch.equal(one.full_tensor(), other.full_tensor()) for one, other in pairs),
            "scales": [
                each.precision_plugin.histories["model"].scale.tolist()
                for each in (trainer, second)  # type: ignore[attr-defined]
            ],
            "num_fp8": second.precision_plugin.summary.num_fp8,  # type: ignore[attr-defined]
            "gathered": in_fp8(resumed),
        }
    return report


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if sys.argv[2] != "trainer":
        dist.init_process_group("gloo")
    report = globals()[f"part_{sys.argv[2]}"]()
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
