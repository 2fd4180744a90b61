"""Transformer Engine's DotProductAttention. It runs in FP8 if the recipe has ``fp8_dpa``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import one_of, require_bool, require_bools_or_none
from lightning_fp8.attention.context_parallel import context_parallel
from lightning_fp8.attention.function import why_not_heads
from lightning_fp8.attention.modules import arguments, high_precision, masks
from lightning_fp8.attention.modules.core import CoreAttention, CoreCall
from lightning_fp8.attention.modules.sequences import Sequences
from lightning_fp8.attention.ops import FORMATS, Band
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.modules.tensor_parallel import GroupTaker, TensorParallel
from lightning_fp8.parallel.checkpoint import checkpoint
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.te.arguments import PassesContextParallelGroup, checked_arguments, refuse_in_forward


class DotProductAttention(PassesContextParallelGroup, GroupTaker, CoreAttention):  # type: ignore[misc]
    """``softmax(softmax_scale q kᵀ + bias) v`` with Transformer Engine's arguments, in its order.

    Inside ``fp8_autocast`` with a recipe that has ``fp8_dpa`` (``fp8_mha`` has the same effect), all matrix
    multiplications run in FP8, forward and backward. Dropout in training, biases, ALiBi, arbitrary masks, other softmax
    types and heads of more than 256 channels are not supported in FP8: such calls run
    ``torch.nn.functional.scaled_dot_product_attention`` in the tensors' own precision, with a warning, and set
    :attr:`reason`. Outside ``fp8_autocast`` every call does.

    Tensors are scaled by their current amaxes under every recipe. Delayed scaling also keeps Transformer Engine's
    slots: ``qkv``, ``o``, ``do`` and ``dqkv`` record amaxes; ``s`` and ``dp`` are only for checkpoints.

    Args:
        num_attention_heads: the number of query heads.
        kv_channels: the number of channels of each head; a pair for keys and values if they differ.
        num_gqa_groups: the number of key and value heads; None is the number of query heads.
        attention_dropout: the dropout probability.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``, sequences one after the other.
        attn_mask_type: ``"no_mask"``, ``"padding"``, ``"causal"``, ``"padding_causal"``, the two with
            ``_bottom_right``, or ``"arbitrary"``.
        window_size: keys before and after the diagonal that a query attends to; -1 is all.
        bottom_right_diagonal: whether the diagonal of ALiBi, and of a window without a causal mask, ends in the bottom
            right corner; None is True.
        tp_group, tp_size: the ranks over which heads are sharded, and their number. ``num_attention_heads`` and
            ``num_gqa_groups`` count the heads of all ranks; inputs and ``softmax_offset`` have those of this rank.
        get_rng_state_tracker: a function that returns a tracker of random states. Its state is forked around dropout
            unless ``sequence_parallel``, as in Transformer Engine. ``checkpoint_core_attention`` requires a tracker
            with ``get_states`` and ``set_states``.
        softmax_scale: the factor of the scores; None is ``1 / sqrt(kv_channels)``.
        softmax_type: ``"vanilla"``, ``"off-by-one"``, or ``"learnable"``, which adds the parameter
            ``softmax_offset [h]``.
        layer_number, attention_type, name: accepted; they have no effect.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: see :meth:`set_context_parallel_group`.
        return_max_logit: also return the largest score of each head, ``[heads]`` in the output's dtype. This costs one
            more product of queries and keys, and is not supported with context parallelism.
        num_splits: not supported if it is more than 1.
        center_keys: subtract a mean over the sequence from keys before they are cast; not an argument of Transformer
            Engine. See docs/attention.md.

    Attributes:
        reason: why the last forward inside ``fp8_autocast`` ran in high precision. Before the first forward, why this
            module cannot run in FP8 under any recipe. Empty if it ran, or can run, in FP8. Compiled forwards do not
            change it.

    Raises:
        ValueError, TypeError: If an argument is invalid. The message lists valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
    """

    @checked_arguments
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        num_splits: int | None = None,
        center_keys: bool = True,
    ) -> None:
        super().__init__()
        self.tensor_parallel = TensorParallel.asked({"tp_size": tp_size, "tp_group": tp_group})
        whole = arguments.sizes_of(num_attention_heads, kv_channels, num_gqa_groups)
        self.sizes = whole._replace(
            heads=self.tensor_parallel.part_of("num_attention_heads", whole.heads),
            groups=self.tensor_parallel.part_of("num_gqa_groups", whole.groups),
        )
        self.softmax_scale = arguments.checked_scale(softmax_scale, self.sizes.channels)
        self.softmax_type = softmax_type
        self.attention_dropout = float(attention_dropout)
        self.qkv_format = qkv_format
        self.attention_type = attention_type
        self.attn_mask_type = masks.mask_type(attn_mask_type)
        self.window_size = masks.fitted_window(self.attn_mask_type, masks.checked_window(window_size))
        self.bottom_right_diagonal = bottom_right_diagonal
        self.layer_number, self.name = layer_number, name
        self.center_keys = center_keys
        self.return_max_logit = return_max_logit
        self._rng_state_tracker = None if sequence_parallel else get_rng_state_tracker
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(self.sizes.heads, dtype=torch.float32))
            if self.tensor_parallel.size > 1:
                self.cuts = {"softmax_offset": Cut(0)}
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.reset_parameters()
        self.reason = self.why_not_in_training()
        self.use_history(AmaxHistory(self.history_slots()))

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: Any = "p2p"
    ) -> None:
        """Shard each sequence over the ranks of ``cp_group``; None disables context parallelism.

        The tensors of a forward are then this rank's rows, as :func:`lightning_fp8.get_batch_on_this_cp_rank` returns
        them, and all ranks must call the forward.

        Args:
            cp_group: a ``torch.distributed.ProcessGroup`` that this rank is in.
            cp_global_ranks: the global ranks of ``cp_group``; they must equal the group's.
            cp_stream: accepted; it has no effect.
            cp_comm_type: ``"p2p"``, ``"all_gather"`` or ``"a2a"``. It has no effect: keys and values are always
                gathered, and every type gives the same results.

        Raises:
            TypeError: If ``cp_group`` is not a process group.
            ValueError: If ``cp_global_ranks`` are not the group's ranks, in order, or are passed without ``cp_group``,
                or if ``cp_comm_type`` is unknown.
            NotImplementedError: If ``cp_comm_type`` is ``"a2a+p2p"``, which uses two groups, or if ``cp_group`` is a
                list of groups.
        """
        self.context_parallel = context_parallel(cp_group, cp_global_ranks, cp_comm_type)

    def reset_parameters(self) -> None:
        """Set ``softmax_offset``, if it is learned, to 0."""
        if self.softmax_type == "learnable":
            nn.init.zeros_(self.softmax_offset)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int | None = None,
        score_mod: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Any:
        """Attention of ``[s, b, h, d]`` (``sbhd``), ``[b, s, h, d]`` or ``[t, h, d]``; heads of the output are joined.

        Args:
            query_layer, key_layer, value_layer: bfloat16, float16 or float32, any strides.
            qkv_layer, kv_layer: one tensor with queries, keys and values, or with keys and values, which replaces the
                separate tensors. They are stacked along ``qkv_interleave_dim``: -3 for ``[..., 3, h, d]``, -2 for
                ``[..., h, 3, d]``.
            attention_mask: True is masked out. With a padding type: ``[b, 1, 1, s]``, which masks the end of each
                sequence, or a pair of such masks for queries and keys. With ``"arbitrary"``: broadcastable as
                ``core_attention_bias``; None hides no key, and a warning is issued. With other types it has no effect,
                and a warning is issued. If ``cu_seqlens`` are also passed, they are used, as in Transformer Engine. A
                padding mask with other lengths is then an error if both are on the host; on a GPU and in compiled code
                the two are not compared.
            cu_seqlens_q, cu_seqlens_kv: integers ``[b + 1]``: the start of each sequence of ``thd``; with the other
                formats and a padding type, the cumulative lengths. Otherwise they have no effect, and a warning is
                issued. If one of them is None, the other is used for both, which must have equally many rows.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: the start of each sequence of ``thd`` if there is padding between
                sequences; ``cu_seqlens_*`` are then the cumulative lengths without padding. If queries and keys share
                ``cu_seqlens`` and one of these is None, the other is used for both. Other formats do not use them.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal: None is the constructor's value.
            checkpoint_core_attention: save only the inputs for the backward pass, which computes attention again.
            core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"``, ``"post_scale_bias"`` or ``"alibi"``.
            core_attention_bias: broadcastable to ``[b, h, sq, skv]``. For ``thd``, sq and skv are the lengths of the
                longest sequences, or ``max_seqlen_q`` and ``max_seqlen_kv``, and each sequence uses the same bias from
                its first row on.
            alibi_slopes: float32 ``[h]`` or ``[b, h]``; None is the slopes of the paper (arXiv:2108.12409).
            max_seqlen_q: for ``thd``, an upper bound of the lengths of query sequences, with which the backward pass
                needs less memory on a GPU. A longer sequence is an error; on a GPU, a device assertion.
            max_seqlen_kv: the same for keys. Compiled code in high precision allocates this many rows for each
                sequence, or without the bounds as many as the tensor has. Other formats use neither bound.
            fast_zero_fill, pad_between_seqs: accepted; they have no effect.
            inference_params, fp8_output, bf16_backward, num_splits, score_mod: not supported, except at their defaults.

        Returns:
            ``[s, b, h d]``, ``[b, s, h d]`` or ``[t, h d]`` in the input's dtype, or in torch.autocast's. Rows of
            padding, and of queries that attend to no key, are 0. With ``return_max_logit``, a pair of the output and
            the largest score of each head, in the same dtype.

        Raises:
            ValueError, TypeError: If an argument is invalid. The message lists valid values.
            NotImplementedError: If an argument that is not supported differs from its default.
        """
        refuse_in_forward(
            inference_params=inference_params,
            fp8_output=fp8_output,
            bf16_backward=bf16_backward,
            num_splits=num_splits,
            score_mod=score_mod,
        )
        require_bool("checkpoint_core_attention", checkpoint_core_attention)
        arguments.check_tensors(
            attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        require_bools_or_none(
            bottom_right_diagonal=bottom_right_diagonal,
            fast_zero_fill=fast_zero_fill,
            pad_between_seqs=pad_between_seqs,
        )
        q, k, v = arguments.unpacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        qkv_format = self.qkv_format if qkv_format is None else one_of("qkv_format", qkv_format, FORMATS)
        arguments.check_inputs(self.sizes, qkv_format, q, k, v)
        mask_type = self.attn_mask_type if attn_mask_type is None else masks.mask_type(attn_mask_type)
        window = self.window_size if window_size is None else masks.checked_window(window_size)
        diagonal = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        if mask_type == "arbitrary" and attention_mask is None:
            arguments.tell(
                "attn_mask_type='arbitrary' without attention_mask hides no key: pass the mask, or "
                "attn_mask_type='no_mask', which can run in FP8"
            )
        if "padding" not in mask_type:
            masks.warn_of_no_effect(
                mask_type,
                attention_mask=attention_mask is not None and mask_type != "arbitrary",
                cu_seqlens=qkv_format != "thd" and not (cu_seqlens_q is None and cu_seqlens_kv is None),
            )
        arguments.check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv)
        sequences = Sequences.of(
            qkv_format,
            q,
            k,
            attention_mask if "padding" in mask_type else None,
            (cu_seqlens_q, cu_seqlens_kv) if "padding" in mask_type or qkv_format == "thd" else (None, None),
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            (max_seqlen_q, max_seqlen_kv),
        )
        if "padding" in mask_type and sequences.cu_seqlens_q is None:
            raise ValueError(f"attn_mask_type={mask_type!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        dropout = self.attention_dropout if self.training else 0.0
        extras = high_precision.extras_of(
            mask_type,
            attention_mask,
            core_attention_bias_type,
            core_attention_bias,
            self._slopes(alibi_slopes, core_attention_bias_type, q),
            self._sink(q),
            q,
            self.softmax_scale,
            dropout,
        )
        band = masks.band_of(mask_type, window, diagonal)
        if self.context_parallel is not None:
            self._check_context_parallel(qkv_format, mask_type, core_attention_bias_type, band, q, k)
        reason = self._why_not_fp8(mask_type, core_attention_bias_type, dropout)
        call = CoreCall(sequences, band, extras)
        core = self.way_to_run(call, reason, q, k, v)
        if checkpoint_core_attention and torch.is_grad_enabled():
            tracker = self._rng_state_tracker if dropout else None
            output = checkpoint(core, q, k, v, get_rng_state_tracker=tracker).flatten(-2)
        else:
            output = core(q, k, v).flatten(-2)
        if not self.return_max_logit:
            return output  # type: ignore[no-any-return]
        (q, k, _), lengths, extras = self._heads(call, q, k, v)
        return output, high_precision.max_logits(q, k, self.softmax_scale, band, lengths, extras).to(output.dtype)

    def _check_context_parallel(
        self, qkv_format: str, mask_type: str, bias_type: str, band: Band, q: Tensor, k: Tensor
    ) -> None:
        """Refuse what context parallelism does not support."""
        window = f"a window of {band.left} keys before and {band.right} after the diagonal"
        refused = (
            (qkv_format == "thd", "qkv_format='thd'", ", whose sequences have one length; pass 'bshd' or 'sbhd'"),
            (
                mask_type not in ("no_mask", "causal"),
                f"attn_mask_type={mask_type!r}",
                "; pass 'causal' or 'no_mask', with sequences of one length",
            ),
            (
                bias_type != "no_bias",
                f"core_attention_bias_type={bias_type!r}",
                ", where ranks have two chunks; leave it out",
            ),
            (mask_type == "no_mask" and band.limited, f"{window} with 'no_mask'", "; pass 'causal', or no window"),
            (self.return_max_logit, "return_max_logit=True", "; leave it out"),
        )
        for is_given, what, instead in refused:
            if is_given:
                raise NotImplementedError(f"{what} is not supported with context parallelism{instead}")
        assert self.context_parallel is not None
        size, rows = self.context_parallel.size, 0 if qkv_format == "sbhd" else 1
        for name, x in (("query_layer", q), ("key_layer", k)):
            if x.shape[rows] % 2 or not x.shape[rows]:
                raise ValueError(
                    f"{name} has {x.shape[rows]} rows on this rank, which is not an even number; pad sequences to a "
                    f"multiple of {2 * size} rows, and split them by get_batch_on_this_cp_rank"
                )
        if mask_type == "causal" and q.shape[rows] != k.shape[rows]:
            raise ValueError(
                f"{q.shape[rows]} rows of queries and {k.shape[rows]} of keys under a causal mask with context "
                "parallelism; both must be as many"
            )

    def why_not_in_training(self) -> str:
        """Why a training step with default arguments does not run in FP8; empty if it does."""
        return self._why_not_fp8(self.attn_mask_type, "no_bias", self.attention_dropout)

    def _slopes(self, given: Tensor | None, bias_type: str, q: Tensor) -> Tensor | None:
        """The slopes that are passed, or those of the paper for this rank's part of all ranks' heads."""
        tensor_parallel = self.tensor_parallel
        if given is not None or bias_type != "alibi" or tensor_parallel.size == 1:
            return given
        if tensor_parallel.group is None:
            raise RuntimeError(
                f"core_attention_bias_type='alibi' with tp_size={tensor_parallel.size} needs to know which heads this "
                "rank has: call set_tensor_parallel_group(tp_group), or pass alibi_slopes of this rank's heads"
            )
        slopes = high_precision.alibi_slopes(self.sizes.heads * tensor_parallel.size, q.device)
        return slopes.chunk(tensor_parallel.size)[tensor_parallel.rank]

    def _sink(self, q: Tensor) -> Tensor | None:
        """``[1, H, 1, 1]``, or one that broadcasts to it."""
        if self.softmax_type == "learnable":
            return self.softmax_offset.reshape(1, -1, 1, 1)
        return q.new_zeros(1, 1, 1, 1) if self.softmax_type == "off-by-one" else None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also load a ``softmax_offset`` in its former shape, ``[1, H, 1, 1]``, or one for the heads of all ranks."""
        offset = state_dict.get(f"{prefix}softmax_offset")
        heads, ranks = self.sizes.heads, self.tensor_parallel.size
        if isinstance(offset, Tensor) and tuple(offset.shape) in ((1, heads, 1, 1), (1, heads * ranks, 1, 1)):
            state_dict[f"{prefix}softmax_offset"] = offset = offset.flatten()
        if isinstance(offset, Tensor) and ranks > 1 and tuple(offset.shape) == (heads * ranks,):
            state_dict[f"{prefix}softmax_offset"] = Cut(0).piece(offset, self.tensor_parallel.rank, ranks)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _why_not_fp8(self, mask_type: str, bias_type: str, dropout: float) -> str:
        sizes = self.sizes
        if dropout:
            return f"attention_dropout={dropout} in training"
        if mask_type == "arbitrary":
            return "attn_mask_type='arbitrary'"
        if bias_type != "no_bias":
            return f"core_attention_bias_type={bias_type!r}"
        if self.softmax_type != "vanilla":
            return f"softmax_type={self.softmax_type!r}"
        return why_not_heads(sizes.channels, sizes.value_channels)

    def extra_repr(self) -> str:
        return (
            f"heads={self.sizes.heads}, groups={self.sizes.groups}, channels={self.sizes.channels}, "
            f"qkv_format={self.qkv_format!r}, attn_mask_type={self.attn_mask_type!r}"
        )
