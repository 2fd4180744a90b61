"""Run by two processes: one linear layer that is cut over them, against float64.

``python -m tests.distributed.scripts.parallel_linear FOLDER``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import Linear, fp8_autocast, make_recipe
from lightning_fp8.functions.product import Product
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.parallel.function import Parallel, parallel_linear
from tests.distributed.launch import leave

N, K = 96, 128
SHAPE = 4, 64


class Collectives(TorchDispatchMode):
    """Counts the bytes that this rank gives to the collectives of torch.distributed, also to DTensor's."""

    INPUTS: ClassVar = {
        "c10d::_allgather_base_": ("gather", 1),
        "c10d::_reduce_scatter_base_": ("scatter", 1),
        "c10d::allreduce_": ("sum", 0),
        "_c10d_functional::all_gather_into_tensor": ("gather", 0),
        "_c10d_functional::reduce_scatter_tensor": ("scatter", 0),
        "_c10d_functional::all_reduce": ("sum", 0),
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(("gather", "scatter", "sum"), 0)
        self.calls = dict.fromkeys(self.bytes, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if DTensor in types:
            return NotImplemented  # what it calls comes here again
        name = function.name().partition(".")[0]
        if name in self.INPUTS:
            kind, position = self.INPUTS[name]
            given = args[position]
            for each in given if isinstance(given, (list, tuple)) else [given]:
                self.bytes[kind] += each.numel() * each.itemsize
            self.calls[kind] += 1
        return function(*args, **(kwargs or {}))


def reports() -> dict[str, Any]:
    """Relative errors of y, dx, dw and dbias, of the layer that is cut and of one process's, and the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, weight, bias, dy = random(*SHAPE, K), random(N, K) / 8, random(N), random(*SHAPE, N)
    truth = (
        x.double() @ weight.double().t() + bias.double(),
        dy.double() @ weight.double(),
        dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1),
        dy.double().sum((0, 1)),
    )

    def piece(tensor: Tensor, dim: int | None) -> Tensor:
        return (tensor if dim is None else tensor.chunk(ranks, dim)[rank]).clone().contiguous()

    def whole(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces, dim)

    def errors(results: Sequence[Tensor | None]) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True)]  # type: ignore[union-attr]

    found: dict[str, Any] = {}
    for name in RECIPES:
        uncut = Linear(K, N, dtype=torch.bfloat16)
        uncut.load_state_dict({"weight": weight, "bias": bias})
        its_x = x.clone().requires_grad_()
        with fp8_autocast(fp8_recipe=name):
            its_y = uncut(its_x)
        its_y.backward(dy)
        found[name] = errors((its_y, its_x.grad, uncut.weight.grad, uncut.bias.grad))
        for mode in ("column", "row"):
            for sequence in (None, 0, 1):
                is_row = mode == "row"
                layer = Linear(K // (ranks if is_row else 1), N // (1 if is_row else ranks))
                product = Product(make_recipe(name), layer.ensure_slots()[0], observe=True)
                own_weight = piece(weight, 1 if is_row else 0).requires_grad_()
                own_bias = piece(bias, None if is_row else 0).requires_grad_()
                own_x = piece(x, 2 if is_row else sequence).requires_grad_()
                collectives = Collectives()
                with collectives:
                    parallel = Parallel(mode, dist.group.WORLD, sequence)  # type: ignore[arg-type]
                    y = parallel_linear(own_x, own_weight, own_bias, product, torch.bfloat16, parallel)
                    y.backward(piece(dy, sequence if is_row else 2))
                results = (
                    whole(y.detach(), sequence if is_row else 2),
                    whole(own_x.grad, 2 if is_row else sequence),  # type: ignore[arg-type]
                    whole(own_weight.grad, 1 if is_row else 0),  # type: ignore[arg-type]
                    whole(own_bias.grad, None if is_row else 0),  # type: ignore[arg-type]
                )
                found[f"{name} {mode} {sequence}"] = {
                    "errors": [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, truth, strict=True)],
                    "bytes": collectives.bytes,
                    "calls": collectives.calls,
                }
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(reports()))
    leave()
