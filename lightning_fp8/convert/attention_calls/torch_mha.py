"""``nn.MultiheadAttention`` under torch.compile, which does not trace into the function that computes it."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_KEPT_WHOLE: Any = F.multi_head_attention_forward


def _looked_into() -> Any:
    """A copy of torch's function that Dynamo does not recognize, so that it traces into the copy."""
    code = _KEPT_WHOLE.__code__.replace(co_filename=__file__)
    found = FunctionType(code, _KEPT_WHOLE.__globals__, argdefs=_KEPT_WHOLE.__defaults__)
    found.__kwdefaults__ = _KEPT_WHOLE.__kwdefaults__
    return found


_multi_head_attention_forward = _looked_into()


def computes_as_torch(cls: type[nn.Module]) -> bool:
    """Whether :func:`forward` is equivalent to the forward of ``cls``."""
    return issubclass(cls, nn.MultiheadAttention) and cls.forward is nn.MultiheadAttention.forward


def forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of ``nn.MultiheadAttention``, with the same arguments and results."""
    hides = key_padding_mask is not None or (attn_mask is not None and not is_causal)
    may_be_fast = not module.training and key is query
    if hides or need_weights or may_be_fast:  # these do not run in FP8 without torch.compile either
        return nn.MultiheadAttention.forward(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    turned = module.batch_first and query.dim() == 3
    if turned:  # keep equal tensors identical: torch projects one tensor in one product, three tensors in three
        keys_are_queries, values_are_keys = key is query, value is key
        query = query.transpose(1, 0)
        key = query if keys_are_queries else key.transpose(1, 0)
        value = key if values_are_keys else value.transpose(1, 0)
    o, weights = _multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        module.out_proj.weight,
        module.out_proj.bias,
        training=module.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    return o.transpose(1, 0) if turned else o, weights
