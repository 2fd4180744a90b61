"""Run by two processes: the collectives of torch's own FSDP2 and tensor parallelism of a small Llama in BF16.

``python -m tests.distributed.scripts.counted FOLDER``. Reports for each case the number of collectives of each kind,
and the bytes of what each gathers or sums, whole.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.distributed.launch import leave

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 128, 4, 2, 16, 96
BATCH, LENGTH, ACCUMULATE = 2, 16, 2


class Attention(nn.Module):
    def __init__(self, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * HEAD_DIM, bias=False) for n in (HEADS, kv_heads, kv_heads))
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for each in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return self.o(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.RMSNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """``recompute``: each block in the backward pass."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Counted(TorchDispatchMode):
    """Collectives by kind: how many, and the bytes of the whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which comes again with local tensors
        name = str(func)
        ranks = dist.get_world_size()
        if name.startswith("_c10d_functional.all_gather_into_tensor."):
            self._add("all_gather", ranks * args[0].nbytes)
        elif name.startswith("_c10d_functional.reduce_scatter_tensor."):
            self._add("reduce_scatter", args[0].nbytes)
        elif name.startswith("_c10d_functional.all_reduce"):
            self._add("all_reduce", args[0].nbytes)
        elif name.startswith("c10d._allgather_base_."):
            self._add("all_gather", args[0].nbytes)
        elif name.startswith("c10d._reduce_scatter_base_."):
            self._add("reduce_scatter", args[1].nbytes)
        elif "c10d" in name and "wait" not in name and "_wrap_tensor" not in name:
            self._add(name, 0)  # which the formulas do not know
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, size: int) -> None:
        count, total = self.found.get(kind, [0, 0])
        self.found[kind] = [count + 1, total + size]


def with_fsdp(model: Llama, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def with_tensor_parallelism(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """torch's standard plan: one gather for q, k and v, and one for gate and up."""
    x: Any = Shard(1) if sequence_parallel else Replicate()
    norm = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence_parallel else {}
    whole = PrepareModuleInput(input_layouts=x, desired_input_layouts=Replicate())
    for block in model.blocks:
        columns = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ColwiseParallel())
        rows = dict.fromkeys(("attention.o", "mlp.down"), RowwiseParallel(output_layouts=x))
        parallelize_module(block, mesh, {**norm, **columns, **rows, "attention": whole, "mlp": whole})
    of_root: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=x),
        "head": ColwiseParallel(input_layouts=x, use_local_output=False),
    }
    parallelize_module(model, mesh, of_root | ({"norm": SequenceParallel()} if sequence_parallel else {}))


def counted(parallelize: Callable[[Llama], None], recompute: bool, parallel_loss: bool) -> dict[str, list[int]]:
    torch.manual_seed(0)
    model = Llama(recompute).bfloat16()
    parallelize(model)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    with Counted() as mode:
        for _ in range(ACCUMULATE):
            logits = model(tokens).flatten(0, 1)
            if parallel_loss:
                with loss_parallel():
                    F.cross_entropy(logits.float(), tokens.flatten()).backward()
            else:
                F.cross_entropy(logits.float(), tokens.flatten()).backward()
    return mode.found


def cases() -> dict[str, dict[str, list[int]]]:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for recompute in (False, True):
        found[f"fsdp, {recompute}"] = counted(lambda model: with_fsdp(model, mesh), recompute, False)
        for sequence in (True, False):
            found[f"sequence={sequence}, {recompute}"] = counted(
                lambda model, sequence=sequence: with_tensor_parallelism(model, mesh, sequence),  # type: ignore[misc]
                recompute,
                True,
            )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(cases()))
    leave()
