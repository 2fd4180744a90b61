"""The arguments of MultiheadAttention and TransformerLayer, with Transformer Engine's names, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from lightning_fp8.arguments import require_positive
from lightning_fp8.attention.modules.arguments import Sizes, sizes_of
from lightning_fp8.transformer.inference import InferenceParams

Mask = Tensor | tuple[Tensor, Tensor]


class AttentionArguments(TypedDict, total=False):
    """The arguments of a forward that are passed on to all attention modules of a layer.

    Attributes:
        is_first_microbatch: see :class:`lightning_fp8.Linear`: True casts weights and caches the copies, False uses
            the cached copies.
        checkpoint_core_attention: save only q, k and v for the backward pass, and recompute attention there.
        inference_params: the cache of keys and values, under ``torch.no_grad()``.
        rotary_pos_emb: angles float32 ``[positions, 1, 1, channels]``, or a pair of them for queries and keys.
        core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"``, ``"post_scale_bias"`` or ``"alibi"``.
        core_attention_bias: broadcastable to ``[b, h, sq, skv]``.
        alibi_slopes: float32 ``[h]`` or ``[b, h]``; None uses the slopes of the paper.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: see
            :class:`lightning_fp8.DotProductAttention`. ``inference_params`` overrides them.
        max_seqlen_q, max_seqlen_kv: see :class:`lightning_fp8.DotProductAttention`; ignored with
            ``inference_params``.
        fast_zero_fill, pad_between_seqs: accepted and ignored.
    """

    is_first_microbatch: bool | None
    checkpoint_core_attention: bool
    inference_params: InferenceParams | None
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None
    core_attention_bias_type: str
    core_attention_bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    fast_zero_fill: bool
    pad_between_seqs: bool | None


def mask_type_over_cache(attn_mask_type: str, attention_mask: Mask | None, padded: bool) -> str:
    """The mask type for the queries of one step and the keys of all steps. The last keys belong to the queries.

    Args:
        attn_mask_type, attention_mask: the layer's arguments.
        padded: whether the step has ``cu_seqlens``.

    Raises:
        ValueError: If there are both a mask tensor and ``cu_seqlens``.
    """
    if attn_mask_type == "arbitrary" and not padded:
        return attn_mask_type
    if attention_mask is not None or attn_mask_type == "arbitrary":
        raise ValueError(
            f"attention_mask with {attn_mask_type=} is not supported with inference_params, which hold the lengths of "
            "the sequences: leave it out, or pass attn_mask_type='arbitrary' if all sequences have the same length"
        )
    causal = "causal" in attn_mask_type
    if padded:
        return "padding_causal_bottom_right" if causal else "padding"
    return "causal_bottom_right" if causal else "no_mask"


def check_call(layer_name: str, call: Mapping[str, Any]) -> None:
    """Raises:
    TypeError: If an argument is not in :class:`AttentionArguments`, or has the wrong type.
    """
    if unknown := [name for name in call if name not in AttentionArguments.__annotations__]:
        raise TypeError(f"{layer_name}.forward got an unexpected keyword argument {unknown[0]!r}")
    params = call.get("inference_params")
    if params is not None and not isinstance(params, InferenceParams):
        raise TypeError(f"inference_params is {type(params).__name__}; pass a lightning_fp8.InferenceParams")


def angles_of_both(rotary_pos_emb: Any) -> tuple[Any, Any]:
    """The angles of the queries, and the angles of the keys.

    Raises:
        ValueError: If ``rotary_pos_emb`` is a sequence, but not of two.
    """
    if not isinstance(rotary_pos_emb, (tuple, list)):
        return rotary_pos_emb, rotary_pos_emb
    if len(rotary_pos_emb) != 2:
        raise ValueError(
            f"rotary_pos_emb is a sequence of {len(rotary_pos_emb)}; pass one tensor of angles, or a pair for "
            "queries and keys"
        )
    return rotary_pos_emb[0], rotary_pos_emb[1]


def check_encoder_output(argument: str, value: str, crossing: str, encoder_output: object) -> None:
    """Check that ``encoder_output`` is passed if and only if ``argument`` is ``crossing``.

    Raises:
        ValueError: If it is missing, or if the layer does not use it.
    """
    if (value == crossing) != (encoder_output is not None):
        wrong = "needs encoder_output" if encoder_output is None else f"does not use encoder_output; pass {crossing!r}"
        raise ValueError(f"{argument}={value!r} {wrong}")


def head_sizes(
    hidden_size: int, num_attention_heads: int, kv_channels: int | None, num_gqa_groups: int | None
) -> Sizes:
    """Heads, groups and channels. ``kv_channels=None`` is ``hidden_size / num_attention_heads``.

    Raises:
        ValueError: If a number is not positive, or not divisible as it must be.
    """
    require_positive("hidden_size", hidden_size)
    if kv_channels is None and isinstance(num_attention_heads, int) and num_attention_heads > 0:
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} does not divide hidden_size={hidden_size}; pass kv_channels"
            )
        kv_channels = hidden_size // num_attention_heads
    return sizes_of(num_attention_heads, kv_channels, num_gqa_groups)
