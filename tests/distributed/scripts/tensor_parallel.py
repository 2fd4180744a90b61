"""Run by two processes: blocks that ``parallelize_module`` cuts, beside one process and float32.

``python -m tests.distributed.scripts.tensor_parallel FOLDER RECIPE [compiled] KIND...``
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from lightning_fp8 import Linear, convert_module, fp8_autocast
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.sharding import styles
from tests.distributed.launch import leave
from tests.distributed.scripts.parallel_linear import Collectives

WIDTH, HEADS, SHAPE, STEPS = 64, 4, (2, 32), 2
STYLES = {"torch": torch_styles, "ours": styles}


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        # A bias of keys has no effect: the gradient is 0 but for rounding.
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias and name != "k") for name in "qkvo")

    is_sequence_first = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.q, self.k, self.v))
        if self.is_sequence_first:
            q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out((o.transpose(0, 1) if self.is_sequence_first else o).flatten(2))


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias), nn.Linear(2 * WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.RMSNorm(WIDTH),
            Attention(bias),
            nn.LayerNorm(WIDTH),
            MLP(bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def blocks(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(bias), Block(bias)).bfloat16()


def with_arguments(kind: str, group: Any) -> nn.Sequential:
    """:func:`blocks` without biases, cut by Transformer Engine's arguments. Sequences come first where they are cut."""
    sequence = kind == "each"
    parallel: dict[str, Any] = {"tp_group": group, "sequence_parallel": sequence}
    model = blocks(bias=False)
    for block in model:
        for parent, name in ((block.attention, "q"), (block.attention, "k"), (block.attention, "v"),
                             (block.attention, "out"), (block.mlp, "up"), (block.mlp, "down")):  # fmt: skip
            layer = getattr(parent, name)
            mode = "row" if name in ("out", "down") else "column"
            cut_layer = Linear(
                layer.in_features, layer.out_features, bias=False, parallel_mode=mode, params_dtype=torch.bfloat16,
                **parallel,
            )  # fmt: skip
            cut_layer.load_state_dict(layer.state_dict())
            setattr(parent, name, cut_layer)
        block.attention.is_sequence_first = sequence
        for parameter in (*block.norm1.parameters(), *block.norm2.parameters()) if sequence else ():
            parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=group))
    return model


def plan(kind: str, made_by: Any) -> dict[str, Any]:
    """Lightning's own plan: with sequence parallelism one gather for q, k and v, or one for each layer."""
    column, row, prepare = made_by.ColwiseParallel, made_by.RowwiseParallel, made_by.PrepareModuleInput
    if kind == "plain":
        columns, rows, others = column(), row(), {}
    elif kind == "each":  # every layer gathers for itself
        columns, rows = column(input_layouts=Shard(1)), row(output_layouts=Shard(1))
        others = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    else:
        columns, rows = column(), row(output_layouts=Shard(1))
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        others = {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attention": prepare(**gather), "mlp": prepare(**gather),
        }  # fmt: skip
    names = {**dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.up"), columns),
             **dict.fromkeys(("attention.out", "mlp.down"), rows)}  # fmt: skip
    return {**others, **names}


def cut(model: nn.Sequential, kind: str, made_by: Any, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        parallelize_module(block, mesh, plan(kind, made_by))
    return model


def train(model: nn.Sequential, recipe: Any, kind: str, group: Any = None, counts: bool = True) -> dict[str, Any]:
    """Losses, the last step's gradients, the scales, and the bytes that this rank gave to collectives.

    ``counts``: the bytes; Dynamo does not compile where a dispatch mode is active.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, collectives = [], Collectives()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(*SHAPE, WIDTH, generator=generator) for _ in range(2))
        x = x.to(next(model.parameters()).dtype)
        is_cut = kind in ("each", "once")
        if is_cut:
            x, target = (each.chunk(ranks, 1)[rank].contiguous() for each in (x, target))
        if is_sequence_first := model[0].attention.is_sequence_first:
            x = x.transpose(0, 1).contiguous()
        collectives = Collectives()
        counting = collectives if counts else nullcontext()
        with counting, fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, fp8_group=group):
            y = model(x)
        y = y.to_local() if isinstance(y, DTensor) else y
        y = y.transpose(0, 1) if is_sequence_first else y
        loss = (y.float() - target).square().sum() / (math.prod(SHAPE) * WIDTH)
        with counting:
            loss.backward()
        if is_cut:
            loss = loss.detach().clone()
            dist.all_reduce(loss)
        losses.append(loss.item())
        gradients = {name: _whole(each.grad) for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    scales = [slot.scale.item() for _, module in fp8_modules(model) for _, slot in module.named_slots()]
    records = [module.record.fp8 for _, module in fp8_modules(model)]
    return {
        "losses": losses, "gradients": gradients, "scales": scales, "records": records,
        "bytes": collectives.bytes, "calls": collectives.calls,
    }  # fmt: skip


def compiled(model: nn.Sequential, recipe: str, kind: str) -> dict[str, Any]:
    """What :func:`train` finds with compiled blocks, with their graphs, and why these end where a block goes on."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    for block in model:
        block.compile(backend=backend)
    made = train(model, recipe, kind, counts=False)
    del made["gradients"]
    return {**made, "graphs": len(graphs), "breaks": list(torch._dynamo.utils.counters["graph_break"])}


def _whole(gradient: Any) -> Tensor:
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradient.float()  # type: ignore[no-any-return]


def of_compiled(recipe: str, kind: str) -> dict[str, Any]:
    """Of blocks that are compiled, and of blocks that are not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one, other = (cut(convert_module(blocks(), first_last_layers_bf16=False), kind, styles, mesh) for _ in range(2))  # type: ignore[arg-type]
    eager = train(one, recipe, kind)
    del eager["gradients"]
    return {"eager": eager, "compiled": compiled(other, recipe, kind)}


def reports(recipe: str, kinds: list[str]) -> dict[str, Any]:
    """Of one process in FP8, of the block that is cut in each way, and of BF16."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    truth = train(blocks().float(), None, "one process")["gradients"]
    found: dict[str, Any] = {}

    def report(name: str, model: nn.Sequential, recipe: Any, kind: str, group: Any = None) -> None:
        made = train(model, recipe, kind, group)
        gradients = made.pop("gradients")
        if gradients.keys() == truth.keys():
            made["errors"] = {
                key: float((gradient - truth[key]).norm() / truth[key].norm()) for key, gradient in gradients.items()
            }
        found[name] = made

    def converted(model: nn.Sequential) -> nn.Sequential:
        return convert_module(model, first_last_layers_bf16=False)  # type: ignore[return-value]

    report("one process", converted(blocks()), recipe, "one process", groups[dist.get_rank()])
    for kind in kinds:
        for styles_of, made_by in STYLES.items():
            for bias in (True, False):
                if styles_of == "ours":  # conversion comes before or after
                    model = cut(converted(blocks(bias)), kind, made_by, mesh)
                else:
                    model = converted(cut(blocks(bias), kind, made_by, mesh))
                report(f"{kind} {styles_of}{'' if bias else ' without biases'}", model, recipe, kind)
        report(f"{kind} bf16", cut(blocks(), kind, torch_styles, mesh), None, kind)
        if kind != "once":  # each layer gathers for itself
            report(f"{kind} arguments", with_arguments(kind, mesh.get_group()), recipe, kind)
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    recipe, *kinds = sys.argv[2:]
    made = of_compiled(recipe, kinds[1]) if kinds[0] == "compiled" else reports(recipe, kinds)
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(made))
    leave()
