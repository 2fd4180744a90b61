"""Where the time of a training step goes on an H200, op by op, as a model beside what was measured.

    python -m benchmarks.budget                          # the suite ``models``' step: two blocks of Llama-8B
    python -m benchmarks.budget --json out.json          # with every group of ops, in milliseconds

A small Llama takes a step on the CPU, and each op that torch would launch on a GPU is recorded. Its sizes are pairwise
different, and each is replaced by that of the large model. An op's time comes from committed results: products, casts
and attention as they were measured on the H200; torch's own kernels by the bytes that they move, over the bandwidth of
a copy of as many bytes, times an efficiency of the kind of kernel. It is a model: the host's time, launches and the
clocks of a whole step are not in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measuring.files import write
from lightning_fp8 import FP8FabricPrecision

RESULTS = Path(__file__).parent / "results"
WHAT = "modelled time of a training step on an H200 by kind of op, in milliseconds; see docs/benchmarks.md"

# --- The step, op by op -----------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a Llama and its batch."""

    sequences: int
    positions: int
    tokens: int
    heads: int
    groups: int
    channels: int
    width: int
    keys: int
    inner: int
    vocabulary: int
    half: int
    padded: int


SMALL = Sizes(3, 48, 144, 8, 2, 32, 256, 64, 896, 544, 16, 49)
LARGE = Sizes(4, 2048, 8192, 32, 8, 128, 4096, 1024, 14336, 8192, 64, 2049)
BLOCKS = 2
PARAMETERS = BLOCKS * LARGE.width * (2 * LARGE.width + 2 * LARGE.keys + 3 * LARGE.inner) + 2 * 8192 * LARGE.width
_LARGE = {**dict(zip(SMALL, LARGE)), SMALL.sequences * SMALL.padded: LARGE.sequences * LARGE.padded}
_LARGE |= {2 * SMALL.inner: 2 * LARGE.inner}


class Operand(NamedTuple):
    """A tensor of the large model: its dtype, shape, whether it is contiguous, and its bytes in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: bool
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Launch(NamedTuple):
    """An op of the step."""

    name: str
    phase: str
    inputs: list[Operand]
    outputs: list[Operand]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in (*self.inputs, *self.outputs))


def _operand(x: Tensor) -> Operand:
    shape = tuple(_LARGE.get(size, size) for size in x.shape)
    distinct = math.prod(size for size, stride in zip(shape, x.stride()) if stride)  # a stride of 0 repeats
    return Operand(x.dtype, shape, x.is_contiguous(), distinct * x.element_size())


_VIEWS = {
    *("view", "_unsafe_view", "view_as", "_reshape_alias", "alias", "as_strided", "detach", "lift_fresh", "narrow"),
    *("t", "transpose", "permute", "expand", "slice", "select", "squeeze", "unsqueeze", "unbind", "chunk"),
    *("split", "split_with_sizes", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("is_same_size", "_local_scalar_dense", "_record_function_enter_new", "_record_function_exit"),
}


class Recorder(TorchDispatchMode):
    """Records the ops that launch kernels, those of tensor subclasses included."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_unobserved")
        if name in _VIEWS:
            return result
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        read = {x.untyped_storage()._cdata for x in inputs}
        if name in ("reshape", "contiguous", "_to_copy") and all(x.untyped_storage()._cdata in read for x in outputs):
            return result
        self.launches.append(Launch(name, self.phase, [*map(_operand, inputs)], [*map(_operand, outputs)]))
        return result


@dataclass(frozen=True)
class Run:
    """A step: a recipe (None is BF16), FP8 attention or BF16's, fused or not.

    ``liger``: RoPE and cross entropy of Liger-Kernel; in BF16 also its norms and MLPs.
    """

    recipe: str | None = None
    fuse: bool = False
    attention: bool = False
    liger: bool = False

    @property
    def name(self) -> str:
        by_liger = ", Liger's RoPE and loss" if self.recipe else ", Liger"
        more = ", fused" * self.fuse + ", FP8 attention" * self.attention + by_liger * self.liger
        return f"{self.recipe or 'BF16'}{more}"


RUNS = (
    Run(),
    Run(liger=True),
    Run("delayed"),
    Run("delayed", fuse=True),
    Run("delayed", fuse=True, liger=True),
    Run("delayed", fuse=True, liger=True, attention=True),
    Run("tensorwise"),
    Run("tensorwise", fuse=True),
    Run("rowwise", fuse=True),
    Run("blockwise"),
    Run("blockwise", fuse=True),
    Run("blockwise", fuse=True, liger=True),
)


@cache
def launches(recipe: str | None, fuse: bool, attention: bool, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The ops of a step with weights in ``dtype``, after steps that fill caches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = SMALL
    config = LlamaConfig(
        vocab_size=small.vocabulary, hidden_size=small.width, intermediate_size=small.inner,
        num_hidden_layers=BLOCKS, num_attention_heads=small.heads, num_key_value_heads=small.groups,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)
    plugin = None
    if recipe is not None:
        plugin = FP8FabricPrecision(recipe=recipe, fuse=fuse, attention=attention, first_last_layers_bf16=False)
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(0, small.vocabulary, (small.sequences, small.positions))
    recorder = Recorder()

    def step() -> None:
        recorder.phase = "forward"
        with plugin.forward_context() if plugin else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        recorder.phase = "backward"
        loss.backward()
        recorder.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with recorder:
        step()
    return recorder.launches


# --- What ops take ----------------------------------------------------------------------------------------------------

EFFICIENCY = {"plain": 0.95, "convert": 0.90, "broadcast": 0.50, "reduce": 0.80, "adam": 0.70, "one pass": 0.85}
"""Bandwidth of torch's kernels over that of a copy. Broadcast operands take its kernel without vectors: ``(x *
scale).clamp().to(fp8)``, less its ``.to(fp8)``, moves 537 MB in 0.29 ms, which is 0.43 for one broadcast and one plain
op."""
SMALL_LAUNCH = 0.003
"""Milliseconds of a kernel that moves less than :data:`FEW_BYTES`."""
FEW_BYTES = 4_000_000
CROSS_ENTROPY = "head: cross entropy"
ROPE = "RoPE and layouts of heads"
FP8_CASTS = {
    "delayed": ("cast + transposed + amax", "cast + amax", "transposed only"),
    "tensorwise": ("current scaling + transposed", "current scaling", "current scaling"),
    "rowwise": ("row + transposed", "row", "row"),
    "blockwise": ("1x128 + transposed", "128x128", "128x128"),
}
"""By recipe, the measured casts of an activation, and of a weight in the forward and the backward pass."""


class Measured:
    """Times of committed results of the H200, in milliseconds."""

    def __init__(self) -> None:
        files = "2026-11-27-h200-casts 2026-11-26-h200-products 2026-11-27-h200-attention 2026-11-27-h200-models"
        self.casts, self.products, self.attentions, self.models = map(self._results, files.split())
        copies = [each for each in self.casts if each["name"].startswith("copy of")]
        self.copies = sorted((each["bytes"], _ms(each)) for each in copies)

    def _results(self, file: str) -> list[dict[str, Any]]:
        suites = json.loads((RESULTS / f"{file}.json").read_text())["suites"]
        return [each for suite in suites.values() for each in suite if each["milliseconds"]]

    def copy(self, size: float) -> float:
        """A copy that reads and writes ``size`` bytes together, interpolated."""
        (first, first_ms), (last, last_ms) = self.copies[0], self.copies[-1]
        if size <= first:
            return SMALL_LAUNCH + size / first * (first_ms - SMALL_LAUNCH)
        for (smaller, below), (larger, above) in zip(self.copies, self.copies[1:]):
            if size <= larger:
                return below + (above - below) * (size - smaller) / (larger - smaller)
        return size / last * last_ms

    def cast(self, name: str, elements: int) -> float:
        """A cast, norm or activation of so many elements, as at 16,384 × 4,096."""
        found = next(
            each
            for each in self.casts
            if each["name"] == name and each["shape"] == [16384, 4096] and each["by"] == "lightning_fp8"
        )
        of_halves = 2 if name.startswith("SwiGLU") else 1  # measured on a tensor of gate and up
        return 0.001 + _ms(found) * elements * of_halves / 2**26

    def product(self, sizes: tuple[int, ...], by: str) -> float:
        """The product of the nearest sizes that was measured, at its rate; a side below 2,048 costs 15 %."""
        found = [
            each
            for each in self.products
            if each["by"] == by
            and len(each["shape"]) == 3
            and min(each["shape"]) >= 1024
            and not any(word in each["name"] for word in ("wgrad in", "added", "blockwise", "rowwise", "Linear"))
        ]
        near = min(found, key=lambda each: max(abs(math.log(a / b)) for a, b in zip(sizes, each["shape"])))
        rate = math.prod(near["shape"]) / _ms(near) * (0.85 if min(sizes) < 2048 else 1)
        return math.prod(sizes) / rate

    def blockwise_over_bf16(self, kind: str) -> float:
        """The time of a product with scales of blocks over BF16's, at 4,096 × 7,168 × 16,384."""
        name = "wgrad blockwise" if kind == "wgrad" else "fprop blockwise"
        ours, bf16 = (
            next(_ms(each) for each in self.products if each["name"] == name and each["by"] == by)
            for by in ("torch._scaled_mm (full)", "BF16")
        )
        return ours / bf16

    def attention(self, direction: str, by: str) -> float:
        """Causal attention with 4 heads to one of keys, for as many heads and sequences as the step has."""
        name = f"{direction}, causal, 4 heads to one of keys"
        found = next(
            each
            for each in self.attentions
            if each["name"] == name and each["by"] == by and each["shape"][1::2] == [LARGE.positions, LARGE.channels]
        )
        return _ms(found) * LARGE.sequences * LARGE.heads / (found["shape"][0] * found["shape"][2])

    def linears(self, recipe: str | None) -> float:
        """Forward and backward of the Linears of a block, in a row."""
        by = {None: "BF16", "delayed": "lightning_fp8"}.get(recipe, f"lightning_fp8, {recipe}")
        return next(_ms(each) for each in self.products if each["name"].startswith("Llama-8B") and each["by"] == by)

    def step(self, run: Run) -> float | None:
        """A step as it was measured; None if it was not."""
        if run.fuse or run.liger:
            return None
        by = f"lightning_fp8, {run.recipe}" if run.recipe else "BF16"
        by += " with FP8 attention" * run.attention
        return next((_ms(each) for each in self.models if each["by"] == by), None)


def _ms(result: dict[str, Any]) -> float:
    return float(result["milliseconds"]["median"])


def priced(launch: Launch, recipe: str | None, measured: Measured) -> tuple[str, float]:
    """The group of an op, and its milliseconds."""
    name, phase, tokens = launch.name, launch.phase, LARGE.tokens
    first = launch.inputs[0] if launch.inputs else None
    size = launch.bytes
    if name in ("mm", "addmm"):
        a, b = launch.inputs[-2:]
        sizes = (*a.shape, b.shape[1])
        is_head = sorted(sizes) == sorted((tokens, LARGE.width, LARGE.vocabulary))
        return "head: products" if is_head else "products", measured.product(sizes, "BF16")
    if name.startswith("scaled_mm"):
        (m, k), n = launch.inputs[0].shape, launch.inputs[2].shape[0]
        kind = "wgrad" if k == tokens else "dgrad" if phase == "backward" else "fprop"
        if recipe == "blockwise":
            return "products", measured.product((m, k, n), "BF16") * measured.blockwise_over_bf16(kind)
        return "products", measured.product((m, k, n), f"torch._scaled_mm ({'fast' if kind == 'fprop' else 'full'})")
    # Kernels that scale from the values read them twice.
    twice = ("current scaling + transposed", "cast + transposed + amax")
    again = 1.0
    if recipe in ("tensorwise", "rowwise"):
        again = measured.cast(twice[0], 2**26) / measured.cast(twice[1], 2**26)
    if name.startswith("quantize"):
        assert first is not None
        assert recipe is not None
        of_activation, forward, backward = FP8_CASTS[recipe]
        if first.shape[0] == tokens:
            return "casts of x and dy", measured.cast(of_activation, first.elements)
        return "casts of weights", measured.cast(forward if phase == "forward" else backward, first.elements)
    if name == "rms_norm":
        return "RMSNorm", measured.copy(size) / EFFICIENCY["one pass"]
    if name == "norm_quantize":
        assert first is not None
        return "RMSNorm", again * measured.cast("RMSNorm + cast + transposed", first.elements)
    if name == "norm_backward":
        assert first is not None
        return "RMSNorm", measured.cast("RMSNorm backward", first.elements)
    if name.startswith(("gated", "activation")):
        assert first is not None
        if "backward" not in name:
            return "SwiGLU", again * measured.cast("SwiGLU + cast + transposed", first.elements)
        # by bytes, at the rate of the kernel for one tensor of both halves, which moves 10 for each element
        moved = 2 * sum(each.elements for each in launch.inputs if each.dtype is torch.bfloat16 and each.elements > 1)
        moved += sum(each.elements for each in launch.outputs if each.dtype.itemsize == 1)
        rate = measured.cast("SwiGLU backward + cast + transposed", first.elements) / (10 * first.elements)
        return "SwiGLU", again * rate * moved
    if "scaled_dot_product" in name or name.startswith("attention_"):
        by = "lightning_fp8" if name.startswith("attention_") else "cuDNN (BF16)"
        return "attention", measured.attention("backward" if "backward" in name else "forward", by)
    if name == "_fused_adamw_":
        return "AdamW", measured.copy(14 * PARAMETERS) / EFFICIENCY["adam"]
    if name.startswith("embedding"):
        table = 2 * 8192 * LARGE.width
        moved, kind = (size, "plain") if name == "embedding" else (3 * table, "reduce")
        return "embedding", measured.copy(moved) / EFFICIENCY[kind] + 0.1 * (name != "embedding")
    if "nll_loss" in name or "log_softmax" in name or (launch.outputs and _is_logits(launch.outputs[0])):
        if name == "nll_loss_forward":
            return CROSS_ENTROPY, 0.03
        kind = "reduce" if "softmax" in name else "convert" if name == "_to_copy" else "plain"
        return CROSS_ENTROPY, measured.copy(size) / EFFICIENCY[kind]
    if size < FEW_BYTES:
        return "small kernels", SMALL_LAUNCH
    return _group_of_elementwise(launch), measured.copy(size) / EFFICIENCY[_kind_of_elementwise(launch)]


def _is_logits(x: Operand) -> bool:
    return x.shape[-1:] == (8192,) and x.elements >= LARGE.tokens * 8192


def _kind_of_elementwise(launch: Launch) -> str:
    operands = [each for each in (*launch.inputs, *launch.outputs) if each.elements > 1]
    contiguous = all(each.contiguous for each in operands)
    if launch.name in ("mean", "sum"):
        return "reduce"
    if launch.name in ("_to_copy", "to") and contiguous:
        return "convert"
    return "plain" if contiguous and len({each.elements for each in operands}) == 1 else "broadcast"


def _group_of_elementwise(launch: Launch) -> str:
    shape = launch.outputs[0].shape
    if len(shape) == 4:
        return ROPE
    if LARGE.inner in shape:
        return "SwiGLU"
    if launch.name == "add" and launch.inputs[0].dtype is torch.bfloat16:
        return "residual adds, sums of gradients"
    return "RMSNorm"


def budget(run: Run, measured: Measured) -> tuple[dict[str, float], int]:
    """Milliseconds by group of ops, and the number of ops.

    Products in a row run at lower clocks than alone: their sum is that of the measured Linears of a block, less casts.
    """
    groups, count = _groups(run.recipe, run.fuse, run.attention, measured)
    plain, _ = _groups(run.recipe, False, False, measured)
    bf16, _ = _groups(None, False, False, measured)
    casts = sum(ms for group, ms in plain.items() if group.startswith("casts"))
    groups["products"] *= (BLOCKS * measured.linears(run.recipe) - casts) / plain["products"]
    groups["head: products"] *= BLOCKS * measured.linears(None) / bf16["products"]
    if run.liger:  # in place, one pass each way; the copies of keys for heads stay; logits are read twice
        heads = LARGE.tokens * (LARGE.width + LARGE.keys)
        groups[ROPE] = BLOCKS * measured.copy(8 * heads + 8 * LARGE.tokens * LARGE.keys) / EFFICIENCY["reduce"]
        groups[CROSS_ENTROPY] = measured.copy(6 * LARGE.tokens * 8192) / EFFICIENCY["reduce"]
        if run.recipe is None:  # reads x, writes y; reads dy and x, writes dx; and alike for gate and up
            norm, inner = 2 * LARGE.tokens * LARGE.width, 2 * LARGE.tokens * LARGE.inner
            both_ways = measured.copy(2 * norm) + measured.copy(3 * norm)
            groups["RMSNorm"] = (2 * BLOCKS + 1) * both_ways / EFFICIENCY["one pass"]
            both_ways = measured.copy(3 * inner) + measured.copy(5 * inner)
            groups["SwiGLU"] = BLOCKS * both_ways / EFFICIENCY["one pass"]
    return groups, count


def _groups(recipe: str | None, fuse: bool, attention: bool, measured: Measured) -> tuple[dict[str, float], int]:
    groups: dict[str, float] = defaultdict(float)
    recorded = launches(recipe, fuse, attention)
    for each in recorded:
        group, milliseconds = priced(each, recipe, measured)
        groups[group] += milliseconds
    return groups, len(recorded)


# --- The command ------------------------------------------------------------------------------------------------------


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """For each run its modelled groups, sum, measured time, and ratios to BF16."""
    measured = Measured()
    base: float | None = None
    for run in runs:
        groups, count = budget(run, measured)
        total = sum(groups.values())
        base = total if base is None else base
        yield {
            "run": run.name,
            "groups": {group: round(ms, 3) for group, ms in sorted(groups.items(), key=lambda item: -item[1])},
            "modelled": round(total, 2),
            "measured": measured.step(run),
            "ops": None if run.liger else count,
            "over BF16, modelled": round(base / total, 2),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description="A step's time, op by op.")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(arguments)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no tables of layers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    found = list(rows(RUNS))
    for row in found:
        beside = "" if row["measured"] is None else f", measured {row['measured']:.2f}"
        print(
            f"{row['run']}: {row['modelled']:.2f} ms{beside}; {row['over BF16, modelled']:.2f}; {row['ops'] or '?'} ops"
        )
        print("  " + ", ".join(f"{group} {ms:.2f}" for group, ms in row["groups"].items()))
    if args.json:
        model = "two blocks of Llama-8B, both in FP8, vocabulary 8,192"
        conditions = f"{model}, 4 × 2,048 tokens, BF16 weights, fused AdamW, eager"
        document = {"what": WHAT, "conditions": conditions, "torch": torch.__version__, "runs": found}
        write(document, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
