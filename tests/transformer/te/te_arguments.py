"""Transformer Engine's documented arguments, 1.x and the newest, and what becomes of each here.

A value is accepted; where a reason stands beside it, it is refused with that reason. Names that are positional, which
every call of the tests has, are not among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import DelayedScaling, InferenceParams, RotaryPositionEmbedding

GROUP = object()
NOT_OVERLAPPED = "do not overlap with GEMMs"


def constant(weight: Tensor) -> None:
    weight.fill_(0.5)


class Refused:
    """A value that is refused, with what the message says."""

    def __init__(self, value: Any, reason: str, error: type[Exception] = NotImplementedError) -> None:
        self.value, self.reason, self.error = value, reason, error


ACTIVATIONS = ("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "squared_relu", "srelu", "sreglu", "silu")

PARALLEL = {
    "sequence_parallel": [False, True],
    "tp_group": [None, Refused(GROUP, "must be a process group", TypeError)],
    "tp_size": [1, 2, Refused(0, "tp_size=0 must be a positive integer", ValueError)],
    "get_rng_state_tracker": [None],
    "name": ["layers.0"],
}
COLUMN_OR_ROW = {
    "parallel_mode": [None, "column", "row", Refused("both", "use one of 'column', 'row'", ValueError)],
    "symmetric_ar_type": [None, Refused("one_shot", "torch.distributed's all_reduce")],
    "ub_name": ["qkv"],
    "delay_wgrad_compute": [False, True],
    "rng_tracker_name": ["model-parallel-rng"],
    "skip_weight_param_allocation": [Refused(False, "was removed from Transformer Engine", TypeError)],
}
OVERLAP = {
    name: [False, Refused(True, NOT_OVERLAPPED)]
    for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
}
OPTIMIZATION = {
    "params_dtype": [torch.bfloat16],
    "device": ["cpu"],
    "init_method": [None, constant],
}
WITH_BIAS = {"bias": [True, False], "return_bias": [True], "fuse_wgrad_accumulation": [True]}
NORM = {
    "normalization": ["LayerNorm", "RMSNorm"],
    "zero_centered_gamma": [True],
    "return_layernorm_output": [True],
}
SPLIT = {"parameters_split": [("query", "key"), ("query_", "key_"), {"query": 16, "key": 16}]}
ATTENTION = {
    "num_gqa_groups": [None, 2, 1],
    "kv_channels": [None, 24],
    "attention_dropout": [0.0, 0.5],
    "layer_number": [None, 3, Refused(-3, "layer_number=-3 must be a positive integer", ValueError)],
    "window_size": [None, (4, 0)],
    "bottom_right_diagonal": [None, False, True],
    "softmax_type": ["vanilla", "off-by-one", "learnable"],
}
MULTIHEAD = {
    **ATTENTION,
    "layernorm_epsilon": [1e-3],
    "output_layer_init_method": [None, constant],
    "fuse_qkv_params": [False, True],
    "qkv_weight_interleaved": [True, False],
    "rotary_pos_interleaved": [True],
    "qk_norm_type": [None, "L2Normalization", "RMSNorm", "LayerNorm"],
    "qk_norm_eps": [1e-3, Refused("a", "qk_norm_eps='a' must be a number", TypeError)],
    "qk_norm_before_rope": [True],
    "seq_length": [128, Refused("abc", "seq_length='abc' must be a positive integer", ValueError)],
    "micro_batch_size": [2, Refused(-3, "micro_batch_size=-3 must be a positive integer", ValueError)],
    "set_parallel_mode": [False, True],
    "fuse_wgrad_accumulation": [False, Refused(True, "needs fuse_qkv_params=True", ValueError)],
    **{name: NORM[name] for name in ("normalization", "zero_centered_gamma")},
    **OPTIMIZATION,
    **PARALLEL,
}

CONSTRUCTORS: dict[str, dict[str, list[Any]]] = {
    "Linear": {**WITH_BIAS, **SPLIT, **OPTIMIZATION, **PARALLEL, **COLUMN_OR_ROW, **OVERLAP},
    "LayerNorm": {"eps": [1e-3], "zero_centered_gamma": [True], "params_dtype": [torch.bfloat16]}
    | {"sequence_parallel": PARALLEL["sequence_parallel"], "device": ["cpu"]},
    "LayerNormLinear": {"eps": [1e-3], **WITH_BIAS, **SPLIT, **NORM, **OPTIMIZATION, **PARALLEL, **COLUMN_OR_ROW}
    | {**OVERLAP, "return_layernorm_output_gathered": [False, True]},
    "LayerNormMLP": {"eps": [1e-3], **WITH_BIAS, **NORM, **OPTIMIZATION, **PARALLEL, **OVERLAP}
    | {
        "activation": [
            *ACTIVATIONS,
            *("swiglu", "clamped_swiglu"),
            Refused("mish", "activation='mish' is unknown", ValueError),
        ],
        "output_layer_init_method": [None, constant],
        "set_parallel_mode": MULTIHEAD["set_parallel_mode"],
        "seq_length": [128, Refused(0, "seq_length=0 must be a positive integer", ValueError)],
        "micro_batch_size": [2],
    },
    "MultiheadAttention": {
        **MULTIHEAD,
        **OVERLAP,
        "attn_mask_type": ["causal", "no_mask", "causal_bottom_right"],
        "normalization": ["RMSNorm", Refused("foo", "normalization='foo' is unknown; use one of", ValueError)],
        "return_bias": [True],
        "return_layernorm_output": [Refused(True, "needs input_layernorm=True", ValueError)],
        "input_layernorm": [True],
        "attention_type": ["self", Refused("both", "use one of 'self', 'cross'", ValueError)],
        "bias": [False],
        "qkv_format": ["sbhd", "bshd"],
    },
    "TransformerLayer": {
        **MULTIHEAD,
        "hidden_dropout": [0.0, 0.5],
        "self_attn_mask_type": ["causal", "no_mask", "causal_bottom_right"],
        "enc_dec_attn_mask_type": [
            *("no_mask", "causal", "padding", "arbitrary"),
            Refused("foo", "enc_dec_attn_mask_type='foo' is unknown; use one of", ValueError),
        ],
        "enc_dec_window_size": [None, (4, 4)],
        "enc_dec_bottom_right_diagonal": [None, True],
        "apply_residual_connection_post_layernorm": [True],
        "output_layernorm": [True],
        "parallel_attention_mlp": [True],
        "layer_type": ["encoder", Refused("both", "use one of 'encoder', 'decoder'", ValueError)],
        "drop_path_rate": [0.0, 0.5],
        "ub_tp_comm_overlap": [False, Refused(True, NOT_OVERLAPPED)],
        **{name: [True, False] for name in OVERLAP},
        "bias": [False],
        "activation": ["gelu", "relu", "reglu", "geglu", "swiglu"],
        "activation_params": [None, Refused({"limit": 7.0}, "'gelu' has no activation_params", ValueError)],
        "attn_input_format": ["sbhd", "bshd"],
        "attention_softmax_in_fp32": [Refused(True, "softmax is computed in float32", TypeError)],
        "apply_query_key_layer_scaling": [Refused(True, "scores are scaled once", TypeError)],
    },
}
CONSTRUCTORS["RMSNorm"] = CONSTRUCTORS["LayerNorm"]
CONSTRUCTORS["DotProductAttention"] = {
    **{name: ATTENTION[name] for name in ATTENTION if name != "kv_channels"},
    **{name: PARALLEL[name] for name in ("get_rng_state_tracker", "name", "tp_size", "tp_group")},
    "attn_mask_type": [
        *("causal", "no_mask", "padding", "arbitrary"),
        Refused("both", "is unknown; use one of", ValueError),
    ],
    "bottom_right_diagonal": [None, True, Refused("no", "must be True or False", TypeError)],
    "sequence_parallel": [False, True],
    "cp_group": [None, Refused(GROUP, "pass a torch.distributed.ProcessGroup", TypeError)],
}

_BIAS = torch.zeros(1, 4, 6, 6)
CALL: dict[str, list[Any]] = {
    "is_first_microbatch": [None, True, False],
    "checkpoint_core_attention": [
        False,
        True,
        Refused("x", "checkpoint_core_attention='x' must be True or False", TypeError),
    ],
    "inference_params": [
        None,
        InferenceParams(2, 6),
        Refused({}, "pass a lightning_fp8.InferenceParams", TypeError),
    ],
    "rotary_pos_emb": [
        None,
        RotaryPositionEmbedding(8)(6),
        (RotaryPositionEmbedding(8)(6), RotaryPositionEmbedding(4)(9)),
        Refused(5, "rotary_pos_emb=5 must be a tensor of angles .*RotaryPositionEmbedding", TypeError),
        Refused((RotaryPositionEmbedding(8)(6),) * 3, "a sequence of 3; pass one tensor", ValueError),
    ],
    "core_attention_bias_type": [
        "no_bias",
        "alibi",
        Refused("post_scale_bias", "with no core_attention_bias", ValueError),
        Refused("bias", "use one of 'no_bias', 'pre_scale_bias', 'post_scale_bias', 'alibi'", ValueError),
    ],
    "core_attention_bias": [None, Refused(_BIAS, "pass 'post_scale_bias'", ValueError)],
    "alibi_slopes": [None, Refused(torch.ones(4), "pass 'alibi'", ValueError)],
    "cu_seqlens_q": [None],
    "cu_seqlens_kv": [None],
    "cu_seqlens_q_padded": [None],
    "cu_seqlens_kv_padded": [None],
    "max_seqlen_q": [None, 6, Refused("junk", "max_seqlen_q='junk' must be an integer", TypeError)],
    "max_seqlen_kv": [None, 6],
    "fast_zero_fill": [True, False, Refused(3, "fast_zero_fill=3 must be True or False", TypeError)],
    "pad_between_seqs": [None, False, Refused("z", "pad_between_seqs='z' must be True or False", TypeError)],
    "window_size": [None, (2, 0)],
    "bottom_right_diagonal": [None, True],
    "attention_mask": [None],
    "encoder_output": [None, Refused(torch.zeros(6, 2, 32), "does not use encoder_output; pass", ValueError)],
    "score": [Refused(1, "unexpected keyword argument 'score'", TypeError)],
}
LINEAR_CALL: dict[str, list[Any]] = {
    "is_first_microbatch": [None, True],
    "fp8_output": [False, Refused(True, "the output is in high precision")],
    "fp8_grad": [False, Refused(True, "the gradient of the input is in high precision")],
    "weight": [None, Refused(torch.zeros(2, 3), r"weight=a tensor \[2, 3\] is not supported: .* has its own weight")],
    "bias": [None, Refused(torch.zeros(3), "a layer has its own bias")],
}
FORWARDS: dict[str, dict[str, list[Any]]] = {
    "MultiheadAttention": {
        **CALL,
        "attn_mask_type": ["no_mask", Refused("both", "is unknown; use one of", ValueError)],
    },
    "TransformerLayer": {
        **CALL,
        "self_attn_mask_type": ["no_mask", Refused("both", "is unknown; use one of", ValueError)],
        "enc_dec_attn_mask": [None],
        "enc_dec_attn_mask_type": [None, "padding", Refused("foo", "enc_dec_attn_mask_type='foo' is", ValueError)],
        "enc_dec_window_size": [None, (2, 2), Refused("junk", "window_size='junk' must be", ValueError)],
        "enc_dec_bottom_right_diagonal": [None, True, Refused("no", "must be True or False", TypeError)],
    },
    "LayerNormLinear": LINEAR_CALL,
    "LayerNormMLP": {"is_first_microbatch": [None, True]},
    "Linear": LINEAR_CALL,
    "DotProductAttention": {
        **{
            name: CALL[name] for name in CALL if name not in ("is_first_microbatch", "rotary_pos_emb", "encoder_output")
        },
        "inference_params": [None, Refused(InferenceParams(2, 6), "MultiheadAttention keeps keys")],
        "core_attention_bias": [None, Refused(_BIAS, "pass 'post_scale_bias'", ValueError)],
        "bottom_right_diagonal": [None, False, Refused("no", "must be True or False", TypeError)],
    },
}
FUNCTIONS: dict[str, dict[str, list[Any]]] = {
    "fp8_autocast": {
        "enabled": [True, False, Refused("no", "must be True or False", TypeError)],
        "calibrating": [False, True],
        "fp8_recipe": [None, DelayedScaling(), "mxfp8"],
        "fp8_group": [None, Refused(GROUP, "fp8_group", TypeError)],
    },
    "onnx_export": {"enabled": [True, False]},
    "checkpoint": {
        "function": [dict, Refused(3, "function=3 cannot be called", TypeError)],
        "distribute_saved_activations": [False, Refused(True, "pass tp_group", ValueError)],
        "get_cuda_rng_tracker": [None, Refused(object, "has no get_states and set_states", TypeError)],
        "tp_group": [None],
    },
}
