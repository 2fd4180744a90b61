"""Attention of one call. The context, the recipe and the tensors decide whether it runs in FP8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import fp8_region, ops
from lightning_fp8.arguments import refuse_sharded, refuse_transforms
from lightning_fp8.attention.context_parallel import (
    CodesFunction,
    ContextParallel,
    attention_of_gathered,
    has_whole_blocks,
)
from lightning_fp8.attention.function import fp8_attention, why_not_fp8
from lightning_fp8.attention.modules import arguments
from lightning_fp8.attention.modules.high_precision import Extras, attention, fitted
from lightning_fp8.attention.modules.sequences import Sequences
from lightning_fp8.attention.ops import Band, Lengths
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.linear import ObserveGradFunction
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import ATTENTION_ROLES, Role


class CoreCall(NamedTuple):
    """The arguments of one forward, independent of its precision."""

    sequences: Sequences
    band: Band
    extras: Extras


class CoreAttention(FP8Module):
    """A module that runs a :class:`CoreCall` in FP8, in high precision or calibrating, depending on the current
    context.

    Attributes:
        softmax_scale: the factor of the scores.
        center_keys: whether a mean over the sequence is subtracted from keys before they are cast.
        context_parallel: the ranks that share sequences; None is only this rank.
        reason: why the last forward inside ``fp8_autocast`` ran in high precision; empty if it ran in FP8.
    """

    roles = ATTENTION_ROLES
    softmax_scale: float
    center_keys: bool
    reason: str
    context_parallel: ContextParallel | None = None
    _rng_state_tracker: Callable[[], Any] | None
    _last_context: FP8Context | None = None

    def way_to_run(
        self, call: CoreCall, reason: str, q: Tensor, k: Tensor, v: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """From q, k and v to the output; a function of them alone, which the backward pass may compute again.

        ``reason``: why the call cannot run in FP8, as far as it is known without the tensors.
        """
        context = fp8_region.current_context(self.own_context)
        recomputing = fp8_region.in_backward()
        if fp8_region.is_repeating():  # what its forward did, outside every region
            context = self._last_context or context
        recipe_wants_fp8 = context.recipe.fp8_dpa or context.recipe.fp8_mha
        if recipe_wants_fp8 and self.fp8 and context.enabled:
            key_rows = k.shape[1 if call.sequences.qkv_format == "bshd" else 0]
            of_codes = self.context_parallel is not None and has_whole_blocks(key_rows)
            dtype = autocast_dtype(q.device.type)
            reason = reason or why_not_fp8(q, k, v, dtype=dtype, center_keys=self.center_keys, of_codes=of_codes)
            if reason:
                arguments.tell(f"DotProductAttention runs in high precision: {reason}")
        if not recipe_wants_fp8:
            reason = "the recipe has fp8_dpa=False"
        if not self.fp8:
            reason = "this module has fp8=False"
        in_fp8 = context.enabled and not reason
        if not (recomputing or torch.compiler.is_compiling()):
            if self._last_context is not context:
                self._last_context = context  # slow in a module, so only where it changes
            if context.enabled and self.reason != reason:
                self.reason = reason
            (self._record or self.record).note(in_fp8, self.training)
        observe = torch.is_grad_enabled() and self.training and context.observe and not q.is_meta
        if in_fp8:
            return lambda q, k, v: self._fp8(call, context.recipe, observe, q, k, v)
        if recipe_wants_fp8 and self.fp8 and context.calibrating and not context.enabled and not q.is_meta:
            return lambda q, k, v: self._calibrating(call, context.recipe, q, k, v)
        return lambda q, k, v: self._high_precision(call, q, k, v)

    def _fp8(self, call: CoreCall, recipe: Recipe, observe: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        refuse_sharded("DotProductAttention", query_layer=q, key_layer=k, value_layer=v)
        observe = observe and isinstance(recipe, DelayedScaling)
        if observe:
            self._follow(recipe, q.device)
        dtype = autocast_dtype(q.device.type) or q.dtype
        sequences = call.sequences
        if self.context_parallel is not None:
            ranks = self.context_parallel
            return self._on_ranks(ranks, call, observe, True, q.to(dtype), k.to(dtype), v.to(dtype))
        o = fp8_attention(
            *sequences.without_gaps(q.to(dtype), k.to(dtype), v.to(dtype)),
            qkv_format=sequences.qkv_format,
            band=call.band,
            softmax_scale=self.softmax_scale,
            cu_seqlens_q=sequences.cu_seqlens_q,
            cu_seqlens_kv=sequences.cu_seqlens_kv,
            max_seqlen_q=sequences.max_seqlen_q,
            center_keys=self.center_keys,
            slots=self.slots,
            observe=observe,
        )
        return sequences.with_gaps(o)

    def _follow(self, recipe: Recipe, device: torch.device) -> None:
        """Observe under ``recipe`` on the tensors' device: modules without parameters are not moved."""
        history = self.history
        if torch.compiler.is_compiling() or history is None:
            return
        if isinstance(recipe, DelayedScaling):
            history.follow(recipe)
        if history.scale.device != device and len(history.names) == len(self.roles):
            history.to(device)

    @torch.compiler.disable
    def _on_ranks(
        self, ranks: ContextParallel, call: CoreCall, observe: bool, in_fp8: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention with context parallelism, which gathers keys and values in FP8 or in high precision."""
        refuse_transforms("DotProductAttention", q, k, v)
        sbhd, band = call.sequences.qkv_format == "sbhd", call.band
        ranks.require_agreement(
            ranks=ranks.size, fp8=in_fp8, query_layer=tuple(q.shape), key_layer=tuple(k.shape), dtype=q.dtype, band=band
        )
        if sbhd:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        rows = k.shape[1]
        of_codes = in_fp8 and has_whole_blocks(rows)
        if in_fp8 and not of_codes:
            arguments.tell(
                f"DotProductAttention gathers keys and values as {k.dtype}: the {rows} rows of a rank are not two "
                "chunks of whole blocks of 128, of which codes could be gathered; attention itself runs in FP8. "
                f"Make sequences a multiple of {256 * ranks.size} rows for codes on the wire"
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not of_codes:
                piece = partial(self._piece, None if in_fp8 else call.extras)
                return attention_of_gathered(ranks, q, k, v, band, piece)
            o: Tensor = CodesFunction.apply(q, k, v, ranks, band, self.softmax_scale, self.center_keys)
            return o

        o = self._observing(attend, q, k, v) if observe else attend(q, k, v)
        return o.transpose(0, 1).contiguous() if sbhd else o

    def _observing(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``attend(q, k, v)``, with the amaxes of inputs, output and their gradients."""
        slots = self.slots
        assert slots is not None
        for x in (q, k, v):
            ops.observe(x.detach(), slots[Role.QKV].amax)
        q, k, v = (ObserveGradFunction.apply(x, slots[Role.DQKV]) if x.requires_grad else x for x in (q, k, v))
        o = attend(q, k, v)
        ops.observe(o.detach(), slots[Role.O].amax)
        return ObserveGradFunction.apply(o, slots[Role.DO]) if o.requires_grad else o

    def _piece(self, extras: Extras | None, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Tensor:
        if extras is None:
            return fp8_attention(q, k, v, band=band, softmax_scale=self.softmax_scale, center_keys=self.center_keys)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, self.softmax_scale, band, None, extras).transpose(1, 2)

    def _calibrating(self, call: CoreCall, recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        refuse_transforms("DotProductAttention", q, k, v)
        refuse_sharded("DotProductAttention", query_layer=q, key_layer=k, value_layer=v)
        self._follow(recipe, q.device)
        history = self.history
        assert history is not None
        history.calibrated = True
        return self._observing(partial(self._high_precision, call), q, k, v)

    def _heads(self, call: CoreCall, *qkv: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Lengths | None, Extras]:
        """Each as ``[B, H, L, D]``, the sequences' lengths, and the options that fit their scores."""
        sequences = call.sequences
        heads, lengths = sequences.to_heads(*sequences.without_gaps(*qkv))
        scores = (*heads[0].shape[:3], heads[1].shape[2])
        return heads, lengths, fitted(call.extras, scores, (sequences.max_seqlen_q, sequences.max_seqlen_kv))

    def _high_precision(self, call: CoreCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sequences, tracker = call.sequences, self._rng_state_tracker
        heads, lengths, extras = self._heads(call, q, k, v)
        with nullcontext() if tracker is None or not call.extras.dropout else tracker().fork():
            if self.context_parallel is not None:
                return self._on_ranks(self.context_parallel, call, False, False, q, k, v)
            o = attention(*heads, self.softmax_scale, call.band, lengths, extras)
        return sequences.with_gaps(sequences.from_heads(o))
