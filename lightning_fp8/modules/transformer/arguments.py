"""What MultiheadAttention and TransformerLayer are told, in Transformer Engine's words, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from lightning_fp8.arguments import require_positive
from lightning_fp8.attention.modules.arguments import Sizes, sizes_of
from lightning_fp8.modules.transformer.inference import InferenceParams

Mask = Tensor | tuple[Tensor, Tensor]


class AttentionArguments(TypedDict, total=False):
    """Arguments of a forward that all attention of a layer is called with.

    Attributes:
        is_first_microbatch: as :class:`lightning_fp8.Linear` has it: True casts weights and keeps the copies, False
            uses them again.
        checkpoint_core_attention: keep only q, k and v for the backward pass, and compute attention again there.
        inference_params: keys and values of earlier rows, under ``torch.no_grad()``.
        rotary_pos_emb: angles float32 ``[positions, 1, 1, channels]`` of queries and keys, or a pair, one for each.
        core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"``, ``"post_scale_bias"`` or ``"alibi"``.
        core_attention_bias: broadcastable to ``[b, h, sq, skv]``.
        alibi_slopes: float32 ``[h]`` or ``[b, h]``; None is the paper's.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: as
            :class:`lightning_fp8.DotProductAttention` has them. With ``inference_params`` theirs count.
        max_seqlen_q, max_seqlen_kv: as :class:`lightning_fp8.DotProductAttention` has them; not used with
            ``inference_params``.
        fast_zero_fill, pad_between_seqs: taken, and not needed.
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
    """The mask type of a step's queries over the keys of all steps, of which the newest are the queries' own.

    Args:
        attn_mask_type, attention_mask: what the layer is called with.
        padded: the step says lengths, by ``cu_seqlens``.

    Raises:
        ValueError: a mask tensor that does not go with lengths that the step says.
    """
    if attn_mask_type == "arbitrary" and not padded:
        return attn_mask_type
    if attention_mask is not None or attn_mask_type == "arbitrary":
        raise ValueError(
            f"inference_params say how long sequences are: pass no attention_mask with {attn_mask_type=}; 'arbitrary' "
            "takes one where all sequences are of one length"
        )
    causal = "causal" in attn_mask_type
    if padded:
        return "padding_causal_bottom_right" if causal else "padding"
    return "causal_bottom_right" if causal else "no_mask"


def check_call(layer_name: str, call: Mapping[str, Any]) -> None:
    """Raises:
    TypeError: an argument that :class:`AttentionArguments` does not have, or of another type.
    """
    if unknown := [name for name in call if name not in AttentionArguments.__annotations__]:
        raise TypeError(f"{layer_name}.forward got an unexpected keyword argument {unknown[0]!r}")
    params = call.get("inference_params")
    if params is not None and not isinstance(params, InferenceParams):
        raise TypeError(f"inference_params is {type(params).__name__}; make it of lightning_fp8.InferenceParams")


def angles_of_both(rotary_pos_emb: Any) -> tuple[Any, Any]:
    """The angles of queries and those of keys.

    Raises:
        ValueError: a sequence that is no pair.
    """
    if not isinstance(rotary_pos_emb, (tuple, list)):
        return rotary_pos_emb, rotary_pos_emb
    if len(rotary_pos_emb) != 2:
        raise ValueError(
            f"rotary_pos_emb is a sequence of {len(rotary_pos_emb)}; pass the angles, or a pair: of queries and of keys"
        )
    of_q, of_k = rotary_pos_emb
    return of_q, of_k


def check_encoder_output(argument: str, value: str, crossing: str, encoder_output: object) -> None:
    """Check that ``encoder_output`` comes where ``argument`` is ``crossing``, and only there.

    Raises:
        ValueError: it is missing, or there is nothing that looks at it.
    """
    if (value == crossing) != (encoder_output is not None):
        wrong = "needs encoder_output" if encoder_output is None else f"takes no encoder_output; pass {crossing!r}"
        raise ValueError(f"{argument}={value!r} {wrong}")


def head_sizes(
    hidden_size: int, num_attention_heads: int, kv_channels: int | None, num_gqa_groups: int | None
) -> Sizes:
    """Heads, groups and channels; ``hidden_size / num_attention_heads`` channels where ``kv_channels`` is None.

    Raises:
        ValueError: a number that is not positive, or that another does not divide.
    """
    require_positive("hidden_size", hidden_size)
    if kv_channels is None and isinstance(num_attention_heads, int) and num_attention_heads > 0:
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} does not divide hidden_size={hidden_size}; pass kv_channels"
            )
        kv_channels = hidden_size // num_attention_heads
    return sizes_of(num_attention_heads, kv_channels, num_gqa_groups)
