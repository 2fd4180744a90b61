"""InferenceParams: a cache of keys and values for step-by-step generation."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import one_of, require_positive
from lightning_fp8.attention.ops import FORMATS


class Batch(NamedTuple):
    """For each sequence of a batch, the number of rows before a step of generation and the number of new rows."""

    before: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.before, self.new)))

    def is_even(self, rows: int) -> bool:
        """Whether all sequences have the same length, and ``rows`` new rows."""
        return {*self.new} <= {rows} and len({*self.before}) < 2

    def cu_seqlens_q(self, device: torch.device) -> Tensor:
        """The cumulative numbers of new rows, int32 ``[b + 1]``."""
        return _added_up(self.new, device)

    def start_positions(self) -> Tensor | None:
        """The position of each sequence's first new row, integers ``[b]``; None if all of them are 0."""
        return torch.tensor(self.before, device="cpu") if any(self.before) else None


class InferenceParams:
    """A cache of keys and values for each attention module that is called with it, under ``torch.no_grad()``.

    Before each forward of the model, :meth:`pre_step` sets the number of new rows of each sequence::

        params = InferenceParams(max_batch_size=1, max_sequence_length=128)
        rows = prompt  # [s, 1, h]
        for _ in range(64):
            params.pre_step({0: len(rows)})
            rows = next_row(model(rows, inference_params=params))

    Alternatively, increase ``sequence_len_offset`` after each forward, as before Transformer Engine 2.2.

    An attention module stores its rows once per step. A step begins with a call of :meth:`pre_step` or :meth:`reset`,
    or with an assignment to ``sequence_len_offset``, even of the same value.

    Args:
        max_batch_size: the maximum number of sequences in a batch.
        max_sequence_length: the maximum number of rows of a sequence.
        num_heads_kv, head_dim_k, head_dim_v, dtype, max_ctx_len, qkv_format: accepted and ignored. The cache takes them
            from the first keys and values.
        is_paged, total_num_pages, page_size, custom_cache_manager: paged caches are not supported; only the defaults
            are accepted.

    Attributes:
        is_paged: False.
        sequence_len_offset: the number of cached rows of every sequence; used if :meth:`pre_step` is never called.

    Raises:
        ValueError: If a size is not positive.
        NotImplementedError: If a paged cache or a custom cache manager is requested.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        require_positive("max_batch_size", max_batch_size)
        require_positive("max_sequence_length", max_sequence_length)
        if is_paged or custom_cache_manager is not None:
            raise NotImplementedError(
                "a paged cache or a custom cache manager is not supported: leave out is_paged and "
                "custom_cache_manager; the memory of finished sequences is reused without them"
            )
        one_of("qkv_format", qkv_format, FORMATS)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.is_paged = False
        self._step = 0
        self._step_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # in which a module last stored rows
        self.sequence_len_offset = 0
        self._batch: dict[Any, tuple[int, int]] | None = None  # sequence: numbers of cached and of new rows
        self._caches: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    @property
    def sequence_len_offset(self) -> int:
        return self._sequence_len_offset

    @sequence_len_offset.setter
    def sequence_len_offset(self, rows: int) -> None:
        self._sequence_len_offset = _count("sequence_len_offset", rows)
        self._step += 1

    def reset(self) -> None:
        """Drop all sequences. Their memory is reused."""
        self._batch, self.sequence_len_offset = None, 0

    def allocate_memory(self, layer_number: int) -> None:
        """Accepted; it has no effect. A module's memory is allocated when it first stores rows."""

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Begin a step. ``step_dict`` maps each sequence's id to its number of new rows, in the order of the batch.

        A sequence that is missing is finished. An id that occurs for the first time is a new sequence.

        Raises:
            ValueError: If there are more sequences or rows than the cache has memory for.
            TypeError: If ``step_dict`` is not a mapping to integers.
        """
        if not isinstance(step_dict, Mapping):
            raise TypeError(
                f"pre_step takes a mapping of sequences to numbers of new rows, such as {{0: 5}}, not {step_dict!r}"
            )
        step_dict = {seq_id: _count(f"rows of sequence {seq_id!r}", new) for seq_id, new in step_dict.items()}
        lengths = {seq_id: sum(counts) for seq_id, counts in (self._batch or {}).items()}
        batch = {seq_id: (lengths.get(seq_id, 0), new) for seq_id, new in step_dict.items()}
        self._check([*batch], [*batch.values()])
        old = {seq_id: place for place, seq_id in enumerate(lengths)}
        moves = [(old[seq_id], place) for place, seq_id in enumerate(batch) if seq_id in old]
        if any(source != target for source, target in moves):
            sources, targets = map(list, zip(*moves))
            for cache in self._caches.values():
                for x in cache:
                    x[targets] = x[sources]
        self._batch = batch
        self._step += 1

    def get_seqlens_pre_step(self) -> Tensor:
        """The number of rows of each sequence before this step: int32 ``[b]``."""
        return torch.tensor([before for before, _ in (self._batch or {}).values()], dtype=torch.int32, device="cpu")

    def batch_of(self, k: Tensor, qkv_format: str) -> Batch:
        """The sequences that the new keys ``k`` of this step belong to.

        Raises:
            ValueError: If the shape of ``k`` does not match the last :meth:`pre_step`.
        """
        packed = qkv_format == "thd"
        if self._batch is None and packed:
            raise ValueError("qkv_format='thd' needs InferenceParams.pre_step, which sets the lengths of the sequences")
        rows, sequences = k.shape[:2] if qkv_format == "sbhd" else k.shape[1::-1]
        if self._batch is None:
            self._check([*range(sequences)], [(self.sequence_len_offset, rows)])
            return Batch((self.sequence_len_offset,) * sequences, (rows,) * sequences)
        batch = Batch(*zip(*self._batch.values())) if self._batch else Batch((), ())
        fits = len(k) == sum(batch.new) if packed else rows >= max(batch.new, default=0) and sequences == len(batch.new)
        if not fits:
            raise ValueError(
                f"keys of shape {list(k.shape)} in {qkv_format!r} do not match the last call of pre_step: rows of "
                f"each sequence {list(batch.new)}"
            )
        return batch

    def append(
        self, module: nn.Module, batch: Batch, k: Tensor, v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Store the new keys and values of ``module``.

        Returns:
            The keys and values of all steps in the batch's format, padded to the number of rows of the longest
            sequence; and the cumulative numbers of new and of all rows, int32 ``[b + 1]``, or None if all lengths are
            equal.

        Raises:
            RuntimeError: If gradients are enabled, since they would not flow to the rows of earlier steps; or if
                ``module`` has already stored rows in this step, which the new ones would overwrite.
        """
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("inference_params do not support gradients: call the model under torch.no_grad()")
        if self._step_of.get(module) == self._step:
            raise RuntimeError(
                "inference_params store the rows of an attention module once per step, and this module was already "
                "called in this step. Begin a new step: call pre_step or reset, or assign sequence_len_offset. If "
                "layers share this module, call each with its own InferenceParams"
            )
        if module not in self._caches:
            sizes = (self.max_batch_size, self.max_sequence_length)
            with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
                self._caches[module] = k.new_zeros(*sizes, *k.shape[-2:]), v.new_zeros(*sizes, *v.shape[-2:])
        caches = self._caches[module]
        for cache, x in zip(caches, (k, v)):
            _write(cache, x, batch, qkv_format)
        self._step_of[module] = self._step
        lengths = batch.lengths
        if qkv_format == "thd":
            all_k, all_v = (torch.cat([x[i, :n] for i, n in enumerate(lengths)]) for x in caches)
        else:
            all_k, all_v = (x[: len(lengths), : max(lengths, default=0)] for x in caches)
            if qkv_format == "sbhd":
                all_k, all_v = all_k.transpose(0, 1), all_v.transpose(0, 1)
            if batch.is_even(k.shape[0 if qkv_format == "sbhd" else 1]):
                return all_k, all_v, None, None
        return all_k, all_v, batch.cu_seqlens_q(k.device), _added_up(lengths, k.device)

    def _check(self, seq_ids: Sequence[Any], before_and_new: Sequence[tuple[int, int]]) -> None:
        if len(seq_ids) > self.max_batch_size:
            raise ValueError(f"{len(seq_ids)} sequences are more than max_batch_size={self.max_batch_size}")
        for seq_id, (before, new) in zip(seq_ids, before_and_new):
            if before + new > self.max_sequence_length:
                raise ValueError(
                    f"{new} rows for sequence {seq_id!r}, which has {before}, do not fit "
                    f"max_sequence_length={self.max_sequence_length}"
                )


def _count(name: str, rows: Any) -> int:
    """Raises:
    TypeError: If ``rows`` is not an integer.
    ValueError: If ``rows`` is negative.
    """
    try:
        rows = operator.index(rows)
    except TypeError:
        raise TypeError(f"{name}={rows!r} must be an integer, a number of rows") from None
    if rows < 0:
        raise ValueError(f"{name}={rows} must be at least 0, a number of rows")
    return int(rows)


def _write(cache: Tensor, x: Tensor, batch: Batch, qkv_format: str) -> None:
    if qkv_format == "thd":
        sequences = x.split(batch.new)
    else:
        batch_first = x.transpose(0, 1) if qkv_format == "sbhd" else x
        sequences = tuple(sequence[:new] for sequence, new in zip(batch_first, batch.new))
    for place, (before, new, new_rows) in enumerate(zip(batch.before, batch.new, sequences)):
        cache[place, before : before + new] = new_rows


def _added_up(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
