"""Which rows of queries and keys make a sequence: padded, packed, or packed with padding between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.modules import packed
from lightning_fp8.attention.modules.arguments import check_cu_seqlens, check_longest
from lightning_fp8.attention.modules.masks import check_mask_beside, cu_seqlens_of
from lightning_fp8.attention.ops import Lengths
from lightning_fp8.attention.ops.layouts import from_heads, to_heads
from lightning_fp8.attention.sequence_tables import shared

Pair = tuple[Tensor | None, Tensor | None]
"""One for queries, and one for keys and values."""


class Sequences(NamedTuple):
    """The sequences of one call.

    Attributes:
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        cu_seqlens_q, cu_seqlens_kv: integers ``[B + 1]``, the cumulative lengths of the sequences; None if sequences
            have no padding. ``thd`` always has them.
        rows_of_sequences_q, rows_of_sequences_kv: for ``thd``, the indices of the rows that belong to a sequence rather
            than to the padding between sequences; None means all rows.
        rows: for ``thd``, the number of rows of the query tensor, including padding; 0 for other formats.
        max_seqlen_q, max_seqlen_kv: for ``thd``, an upper bound of the length of a sequence; None if it is not known.
    """

    qkv_format: str
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    rows_of_sequences_q: Tensor | None = None
    rows_of_sequences_kv: Tensor | None = None
    rows: int = 0
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @classmethod
    def of(
        cls,
        qkv_format: str,
        q: Tensor,
        k: Tensor,
        padding: Tensor | tuple[Tensor, Tensor] | None,
        cu_seqlens: Pair,
        cu_seqlens_padded: Pair,
        max_seqlens: tuple[int | None, int | None] = (None, None),
    ) -> Sequences:
        """The sequences of q and k, from Transformer Engine's arguments.

        Args:
            padding: a mask of which True is masked out, or a pair; beside ``cu_seqlens`` it may say nothing else.

        Raises:
            ValueError: If they do not fit the tensors.
        """
        batch, length = {"bshd": (0, 1), "sbhd": (1, 0), "thd": (None, 0)}[qkv_format]
        of_q, of_kv = cu_seqlens
        if (of_q is None) != (of_kv is None):
            if q.shape[length] != k.shape[length]:
                raise ValueError(
                    f"{q.shape[length]} rows of queries and {k.shape[length]} of keys with only one of cu_seqlens_q "
                    "and cu_seqlens_kv; pass both"
                )
            of_q = of_kv = of_kv if of_q is None else of_q
            with_gaps = [each for each in cu_seqlens_padded if each is not None]
            cu_seqlens_padded = (with_gaps[0], with_gaps[-1]) if with_gaps else (None, None)
        given = of_q, of_kv
        masks: Any = padding if isinstance(padding, (tuple, list)) else (padding, padding)
        if batch is not None and of_q is None and padding is not None:
            of_q, of_kv = (_of_mask(mask, x.shape[batch], x.shape[length]) for mask, x in zip(masks, (q, k)))
        sequences = None if batch is None else q.shape[batch]
        for of, cu, x in (("q", of_q, q), ("kv", of_kv, k)):
            check_cu_seqlens(f"cu_seqlens_{of}", cu, qkv_format, sequences, x.shape[length])
        if of_q is not None and of_kv is not None and len(of_q) != len(of_kv):
            raise ValueError(f"cu_seqlens_q has {len(of_q)} values and cu_seqlens_kv {len(of_kv)}; both need as many")
        for of, mask, cu, x in zip(("q", "kv"), masks, given, (q, k)):
            if mask is not None and cu is not None:
                check_mask_beside(of, mask, cu, None if batch is None else x.shape[length])
        if batch is not None:
            return cls(qkv_format, of_q, of_kv)
        rows_of_sequences = []
        for of, cu, x, gaps, longest in zip(("q", "kv"), (of_q, of_kv), (q, k), cu_seqlens_padded, max_seqlens):
            assert cu is not None
            check_longest(of, longest, cu)
            if gaps is not None:
                check_cu_seqlens(f"cu_seqlens_{of}_padded", gaps, qkv_format, None, x.shape[0])
            rows_of_sequences.append(None if gaps is None else _between(cu, gaps, x.shape[0]))
        of_sequences_q, of_sequences_kv = rows_of_sequences
        return cls(qkv_format, of_q, of_kv, of_sequences_q, of_sequences_kv, q.shape[0], *max_seqlens)

    def without_gaps(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that belong to a sequence."""
        q = q if self.rows_of_sequences_q is None else q.index_select(0, self.rows_of_sequences_q)
        if self.rows_of_sequences_kv is not None:
            k, v = k.index_select(0, self.rows_of_sequences_kv), v.index_select(0, self.rows_of_sequences_kv)
        return q, k, v

    def with_gaps(self, o: Tensor) -> Tensor:
        """The output's rows where the queries' were; 0 between them."""
        if self.rows_of_sequences_q is None:
            return o
        out = o.new_zeros(self.rows, *o.shape[1:])
        if torch.compiler.is_compiling():  # rows after the last sequence are 0, and are added to its last one
            return out.index_add(0, self.rows_of_sequences_q, o)
        return out.index_copy(0, self.rows_of_sequences_q, o)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Lengths | None]:
        """Each as ``[B, H, L, D]``, and the sequences' lengths."""
        q, q_lengths = self._to_heads(q, self.cu_seqlens_q, self.max_seqlen_q)
        k, k_lengths = self._to_heads(k, self.cu_seqlens_kv, self.max_seqlen_kv)
        v, _ = self._to_heads(v, self.cu_seqlens_kv, self.max_seqlen_kv)
        if q_lengths is None or k_lengths is None:
            return (q, k, v), None
        return (q, k, v), Lengths(q_lengths.to(q.device), k_lengths.to(q.device))

    def _to_heads(self, x: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor | None]:
        if self.qkv_format == "thd" and cu_seqlens is not None and torch.compiler.is_compiling():
            return packed.heads_of(x, cu_seqlens, longest)
        return to_heads(x, self.qkv_format, cu_seqlens)

    def from_heads(self, o: Tensor) -> Tensor:
        """``[B, H, L, D]`` in the format, contiguous."""
        if self.qkv_format == "thd" and self.cu_seqlens_q is not None and torch.compiler.is_compiling():
            return packed.rows_of(o, self.cu_seqlens_q, self.rows)
        return from_heads(
            o, self.qkv_format, self.cu_seqlens_q, self.rows if self.rows_of_sequences_q is None else None
        )


def _of_mask(mask: Tensor, sequences: int, max_seqlen: int) -> Tensor:
    """:func:`cu_seqlens_of`, one tensor for all layers."""
    (starts,) = shared(
        mask.device, (mask,), (sequences, max_seqlen), lambda: (cu_seqlens_of(mask, sequences, max_seqlen),)
    )
    return starts


def _between(cu_seqlens: Tensor, padded: Tensor, rows: int) -> Tensor:
    """The rows that belong to a sequence, where each starts at ``padded`` and is as long as in ``cu_seqlens``.

    In compiled code as many as the tensor's ``rows``: see :func:`packed.rows_between_gaps`.
    """
    if padded.shape != cu_seqlens.shape:
        raise ValueError(f"{len(cu_seqlens)} cu_seqlens and {len(padded)} of them with padding; both must be as many")
    if torch.compiler.is_compiling():
        return packed.rows_between_gaps(cu_seqlens, padded, rows)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if not cu_seqlens.is_cuda and (lengths > padded[1:] - padded[:-1]).any():
        raise ValueError(f"sequences of {lengths.tolist()} rows do not fit between {padded.tolist()}")
    shift = torch.repeat_interleave(padded[:-1] - cu_seqlens[:-1], lengths)
    return torch.arange(len(shift), device=shift.device) + shift
