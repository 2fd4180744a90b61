"""MultiheadAttention: projections to queries, keys and values, attention, and the output projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.modules.fused import LayerNormLinear
from lightning_fp8.modules.initialization import InitMethod
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.modules.tensor_parallel import GroupTaker, TensorParallel, cut_linear
from lightning_fp8.te.arguments import ParallelArguments, PassesContextParallelGroup, checked_arguments
from lightning_fp8.te.keys import has_split_parameters, rows_of_projections, split_or_joined
from lightning_fp8.transformer.arguments import (
    AttentionArguments,
    Mask,
    angles_of_both,
    check_call,
    check_encoder_output,
    head_sizes,
    mask_type_over_cache,
)
from lightning_fp8.transformer.head_norms import head_norms
from lightning_fp8.transformer.inference import Batch
from lightning_fp8.transformer.rotary import apply_rotary_pos_emb

_CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_kv")
_NOT_OF_CORE = "is_first_microbatch", "inference_params", "rotary_pos_emb"


class MultiheadAttention(PassesContextParallelGroup, GroupTaker):
    """Multi-head attention with Transformer Engine's arguments and parameter names, in FP8 inside ``fp8_autocast``.

    For ``attention_type="self"`` its children are ``layernorm_qkv`` (``qkv`` without ``input_layernorm``),
    ``core_attention`` and ``proj``. For ``"cross"`` they are ``layernorm_query`` (``query_layer`` without
    ``input_layernorm``), ``key_value``, ``core_attention`` and ``proj``.

    Args:
        hidden_size: the number of columns of input and output.
        num_attention_heads: the number of query heads.
        kv_channels: the number of channels of a head. None is ``hidden_size / num_attention_heads``.
        attention_dropout: the dropout probability. Attention runs in FP8 only without dropout.
        layernorm_epsilon: the epsilon of the input's norm.
        init_method, output_layer_init_method: initialize the weights of the projections to q, k and v, and the weight
            of the output projection. None is a normal distribution with a standard deviation of 0.023.
        attn_mask_type, window_size, bottom_right_diagonal: see :class:`lightning_fp8.DotProductAttention`.
        num_gqa_groups: the number of key and value heads. None is ``num_attention_heads``.
        return_bias: return the output without the bias of ``proj``, and the bias.
        input_layernorm: normalize the input first. ``normalization`` is ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: also return the normalized input; needs ``input_layernorm``.
        fuse_qkv_params: use one weight for queries, keys and values instead of ``query_weight``, ``key_weight`` and
            ``value_weight``. ``fuse_wgrad_accumulation`` needs it.
        qkv_weight_interleaved: the order of the fused weight's rows. True orders them by group: its query heads, its
            key head, its value head. False puts all queries first. Without ``fuse_qkv_params`` it is the order of a
            fused weight in a checkpoint.
        rotary_pos_interleaved: ``rotary_pos_emb`` rotates pairs of neighboring channels, not the halves of a head.
        qkv_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``: inputs ``[s, b, h]``, ``[b, s, h]`` or ``[t, h]``.
        qk_norm_type: ``"L2Normalization"``, ``"RMSNorm"`` or ``"LayerNorm"`` for the heads of queries and keys, with
            ``qk_norm_eps``, before or after the rotary embedding (``qk_norm_before_rope``).
        softmax_type: ``"vanilla"``, ``"off-by-one"`` or ``"learnable"``.
        get_rng_state_tracker: returns the RNG tracker whose state is forked for attention dropout and initialization.
        layer_number, name, seq_length, micro_batch_size: accepted and ignored.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`. With ``set_parallel_mode`` heads and groups
            are divided equally over the ranks: the projections to q, k and v are column-parallel, ``proj`` is
            row-parallel.

    Raises:
        ValueError, TypeError: If an argument is invalid; the message names the valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
    """

    q_norm: nn.Module | None
    k_norm: nn.Module | None

    @checked_arguments
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        super().__init__()
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "fuse_wgrad_accumulation=True needs fuse_qkv_params=True: a main_grad belongs to one weight"
            )
        if return_layernorm_output and not input_layernorm:
            raise ValueError("return_layernorm_output=True needs input_layernorm=True, which normalizes the input")
        self.attention_type = attention_type
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.fuse_qkv_params, self.qkv_weight_interleaved = fuse_qkv_params, qkv_weight_interleaved
        self.return_bias, self.layer_number = return_bias, layer_number
        sizes = head_sizes(hidden_size, num_attention_heads, kv_channels, num_gqa_groups)
        self.tensor_parallel = TensorParallel.of_several_layers(parallel)
        self.tp_size = self.tensor_parallel.size
        interleaved = fuse_qkv_params and qkv_weight_interleaved
        layout = sizes.channels, attention_type == "self", interleaved, input_layernorm
        of_all_ranks = rows_of_projections(sizes.heads, sizes.groups, *layout)
        heads = self.tensor_parallel.part_of("num_attention_heads", sizes.heads)
        groups = self.tensor_parallel.part_of("num_gqa_groups", sizes.groups)
        self.projection_rows = rows_of_projections(heads, groups, *layout)

        shared: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": parallel.get("get_rng_state_tracker"),
        }
        for name, order in of_all_ranks.items():
            projection = {"init_method": init_method, **shared}
            if has_split_parameters(name, fuse_qkv_params):
                projection["parameters_split"] = order.sizes
            out_features = sum(order.sizes.values())
            if name.startswith("layernorm"):
                projection |= {"eps": layernorm_epsilon, "zero_centered_gamma": zero_centered_gamma}
                projection |= {"normalization": normalization, "return_layernorm_output": return_layernorm_output}
                self.add_module(name, LayerNormLinear(hidden_size, out_features, **projection))
            else:
                self.add_module(name, Linear(hidden_size, out_features, **projection))
        self.q_norm, self.k_norm = head_norms(
            qk_norm_type, sizes.channels, qk_norm_eps, params_dtype=params_dtype, device=device
        )
        self.core_attention = DotProductAttention(
            num_attention_heads,
            sizes.channels,
            num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            bottom_right_diagonal,
            get_rng_state_tracker=parallel.get("get_rng_state_tracker"),
            attention_type=attention_type,
            softmax_type=softmax_type,
            sequence_parallel=self.tensor_parallel.sequence,
            tp_size=self.tp_size,
            tp_group=self.tensor_parallel.group,
        )
        self.proj = Linear(
            sizes.heads * sizes.channels,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            **shared,
        )
        if self.tp_size > 1:
            for name, order in of_all_ranks.items():
                layer = getattr(self, name)
                fused = len(layer.weight_names) == 1 and not order.interleaved
                cut_linear(layer, "column", self.tensor_parallel, tuple(order.sizes.values()) if fused else 1)
            cut_linear(self.proj, "row", self.tensor_parallel)
            for norm in (self.q_norm, self.k_norm):
                if isinstance(norm, (LayerNorm, RMSNorm)):
                    norm.sequence_parallel = True  # each rank normalizes only its own heads
                    norm.tensor_parallel = self.tensor_parallel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Mask | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        **call: Unpack[AttentionArguments],
    ) -> Tensor | tuple[Tensor | None, ...]:
        """``[s, b, hidden_size]`` (``sbhd``), ``[b, s, hidden_size]`` or ``[t, hidden_size]`` to the same shape.

        Args:
            hidden_states: a bfloat16, float16 or float32 tensor.
            attention_mask: True is masked out; see :meth:`lightning_fp8.DotProductAttention.forward`.
            encoder_output: the input of cross attention's keys and values, in the format of ``hidden_states``.
            attn_mask_type, window_size, bottom_right_diagonal: None uses the constructor's value.
            call: :class:`lightning_fp8.transformer.AttentionArguments`.

        Returns:
            The output; with ``return_bias`` or ``return_layernorm_output`` a tuple of the output, the bias and the
            normalized input.

        Raises:
            ValueError, TypeError: If an argument is invalid; the message names the valid values.
        """
        check_call("MultiheadAttention", call)
        check_encoder_output("attention_type", self.attention_type, "cross", encoder_output)
        q, k, v, normalized = self._project(hidden_states, encoder_output, call.get("is_first_microbatch"))
        params = call.get("inference_params")
        if params is not None and self.core_attention.context_parallel is not None:
            raise NotImplementedError(
                "inference_params with context parallelism are not supported; call set_context_parallel_group(None) "
                "for generation"
            )
        batch = None if params is None else params.batch_of(q, self.qkv_format)
        q, k = self._positioned(q, k, call, batch)
        core: dict[str, Any] = {name: value for name, value in call.items() if name not in _NOT_OF_CORE}
        kind = attn_mask_type or self.core_attention.attn_mask_type
        if params is not None and batch is not None and self.attention_type == "self":
            k, v, *cu_seqlens = params.append(self, batch, k, v, self.qkv_format)
            kind = mask_type_over_cache(kind, attention_mask, padded=cu_seqlens[0] is not None)
            bottom_right_diagonal = True
            core |= dict(zip(_CU_SEQLENS, [*cu_seqlens, None, None])) | dict.fromkeys(_MAX_SEQLENS)
        core |= {"window_size": window_size, "bottom_right_diagonal": bottom_right_diagonal}
        context_layer = self.core_attention(q, k, v, attention_mask, attn_mask_type=kind, **core)
        projected = self.proj(context_layer, call.get("is_first_microbatch"))
        outputs = [*projected] if self.return_bias else [projected]
        outputs += [] if normalized is None else [normalized]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _project(
        self, x: Tensor, encoder_output: Tensor | None, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The heads of queries, keys and values, and the normalized input with ``return_layernorm_output``."""
        heads: list[Tensor] = []
        normalized: Tensor | None = None
        for name, order in self.projection_rows.items():
            projected = getattr(self, name)(encoder_output if name == "key_value" else x, is_first_microbatch)
            if self.return_layernorm_output and name.startswith("layernorm"):
                projected, normalized = projected
            heads += order.split_heads(projected)
        q, k, v = heads
        return q, k, v, normalized

    def _positioned(self, q: Tensor, k: Tensor, call: AttentionArguments, batch: Batch | None) -> tuple[Tensor, Tensor]:
        """Queries and keys after the norm of their heads and the rotary embedding."""
        if self.qk_norm_before_rope:
            q, k = self._head_norms(q, k)
        if (rotary := call.get("rotary_pos_emb")) is not None:
            of_q, of_k = angles_of_both(rotary)
            starts_q, lengths_q = _starts_and_lengths(call, "q", "kv")
            starts_kv, lengths_kv = _starts_and_lengths(call, "kv", "q")
            position = None if batch is None else batch.start_positions()
            own = self.attention_type == "self"
            if batch is not None and self.qkv_format == "thd":
                starts_q, lengths_q = batch.cu_seqlens_q(q.device), None
                if own:
                    starts_kv, lengths_kv = starts_q, None
            layout, interleaved = self.qkv_format, self.rotary_pos_interleaved
            ranks = self.core_attention.context_parallel
            if ranks is not None:
                rows = 0 if layout == "sbhd" else 1
                of_q, of_k = ranks.positions(of_q, q.shape[rows]), ranks.positions(of_k, k.shape[rows])
            q = apply_rotary_pos_emb(q, of_q, layout, position, interleaved, starts_q, lengths_q)
            position = position if own else None
            k = apply_rotary_pos_emb(k, of_k, layout, position, interleaved, starts_kv, lengths_kv)
        return (q, k) if self.qk_norm_before_rope else self._head_norms(q, k)

    def _head_norms(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load projections, including those that were saved with the other value of ``fuse_qkv_params``."""
        for projection in self.projection_rows:
            projection_prefix = f"{prefix}{projection}."
            own = [key for key in state_dict if key.startswith(projection_prefix)]
            parameters = {key.removeprefix(projection_prefix): state_dict[key] for key in own}
            renamed = self.projection_parameters(projection, parameters)
            if renamed.keys() != parameters.keys():
                for name in parameters:
                    del state_dict[projection_prefix + name]
                state_dict.update({projection_prefix + name: value for name, value in renamed.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def projection_parameters(self, projection: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a projection, split or joined, with the names and the order of rows that this module has.

        Args:
            projection: the name of the projection's module.
            parameters: the parameters by name without prefix, of this rank or of the unsharded model. Other parameters
                are returned unchanged.
        """
        if projection not in self.projection_rows:
            return dict(parameters)
        split = has_split_parameters(projection, self.fuse_qkv_params)
        order = replace(self.projection_rows[projection], interleaved=self.qkv_weight_interleaved)
        renamed = split_or_joined(parameters, order, split)
        if renamed.keys() == parameters.keys() and self.tp_size > 1:
            renamed = split_or_joined(parameters, replace(order, groups=order.groups * self.tp_size), split)
        return renamed

    @property
    def qkv_format(self) -> str:
        return self.core_attention.qkv_format

    def extra_repr(self) -> str:
        return f"attention_type={self.attention_type!r}, fuse_qkv_params={self.fuse_qkv_params}"


def _starts_and_lengths(call: Mapping[str, Any], of: str, other: str) -> tuple[Tensor | None, Tensor | None]:
    """The starts of the sequences of ``of`` (``"q"`` or ``"kv"``), and their lengths if there is padding between them.

    If only one of ``"q"`` and ``"kv"`` is passed, it holds for both, as in ``DotProductAttention``.
    """
    both = all(call.get(f"cu_seqlens_{name}") is not None for name in (of, other))
    added_up, padded = (
        next((given for name in names if (given := call.get(f"cu_seqlens_{name}{suffix}")) is not None), None)
        for names in [(of,) if both else (of, other)]
        for suffix in ("", "_padded")
    )
    return (added_up, None) if padded is None or added_up is None else (padded, added_up.diff())
