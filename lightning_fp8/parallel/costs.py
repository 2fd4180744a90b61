"""What one optimizer step of a Llama-like model costs each rank: bytes on the wire, collectives, and memory.

Pure functions of a :class:`Setup`, with BF16 (``recipe=None``) and FP8 by the same formulas. They know bytes and
counts, no times. A collective over ``n`` ranks is counted as a ring sends it: of a tensor of ``s`` bytes in all,
``s (n - 1) / n`` from each rank for an all-gather or a reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, NamedTuple

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
STATES = {"adamw": 2, "sgd": 0}
"""Tensors that an optimizer keeps for each parameter, in the parameter's dtype."""

WIDE = 2
"""Bytes of a BF16 value."""


# --- Models -----------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A parameter ``[rows, columns]``, and which of these tensor parallelism splits."""

    rows: int
    columns: int
    split: Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Shape:
    """A Llama-like model: blocks of attention and a gated MLP, each behind an RMSNorm, without biases."""

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
        """What is in no block: embedding, head and the last norm."""
        vocabularies = 1 if self.tied else 2
        return (Weight(self.vocabulary, self.hidden, "rows"),) * vocabularies + (Weight(self.hidden, 1, "none"),)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
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


def shape_of_config(config: dict[str, Any]) -> Shape:
    """The shape that a ``config.json`` of Hugging Face describes.

    Raises:
        ValueError: a key is missing or no positive integer, or the model is not Llama-like.
    """
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "is_encoder_decoder"):
        if config.get(key):
            raise ValueError(f"{key}={config[key]} is not supported: the formulas are of dense Llama-like decoders")

    def read(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = f"has no {key}" if value is None else f"has {key}={value!r}"
            raise ValueError(f"the configuration {said}; it must be a positive integer, as in Llama's config.json")
        return value

    heads, hidden = read("num_attention_heads"), read("hidden_size")
    return Shape(
        layers=read("num_hidden_layers"),
        hidden=hidden,
        ffn=read("intermediate_size"),
        heads=heads,
        kv_heads=read("num_key_value_heads", heads),
        head_dim=read("head_dim", hidden // heads),
        vocabulary=read("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma"))),
    )


@dataclass(frozen=True)
class Setup:
    """A model, a mesh, a batch and a recipe.

    Attributes:
        shape: the model.
        recipe: a recipe's name; None is BF16.
        data, tensor, context: ranks of each dimension of the mesh. FSDP2 shards over data times context.
        sequence_parallel: split norms and residuals over the tensor-parallel ranks.
        micro_batch, sequence_length: sequences of a micro-batch on each data-parallel rank, and their tokens.
        accumulate: micro-batches of an optimizer step.
        weights_dtype: of the sharded parameters; gathers and gradients on the wire are BF16.
        optimizer: ``adamw`` or ``sgd``.
        checkpointing: recompute each block in the backward pass.
        gather_again: keep the sharded input of a column-parallel layer, and gather it again for the weight's gradient.
        fused: the gated MLP keeps its first product alone, as :class:`lightning_fp8.LayerNormMLP` does.
        fp8_attention: keys and values of context parallelism travel as FP8 codes.
        bf16_blocks: blocks that an FP8 recipe leaves in BF16; the plugin's default is the first and the last one.

    Raises:
        ValueError: a size that the mesh does not divide, or that is not positive.
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
    weights_dtype: str = "bfloat16"
    optimizer: str = "adamw"
    checkpointing: bool = False
    gather_again: bool = False
    fused: bool = False
    fp8_attention: bool = False
    bf16_blocks: int = 2

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "context", "micro_batch", "sequence_length", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.bf16_blocks < 0:
            raise ValueError(f"bf16_blocks={self.bf16_blocks} must be at least 0")
        for name, known in (("weights_dtype", WEIGHT_BYTES), ("optimizer", STATES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")
        if self.recipe is not None and self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r} is unknown; use one of {', '.join(RECIPES)}")
        shape = self.shape
        for name in ("heads", "kv_heads", "ffn", "vocabulary"):
            if getattr(shape, name) % self.tensor:
                raise ValueError(
                    f"the model's {name}={getattr(shape, name)} do not divide by {self.tensor} tensor-parallel ranks; "
                    "make the second number of the mesh smaller"
                )
        if self.context > 1 and self.sequence_length % (2 * self.context):
            raise ValueError(
                f"sequence_length={self.sequence_length} does not divide into two chunks for each of {self.context} "
                f"context-parallel ranks; use a multiple of {2 * self.context}"
            )
        if self.splits_sequence and self.tokens % self.tensor:
            raise ValueError(
                f"{self.tokens} tokens do not divide by {self.tensor} tensor-parallel ranks; change the sequence "
                "length, or turn sequence parallelism off"
            )

    @property
    def cards(self) -> int:
        """Ranks of the mesh."""
        return self.data * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 shards over."""
        return self.data * self.context

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a tensor-parallel group of ranks."""
        return self.micro_batch * self.sequence_length // self.context

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and residuals are split over ranks."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def fp8_blocks(self) -> int:
        """Blocks whose linear layers run in FP8."""
        return 0 if self.recipe is None else max(0, self.shape.layers - self.bf16_blocks)

    def over_blocks(self, cost: Callable[[Setup], float]) -> float:
        """The sum of a block's cost over all blocks, those that run in BF16 included."""
        fp8, wide = self.fp8_blocks, replace(self, recipe=None)
        return (fp8 * cost(self) if fp8 else 0) + (self.shape.layers - fp8) * cost(wide)

    def local(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns that tensor parallelism leaves a rank."""
        rows, columns, split = weight
        return rows // (self.tensor if split == "rows" else 1), columns // (self.tensor if split == "columns" else 1)

    def shard(self, weight: Weight) -> int:
        """Elements of a rank's shard, with the padding that FSDP2 adds to make rows divide by ranks."""
        rows, columns = self.local(weight)
        return ceil(rows / self.shards) * columns


class Traffic(NamedTuple):
    """Collectives of an optimizer step, and the bytes that each rank sends for them in a ring."""

    collectives: int
    bytes: float


def _ring(ranks: int) -> float:
    """Of a gathered or scattered tensor, the part that each rank sends."""
    return (ranks - 1) / ranks


# --- On the wire: FSDP2 -----------------------------------------------------------------------------------------------


def gathers_fp8(setup: Setup, weight: Weight) -> bool:
    """Whether FSDP2 gathers a linear layer's weight as FP8 codes.

    Blocks of scales may not cross shards: a shard has a multiple of 128 rows (blockwise) or 32 (mxfp8). Other weights
    are gathered in BF16.
    """
    block = {"blockwise": 128, "mxfp8": 32}.get(setup.recipe or "", 1)
    return setup.recipe is not None and (block == 1 or setup.local(weight)[0] % (block * setup.shards) == 0)


def gathered_bytes(setup: Setup, weight: Weight) -> float:
    """A linear layer's weight on the wire of one gather, whole.

    BF16: 2 B per element. FP8: 1 B, and the scales: none (delayed, tensorwise: all ranks have it), 4 B per row
    (rowwise), 4 B per 128 x 128 elements (blockwise), 1 B per 32 (mxfp8; the forward gathers the copy that is scaled
    along rows, the backward pass the other). Counted on 2 ranks: 0.502, 0.502, 0.508, 0.503 and 0.518 of BF16's.
    """
    columns = setup.local(weight)[1]
    rows = setup.shards * setup.shard(weight) // columns
    if not gathers_fp8(setup, weight):
        return WIDE * rows * columns
    scales = {"rowwise": 4 * rows, "blockwise": 4 * ceil(rows / 128) * ceil(columns / 128)}
    scales["mxfp8"] = rows * ceil(columns / 32)
    return rows * columns + scales.get(str(setup.recipe), 0)


def gathered_block_bytes(setup: Setup) -> float:
    """All parameters of a block on the wire of one gather, whole; norms are BF16."""
    norms = sum(WIDE * setup.shards * setup.shard(norm) for norm in setup.shape.norms)
    return norms + sum(gathered_bytes(setup, weight) for weight in setup.shape.linears)


def gathered_root_bytes(setup: Setup) -> float:
    """Embedding, head and the last norm, which are BF16."""
    return sum(WIDE * setup.shards * setup.shard(weight) for weight in setup.shape.root)


def fsdp_all_gathers(setup: Setup) -> Traffic:
    """Each block is gathered for the forward and for the backward pass of a micro-batch, the root once.

    That is ``fully_shard(block)`` for each block and ``fully_shard(model)``: torch keeps the root gathered.
    """
    if setup.shards == 1:
        return Traffic(0, 0)
    whole = 2 * setup.over_blocks(gathered_block_bytes) + gathered_root_bytes(setup)
    return Traffic(setup.accumulate * (2 * setup.shape.layers + 1), setup.accumulate * whole * _ring(setup.shards))


def fsdp_reduce_scatters(setup: Setup) -> Traffic:
    """The gradients of each block and of the root, BF16, once for each micro-batch: FP8 values are not summed."""
    if setup.shards == 1:
        return Traffic(0, 0)
    wide = replace(setup, recipe=None)
    whole = setup.shape.layers * gathered_block_bytes(wide) + gathered_root_bytes(setup)
    return Traffic(setup.accumulate * (setup.shape.layers + 1), setup.accumulate * whole * _ring(setup.shards))


# --- On the wire: tensor, sequence and context parallelism ------------------------------------------------------------


def input_bytes(setup: Setup) -> float:
    """One element of a gathered input: 2 B in BF16; 1 B where one scale serves a tensor (delayed, tensorwise).

    Other recipes gather 1 B and scales along rows where the input is gathered again for the backward pass, and BF16
    where one gather serves both passes.
    """
    one_scale = setup.recipe in ("delayed", "tensorwise")
    if setup.recipe is None or not (one_scale or setup.gather_again):
        return WIDE
    return 1 + {"rowwise": 4 / setup.shape.hidden, "blockwise": 4 / 128, "mxfp8": 1 / 32}.get(setup.recipe, 0)


def gradient_bytes(setup: Setup) -> float:
    """One element of a gathered output gradient, or of an input that is gathered again.

    1 B where one scale serves both copies that are multiplied (delayed, tensorwise). Other recipes need two copies,
    whose codes take what BF16 does, and gather BF16.
    """
    return 1 if setup.recipe in ("delayed", "tensorwise") else WIDE


def tensor_block_all_gathers(setup: Setup) -> Traffic:
    """Of a block and micro-batch, with sequence parallelism, M tokens and H channels.

    Forward: x for q, k and v, and for gate and up. Backward: the output gradients of o and down. With the reduce-
    scatters they are 16 MH bytes in BF16 and 12 MH with a single scale (16 with others); with x gathered again 20, 14
    and 18. A recomputed block gathers x again, too.
    """
    if not setup.splits_sequence:
        return Traffic(0, 0)
    inputs = 4 if setup.checkpointing else 2
    gradients = 4 if setup.gather_again else 2
    elements = setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(inputs + gradients, elements * (inputs * input_bytes(setup) + gradients * gradient_bytes(setup)))


def tensor_block_sums(setup: Setup) -> Traffic:
    """Of a block and micro-batch: the outputs of o and down, and two input gradients, BF16 under any recipe.

    Reduce-scatters with sequence parallelism, else all-reduces. A recomputation stops before down's.
    """
    if setup.tensor == 1:
        return Traffic(0, 0)
    sums = 5 if setup.checkpointing else 4
    rounds = 1 if setup.splits_sequence else 2
    return Traffic(sums, sums * rounds * WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor))


def _over_blocks(setup: Setup, cost: Callable[[Setup], Traffic]) -> Traffic:
    """Of all blocks in an optimizer step."""
    count = setup.over_blocks(lambda each: cost(each).collectives)
    return Traffic(setup.accumulate * int(count), setup.accumulate * setup.over_blocks(lambda each: cost(each).bytes))


def tensor_all_gathers(setup: Setup) -> Traffic:
    """Those of the blocks; and, in BF16, the head's input and the gradient of the embedding's output."""
    if not setup.splits_sequence:
        return Traffic(0, 0)
    count, size = _over_blocks(setup, tensor_block_all_gathers)
    of_root = WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(count + 2 * setup.accumulate, size + 2 * setup.accumulate * of_root)


def tensor_sums(setup: Setup) -> Traffic:
    """Those of the blocks; and, in BF16, the embedding's output and the gradient of the head's input."""
    if setup.tensor == 1:
        return Traffic(0, 0)
    count, size = _over_blocks(setup, tensor_block_sums)
    rounds = 1 if setup.splits_sequence else 2
    of_root = rounds * WIDE * setup.tokens * setup.shape.hidden * _ring(setup.tensor)
    return Traffic(count + 2 * setup.accumulate, size + 2 * setup.accumulate * of_root)


def loss_all_reduces(setup: Setup) -> Traffic:
    """A loss over a vocabulary that is split (``loss_parallel``): maximum, sum and target of each token, float32."""
    if setup.tensor == 1:
        return Traffic(0, 0)
    count = 3 * setup.accumulate
    return Traffic(count, count * 2 * 4 * setup.tokens * _ring(setup.tensor))


def context_all_gathers(setup: Setup) -> Traffic:
    """Keys and values of all ranks, in one collective for the forward pass, and one for its recomputation.

    2 B per element, or 1 B and 4 B for each head and 128 rows where they travel as FP8 codes. Of codes a rank keeps its
    own, and gathers again for the backward pass; in BF16 autograd keeps the whole.
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
    """Of a block's keys on the heads of a tensor-parallel rank, all tokens."""
    return setup.micro_batch * setup.sequence_length * setup.shape.kv_heads * setup.shape.head_dim / setup.tensor


def amax_all_reduces(setup: Setup) -> Traffic:
    """What scales add.

    delayed: one all-reduce of 4 B for each of a layer's three tensors, over all ranks. tensorwise and rowwise: one over
    FSDP2's ranks for all weights, of 4 B per weight and per column of each weight. tensorwise with sequence
    parallelism: 4 B before each gather of new data.
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
    """All collectives of an optimizer step; those of the other kinds are 0."""
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


def sharded_elements(setup: Setup) -> int:
    """Parameters that a rank holds."""
    shape = setup.shape
    block = sum(setup.shard(weight) for weight in (*shape.linears, *shape.norms))
    return shape.layers * block + sum(setup.shard(weight) for weight in shape.root)


def gathered_weight_memory(setup: Setup) -> float:
    """The block that computes, the one that is gathered ahead, and the root; without FSDP2 what micro-batches share.

    FP8 weights of one scale for both GEMMs are transposed for the backward pass, a second byte per element of the block
    that computes; rowwise and mxfp8 gather the copy that is needed.
    """
    if setup.shards == 1:  # a Trainer keeps both copies of each FP8 weight for the micro-batches of a step
        elements = sum(rows * columns for rows, columns in map(setup.local, setup.shape.linears))
        return 2.0 * elements * setup.fp8_blocks if setup.accumulate > 1 else 0.0
    each = setup if setup.fp8_blocks else replace(setup, recipe=None)
    transposed = 0.0
    if each.recipe in ("delayed", "tensorwise", "blockwise"):
        transposed = sum(gathered_bytes(each, weight) for weight in each.shape.linears if gathers_fp8(each, weight))
    return 2 * gathered_block_bytes(each) + transposed + gathered_root_bytes(setup)


def gathered_gradient_memory(setup: Setup) -> float:
    """A block's BF16 gradients, and their copy that is reduced and scattered; 0 without FSDP2."""
    return 0 if setup.shards == 1 else 2 * gathered_block_bytes(replace(setup, recipe=None))


def kept_operand_bytes(setup: Setup, columns: int) -> float:
    """An input ``[tokens, columns]`` that a linear layer keeps for its weight's gradient.

    2 B per element in BF16. FP8: 1 B, and the scales of the copy along tokens: one (delayed, tensorwise), 4 B per
    column (rowwise), 4 B per 128 tokens (blockwise) or 1 B per 32 (mxfp8) of each column.
    """
    tokens = setup.tokens
    if setup.recipe is None:
        return WIDE * tokens * columns
    scales = {"rowwise": 4 * columns, "blockwise": 4 * columns * ceil(tokens / 128)}
    scales["mxfp8"] = columns * ceil(tokens / 32)
    return tokens * columns + scales.get(setup.recipe, 4)


def block_activations(setup: Setup) -> float:
    """What a block of a micro-batch keeps between forward and backward, as saved tensors were counted.

    BF16 residuals before both norms and their statistics (split with sequence parallelism); the inputs of q, k and v,
    of o, of gate and up, and of down (:func:`kept_operand_bytes`; whole with sequence parallelism, unless they are
    gathered again); q, k, v, the output and a float32 per row and head of BF16 attention; and of the gated MLP gate,
    its activation and up, or gate and up alone where it is fused. Norms are such that keep their input alone.
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
    """Of all blocks; with activation checkpointing each block's input, and the tensors of one that is recomputed."""
    if not setup.checkpointing:
        return setup.over_blocks(block_activations)
    split = setup.tokens // setup.tensor if setup.splits_sequence else setup.tokens
    one = block_activations(setup if setup.fp8_blocks == setup.shape.layers else replace(setup, recipe=None))
    return setup.shape.layers * WIDE * split * setup.shape.hidden + one


def logits_memory(setup: Setup) -> float:
    """Float32 log-probabilities, and their gradient in float32 and BF16: 10 B per token and entry of the vocabulary."""
    return 10 * setup.tokens * setup.shape.vocabulary / setup.tensor


def memory(setup: Setup) -> dict[str, float]:
    """Bytes on each rank, by what takes them. Buffers of libraries and the allocator's gaps are not in it."""
    held = WEIGHT_BYTES[setup.weights_dtype] * sharded_elements(setup)
    rows = {
        "weights": held,
        "gradients": held,
        "optimizer states": STATES[setup.optimizer] * held,
        "gathered weights": gathered_weight_memory(setup),
        "gathered gradients": gathered_gradient_memory(setup),
        "activations": activation_memory(setup),
        "logits": logits_memory(setup),
    }
    return rows | {"all": sum(rows.values())}


def most_layers(setup: Setup, limit: float) -> int:
    """How many of the model's blocks fit into ``limit`` bytes of each rank; 0 if not even one does."""

    def fits(layers: int) -> bool:
        return memory(replace(setup, shape=replace(setup.shape, layers=layers)))["all"] <= limit

    low, high = 0, 1
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_of_table(setup: Setup, limit: float) -> str | None:
    """The largest of :data:`SHAPES` that fits into ``limit`` bytes of each rank, if any does."""
    found = None
    for name, shape in SHAPES.items():
        try:
            if memory(replace(setup, shape=shape))["all"] <= limit:
                found = name
        except ValueError:  # the mesh does not divide it
            continue
    return found
