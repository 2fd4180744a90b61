"""TransformerLayer: self attention, cross attention (in decoders) and an MLP, each with its norm and its residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lightning_fp8.arguments import require_bools_or_none
from lightning_fp8.attention.modules.arguments import tell
from lightning_fp8.attention.modules.masks import checked_window, mask_type
from lightning_fp8.attention.modules.packed import sequence_of
from lightning_fp8.modules.fused import LayerNormMLP
from lightning_fp8.modules.initialization import InitMethod
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.modules.tensor_parallel import GroupTaker, TensorParallel
from lightning_fp8.te.arguments import ParallelArguments, PassesContextParallelGroup, checked_arguments
from lightning_fp8.transformer.arguments import AttentionArguments, Mask, check_call, check_encoder_output
from lightning_fp8.transformer.multihead_attention import MultiheadAttention

_SHARDING = "tp_group", "tp_size", "sequence_parallel", "set_parallel_mode", "get_rng_state_tracker"
_EVERYWHERE = (
    *("init_method", "output_layer_init_method", "bias", "params_dtype", "device", "fuse_wgrad_accumulation"),
    *("normalization", "zero_centered_gamma"),
)
_OF_ATTENTION = (
    *("hidden_size", "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "num_gqa_groups"),
    *("fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "softmax_type"),
    *("qk_norm_type", "qk_norm_eps", "qk_norm_before_rope"),
)
"""The arguments that are passed on to attention and MLP, and to attention."""


class TransformerLayer(PassesContextParallelGroup, GroupTaker):
    """A transformer layer with Transformer Engine's arguments and parameter names, in FP8 inside ``fp8_autocast``.

    It computes ``x + attention(norm(x))``, in a decoder ``x + cross_attention(norm(x), encoder_output)``, and
    ``x + mlp(norm(x))``. Its children are ``self_attention``, ``inter_attention`` (in a decoder), ``layernorm_mlp`` and
    ``layernorm`` (with ``output_layernorm``).

    Args:
        hidden_size: the number of columns of input and output.
        ffn_hidden_size: the number of columns inside the MLP.
        num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, softmax_type, fuse_qkv_params,
            fuse_wgrad_accumulation, qkv_weight_interleaved, rotary_pos_interleaved, qk_norm_type, qk_norm_eps,
            qk_norm_before_rope, get_rng_state_tracker: see :class:`lightning_fp8.MultiheadAttention`.
        layernorm_epsilon, normalization, zero_centered_gamma: the arguments of all norms, except those of heads.
        hidden_dropout: the dropout probability of the branches, before they are added to the residual.
        drop_path_rate: the probability that self attention or the MLP is dropped for a sequence.
        init_method, output_layer_init_method: initialize the first and the last weights of the branches. None is a
            normal distribution with a standard deviation of 0.023.
        self_attn_mask_type, window_size, bottom_right_diagonal: the mask of self attention; see
            :class:`lightning_fp8.DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the mask of cross attention.
        apply_residual_connection_post_layernorm: add a branch to the output of its norm, not to the input of its norm.
        output_layernorm: normalize the output of the layer, instead of the input of self attention.
        parallel_attention_mlp: attention and MLP read the same input, and both outputs are added to it.
        layer_type: ``"encoder"``, or ``"decoder"`` for a layer with cross attention.
        bias: whether linear layers have biases.
        activation, activation_params: the activation of the MLP; see :class:`lightning_fp8.LayerNormMLP`.
        attn_input_format: ``"sbhd"``, ``"bshd"`` or ``"thd"``: inputs ``[s, b, h]``, ``[b, s, h]`` or ``[t, h]``.
        layer_number, name, seq_length, micro_batch_size: accepted and ignored.
        ub_tp_comm_overlap: True is not supported. Other ``ub_...`` arguments are ignored.
        parallel: :class:`lightning_fp8.te.arguments.ParallelArguments`. With ``set_parallel_mode`` attention and MLP
            are sharded over the ranks. With ``sequence_parallel`` the input, the output and the residual stream are
            sharded along their first dimension.

    Raises:
        ValueError, TypeError: If an argument is invalid; the message names the valid values.
        NotImplementedError: If an argument that is not supported differs from its default.
    """

    @checked_arguments
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **parallel: Unpack[ParallelArguments],
    ) -> None:
        super().__init__()
        given: dict[str, Any] = locals()
        mask_type(self_attn_mask_type, "self_attn_mask_type")
        mask_type(enc_dec_attn_mask_type, "enc_dec_attn_mask_type")  # of an encoder, too
        checked_window(enc_dec_window_size)
        self.layer_type = layer_type
        if parallel_attention_mlp and (
            layer_type == "decoder" or apply_residual_connection_post_layernorm or output_layernorm
        ):
            raise ValueError(
                "parallel_attention_mlp=True needs layer_type='encoder', and supports neither "
                "apply_residual_connection_post_layernorm nor output_layernorm"
            )
        self.parallel_attention_mlp = parallel_attention_mlp
        self.hidden_dropout, self.drop_path_rate = float(hidden_dropout), float(drop_path_rate)
        self.layer_number = layer_number

        self.tensor_parallel = TensorParallel.of_several_layers(parallel)
        if self.tensor_parallel.sequence and drop_path_rate:
            raise ValueError(
                f"drop_path_rate={drop_path_rate} with sequence_parallel=True is not supported: each rank would drop "
                "other samples; pass drop_path_rate=0.0, or sequence_parallel=False"
            )
        everywhere = {name: given[name] for name in _EVERYWHERE}
        everywhere |= {name: value for name, value in parallel.items() if name in _SHARDING}
        everywhere["return_layernorm_output"] = apply_residual_connection_post_layernorm
        attention = {name: given[name] for name in _OF_ATTENTION} | everywhere | {"qkv_format": attn_input_format}
        own = {"return_layernorm_output": apply_residual_connection_post_layernorm and not output_layernorm}
        self.self_attention = MultiheadAttention(
            **(attention | own),
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                **attention,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                input_layernorm=True,
                attention_type="cross",
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            **everywhere,
        )
        self.layernorm = None
        if output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(
                hidden_size,
                layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                params_dtype=params_dtype,
                device=device,
                sequence_parallel=self.tensor_parallel.sequence,
            )
            self.layernorm.tensor_parallel = self.tensor_parallel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Mask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Mask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        **call: Unpack[AttentionArguments],
    ) -> Tensor:
        """``[s, b, hidden_size]`` (``sbhd``), ``[b, s, hidden_size]`` or ``[t, hidden_size]`` to the same shape.

        Under torch.autocast ``hidden_states`` is cast to autocast's dtype first, as in Transformer Engine, so the
        residual stream takes half of the memory. torch's own layers keep it in float32: for that, add the outputs of
        ``MultiheadAttention`` and ``LayerNormMLP`` to a float32 stream yourself.

        Args:
            hidden_states: a bfloat16, float16 or float32 tensor.
            attention_mask: the mask of self attention; True is masked out.
            encoder_output: the input of a decoder's cross attention, in the format of ``hidden_states``.
            enc_dec_attn_mask: the mask of cross attention. An encoder warns if it gets an ``enc_dec`` argument.
            self_attn_mask_type, window_size, bottom_right_diagonal, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: None uses the constructor's value.
            call: :class:`lightning_fp8.transformer.AttentionArguments`. Both attentions get these arguments, as
                in Transformer Engine. In self attention, the lengths of the queries are also those of the keys.

        Raises:
            ValueError, TypeError: If an argument is invalid; the message names the valid values.
        """
        check_call("TransformerLayer", call)
        check_encoder_output("layer_type", self.layer_type, "decoder", encoder_output)
        if enc_dec_attn_mask_type is not None:
            mask_type(enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        checked_window(enc_dec_window_size)
        require_bools_or_none(enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal)
        crossing = {
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_dec_attn_mask_type": enc_dec_attn_mask_type,
            "enc_dec_window_size": enc_dec_window_size,
            "enc_dec_bottom_right_diagonal": enc_dec_bottom_right_diagonal,
        }
        unused = [name for name, value in crossing.items() if value is not None and self.layer_type == "encoder"]
        if unused:
            tell(
                f"{' and '.join(unused)} has no effect: layer_type='encoder' has no cross attention; leave them out, "
                "or construct the layer with layer_type='decoder'"
            )
        if isinstance(hidden_states, Tensor) and (dtype := autocast_dtype(hidden_states.device.type)) is not None:
            hidden_states = hidden_states.to(dtype)
        is_first_microbatch = call.get("is_first_microbatch")
        cu_seqlens, padded = call.get("cu_seqlens_q"), call.get("cu_seqlens_q_padded")
        starts = cu_seqlens if padded is None else padded
        own: AttentionArguments = {
            **call,
            "cu_seqlens_kv": cu_seqlens,
            "cu_seqlens_kv_padded": padded,
            "max_seqlen_kv": call.get("max_seqlen_q"),
        }
        attended = self.self_attention(
            hidden_states, attention_mask, None, self_attn_mask_type, window_size, bottom_right_diagonal, **own
        )
        drop_path = self.drop_path_rate
        if self.parallel_attention_mlp:
            both = attended + self.layernorm_mlp(hidden_states, is_first_microbatch)
            return self._add(hidden_states, both, drop_path, starts)
        x = self._add(hidden_states, attended, drop_path, starts)
        if self.layer_type == "decoder":
            crossed = self.inter_attention(
                x,
                enc_dec_attn_mask,
                encoder_output,
                enc_dec_attn_mask_type,
                enc_dec_window_size,
                enc_dec_bottom_right_diagonal,
                **call,
            )
            x = self._add(x, crossed, 0.0, starts)
        x = self._add(x, self.layernorm_mlp(x, is_first_microbatch), drop_path, starts)
        return x if self.layernorm is None else self.layernorm(x)

    def _add(
        self, x: Tensor, branch: Tensor | tuple[Tensor, Tensor], drop_path: float, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Add the branch to ``x``, or to the output of the branch's norm if the branch returns it."""
        if isinstance(branch, tuple):
            branch, x = branch
        if self.training:
            branch = F.dropout(branch, self.hidden_dropout) if self.hidden_dropout else branch
            if drop_path:
                branch = branch * _kept_samples(branch, drop_path, self.self_attention.qkv_format, cu_seqlens)
        return x + branch

    def extra_repr(self) -> str:
        return f"layer_type={self.layer_type!r}, hidden_dropout={self.hidden_dropout}"


def _kept_samples(x: Tensor, drop_path: float, qkv_format: str, cu_seqlens: Tensor | None) -> Tensor:
    """For each sample, 0 or one over the probability to keep it; broadcastable to ``x``.

    A sample is a sequence of the batch; all rows of ``"thd"`` without ``cu_seqlens``, the starts of its sequences, are
    one. Source: Huang et al., *Deep Networks with Stochastic Depth*, arXiv:1603.09382.
    """
    if qkv_format == "thd":
        samples = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    else:
        samples = x.shape[1 if qkv_format == "sbhd" else 0]
    kept = torch.empty(samples, dtype=x.dtype, device=x.device).bernoulli_(1 - drop_path)
    if drop_path < 1:
        kept = kept / (1 - drop_path)
    if qkv_format == "sbhd":
        return kept[:, None]
    if qkv_format == "bshd":
        return kept[:, None, None]
    if cu_seqlens is None:
        return kept[:, None]
    row = torch.arange(len(x), device=x.device)
    return kept[sequence_of(row, cu_seqlens.to(x.device))][:, None]
