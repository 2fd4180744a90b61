"""What to use instead of names of Transformer Engine that do not exist here, as data.

The names are those of ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe`` in 2.20, and of other
modules that its users import.
"""

from __future__ import annotations

_FOUR_BITS = "no recipe casts to four bits; the nearest is MXFP8BlockScaling"
_QUANTIZERS = (
    "a recipe sets the cast of each tensor, and layers cast it; torch.ops.lightning_fp8.quantize casts a tensor"
)
_WEIGHTS = "weights in FP8 are made by fp8_model_init, and are tensors of lightning_fp8.weights.fp8_tensor"
_EXPERTS = (
    "use a class of transformers' experts, whose 3-D weights run in FP8 once converted, or a ModuleList of Linear"
)
_OVERLAP = "collectives of tensor parallelism do not overlap with GEMMs chunk by chunk; leave it out"
_OFFLOAD = "use torch.autograd.graph.save_on_cpu around the forward"
_GLU = "gate and up are the halves of fc1's rows; torch.chunk and torch.cat give them"
_OPTIMIZERS = "use torch.optim.AdamW(fused=True); for weights in FP8 lightning_fp8.with_master_weights(optimizer)"
_OPERATIONS = "use LayerNormLinear and LayerNormMLP, which fuse a norm and an activation with their casts"
_STATE = (
    "there is no global state: the recipe is an argument of fp8_autocast, and scales are in "
    "lightning_fp8.fp8_state_dict(model)"
)
_INTERNAL = "it is internal to Transformer Engine; leave it out"

RECIPE = {
    "CustomRecipe": _QUANTIZERS,
    "NVFP4BlockScaling": _FOUR_BITS,
    "QParams": "power_2_scale and amax_epsilon are fields of Float8CurrentScaling; leave the others out",
}
"""Names of ``common.recipe``."""

STATE = {
    **RECIPE,
    **dict.fromkeys(("FP8GlobalStateManager", "FP8GlobalState", "RecipeState"), _STATE),
    **dict.fromkeys(
        ("check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support"),
        "use is_fp8_available(return_reason=True), and the like for other recipes",
    ),
    "get_default_fp8_recipe": "use get_default_recipe()",
    "check_recipe_support": "every recipe is supported everywhere; is_fp8_available() is about FP8 tensor cores",
    "get_fp8_torch_dtype": "recipe.cast(role).float8.dtype is the dtype of a tensor's role",
    "get_fp8_max": "recipe.fp8_format.value.max_fwd and max_bwd are the largest values",
    "get_align_size_for_quantization": "sizes need no alignment; leave the padding out",
}
"""Names of ``pytorch.quantization`` and ``pytorch.fp8``."""

PYTORCH = {
    "GroupedLinear": _EXPERTS,
    **dict.fromkeys(("Fp8Padding", "Fp8Unpadding"), "sizes need no alignment; leave the padding out"),
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _OVERLAP),
    "FusedMLAQUpProjRopeQuant": "use LayerNormLinear, RotaryPositionEmbedding and DotProductAttention",
    **dict.fromkeys(
        (
            *("moe_permute", "moe_permute_with_probs", "moe_permute_and_pad_with_probs", "moe_unpermute"),
            *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
        ),
        "use torch.argsort and torch.index_select",
    ),
    **dict.fromkeys(("QuantizerRole", "QuantizerRequest", "DelayedScalingRequest"), _QUANTIZERS),
    "get_cudnn_version": "cuDNN is not used; torch.backends.cudnn.version() is torch's",
    "get_device_compute_capability": "use torch.cuda.get_device_capability()",
    "is_bf16_available": "use torch.cuda.is_bf16_supported()",
    **dict.fromkeys(("deinterleave_glu_tensor", "interleave_glu_tensor"), _GLU),
    "CudaRNGStatesTracker": "get_rng_state_tracker takes Megatron-LM's, or any with get_states and set_states",
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOAD),
    "parallel_cross_entropy": "use torch.distributed.tensor.parallel.loss_parallel",
    **dict.fromkeys(("CusolverMpCtx", "newton_schulz"), "use torch.optim.Muon"),
    **dict.fromkeys(
        (
            *("Quantizer", "Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer"),
            *("Float8BlockQuantizer", "HybridQuantizer", "IdentityQuantizer"),
            *("prepare_for_saving", "restore_from_saved", "restore_from_func_ctx"),
        ),
        _QUANTIZERS,
    ),
    **dict.fromkeys(
        (
            *("QuantizedTensor", "QuantizedTensorStorage", "Float8Tensor", "Float8TensorStorage", "MXFP8Tensor"),
            *("MXFP8TensorStorage", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"),
            *("HybridQuantizedTensor", "HybridQuantizedTensorStorage", "IdentityTensor", "IdentityTensorStorage"),
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"), _FOUR_BITS),
    "DType": "dtypes are torch's: torch.float8_e4m3fn and torch.float8_e5m2",
}
"""Names of ``pytorch``."""

MODULES = {
    "constants": "dtypes and groups are torch's own",
    "cpp_extensions": "the operations are torch.ops.lightning_fp8's",
    "cpu_offload": _OFFLOAD,
    "cpu_offload_v1": _OFFLOAD,
    "cross_entropy": PYTORCH["parallel_cross_entropy"],
    "custom_recipes": _QUANTIZERS,
    **dict.fromkeys(("_extra_state", "distributed_weight", "dynamo"), _INTERNAL),
    "ep": "use transformers' expert parallelism, whose experts run in FP8; tokens are sent in high precision",
    "float8_tensor": _WEIGHTS,
    "jit": _INTERNAL,
    "numerics_debug": "lightning_fp8.FP8Monitor records what casts lose",
    "onnx_extensions": "use onnx_export, as docs/onnx.md shows",
    "ops": _OPERATIONS,
    "optimizers": _OPTIMIZERS,
    "permutation": PYTORCH["moe_permute"],
    "quantized_tensor": _WEIGHTS,
    "router": "use torch.topk and torch.softmax",
    "tensor": _WEIGHTS,
    "torch_version": _INTERNAL,
    "triton": _INTERNAL,
    "utils": _INTERNAL,
}
"""Modules of ``pytorch`` whose names do not exist here."""

NAMES = {
    **{**PYTORCH, **STATE},
    # attention
    "apply_fused_qkv_rotary_pos_emb": "split the tensor, and call apply_rotary_pos_emb of queries and of keys",
    **dict.fromkeys(
        ("KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"),
        "InferenceParams keeps keys and values, without pages; leave it out",
    ),
    **dict.fromkeys(
        ("get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp", "generate_positional_ids_for_cp"),
        "use lightning_fp8.get_batch_on_this_cp_rank, for sequences of one length",
    ),
    # distributed
    "activation_recompute_forward": "checkpoint() needs no context around it; leave it out",
    "gather_split_1d_tensor": "checkpoint(distribute_saved_activations=True) distributes and gathers; leave it out",
    # export
    "te_translation_table": "use lightning_fp8.export.translation_table, as docs/onnx.md shows",
    # module
    "TransformerEngineBaseModule": "test for Linear, LayerNormLinear, LayerNormMLP and DotProductAttention",
}
"""Names of the modules of ``pytorch``, of which each answers all: versions of Transformer Engine move them."""

_INSIDE = {
    "attention": "custom_ops fused_mla_q_uproj",
    "attention.dot_product_attention": "backends context_parallel flex_attention softmax utils",
    "cpp_extensions": "fused_attn gemm",
    "custom_recipes": "gemm quantizer_factories quantizer_factory_zoo reference_current_scaling reference_nvfp4 "
    "reference_utils",
    "dynamo": "quantizer_opaque tensor_spec",
    "module": "_common _split_quantization base fp8_padding fp8_unpadding grouped_linear",
    "ops": "_common basic fused fuser linear op sequential",
    "ops.basic": "activation add_extra_input all_gather all_reduce basic_linear bias constant_scale dropout "
    "grouped_linear identity l2normalization layer_norm make_extra_output quantize reduce_scatter reshape rmsnorm "
    "swiglu",
    "ops.fused": "backward_activation_bias backward_add_rmsnorm backward_linear_add backward_linear_scale "
    "forward_linear_bias_activation forward_linear_bias_add forward_linear_scale_add grouped_mlp "
    "userbuffers_backward_linear userbuffers_forward_linear",
    "optimizers": "fused_adam fused_sgd multi_tensor_apply",
    "tensor": "_quantization_helpers float8_blockwise_tensor float8_tensor grouped_tensor hybrid_tensor "
    "identity_tensor mxfp8_tensor nvfp4_tensor quantized_tensor storage utils",
    "tensor.storage": "float8_blockwise_tensor_storage float8_tensor_storage grouped_tensor_storage "
    "hybrid_tensor_storage identity_tensor_storage mxfp8_tensor_storage nvfp4_tensor_storage",
    "triton": "cross_entropy grouped_dbias_dscales mhc pad permutation",
}

ABSENT_MODULES = MODULES | {
    f"{package}.{name}": MODULES.get(package.partition(".")[0], _INTERNAL)
    for package, names in _INSIDE.items()
    for name in names.split()
}
"""All modules of ``pytorch``, by their paths, whose names do not exist here; a package is before its modules."""
