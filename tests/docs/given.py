"""What the blocks of code in the documentation take as given: a model, its data, an optimizer, a batch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp8
from examples import resume_te_checkpoint
from lightning_fp8 import FP8FabricPrecision, LayerNormMLP, convert_module
from tests.convert.codes.made import save_qwen
from tests.hf_trainer.small import sentences, tokenizer

FEATURES = 32

ON_ONE_RANK = {"distributed.md", "distributed_te.md", "attention.md"}
"""Pages whose blocks run inside torch.distributed, on a process group of one process."""


class Model(L.LightningModule):
    """Three blocks and a head; its ``forward`` gives the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, FEATURES)) for _ in range(4))
        )
        self.head = nn.Linear(FEATURES, 16)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Data(L.LightningDataModule):
    """Four batches of 16 random rows."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64, FEATURES), 16)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def given(page: Path) -> dict[str, Any]:
    """The names that the text of ``page`` takes as given, made anew: all public ones, and a small example's."""
    model = Model()
    names = {name: getattr(lightning_fp8, name) for name in lightning_fp8.__all__ if name != "__version__"}
    names |= {"torch": torch, "nn": nn, "Trainer": L.Trainer, "Fabric": L.Fabric, "Path": Path}
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    names |= {"batch": torch.randn(16, FEATURES), "path": Path("last.pt")}
    names |= {"data": DataLoader(torch.randn(64, FEATURES), 16)}  # type: ignore[arg-type]
    return names | OF_PAGES.get(page.name, dict)()


def of_attention() -> dict[str, Any]:
    q, k, v = (torch.randn(2, 128, heads, 128) for heads in (16, 4, 4))
    tokens = torch.randint(256, (2, 64))
    return {
        "q": q,
        "k": k,
        "v": v,
        "tokens": tokens,
        "labels": tokens,
        "device_mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)),
    }


def of_checkpoints() -> dict[str, Any]:
    data = DataLoader(TensorDataset(*torch.randn(2, 64, 64)), batch_size=32)
    if not (path := Path("old_te_1_7.ckpt")).exists():
        resume_te_checkpoint.write_1_7_checkpoint(path, data)
    return {"model": resume_te_checkpoint.Net(), "data": data}


class Block(nn.Module):
    """A norm and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.mlp = nn.Module()
        self.mlp.gate, self.mlp.up = nn.Linear(FEATURES, 64), nn.Linear(FEATURES, 64)
        self.mlp.down = nn.Linear(64, FEATURES)


def of_distributed() -> dict[str, Any]:
    plugin = FP8FabricPrecision()
    fabric = L.Fabric(plugins=[plugin], accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model := Model(), torch.optim.AdamW(model.parameters()))
    fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "fp8": plugin})
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor_parallel",))
    names = {"block": Block(), "mesh": mesh, "Shard": Shard, "Replicate": Replicate}
    names |= {"fabric": fabric, "plugin": plugin, "model": model, "optimizer": optimizer, "path": "last.ckpt"}
    return names | {"parallelize_module": parallelize_module}


def of_transformer_engines_arguments() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor_parallel",))
    group = mesh["tensor_parallel"].get_group()
    model = LayerNormMLP(FEATURES, 64, tp_group=group, set_parallel_mode=True)
    torch.save(model.state_dict(), "rank0.pt")
    return {"mesh": mesh, "x": torch.randn(8, 2, 512), "model": model, "ranks": 1}


def of_fp8_checkpoints() -> dict[str, Any]:
    save_qwen(folder := Path("qwen"))
    return {"folder": folder, "tokens": torch.randint(64, (2, 2, 16))}


def of_transformers() -> dict[str, Any]:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    names: dict[str, Any] = {"Trainer": transformers.Trainer, "model": convert_module(model, recipe="delayed")}
    if find_spec("datasets") is not None:
        names |= {"texts": sentences("text"), "tokenizer": tokenizer()}
    return names


OF_PAGES = {
    "attention.md": of_attention,
    "checkpoints.md": of_checkpoints,
    "distributed.md": of_distributed,
    "distributed_te.md": of_transformer_engines_arguments,
    "fp8_checkpoints.md": of_fp8_checkpoints,
    "transformers.md": of_transformers,
}
"""What the text of a page takes as given beside."""
