"""Train a Llama of transformers in FP8 over a mesh of data-parallel and tensor-parallel ranks.

    torchrun --nproc-per-node 8 examples/llama_2d.py --tensor-parallel 4      # 2 x 4 GPUs, NCCL
    torchrun --nproc-per-node 4 examples/llama_2d.py --accelerator cpu --tensor-parallel 2 --steps 10    # gloo

FSDP2 shards each block over the data-parallel ranks. Tensor parallelism cuts its linear layers, and sequence
parallelism what is between them. The plan is torch's own, with this package's styles, which send FP8 where torch's send
BF16. The data are the bytes of the standard library, as in ``train_gpt.py``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fp8 import FP8Precision
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.parallel.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel

try:
    from examples.train_gpt import BYTES, StdlibBytes  # from YAML, in the repository's root
except ModuleNotFoundError:
    from train_gpt import BYTES, StdlibBytes  # type: ignore[import-not-found, no-redef]  # as a script


class Llama(L.LightningModule):
    """transformers' Llama on bytes.

    Args:
        width: channels.
        depth: blocks.
        heads: attention heads; tensor parallelism divides them.
        lr: of AdamW.
        length: bytes of context; tensor parallelism divides them, too.
    """

    def __init__(self, width: int = 256, depth: int = 6, heads: int = 8, lr: float = 1e-3, length: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if hasattr(self, "llama"):
            return
        options = self.hparams
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=BYTES,
                hidden_size=options["width"],
                intermediate_size=4 * options["width"],
                num_hidden_layers=options["depth"],
                num_attention_heads=options["heads"],
                num_key_value_heads=options["heads"],
                max_position_embeddings=options["length"],
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
        mesh = self.device_mesh
        if mesh is not None:
            cut_and_shard(self.llama, mesh["tensor_parallel"], mesh["data_parallel"])

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # of the whole sequence
        logits: Tensor = self.llama(input_ids=tokens, position_ids=positions).logits
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), self.hparams["lr"], weight_decay=0.1)


def cut_and_shard(llama: LlamaForCausalLM, tensor_parallel: DeviceMesh, data_parallel: DeviceMesh) -> None:
    """Cut every block over ``tensor_parallel``, and shard it over ``data_parallel``."""
    if tensor_parallel.size() > 1:
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(llama, tensor_parallel, ends)
        for block in llama.model.layers:
            parallelize_module(block, tensor_parallel, block_plan())
    if data_parallel.size() > 1:
        for block in llama.model.layers:
            fully_shard(block, mesh=data_parallel)
        fully_shard(llama, mesh=data_parallel)


def block_plan() -> dict[str, Any]:
    """The plan of one block: x is cast once and gathered once for q, k and v, and once for gate and up."""
    whole = {"desired_input_layouts": (Replicate(),)}
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), **whole),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


class Data(StdlibBytes):
    """:class:`StdlibBytes`, of which all ranks of a tensor-parallel group read the same sequences."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        mesh = self.trainer.model.device_mesh["data_parallel"]  # type: ignore[union-attr, index]
        sampler = DistributedSampler(self.train, mesh.size(), mesh.get_local_rank(), drop_last=True)
        return DataLoader(self.train, self.batch_size, sampler=sampler, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="delayed", choices=(*RECIPES, "bf16"))
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks of a tensor-parallel group")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    options = parser.parse_args()
    ranks, local_ranks = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks % options.tensor_parallel:
        parser.error(
            f"--tensor-parallel {options.tensor_parallel} does not divide {ranks} ranks; start as many by torchrun"
        )
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if options.recipe != "bf16":
        precision = {"plugins": [FP8Precision(recipe=options.recipe)]}
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        strategy=ModelParallelStrategy(ranks // options.tensor_parallel, options.tensor_parallel),
        max_steps=options.steps,
        limit_val_batches=4,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        **precision,
    )
    torch.manual_seed(0)  # the same weights on all ranks
    trainer.fit(Llama(options.width, options.depth), Data())
    trainer.print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
