"""What to use instead of names of Transformer Engine that do not exist here, as data.

The names are those of ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe`` in 2.20, and of other
modules that its users import.
"""

from __future__ import annotations

_FOUR_BITS = "no recipe casts to four bits; the nearest is MXFP8BlockScaling"
_QUANTIZERS = (
    "a recipe sets the cast of each tensor, and layers cast it; torch.ops.lightning_fp8.quantize casts a tensor"
)
_WEIGHTS = "weights in FP8 are made by fp8_model_init, and are tensors of lightning_fp8.fp8_tensor"
_EXPERTS = "write the experts as a ModuleList of Linear, whose products run one after the other"
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
    "make_graphed_callables": "capture the training step with torch.cuda.graph",
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
    "cross_entropy": PYTORCH["parallel_cross_entropy"],
    "float8_tensor": _WEIGHTS,
    "graph": PYTORCH["make_graphed_callables"],
    "jit": _INTERNAL,
    "ops": _OPERATIONS,
    "optimizers": _OPTIMIZERS,
    "permutation": PYTORCH["moe_permute"],
    "router": "use torch.topk and torch.softmax",
    "tensor": _WEIGHTS,
    "utils": _INTERNAL,
}
"""Modules of ``pytorch`` whose names do not exist here."""

ATTENTION = {"FusedMLAQUpProjRopeQuant": PYTORCH["FusedMLAQUpProjRopeQuant"]}
"""Names of ``pytorch.attention``."""

MODULE = {
    name: PYTORCH[name]
    for name in (
        *("GroupedLinear", "Fp8Padding", "Fp8Unpadding"),
        *("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"),
    )
}
"""Names of ``pytorch.module``."""

DISTRIBUTED = {
    "CudaRNGStatesTracker": PYTORCH["CudaRNGStatesTracker"],
    "activation_recompute_forward": "checkpoint() needs no context around it; leave it out",
    "gather_split_1d_tensor": "checkpoint(distribute_saved_activations=True) distributes and gathers; leave it out",
}
"""Names of ``pytorch.distributed``."""

EXPORT = {
    "te_translation_table": "use lightning_fp8.export.translation_table, as docs/onnx.md shows",
}
"""Names of ``pytorch.export``."""
