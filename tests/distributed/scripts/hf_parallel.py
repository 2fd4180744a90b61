"""Run by the processes of a mesh: a Llama that transformers cuts and shards itself, beside one process.

``python -m tests.distributed.scripts.hf_parallel FOLDER FSDP_SIZE TP_SIZE {loop,trainer} RECIPE``. It needs accelerate.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.modules.state import fp8_modules
from tests.distributed.launch import leave
from tests.small import fp8_trainer

LAYERS, ROWS = 3, 4


class Products(TorchDispatchMode):
    """Counts matrix products as the dispatcher sees them: those of FP8, and others of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which comes again with local tensors, and with fake ones, of which shapes follow
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name.startswith("lightning_fp8::scaled_mm"):
            self.found["fp8"] += 1
        elif name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
            self.found["others"] += 1
        return func(*args, **(kwargs or {}))


def loaded(folder: Path, fsdp: int, tp: int) -> Any:
    options: dict[str, Any] = {}
    if fsdp * tp > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=tp, fsdp_size=fsdp)
    return LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16, **options).train()


def tokens() -> Tensor:
    return torch.randint(128, (ROWS, 32), generator=torch.Generator().manual_seed(1))


def described(model: Any, loss: float, products: Products) -> dict[str, Any]:
    grads = {name: each.grad for name, each in model.named_parameters()}
    return {
        "loss": loss,
        "products": dict(products.found),
        "records": [module.record.fp8 for _, module in fp8_modules(model)],
        "dtensors": sum(isinstance(each, DTensor) for each in model.parameters()),
        "gradients": {
            name: float((each.full_tensor() if isinstance(each, DTensor) else each).double().norm())
            for name, each in grads.items()
        },
    }


def by_loop(folder: Path, fsdp: int, tp: int, recipe: str) -> dict[str, Any]:
    model = convert_module(loaded(folder, fsdp, tp), first_last_layers_bf16=False)
    own = tokens().chunk(fsdp)[dist.get_rank() // tp] if fsdp > 1 else tokens()
    with Products() as products, fp8_autocast(fp8_recipe=recipe):
        loss: Any = model(own, labels=own, use_cache=False).loss
        loss.backward()
    return described(model, float(loss), products)


class Module(L.LightningModule):
    def __init__(self, folder: Path, fsdp: int, tp: int) -> None:
        super().__init__()
        self.of = folder, fsdp, tp
        self.report: dict[str, Any] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "llama"):
            self.llama = loaded(*self.of)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.products = Products()
        self.products.__enter__()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.loss: Tensor = self.llama(batch[0], labels=batch[0], use_cache=False).loss
        return self.loss

    def on_after_backward(self) -> None:
        self.products.__exit__(None, None, None)
        self.report = described(self.llama, float(self.loss), self.products)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def by_trainer(folder: Path, fsdp: int, tp: int, recipe: str) -> dict[str, Any]:
    strategy = ModelParallelStrategy(fsdp, tp)
    trainer = fp8_trainer(
        recipe,
        fp8={"first_last_layers_bf16": False},
        strategy=strategy,
        devices=fsdp * tp,
        use_distributed_sampler=False,
    )
    model = Module(folder, fsdp, tp)
    data = tokens().chunk(fsdp)[int(os.environ["RANK"]) // tp]
    trainer.fit(model, DataLoader(TensorDataset(data), ROWS))
    return {**model.report, "summary": trainer.precision_plugin.summary.num_fp8}


def save(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).save_pretrained(folder / "llama")


if __name__ == "__main__":
    folder, door, recipe = Path(sys.argv[1]), *sys.argv[4:]
    sizes = int(sys.argv[2]), int(sys.argv[3])
    if door == "loop":
        dist.init_process_group("gloo")
    made = (by_trainer if door == "trainer" else by_loop)(folder, *sizes, recipe)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(made))
    leave()
