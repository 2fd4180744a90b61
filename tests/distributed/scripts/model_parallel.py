"""Run by two processes: trains under ModelParallelStrategy (FSDP2), saves, resumes and reports; and a model on meta.

``python -m tests.distributed.scripts.model_parallel FOLDER PART``; a part is ``meta``, ``dtypes``, or which file and
which modules are sharded: ``full blocks``, ``sharded linears``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_fp8 import LayerNormMLP, Linear, TransformerLayer
from tests.distributed.launch import leave
from tests.small import Regression, fp8_trainer, quiet_trainer, regression_data


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Sharded(Regression):
    def __init__(self, shard_linears: bool, **options: Any) -> None:
        """``options`` are of ``fully_shard``."""
        super().__init__()
        self.shard_linears, self.options = shard_linears, options
        self.net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(16, 4))
        self.net = nn.Sequential(nn.Sequential(*list(self.net)[:4]), self.net[4])

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in list(self.net.modules()):
            if isinstance(module, nn.Linear if self.shard_linears else Block):
                fully_shard(module, mesh=mesh, **self.options)
        fully_shard(self.net, mesh=mesh, **self.options)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, softmax_type="learnable")
        self.mlp = LayerNormMLP(16, 32, activation="swiglu")
        self.split = Linear(16, 16, parameters_split=["a", "b"])
        self.plain, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.layer(x.unsqueeze(0)).squeeze(0))
        return self.head(x + self.plain(self.split(x)))


class OnMeta(Regression):
    """Lightning fills its parameters, by ``reset_parameters`` of each module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = Net()
        for module in (self.net.layer, self.net.mlp, self.net.split, self.net.plain, self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        self.start = full_weights(self)


def from_meta() -> dict[str, Any]:
    """How a model begins that is made on meta, and what its training gives."""
    L.seed_everything(1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = fp8_trainer("delayed", strategy=strategy, devices=2, max_epochs=3)
    model = OnMeta()
    trainer.fit(model, regression_data())
    return {
        "means": {name: weight.mean().item() for name, weight in model.start.items()},
        "deviations": {name: weight.std(correction=0).item() for name, weight in model.start.items()},
        "losses": model.losses,
        "scales": trainer.precision_plugin.histories["model"].scale.tolist(),
        "num_fp8": trainer.precision_plugin.summary.num_fp8,
    }


def of_dtypes() -> dict[str, Any]:
    """A model of either dtype, with a policy of FSDP2's and without, by Lightning's plugin and by ours."""
    own = {torch.float32: "bf16-mixed", torch.bfloat16: "bf16-true"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report: dict[str, Any] = {}
    for dtype, options in ((dtype, options) for dtype in own for options in ({}, {"mp_policy": policy})):
        runs = []
        for trainer in (quiet_trainer, fp8_trainer, fp8_trainer):
            L.seed_everything(1)
            fp8 = {} if trainer is quiet_trainer else {"fp8": {"skip": ["*"] if len(runs) == 1 else []}}
            running = trainer(
                strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
                **({"precision": own[dtype]} if trainer is quiet_trainer else fp8),
                devices=2,
                max_epochs=2,
            )
            model = Sharded(False, **options).to(dtype)
            running.fit(model, regression_data())
            states = running.optimizers[0].state.values()
            moments = {str(each.dtype) for state in states for each in state.values() if each.dim()}
            runs.append((model.losses, full_weights(model), moments, running))
        (losses, weights, moments, _), (own_losses, own_weights, _, _), (in_fp8, _, kept, running) = runs
        report[f"{dtype}{' with a policy' if options else ''}"] = {
            "same": losses == own_losses and all(torch.equal(weights[name], own_weights[name]) for name in weights),
            "moments": sorted(moments | kept | {str(each.dtype) for each in runs[2][1].values()}),
            "losses": [losses, in_fp8],
            "precision": running.precision,
            "num_fp8": running.precision_plugin.summary.num_fp8,
        }
    return report


def train(epochs: int, sharded_file: bool, shard_linears: bool, ckpt_path: Path | None = None) -> tuple[L.Trainer, Any]:
    L.seed_everything(1)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=sharded_file
    )
    trainer = fp8_trainer("delayed", strategy=strategy, devices=2, max_epochs=epochs)
    model = Sharded(shard_linears)
    trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
    return trainer, model


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def of(folder: Path, sharded_file: bool, shard_linears: bool) -> dict[str, Any]:
    """What a training that is resumed gives, with either file and either module sharded."""
    folder.mkdir(exist_ok=True)
    options = (sharded_file, shard_linears)
    straight_trainer, straight = train(3, *options)
    first, half = train(1, *options)
    first.save_checkpoint(folder / "half.ckpt")
    trainer, resumed = train(3, *options, ckpt_path=folder / "half.ckpt")
    differs = None
    if not sharded_file:
        if trainer.global_rank == 0:
            file = torch.load(folder / "half.ckpt", weights_only=True)
            del file["FP8Precision"]
            torch.save(file, folder / "bare.ckpt")
        trainer.strategy.barrier()
        _, bare = train(3, *options, ckpt_path=folder / "bare.ckpt")
        differs = half.losses + bare.losses != straight.losses
    one, two = full_weights(straight), full_weights(resumed)
    return {
        "losses": half.losses + resumed.losses == straight.losses,
        "differs_without_state": differs,
        "count": len(resumed.losses),
        "falls": sum(straight.losses[-2:]) < sum(straight.losses[:2]),
        "weights": all(torch.equal(one[name], two[name]) for name in one),
        "scales": trainer.precision_plugin.histories["model"].scale.tolist(),
        "straight_scales": straight_trainer.precision_plugin.histories["model"].scale.tolist(),
        "num_fp8": trainer.precision_plugin.summary.num_fp8,
        "converted": sum(isinstance(module, Linear) for module in resumed.modules()),
        "classes": sorted({type(module).__name__ for module in resumed.modules() if isinstance(module, Linear)}),
        "is_folder": (folder / "half.ckpt").is_dir(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    part = sys.argv[2]
    parts = {"meta": from_meta, "dtypes": of_dtypes}
    report = parts[part]() if part in parts else of(folder, part.startswith("sharded"), part.endswith("linears"))
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
