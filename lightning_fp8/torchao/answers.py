"""What to use instead of names of ``torchao.float8`` that do not exist here, as data."""

_CASTS = "layers cast their tensors themselves; leave it out"
_FILTER = "pass a module_filter_fn that compares module.in_features and module.out_features"
_PRODUCTS = "layers choose how they multiply; leave it out"
_INFERENCE = "it is for inference; a recipe sets how tensors are scaled in training"
_WEIGHTS = "layers cast their tensors themselves; weights in FP8 are made by fp8_model_init"

NAMES = {
    "FP8Granularity": _INFERENCE,
    "Float8MMConfig": _INFERENCE,
    "Float8TrainingTensor": _WEIGHTS,
    "Float8TypeConfig": "the formats are torch.float8_e4m3fn and torch.float8_e5m2",
    "GemmInputRole": _CASTS,
    "LinearMMConfig": _PRODUCTS,
    "ScaledMMConfig": _PRODUCTS,
    "WeightWithDynamicFloat8CastTensor": "fully_shard before the conversion lets FSDP2 gather weights in FP8",
    "_auto_filter_for_recipe": _FILTER,
    "matmul_with_hp_or_float8_args": _PRODUCTS,
    "swap_linear_layers": "use convert_to_float8_training with a module_filter_fn",
}
"""Names of the modules."""

MODULES = {
    "distributed_utils": _WEIGHTS,
    "float8_ops": _WEIGHTS,
    "float8_scaling_utils": _CASTS,
    "float8_training_tensor": _WEIGHTS,
    "float8_utils": _CASTS,
    "inference": _INFERENCE,
    "types": _INFERENCE,
}
"""Modules whose names do not exist here."""
