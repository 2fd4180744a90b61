"""Cost of one optimizer step of a Llama-like model on each rank: bytes sent, collectives, and memory.

    python -m benchmarks.scaling                                   # the table of docs/scaling.md
    python -m benchmarks.scaling 70b 32x8x1 8192 --recipe rowwise  # one row: model, mesh, tokens of a sequence
    python -m benchmarks.scaling --write docs/scaling.md           # after a formula has changed

Pure functions of a :class:`Setup`, with the same formulas for BF16 (``recipe=None``) and FP8. They compute bytes and
counts, not times. A collective over ``n`` ranks is counted as a ring: for a tensor of ``s`` bytes, each rank sends
``s (n - 1) / n`` in an all-gather or a reduce-scatter, and twice that in an all-reduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.measuring.report import insert, markdown
from lightning_fp8.numerics.recipes import RECIPES

GB = 1e9

ROWS = (
    ("8b", "8x1x1", 8192),
    ("8b", "64x1x1", 8192),
    ("70b", "8x8x1", 8192),
    ("70b", "32x8x1", 8192),
    ("70b", "128x8x1", 8192),
    ("405b", "128x8x1", 8192),
    ("405b", "512x8x1", 8192),
    ("405b", "2048x8x1", 8192),
    ("405b", "128x8x16", 131072),
)
"""The rows of the page: model, data x tensor x context ranks, and tokens of a sequence."""

HEADER = (
    "GPUs", "model", "data x tensor x context", "tokens of a sequence", "GB sent, BF16", "GB sent, FP8", "ratio",
    "collectives, BF16", "collectives, FP8", "memory, BF16 (GB)", "memory, FP8 (GB)",
)  # fmt: skip

WIDE = 2
"""Bytes of a BF16 value."""


# --- Models -----------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A parameter ``[rows, columns]``, and which of the two tensor parallelism splits."""

    rows: int
    columns: int
    split: Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Shape:
    """A Llama-like model: blocks of attention and a gated MLP, each after an RMSNorm, without biases."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    @property
    def linears(self) -> tuple[Weight, ...]:
        """The linear layers of a block: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            *(Weight(rows, self.hidden, "rows") for rows in (q, kv, kv)),
            Weight(self.hidden, q, "columns"),
            *(Weight(self.ffn, self.hidden, "rows") for _ in range(2)),
            Weight(self.hidden, self.ffn, "columns"),
        )

    @property
    def norms(self) -> tuple[Weight, ...]:
        """The norms of a block."""
        return (Weight(self.hidden, 1, "none"),) * 2

    @property
    def root(self) -> tuple[Weight, ...]:
        """Parameters outside blocks: embedding, head and the last norm."""
        vocabularies = 1 if self.tied else 2
        return (Weight(self.vocabulary, self.hidden, "rows"),) * vocabularies + (Weight(self.hidden, 1, "none"),)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        block = sum(rows * columns for rows, columns, _ in (*self.linears, *self.norms))
        return self.layers * block + sum(rows * columns for rows, columns, _ in self.root)


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "70b": Shape(80, 8192, 28672, 64, 8, 128, 128256),
    "405b": Shape(126, 16384, 53248, 128, 8, 128, 128256),
}
"""Llama 3.2 (1b, 3b) and Llama 3.1, from their ``config.json``."""


@dataclass(frozen=True)
class Setup:
    """A model, a mesh, a batch and a recipe. Parameters, gradients and the states of AdamW are BF16.

    Attributes:
        shape: the model.
        recipe: a recipe's name; None is BF16.
        data, tensor, context: number of ranks in each dimension of the mesh. FSDP2 shards over data times context.
        sequence_parallel: split norms and residuals over the tensor-parallel ranks.
        micro_batch, sequence_length: sequences per micro-batch on each data-parallel rank, and tokens per sequence.
        accumulate: micro-batches per optimizer step.
        checkpointing: recompute each block in the backward pass.
        gather_again: save the sharded input of a column-parallel layer, and gather it again for the weight's gradient.
        fused: the gated MLP saves only its first product, as :class:`lightning_fp8.LayerNormMLP` does.
        fp8_attention: context parallelism gathers keys and values as FP8 codes.
        bf16_blocks: blocks that an FP8 recipe leaves in BF16; the plugin's default is the first and the last one.

    Raises:
        ValueError: If a size is not divisible by the mesh.
    """

    shape: Shape
    recipe: str | None = None
    data: int = 1
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True
    micro_batch: int = 1
    sequence_length: int = 8192
    accumulate: int = 1
    checkpointing: bool = False
    gather_again: bool = False
    fused: bool = False
    fp8_attention: bool = False
    bf16_blocks: int = 2

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "ffn", "vocabulary"):
            if getattr(self.shape, name) % self.tensor:
                raise ValueError(f"{name}={getattr(self.shape, name)} are not divisible by {self.tensor} tensor ranks")
        chunks = 2 * self.context if self.context > 1 else 1
        splits = not self.sequence_length % chunks and not (self.splits_sequence and self.tokens % self.tensor)
        if self.sequence_length < 1 or not splits:
            raise ValueError(
                f"{self.sequence_length} tokens of a sequence cannot be split over {self.tensor} tensor x "
                f"{self.context} context ranks; use a multiple of {chunks * self.tensor}"
            )

    @property
    def cards(self) -> int:
        """Number of ranks of the mesh."""
        return self.data * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP2 shards over."""
        return self.data * self.context

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a tensor-parallel group."""
        return self.micro_batch * self.sequence_length // self.context

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and residuals are split over the tensor-parallel ranks."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def fp8_blocks(self) -> int:
        """Number of blocks whose linear layers run in FP8."""
        return 0 if self.recipe is None else max(0, self.shape.layers - self.bf16_blocks)

    def over_blocks(self, cost: Callable[[Setup], float]) -> float:
        """The sum of ``cost`` over all blocks, including those in BF16."""
        fp8, wide = self.fp8_blocks, replace(self, recipe=None)
        return (fp8 * cost(self) if fp8 else 0) + (self.shape.layers - fp8) * cost(wide)

    def local(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns on a rank under tensor parallelism."""
        rows, columns, split = weight
        return rows // (self.tensor if split == "rows" else 1), columns // (self.tensor if split == "columns" else 1)

    def shard(self, weight: Weight) -> int:
        """Elements of a rank's shard, including FSDP2's padding."""
        rows, columns = self.local(weight)
        return ceil(rows / self.shards) * columns


class Traffic(NamedTuple):
    """Number of collectives in an optimizer step, and the bytes that each rank sends for them in a ring."""

    collectives: int
    bytes: float


def _ring(ranks: int) -> float:
    """The fraction of a gathered or scattered tensor that each rank sends."""
    return (ranks - 1) / ranks


# --- Communication: FSDP2 ---------------------------------------------------------------------------------------------


def gathers_fp8(setup: Setup, weight: Weight) -> bool:
    """Whether FSDP2 gathers a linear layer's weight as FP8 codes; otherwise in BF16.

    A block of scales must not cross shards: a shard needs a multiple of 128 rows (blockwise) or 32 rows (mxfp8).
    """
    block = {"blockwise": 128, "mxfp8": 32}.get(setup.recipe or "", 1)
    return setup.recipe is not None and (block == 1 or setup.local(weight)[0] % (block * setup.shards) == 0)


def gathered_bytes(setup: Setup, weight: Weight) -> float:
    """Bytes of a linear layer's whole weight in one gather.

    BF16: 2 B per element. FP8: 1 B per element, plus scales: none (delayed, tensorwise: all ranks have it), 4 B per row
    (rowwise), 4 B per 128 x 128 elements (blockwise), 1 B per 32 elements (mxfp8; the forward pass gathers the copy
    scaled along rows, the backward pass the other). Counted on 2 ranks: 0.502, 0.502, 0.508, 0.503 and 0.518 of BF16.
    """
    columns = setup.local(weight)[1]
    rows = setup.shards * setup.shard(weight) // columns
    if not gathers_fp8(setup, weight):
        return WIDE * rows * columns
    scales = {"rowwise": 4 * rows, "blockwise": 4 * ceil(rows / 128) * ceil(columns / 128)}
    scales["mxfp8"] = rows * ceil(columns / 32)
    return rows * columns + scales.get(str(setup.recipe), 0)


def gathered_block_bytes(setup: Setup) -> float:
    """Bytes of all parameters of a block in one gather; norms are BF16."""
    norms = sum(WIDE * setup.shards * setup.shard(norm) for norm in setup.shape.norms)
    return norms + sum(gathered_bytes(setup, weight) for weight in setup.shape.linears)


def gathered_root_bytes(setup: Setup) -> float:
    """Bytes of embedding, head and the last norm in one gather, in BF16."""
    return sum(WIDE * setup.shards * setup.shard(weight) for weight in setup.shape.root)


def fsdp_all_gathers(setup: Setup) -> Traffic:
    """Each block is gathered for the forward and for the backward pass of a micro-batch, the root once.

    This assumes ``fully_shard(block)`` for each block and ``fully_shard(model)``: torch keeps the root gathered.
    """
    if setup.shards == 1:
        return Traffic(0, 0)
    whole = 2 * setup.over_blocks(gathered_block_bytes) + gathered_root_bytes(setup)
    return Traffic(setup.accumulate * (2 * setup.shape.layers + 1), setup.accumulate * whole * _ring(setup.shards))


def fsdp_reduce_scatters(setup: Setup) -> Traffic:
    """Gradients of each block and of the root, in BF16, per micro-batch; FP8 values cannot be summed."""
    if setup.shards == 1:
        return Traffic(0, 0)
    wide = replace(setup, recipe=None)
    whole = setup.shape.layers * gathered_block_bytes(wide) + gathered_root_bytes(setup)
    return Traffic(setup.accumulate * (setup.shape.layers + 1), setup.accumulate * whole * _ring(setup.shards))


# --- Communication: tensor, sequence and context parallelism ----------------------------------------------------------


def input_bytes(setup: Setup) -> float:
    """Bytes per element of a gathered input: 2 in BF16; 1 with one scale per tensor (delayed, tensorwise).

    Other recipes gather 1 B and scales along rows if the input is gathered again for the backward pass, and BF16 if one
    gather serves both passes.
    """
    one_scale = setup.recipe in ("delayed", "tensorwise")
    if setup.recipe is None or not (one_scale or setup.gather_again):
        return WIDE
    return 1 + {"rowwise": 4 / setup.shape.hidden, "blockwise": 4 / 128, "mxfp8": 1 / 32}.get(setup.recipe, 0)


def gradient_bytes(setup: Setup) -> float:
    """Bytes per element of a gathered output gradient, or of an input that is gathered again.

    1 if one scale serves both copies that are multiplied (delayed, tensorwise). Other recipes need two copies, whose
    codes are as large as BF16, and gather BF16.
    """
    return 1 if setup.recipe in ("delayed", "tensorwise") else WIDE


def tensor_block_all_gathers(setup: Setup) -> Traffic:
    """All-gathers of a block per micro-batch, with sequence parallelism, M tokens and H channels.

    Forward: x for q, k and v, and for gate and up. Backward: the output gradients of o and down. Together with the
    reduce-scatters they are 16 MH bytes in BF16 and 12 MH with a single scale (16 with others); if x is gathered again,
    20, 14 and 18. A recomputed block gathers x again, too.
    """
    if not setup.splits_sequence:
        return Traffic(0, 0)
    inputs = 4 if setup.checkpointing else 2
    gradients = 4 if setup.gather_again else 2
    elements = setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(inputs + gradients, elements * (inputs * input_bytes(setup) + gradients * gradient_bytes(setup)))


def tensor_block_sums(setup: Setup) -> Traffic:
    """Sums of a block per micro-batch: the outputs of o and down, and two input gradients, in BF16 for any recipe.

    Reduce-scatters with sequence parallelism, else all-reduces. A recomputation stops before down's.
    """
    if setup.tensor == 1:
        return Traffic(0, 0)
    sums = 5 if setup.checkpointing else 4
    rounds = 1 if setup.splits_sequence else 2
    return Traffic(sums, sums * rounds * WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor))


def _over_blocks(setup: Setup, cost: Callable[[Setup], Traffic]) -> Traffic:
    """``cost`` summed over all blocks and micro-batches of an optimizer step."""
    count = setup.over_blocks(lambda each: cost(each).collectives)
    return Traffic(setup.accumulate * int(count), setup.accumulate * setup.over_blocks(lambda each: cost(each).bytes))


def tensor_all_gathers(setup: Setup) -> Traffic:
    """All-gathers of all blocks and, in BF16, of the head's input and the gradient of the embedding's output."""
    if not setup.splits_sequence:
        return Traffic(0, 0)
    count, size = _over_blocks(setup, tensor_block_all_gathers)
    of_root = WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(count + 2 * setup.accumulate, size + 2 * setup.accumulate * of_root)


def tensor_sums(setup: Setup) -> Traffic:
    """Sums of all blocks and, in BF16, of the embedding's output and the gradient of the head's input."""
    if setup.tensor == 1:
        return Traffic(0, 0)
    count, size = _over_blocks(setup, tensor_block_sums)
    rounds = 1 if setup.splits_sequence else 2
    of_root = rounds * WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(count + 2 * setup.accumulate, size + 2 * setup.accumulate * of_root)


def loss_all_reduces(setup: Setup) -> Traffic:
    """A loss over a split vocabulary (``loss_parallel``): maximum, sum and target of each token, in float32."""
    if setup.tensor == 1:
        return Traffic(0, 0)
    count = 3 * setup.accumulate
    return Traffic(count, count * 2 * 4 * setup.tokens * _ring(setup.tensor))


def context_all_gathers(setup: Setup) -> Traffic:
    """Keys and values of all ranks, in one collective for the forward pass, and one for its recomputation.

    2 B per element, or as FP8 codes 1 B per element and 4 B per head and 128 rows. A rank saves only its own codes, and
    gathers again for the backward pass; in BF16 autograd saves the gathered tensors.
    """
    if setup.context == 1:
        return Traffic(0, 0)

    def of_block(each: Setup) -> Traffic:
        codes = each.recipe is not None and each.fp8_attention
        element = 1 + 4 / (128 * each.shape.head_dim) if codes else WIDE
        gathers = (2 if codes else 1) + each.checkpointing
        return Traffic(gathers, 2 * gathers * element * _key_elements(each) * _ring(each.context))

    return _over_blocks(setup, of_block)


def context_reduce_scatters(setup: Setup) -> Traffic:
    """The gradients of keys and values, BF16, in one collective."""
    if setup.context == 1:
        return Traffic(0, 0)
    count = setup.accumulate * setup.shape.layers
    return Traffic(count, 2 * count * WIDE * _key_elements(setup) * _ring(setup.context))


def _key_elements(setup: Setup) -> float:
    """Elements of a block's keys, for the heads of a tensor-parallel rank and all tokens."""
    return setup.micro_batch * setup.sequence_length * setup.shape.kv_heads * setup.shape.head_dim / setup.tensor


def amax_all_reduces(setup: Setup) -> Traffic:
    """The all-reduces of amaxes in one optimizer step.

    delayed: one all-reduce over all ranks, with 4 B for each of the three tensors of each layer. tensorwise and
    rowwise: one all-reduce over FSDP2's ranks, with 4 B per weight (tensorwise) or per column of each weight (rowwise).
    tensorwise with sequence parallelism: in addition, one all-reduce of 4 B over the tensor-parallel ranks before each
    gather of a tensor that has been cast.
    """
    count = size = 0.0
    linears, blocks = setup.shape.linears, setup.fp8_blocks
    if setup.recipe == "delayed" and setup.cards > 1:
        count, size = 1, 2 * 4 * 3 * len(linears) * blocks * _ring(setup.cards)
    if setup.recipe in ("tensorwise", "rowwise") and setup.shards > 1:
        columns = [1 if setup.recipe == "tensorwise" else setup.local(weight)[1] for weight in linears]
        count, size = 1, 2 * 4 * sum(columns) * blocks * _ring(setup.shards)
    if setup.recipe == "tensorwise" and setup.splits_sequence:
        gathers = setup.accumulate * blocks * (6 if setup.checkpointing else 4)
        count, size = count + gathers, size + 2 * 4 * gathers * _ring(setup.tensor)
    return Traffic(int(count) if blocks else 0, size)


def traffic(setup: Setup) -> dict[str, Traffic]:
    """All collectives of an optimizer step by kind; unused kinds are 0."""
    sums = "reduce-scatters" if setup.splits_sequence else "all-reduces"
    rows = {
        "FSDP2 all-gathers": fsdp_all_gathers(setup),
        "FSDP2 reduce-scatters": fsdp_reduce_scatters(setup),
        "tensor-parallel all-gathers": tensor_all_gathers(setup),
        f"tensor-parallel {sums}": tensor_sums(setup),
        "loss all-reduces": loss_all_reduces(setup),
        "context-parallel all-gathers": context_all_gathers(setup),
        "context-parallel reduce-scatters": context_reduce_scatters(setup),
        "amax all-reduces": amax_all_reduces(setup),
    }
    return rows | {"all": Traffic(*map(sum, zip(*rows.values())))}  # type: ignore[arg-type]


# --- Memory -----------------------------------------------------------------------------------------------------------


def gathered_weight_memory(setup: Setup) -> float:
    """Gathered weights: the current block, the prefetched one, and the root. Without FSDP2: cached FP8 copies.

    FP8 weights with one scale for both GEMMs are transposed for the backward pass: a second byte per element of the
    current block. rowwise and mxfp8 gather the copy that is needed.
    """
    if setup.shards == 1:  # a Trainer caches both FP8 copies of each weight for the micro-batches of a step
        elements = sum(rows * columns for rows, columns in map(setup.local, setup.shape.linears))
        return 2.0 * elements * setup.fp8_blocks if setup.accumulate > 1 else 0.0
    each = setup if setup.fp8_blocks else replace(setup, recipe=None)
    transposed = 0.0
    if each.recipe in ("delayed", "tensorwise", "blockwise"):
        transposed = sum(gathered_bytes(each, weight) for weight in each.shape.linears if gathers_fp8(each, weight))
    return 2 * gathered_block_bytes(each) + transposed + gathered_root_bytes(setup)


def gathered_gradient_memory(setup: Setup) -> float:
    """A block's BF16 gradients, and the copy that is reduce-scattered; 0 without FSDP2."""
    return 0 if setup.shards == 1 else 2 * gathered_block_bytes(replace(setup, recipe=None))


def kept_operand_bytes(setup: Setup, columns: int) -> float:
    """Bytes of an input ``[tokens, columns]`` that a linear layer saves for its weight's gradient.

    BF16: 2 B per element. FP8: 1 B per element, plus scales of the copy along tokens: one (delayed, tensorwise), 4 B
    per column (rowwise), and for each column 4 B per 128 tokens (blockwise) or 1 B per 32 tokens (mxfp8).
    """
    tokens = setup.tokens
    if setup.recipe is None:
        return WIDE * tokens * columns
    scales = {"rowwise": 4 * columns, "blockwise": 4 * columns * ceil(tokens / 128)}
    scales["mxfp8"] = columns * ceil(tokens / 32)
    return tokens * columns + scales.get(setup.recipe, 4)


def block_activations(setup: Setup) -> float:
    """Bytes that a block saves for the backward pass of a micro-batch; verified by counting saved tensors.

    BF16 residuals before both norms and their statistics (split with sequence parallelism); the inputs of q, k and v,
    of o, of gate and up, and of down (:func:`kept_operand_bytes`; whole with sequence parallelism, unless they are
    gathered again); q, k, v, the output and a float32 per row and head of BF16 attention; gate, its activation and up
    of the gated MLP, or only gate and up if it is fused. Norms are assumed to save only their input.
    """
    shape, tensor, tokens = setup.shape, setup.tensor, setup.tokens
    q, kv = shape.heads * shape.head_dim // tensor, shape.kv_heads * shape.head_dim // tensor
    ffn = shape.ffn // tensor
    split = tokens // tensor if setup.splits_sequence else tokens
    residuals = 2 * split * (WIDE * shape.hidden + 4)
    if setup.gather_again and setup.splits_sequence:
        of_norms = 2 * gradient_bytes(setup) * split * shape.hidden
    else:
        of_norms = 2 * kept_operand_bytes(setup, shape.hidden)
    attention = tokens * (WIDE * (2 * q + 2 * kv) + 4 * shape.heads // tensor)
    of_output = 0.0 if setup.recipe is None else kept_operand_bytes(setup, q)  # BF16's is attention's output
    gated = (2 if setup.fused and setup.recipe is not None else 3) * WIDE * tokens * ffn
    return residuals + of_norms + attention + of_output + gated + kept_operand_bytes(setup, ffn)


def activation_memory(setup: Setup) -> float:
    """Activations of all blocks; with checkpointing each block's input, and the activations of one recomputed block."""
    if not setup.checkpointing:
        return setup.over_blocks(block_activations)
    split = setup.tokens // setup.tensor if setup.splits_sequence else setup.tokens
    one = block_activations(setup if setup.fp8_blocks == setup.shape.layers else replace(setup, recipe=None))
    return setup.shape.layers * WIDE * split * setup.shape.hidden + one


def logits_memory(setup: Setup) -> float:
    """Float32 log-probabilities, and their gradient in float32 and BF16: 10 B per token and vocabulary entry."""
    return 10 * setup.tokens * setup.shape.vocabulary / setup.tensor


def memory(setup: Setup) -> dict[str, float]:
    """Bytes on each rank by kind, without library buffers and allocator fragmentation."""
    shape = setup.shape
    block = sum(setup.shard(weight) for weight in (*shape.linears, *shape.norms))
    held = WIDE * (shape.layers * block + sum(setup.shard(weight) for weight in shape.root))
    rows = {
        "weights": held,
        "gradients": held,
        "optimizer states": 2 * held,
        "gathered weights": gathered_weight_memory(setup),
        "gathered gradients": gathered_gradient_memory(setup),
        "activations": activation_memory(setup),
        "logits": logits_memory(setup),
    }
    return rows | {"all": sum(rows.values())}


# --- The table --------------------------------------------------------------------------------------------------------


def row(model: str, mesh: str, length: int, recipe: str = "delayed") -> tuple[str, ...]:
    """A row of the table.

    Raises:
        ValueError: If ``mesh`` is not three positive numbers as in ``"8x8x1"``, or does not divide the model.
    """
    sizes = [int(size) for size in mesh.split("x") if size.isdigit() and int(size)]
    if len(sizes) != 3 or mesh.count("x") != 2:
        raise ValueError(f"{mesh!r} is not data x tensor x context ranks, as in 8x8x1")
    data, tensor, context = sizes
    fp8 = Setup(
        SHAPES[model], recipe, data, tensor, context,
        sequence_length=length, checkpointing=True, fp8_attention=context > 1,
    )  # fmt: skip
    both = replace(fp8, recipe=None), fp8
    sent = [traffic(each)["all"] for each in both]
    return (
        f"{fp8.cards:,}", model, " x ".join(map(str, sizes)), f"{length:,}",
        *(f"{each.bytes / GB:.1f}" for each in sent),
        f"{sent[1].bytes / sent[0].bytes:.2f}" if sent[0].bytes else "",
        *(f"{each.collectives:,}" for each in sent),
        *(f"{memory(each)['all'] / GB:.1f}" for each in both),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Computed, not measured.")
    parser.add_argument("model", nargs="?", choices=SHAPES, help="a model of one row (default: all rows of the page)")
    parser.add_argument("mesh", nargs="?", default="8x1x1", help="data x tensor x context ranks (default: 8x1x1)")
    parser.add_argument("tokens", nargs="?", type=int, default=8192, help="of a sequence (default: 8192)")
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument(
        "--write", type=Path, metavar="docs/scaling.md", help="put the table between the page's markers"
    )
    args = parser.parse_args(arguments)
    try:
        rows: Sequence[tuple[str, str, int]] = [(args.model, args.mesh, args.tokens)] if args.model else ROWS
        table = markdown(HEADER, [row(*each, recipe=args.recipe) for each in rows])
    except ValueError as error:
        parser.error(str(error))
    if args.write:
        args.write.write_text(insert(args.write.read_text(), table))
    else:
        print(table)


if __name__ == "__main__":
    main()
