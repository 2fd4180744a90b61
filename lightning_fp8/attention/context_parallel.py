"""Context parallelism: each rank holds a part of every sequence, and its queries attend to the keys of all ranks.

A sequence is divided into ``2 n`` chunks for ``n`` ranks. Rank ``i`` holds chunks ``i`` and ``2 n - 1 - i``, which
balances the ranks' work under a causal mask (Transformer Engine's order). Queries stay on their rank. Keys and values
are cast on their rank, and their codes and scales are gathered in the forward pass, and again in the backward pass, for
which a rank saves only its own codes. Gradients of keys and values are reduce-scattered in the gradient's own dtype:
FP8 codes cannot be added, a BF16 sum has an error of at most 0.4 %, against 5 % of FP8 attention itself, and float32
would double the bytes.

Which collectives run depends only on shapes and arguments, which are the same on all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.attention.ops import (
    BLOCK,
    Attention,
    AttentionCall,
    Band,
    Codes,
    Kept,
    attention_backward,
    attention_cast,
    attention_forward_of_codes,
    rows_of_mean,
)
from lightning_fp8.parallel.agreement import require_same
from lightning_fp8.parallel.collectives import all_gather, reduce_scatter

COMM_TYPES = ("p2p", "all_gather", "a2a")
Attend = Callable[[Tensor, Tensor, Tensor, Band], Tensor]
"""``(q, k, v, band) -> o``, all ``[B, L, H, D]``."""
Batch = TypeVar("Batch", Tensor, dict[str, Any])


class ContextParallel:
    """The ranks that share sequences.

    Copies share the group. Pickles do not contain it; an unpickled object raises when it is used.

    Args:
        group: the process group of these ranks.

    Attributes:
        size, rank: the size of the group, and this rank in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._agreed = False

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        return copy.copy(self)

    def __copy__(self) -> ContextParallel:
        assert self.group is not None
        return ContextParallel(self.group)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}

    @property
    def order(self) -> list[int]:
        """Position of each chunk of a sequence among the chunks of all ranks, concatenated by rank."""
        chunks = range(2 * self.size)
        return [2 * i if i < self.size else 2 * (2 * self.size - 1 - i) + 1 for i in chunks]

    def chunks(self) -> tuple[int, int]:
        """Indices of this rank's two chunks among the ``2 n`` chunks of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    def require_group(self) -> dist.ProcessGroup:
        """Return the group.

        Raises:
            RuntimeError: If this object was unpickled, and has no group.
        """
        if self.group is None:
            raise RuntimeError(
                "this attention was pickled with a context-parallel group, which pickles do not contain; call "
                "set_context_parallel_group again, with None for attention on one rank"
            )
        return self.group

    def require_agreement(self, **here: Any) -> None:
        """Compare the arguments of ranks once. If they differed, later collectives would not match and would hang.

        Raises:
            RuntimeError: If they differ, on all ranks. The message contains both.
        """
        if self._agreed:
            return
        what = (
            "ranks of cp_group must call attention alike (split each batch by get_batch_on_this_cp_rank, and run the "
            "same program on all ranks)"
        )
        require_same(what, ", ".join(f"{name}={value}" for name, value in here.items()), self.require_group())
        self._agreed = True

    def positions(self, x: Tensor, rows: int) -> Tensor:
        """The part for this rank's ``rows`` of a tensor of a sequence's positions ``[L, ...]``.

        Raises:
            ValueError: If there are fewer positions than the sequence has.
        """
        if len(x) < rows * self.size:
            raise ValueError(
                f"rotary_pos_emb has {len(x)} positions; with context parallelism pass those of the whole sequence, "
                f"here {self.size} ranks times {rows} rows = {rows * self.size}"
            )
        return chunks_of_rank(x[: rows * self.size], 0, self.size, self.rank)


def context_parallel(
    cp_group: Any, cp_global_ranks: Sequence[int] | None = None, cp_comm_type: str = "p2p"
) -> ContextParallel | None:
    """The ranks that :meth:`lightning_fp8.DotProductAttention.set_context_parallel_group` is given, with its errors.

    It is None if ``cp_group`` is None or has one rank.
    """
    types = [cp_comm_type] if isinstance(cp_comm_type, str) else list(cp_comm_type)
    if "a2a+p2p" in types or isinstance(cp_group, (list, tuple)):
        raise NotImplementedError(
            "cp_comm_type='a2a+p2p', with two groups, is not supported; pass one cp_group of all ranks that share "
            "sequences"
        )
    if unknown := [each for each in types if each not in COMM_TYPES]:
        raise ValueError(f"cp_comm_type={unknown[0]!r} is unknown; use one of {', '.join(map(repr, COMM_TYPES))}")
    if cp_group is None:
        if cp_global_ranks is not None:
            raise ValueError(f"cp_global_ranks={list(cp_global_ranks)} without cp_group; pass both, or neither")
        return None
    if not isinstance(cp_group, dist.ProcessGroup):
        raise TypeError(
            f"cp_group is {type(cp_group).__name__}; pass a torch.distributed.ProcessGroup that contains this rank, "
            "for example device_mesh['cp'].get_group()"
        )
    ranks = dist.get_process_group_ranks(cp_group)
    if cp_global_ranks is not None and list(cp_global_ranks) != ranks:
        raise ValueError(f"cp_global_ranks={list(cp_global_ranks)}, but cp_group has ranks {ranks}; leave it out")
    return ContextParallel(cp_group) if len(ranks) > 1 else None


def get_batch_on_this_cp_rank(batch: Batch, cp_group: dist.ProcessGroup, seq_dim: int = 1) -> Batch:
    """This rank's part of a batch of whole sequences: two of ``2 n`` chunks, for the ``n`` ranks of ``cp_group``.

    Shift labels before, because the next token of a chunk's last one may be on another rank.

    Args:
        batch: a tensor, or a mapping of tensors. Values that are not tensors are returned unchanged.
        cp_group: the context-parallel ranks.
        seq_dim: the sequence dimension of all tensors.

    Raises:
        TypeError: If ``batch`` is neither a tensor nor a mapping.
        ValueError: If the sequence length is not a multiple of ``2 n``.
    """
    if not isinstance(batch, (Tensor, Mapping)):
        raise TypeError(f"batch={batch!r} must be a tensor, or a mapping of names to tensors")
    if isinstance(batch, Tensor):
        return chunks_of_rank(batch, seq_dim, dist.get_world_size(cp_group), dist.get_rank(cp_group))
    return {
        name: get_batch_on_this_cp_rank(each, cp_group, seq_dim) if isinstance(each, Tensor) else each
        for name, each in batch.items()
    }


def chunks_of_rank(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """Chunks ``rank`` and ``2 size - 1 - rank`` of ``2 size`` chunks along ``dim``.

    Raises:
        ValueError: If the dimension is not a multiple of ``2 size``.
    """
    length = x.shape[dim]
    if length % (2 * size):
        raise ValueError(
            f"a sequence of {length} rows does not divide into {2 * size} chunks, two for each of {size} ranks; pad it "
            f"to {-(-length // (2 * size)) * 2 * size}"
        )
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


# --- Computation on one rank ------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Queries of this rank that attend to the same range of keys, from a sequence's first key on.

    Attributes:
        rows: the range of the rank's queries.
        chunks: the number of chunks of keys.
        band: the mask within this range.
    """

    rows: slice
    chunks: int
    band: Band


def pieces_of(ranks: ContextParallel, query_rows: int, band: Band) -> list[Piece]:
    """Under a causal mask one piece per chunk of queries, which do not need later keys; otherwise one piece."""
    if not band.limited:
        return [Piece(slice(0, query_rows), 2 * ranks.size, band)]
    half = query_rows // 2
    own = Band(band.left, band.right, bottom_right=True)
    first, second = ranks.chunks()
    return [Piece(slice(0, half), first + 1, own), Piece(slice(half, query_rows), second + 1, own)]


def has_whole_blocks(key_rows: int) -> bool:
    """Whether a rank's chunks of keys consist of whole blocks of scales, so that codes can be reordered by chunk."""
    return key_rows % (2 * BLOCK) == 0


def attention_of_gathered(
    ranks: ContextParallel, q: Tensor, k: Tensor, v: Tensor, band: Band, attend: Attend
) -> Tensor:
    """Attention in pieces, with keys and values gathered in their own dtype.

    Args:
        q, k, v: this rank's ``[B, L, H, D]``.
        band: no limit, or causal with any ``left``.
    """
    keys, values = GatherFunction.apply(k, v, ranks)
    chunk = k.shape[1] // 2
    outputs = [
        attend(q[:, piece.rows], keys[:, : piece.chunks * chunk], values[:, : piece.chunks * chunk], piece.band)
        for piece in pieces_of(ranks, q.shape[1], band)
    ]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


class GatherFunction(torch.autograd.Function):
    """Gathers keys and values ``[B, L, H, D]`` into whole sequences; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, ranks: ContextParallel) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        keys, values = (_in_sequence(each, 1, ranks) for each in _gathered([k, v], ranks))
        return keys, values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_scattered(gradients, ctx.ranks), None


class CodesFunction(torch.autograd.Function):
    """FP8 attention with gathered codes of keys and values.

    Args:
        q, k, v: this rank's ``[B, L, H, D]``; L of keys :func:`has_whole_blocks`.
        band: no limit, or causal with any ``left``.
        center_keys: subtract from keys their mean over the whole sequence before the cast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranks: ContextParallel,
        band: Band,
        softmax_scale: float,
        center_keys: bool,
    ) -> Tensor:
        k = k - _mean_of_keys(k, rows_of_mean(band), ranks) if center_keys else k
        own = [each for x in (k, v) for each in attention_cast(x)]
        batch, chunk = k.shape[0], k.shape[1] // 2
        keys, values = _gathered_codes(own, batch, ranks)
        outputs, kept = [], []
        for piece in pieces_of(ranks, q.shape[1], band):
            k8, v8 = (_first(codes, piece.chunks) for codes in (keys, values))
            call = AttentionCall(Attention("bshd", piece.band, False), softmax_scale)
            o, of_queries = attention_forward_of_codes(q[:, piece.rows], *k8, *v8, piece.chunks * chunk, call)
            outputs.append(o)
            kept += [o.to(torch.bfloat16), *of_queries]
        ctx.save_for_backward(*own, *kept)
        ctx.ranks, ctx.band, ctx.softmax_scale, ctx.key_rows = ranks, band, softmax_scale, 2 * chunk
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "FP8 attention does not support second derivatives (create_graph=True); run this attention in high "
                "precision: with fp8_autocast(enabled=False), or a recipe with fp8_dpa=False"
            )
        ranks, batch, chunk = ctx.ranks, do.shape[0], ctx.key_rows // 2
        saved = ctx.saved_tensors  # read only once: activation checkpointing recomputes for each read
        own, kept = saved[:4], saved[4:]
        keys, values = _gathered_codes(own, batch, ranks)
        pieces = pieces_of(ranks, do.shape[1], ctx.band)
        of_queries, of_keys, of_values = [], [], []
        for index, piece in enumerate(pieces):
            o, *queries_kept = kept[5 * index : 5 * index + 5]
            k8, v8 = (_first(codes, piece.chunks) for codes in (keys, values))
            call = AttentionCall(Attention("bshd", piece.band, False), ctx.softmax_scale)
            codes_and_statistics = Kept.from_flat(*queries_kept, *k8, *v8)
            dq, dk, dv = attention_backward(do[:, piece.rows], o, codes_and_statistics, piece.chunks * chunk, call)
            of_queries.append(dq)
            of_keys.append(dk)
            of_values.append(dv)
        dq = torch.cat(of_queries, 1)
        dk, dv = _scattered([_sum(of_keys, ranks, chunk), _sum(of_values, ranks, chunk)], ranks)
        return dq, dk, dv, None, None, None, None


def _mean_of_keys(k: Tensor, mean_rows: int | None, ranks: ContextParallel) -> Tensor:
    """Mean of a sequence's finite keys, or of its first ones: float32 ``[B, 1, H, D]``; see ``ops.casts.cast``."""
    chunk = k.shape[1] // 2
    rows = 2 * chunk * ranks.size if mean_rows is None else min(mean_rows, 2 * chunk * ranks.size)
    total = torch.zeros(k.shape[0], *k.shape[2:], dtype=torch.float32, device=k.device)
    for half, place in zip(k.split(chunk, 1), ranks.chunks()):
        first = half[:, : max(rows - place * chunk, 0)].float()
        total += torch.where(torch.isfinite(first), first, 0.0).sum(1)
    dist.all_reduce(total, group=ranks.require_group())
    mean = total / max(rows, 1)
    return torch.where(torch.isfinite(mean), mean, 0.0)[:, None]


# --- Communication ----------------------------------------------------------------------------------------------------


def _gathered(parts: Sequence[Tensor], ranks: ContextParallel) -> list[Tensor]:
    """Gather each of ``parts`` to ``[n, ...]`` in one collective; sizes in bytes must be multiples of item sizes."""
    mine = torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])
    everyone = mine.new_empty(ranks.size, mine.numel())
    all_gather(everyone.view(-1), mine, ranks.require_group())
    of_parts = everyone.split([part.numel() * part.element_size() for part in parts], 1)
    return [x.contiguous().view(part.dtype).view(ranks.size, *part.shape) for x, part in zip(of_parts, parts)]


def _in_sequence(x: Tensor, dim: int, ranks: ContextParallel) -> Tensor:
    """Reorder gathered ``[n, ...]``, with a rank's rows at dimension ``dim + 1``, to a sequence's order of rows."""
    x = x.movedim(0, dim)  # ranks, then a rank's rows
    x = x.unflatten(dim + 1, (2, x.shape[dim + 1] // 2)).flatten(dim, dim + 1)
    order = torch.tensor(ranks.order, device=x.device)
    return x.index_select(dim, order).flatten(dim, dim + 1)


def _gathered_codes(own: Sequence[Tensor], batch: int, ranks: ContextParallel) -> tuple[Codes, Codes]:
    """Gathered codes of keys and values, by chunk: ``[H, B, 2 n, ...]``, data as bytes and scales of blocks."""
    parts = [part if part.dtype == torch.float32 else part.view(torch.uint8) for part in own]
    parts = [part.unflatten(1, (batch, part.shape[1] // batch)) for part in parts]
    whole = [_in_sequence(each, 2, ranks) for each in _gathered(parts, ranks)]
    chunks = [each.unflatten(2, (2 * ranks.size, each.shape[2] // (2 * ranks.size))) for each in whole]
    return Codes(*chunks[:2]), Codes(*chunks[2:])


def _first(codes: Codes, chunks: int) -> Codes:
    """The first ``chunks`` chunks of each sequence, in packed rows."""
    data, scale_inv = (x[:, :, :chunks].flatten(1, 3) for x in codes)
    return Codes(data.contiguous().view(torch.float8_e4m3fn), scale_inv.contiguous())


def _sum(gradients: Sequence[Tensor], ranks: ContextParallel, chunk: int) -> Tensor:
    """Sum the pieces' gradients of keys, which all start at a sequence's first key, over the whole sequence."""
    if len(gradients) == 1:
        return gradients[0]
    batch, _, *rest = gradients[0].shape
    total = gradients[0].new_zeros(batch, 2 * ranks.size * chunk, *rest, dtype=torch.float32)
    for gradient in gradients:
        total[:, : gradient.shape[1]] += gradient
    return total.to(gradients[0].dtype)


def _scattered(gradients: Sequence[Tensor], ranks: ContextParallel) -> list[Tensor]:
    """Reduce-scatter ``[B, L, H, D]`` in a sequence's order, in one collective: this rank's rows of the sums."""
    parts = []
    for x in gradients:
        chunks = x.unflatten(1, (2 * ranks.size, x.shape[1] // (2 * ranks.size)))
        place_of = torch.tensor(ranks.order, device=x.device).argsort()
        by_rank = chunks.index_select(1, place_of).unflatten(1, (ranks.size, 2))
        parts.append(by_rank.movedim(1, 0))
    flat = torch.cat([part.reshape(ranks.size, -1) for part in parts], 1)
    mine = flat.new_empty(flat.shape[1])
    reduce_scatter(mine, flat.view(-1), group=ranks.require_group())
    sums = mine.split([math.prod(part.shape[1:]) for part in parts])
    return [each.view(part.shape[1:]).flatten(1, 2) for each, part in zip(sums, parts)]
