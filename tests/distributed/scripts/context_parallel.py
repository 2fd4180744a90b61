"""Attention whose sequences are split over ranks, beside attention of one process; what each rank saw.

``python -m tests.distributed.scripts.context_parallel FOLDER CASE,CASE``, with RANK, WORLD_SIZE and MASTER_* set.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import (
    DotProductAttention,
    TransformerLayer,
    fp8_autocast,
    get_batch_on_this_cp_rank,
)
from lightning_fp8.transformer import RotaryPositionEmbedding
from tests.distributed.launch import leave

HEADS, GROUPS, CHANNELS = 4, 2, 16


class Collectives(TorchDispatchMode):
    """Bytes that this rank gives to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensor = args[0][0] if "allreduce" in func._schema.name else args[1]
            tensor = tensor if isinstance(tensor, Tensor) else tensor[0]
            self.seen.append((func._schema.name.removeprefix("c10d::"), tensor.nbytes, str(tensor.dtype)))
        return func(*args, **(kwargs or {}))


class Case(NamedTuple):
    mask: str = "causal"
    length: int = 1024
    qkv_format: str = "bshd"
    window: tuple[int, int] | None = None
    batch: int = 2
    key_length: int | None = None
    softmax_type: str = "vanilla"


CASES = {
    "causal": Case(),
    "no mask": Case("no_mask"),
    "sbhd window": Case(qkv_format="sbhd", window=(300, 0), batch=1),
    "cross": Case("no_mask", key_length=2048, batch=1),
    "short": Case(length=80),
    "sink": Case(length=64, softmax_type="off-by-one"),
}


def drawn(case: Case) -> list[Tensor]:
    """q, k, v and the output's gradient of whole sequences, BF16, keys with a mean."""
    generator = torch.Generator().manual_seed(0)
    keys = case.key_length or case.length
    shapes = [(case.length, HEADS), (keys, GROUPS), (keys, GROUPS), (case.length, HEADS)]
    q, k, v, do = (torch.randn(case.batch, *shape, CHANNELS, generator=generator) for shape in shapes)
    x = [each.bfloat16() for each in (q, k + 4 * torch.randn(CHANNELS, generator=generator), v, do)]
    return x if case.qkv_format == "bshd" else [each.transpose(0, 1).contiguous() for each in x]


def exact(case: Case) -> list[Tensor]:
    """Output and gradients of one process in float64, in the case's format."""
    q, k, v, do = drawn(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    swap = (1, 2) if case.qkv_format == "bshd" else (0, 2)
    heads = [x.transpose(*swap) if case.qkv_format == "bshd" else x.permute(1, 2, 0, 3) for x in leaves]
    q64, k64, v64 = heads[0], *(x.repeat_interleave(HEADS // GROUPS, 1) for x in heads[1:])
    scores = q64 @ k64.mT / math.sqrt(CHANNELS)
    i, j = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
    if case.mask == "causal":
        hidden = j > i
        if case.window is not None:
            hidden = hidden | (j < i - case.window[0])
        scores = scores.masked_fill(hidden, -math.inf)
    if case.softmax_type == "off-by-one":
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:3], 1)], 3)
        v64 = torch.cat([v64, v64.new_zeros(*v64.shape[:2], 1, CHANNELS)], 2)
    o = scores.softmax(3) @ v64
    o = o.transpose(1, 2) if case.qkv_format == "bshd" else o.permute(2, 0, 1, 3)
    o.backward(do.double())
    return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]


def attend(case: Case, recipe: Any, group: Any, checkpoint: bool = False) -> tuple[list[Tensor], Any, Any]:
    """Output and gradients, of this rank's part where there is a group; the collectives, and the module."""
    rows = 1 if case.qkv_format == "bshd" else 0
    tensors = drawn(case)
    if group is not None:
        tensors = [get_batch_on_this_cp_rank(x, group, rows) for x in tensors]
    q, k, v, do = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    module = DotProductAttention(
        HEADS, CHANNELS, GROUPS, qkv_format=case.qkv_format, attn_mask_type=case.mask, window_size=case.window,
        softmax_type=case.softmax_type, cp_group=group,
    )  # fmt: skip
    with Collectives() as collectives, fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        o = module(*leaves, checkpoint_core_attention=checkpoint)
        o.backward(do.flatten(-2))
    return [o.detach().unflatten(-1, (HEADS, -1)), *(x.grad for x in leaves)], collectives.seen, module  # type: ignore[misc]


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def errors(actual: list[Tensor], expected: list[Tensor], case: Case) -> list[float]:
    rows = 1 if case.qkv_format == "bshd" else 0
    here = [get_batch_on_this_cp_rank(x, dist.group.WORLD, rows) for x in expected]  # type: ignore[arg-type]
    return [error(*pair) for pair in zip(actual, here, strict=True)]


def run_case(case: Case) -> dict[str, Any]:
    fp8 = {"name": "tensorwise", "fp8_dpa": True}
    group, truth, report = dist.group.WORLD, exact(case), {}
    for name, recipe in (("high", None), ("fp8", fp8)):
        one, _, _ = attend(case, recipe, None)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            many, collectives, module = attend(case, recipe, group)
        report[name] = {
            "one exact": errors([get_batch_on_this_cp_rank(x, group, _rows(case)) for x in one], truth, case),  # type: ignore[arg-type]
            "exact": errors(many, truth, case),
            "one": errors(many, one, case),
            "collectives": collectives,
            "said": [str(each.message) for each in said],
            "reason": module.reason,
        }
    again, collectives, _ = attend(case, fp8, group, checkpoint=True)
    report["checkpointed"] = all(torch.equal(*pair) for pair in zip(many, again, strict=True))
    return report


def _rows(case: Case) -> int:
    return 1 if case.qkv_format == "bshd" else 0


def run_layer() -> dict[str, Any]:
    """A layer with rotary embeddings and delayed scaling, with what its history holds."""
    group, report = dist.group.WORLD, {}
    x = torch.randn(1, 1024, 32, generator=torch.Generator().manual_seed(1))
    angles = RotaryPositionEmbedding(8)(1024)
    torch.manual_seed(0)
    layer = TransformerLayer(
        32, 64, 4, attn_input_format="bshd", hidden_dropout=0.0, attention_dropout=0.0, num_gqa_groups=2
    )
    other = copy.deepcopy(layer)
    other.set_context_parallel_group(group, [*range(dist.get_world_size())], None, "all_gather")
    results = {}
    for name, module, inputs in (("one", layer, x), ("many", other, get_batch_on_this_cp_rank(x, group))):  # type: ignore[arg-type]
        leaf = inputs.clone().requires_grad_()
        with fp8_autocast(fp8_recipe={"name": "delayed", "fp8_dpa": True}):
            y = module(leaf, rotary_pos_emb=angles)
            y.square().mean().backward()
        results[name] = y.detach(), leaf.grad
        history = module.self_attention.core_attention.history
        assert history is not None
        report[name] = dict(zip(history.names, history.amax.tolist()))
    for index, what in enumerate(("y", "dx")):
        expected = get_batch_on_this_cp_rank(results["one"][index], group)  # type: ignore[arg-type]
        scale = 1 if what == "y" else dist.get_world_size()  # each rank's mean is of its own rows
        report[what] = error(results["many"][index] / scale, expected)
    copied = copy.deepcopy(other.self_attention.core_attention)
    report["copy"] = copied.context_parallel is not None and copied.context_parallel.group is group
    return report


def refused() -> dict[str, str]:
    """What is refused, with its message."""
    group = dist.group.WORLD
    q = torch.randn(2, 8, 2, 16)
    said = {}

    def ask(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as raised:
            said[name] = f"{type(raised).__name__}: {raised}"

    def attention(**kwargs: Any) -> DotProductAttention:
        return DotProductAttention(2, 16, **{"qkv_format": "bshd", "cp_group": group, **kwargs})

    cu = torch.tensor([0, 8])
    ask("thd", lambda: attention()(q[0], q[0], q[0], qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu))
    ask("padding", lambda: attention(attn_mask_type="padding")(q, q, q, torch.zeros(2, 1, 1, 8, dtype=torch.bool)))
    ask("alibi", lambda: attention()(q, q, q, core_attention_bias_type="alibi"))
    ask("window", lambda: attention(attn_mask_type="no_mask", window_size=(2, 2))(q, q, q))
    ask("odd", lambda: attention()(q[:, :7], q[:, :7], q[:, :7]))
    ask("length", lambda: get_batch_on_this_cp_rank(torch.zeros(2, 30), group))  # type: ignore[arg-type]
    ask("group", lambda: attention(cp_group=object()))
    ask("ranks", lambda: attention(cp_global_ranks=[5, 6]))
    ask("two groups", lambda: attention(cp_comm_type="a2a+p2p"))
    pickled = attention()
    pickled.context_parallel.__dict__.update(pickled.context_parallel.__getstate__())  # type: ignore[union-attr]
    ask("pickled", lambda: pickled(q, q, q))
    rows = 4 + 2 * dist.get_rank()
    ask("unlike", lambda: attention(attn_mask_type="no_mask")(q[:, :rows], q[:, :rows], q[:, :rows]))
    compiled = torch.compile(attention(), backend="eager", fullgraph=True)
    try:
        compiled(q, q, q)
    except Exception as raised:  # of Dynamo's own kind
        said["fullgraph"] = f"{type(raised).__name__}: {raised}"
    torch._dynamo.reset()
    module = attention()
    said["compiled"] = str(torch.equal(torch.compile(module, backend="eager")(q, q, q), module(q, q, q)))
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, names = sys.argv[1:]
    report: dict[str, Any] = {"cases": {name: run_case(CASES[name]) for name in names.split(",")}}
    report["layer"] = run_layer()
    report["refused"] = refused()
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main()
