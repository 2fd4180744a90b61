"""Every argument of every public name is given what it is not made for: refused by name, or it means what it says."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_fp8 as fp8
from tests.small import mlp

HOSTILE: list[Any] = [
    None, True, False, 0, 1, 2, 4, -1, 10**12, 0.0, 0.5, -1.0, 1e-5, math.nan, math.inf, 1j,
    "", "false", "true", "delayed", "blockwise", "fp8", "max", "bf16", "bfloat16", "1", "1e-5", "2.4", "cpu", "*",
    b"", b"1", (), [], [None], ["a"], ["a", "a"], ("a", "b"), [4], (4,), [1, -1], range(4), iter("ab"), set(), {"a"},
    {}, {"a": 1}, {"a": 2, "b": 2}, {1: 2}, {"name": "rowwise"},
    np.int64(2), np.float64(0.5), np.bool_(True), np.ones(2), torch.ones(2), torch.ones(()),
    torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn, torch.device("cpu"),
    fp8.Format.HYBRID, fp8.Format.E4M3, fp8.Format.E5M2, fp8.DelayedScaling(), fp8.Float8BlockScaling(),
    fp8.DelayedScaling,
    nn.Linear, nn.init.zeros_, print, Path("a.ckpt"), object(), NotImplemented, ...,
]  # fmt: skip

Accepts = Callable[[Any], bool]


def one_of(*values: Any) -> Accepts:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def is_int(minimum: int, maximum: int | None = None) -> Accepts:
    return lambda value: type(value) is int and value >= minimum and (maximum is None or value <= maximum)


def is_bool(value: Any) -> bool:
    return type(value) is bool


def means_int(minimum: int, maximum: int | None = None) -> Accepts:
    """A recipe and a policy take numpy's scalars, too."""
    return lambda value: is_int(minimum, maximum)(value.item() if isinstance(value, np.generic) else value)


def means_bool(value: Any) -> bool:
    return type(value) in (bool, np.bool_)


def is_epsilon(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 3.5e38


def is_recipe(value: Any) -> bool:
    names = ("delayed", "blockwise")
    return isinstance(value, (fp8.DelayedScaling, fp8.Float8BlockScaling)) or one_of(*names, {}, {"name": "rowwise"})(
        value
    )


def is_skip(value: Any) -> bool:
    """``*`` is the only glob here that matches, and ``print`` a function that takes a module and its name."""
    return value is print or (type(value) in (tuple, list, set) and not value)


def or_none(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


HYBRID, E4M3 = fp8.Format.HYBRID, fp8.Format.E4M3
is_dtype = one_of(torch.bfloat16, torch.float32)
is_norm_dtype = or_none(one_of(torch.bfloat16, torch.float32, torch.float64))
is_size = means_int(1)
SIZES = ("in_features", "out_features", "normalized_shape", "hidden_size", "dim")
POLICY: dict[str, Accepts] = {
    "first_last_layers_bf16": means_bool,
    "num_layers_at_start_in_bf16": means_int(0),
    "num_layers_at_end_in_bf16": means_int(0),
    "replace_layers": means_bool,
    "skip": is_skip,
}
PLUGIN: dict[str, Accepts] = {
    **POLICY,
    "recipe": is_recipe,
    "weights_dtype": or_none(one_of(torch.bfloat16, torch.float32, "bfloat16", "bf16")),
    "compute_dtype": or_none(one_of(torch.bfloat16, torch.float32, "bfloat16", "bf16")),
    "attention": lambda value: means_bool(value) or one_of("always")(value),
    "cache_fp8_weights": or_none(means_bool),
    "fuse": means_bool,
    "where_faster": means_bool,
    # Matched where a model is converted.
    "skip": lambda value: (
        value is print or (type(value) in (tuple, list, set) and all(isinstance(each, str) for each in value))
    ),
}
NORM: dict[str, Accepts] = {
    "normalized_shape": lambda value: is_size(value) or one_of([4], (4,))(value),
    "eps": is_epsilon,
    "zero_centered_gamma": is_bool,
    "elementwise_affine": is_bool,
    "params_dtype": is_norm_dtype,
    "dtype": is_norm_dtype,
    "hidden_size": one_of(None, 4, [4], (4,)),
}
is_init = lambda value: any(value is each for each in (None, nn.init.zeros_, print))  # noqa: E731
FUSED: dict[str, Accepts] = {
    "eps": is_epsilon,
    "bias": is_bool,
    "normalization": one_of(),
    "zero_centered_gamma": is_bool,
    "init_method": is_init,
    "params_dtype": or_none(is_dtype),
    "return_bias": is_bool,
    "return_layernorm_output": is_bool,
    "fuse_wgrad_accumulation": is_bool,
}
MODEL = lambda: fp8.convert_module(mlp())  # noqa: E731
STATE = fp8.fp8_state_dict(MODEL())

# A function, its arguments that fit, and what else each argument takes.
TARGETS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Accepts]]] = {
    "fp8_autocast": (
        fp8.fp8_autocast,
        {},
        {
            "enabled": means_bool,
            "calibrating": means_bool,
            "fp8_recipe": or_none(is_recipe),
            "fp8_group": one_of(None),
        },
    ),
    "autocast": (
        fp8.autocast,
        {},
        {
            "enabled": means_bool,
            "calibrating": means_bool,
            "recipe": or_none(is_recipe),
            "amax_reduction_group": one_of(None),
        },
    ),
    "fp8_model_init": (
        fp8.fp8_model_init,
        {},
        {"enabled": means_bool, "recipe": or_none(is_recipe), "preserve_high_precision_init_val": is_bool},
    ),
    "FP8Monitor": (
        fp8.FP8Monitor,
        {},
        {
            "every_n_steps": is_int(1, 10_000),
            "per_layer": is_bool,
            "path": or_none(lambda value: isinstance(value, (str, Path)) and value != ""),
        },
    ),
    "with_master_weights": (fp8.with_master_weights, {}, {"optimizer": one_of()}),
    "make_recipe": (fp8.make_recipe, {}, {"recipe": is_recipe}),
    "DelayedScaling": (
        fp8.DelayedScaling,
        {},
        {
            "margin": means_int(0, 18),
            "interval": means_int(1),
            "fp8_format": one_of(HYBRID, E4M3),
            "amax_history_len": means_int(1, 65536),
            "amax_compute_algo": one_of("max"),
            "reduce_amax": means_bool,
            "name": one_of("delayed"),
        },
    ),
    "Float8CurrentScaling": (
        fp8.Float8CurrentScaling,
        {},
        {
            "fp8_format": one_of(HYBRID, E4M3),
            "power_2_scale": means_bool,
            "amax_epsilon": lambda value: is_epsilon(value) or type(value) is np.int64,
            "name": one_of(),
        },
    ),
    "Float8RowwiseScaling": (fp8.Float8RowwiseScaling, {}, {"fp8_format": one_of(HYBRID, E4M3), "name": one_of()}),
    "Float8BlockScaling": (
        fp8.Float8BlockScaling,
        {},
        {"fp8_format": one_of(E4M3), "power_2_scale": means_bool, "name": one_of("blockwise")},
    ),
    "MXFP8BlockScaling": (fp8.MXFP8BlockScaling, {}, {"fp8_format": one_of(HYBRID, E4M3), "name": one_of()}),
    "Linear": (
        fp8.Linear,
        {"in_features": 4, "out_features": 4},
        {
            "in_features": is_size,
            "out_features": is_size,
            "bias": is_bool,
            "init_method": lambda value: any(value is each for each in (None, nn.init.zeros_, print)),
            "params_dtype": or_none(is_dtype),
            "parameters_split": one_of(None, ["a"], ("a", "b"), {"a": 2, "b": 2}),
            "return_bias": is_bool,
            "fuse_wgrad_accumulation": is_bool,
            "dtype": or_none(is_dtype),
        },
    ),
    "LayerNorm": (fp8.LayerNorm, {"normalized_shape": 4}, {**NORM, "bias": is_bool}),
    "RMSNorm": (fp8.RMSNorm, {"normalized_shape": 4}, NORM),
    "DotProductAttention": (
        fp8.DotProductAttention,
        {"num_attention_heads": 4, "kv_channels": 4},
        {
            "num_attention_heads": is_int(1),
            "num_gqa_groups": or_none(one_of(1, 2, 4)),
            "attention_dropout": lambda value: is_epsilon(value) and value <= 1,
            "qkv_format": one_of(),
            "attn_mask_type": one_of(),
            "attention_type": one_of(),
            "softmax_scale": or_none(lambda value: is_epsilon(value) and value > 0),
            "softmax_type": one_of(),
        },
    ),
    "LayerNormLinear": (fp8.LayerNormLinear, {"in_features": 4, "out_features": 4}, FUSED),
    "LayerNormMLP": (
        fp8.LayerNormMLP,
        {"hidden_size": 4, "ffn_hidden_size": 4},
        {**FUSED, "activation": one_of(), "checkpoint": is_bool, "output_layer_init_method": is_init},
    ),
    "MultiheadAttention": (
        fp8.MultiheadAttention,
        {"hidden_size": 4, "num_attention_heads": 4},
        {
            "input_layernorm": is_bool,
            "fuse_qkv_params": is_bool,
            "qkv_weight_interleaved": is_bool,
            "rotary_pos_interleaved": is_bool,
            "attention_type": one_of(),
            "qkv_format": one_of(),
            "attn_mask_type": one_of(),
        },
    ),
    "TransformerLayer": (
        fp8.TransformerLayer,
        {"hidden_size": 4, "ffn_hidden_size": 4, "num_attention_heads": 4},
        {
            "output_layernorm": is_bool,
            "parallel_attention_mlp": is_bool,
            "layer_type": one_of(),
            "hidden_dropout": lambda value: is_epsilon(value) and value <= 1,
            "drop_path_rate": lambda value: is_epsilon(value) and value <= 1,
        },
    ),
    "InferenceParams": (
        fp8.InferenceParams,
        {"max_batch_size": 2, "max_sequence_length": 4},
        {"max_batch_size": is_int(1), "max_sequence_length": is_int(1), "qkv_format": one_of()},
    ),
    "RotaryPositionEmbedding": (
        fp8.RotaryPositionEmbedding,
        {"dim": 4},
        {
            "dim": one_of(2, 4),
            "rotary_percent": lambda value: is_epsilon(value) and value in (1, 0.5),
            "seq_len_interpolation_factor": or_none(is_int(1)),
            "pretrained_max_position_embeddings": or_none(is_int(1)),
            "rotary_base": lambda value: is_epsilon(value) and value > 0,
            "interleaved": is_bool,
        },
    ),
    "onnx_export": (fp8.onnx_export, {}, {"enabled": is_bool}),
    "FP8Precision": (fp8.FP8Precision, {}, PLUGIN),
    "FP8FabricPrecision": (fp8.FP8FabricPrecision, {}, PLUGIN),
    "convert_module": (
        fp8.convert_module,
        {"model": MODEL},
        {"model": one_of(), **POLICY, "fuse": means_bool},
    ),
    "fp8_state_dict": (fp8.fp8_state_dict, {}, {"model": one_of()}),
    "load_fp8_state_dict": (
        fp8.load_fp8_state_dict,
        {"model": MODEL, "state": STATE},
        {"model": one_of(), "state": one_of()},
    ),
    "conversion_summary": (fp8.conversion_summary, {}, {"model": one_of()}),
    "reset_fp8_scales": (fp8.reset_fp8_scales, {}, {"model": one_of()}),
    "update_fp8_scales": (fp8.update_fp8_scales, {}, {"model": one_of()}),
    "load_te_state_dict": (
        fp8.load_te_state_dict,
        {"model": MODEL, "state_dict": mlp().state_dict()},
        {"model": one_of(), "state_dict": one_of(), "strict": is_bool},
    ),
    "export_te_state_dict": (
        fp8.export_te_state_dict,
        {"model": MODEL, "version": "2.4"},
        {
            "model": one_of(),
            "version": one_of("2.4"),
            "recipe": lambda value: (
                value is None or isinstance(value, fp8.DelayedScaling) or one_of("delayed", {})(value)
            ),
        },
    ),
}


OTHER_WORDS = {
    "fp8_recipe": ("recipe", "has no field", "is not a Megatron FP8 key"),
    "recipe": ("has no field", "is not a Megatron FP8 key"),
    "init_method": ("must be an integer", "missing 1 required"),  # as what was called says
    "output_layer_init_method": ("must be an integer", "missing 1 required"),
    "hidden_size": ("normalized_shape",),
    "state": ("FP8 state",),
    "state_dict": ("the checkpoint does not fit the model",),
}


def test_every_public_name_is_here() -> None:
    without_arguments = {"FP8Callback", "Format", "__version__"}
    of_others = {"checkpoint", "get_batch_on_this_cp_rank", "FP8State"}  # they take functions, groups and models
    assert TARGETS.keys() | without_arguments | of_others == {*fp8.__all__}


def called(target: Callable[..., Any], fitting: dict[str, Any], name: str, value: Any) -> Any:
    given = {**{key: value() if value is MODEL else value for key, value in fitting.items()}, name: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return target(**given)


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, (_, _, arguments) in TARGETS.items() for name in arguments]
)
def test_an_argument_takes_what_it_is_made_for_and_nothing_else(target: str, name: str) -> None:
    function, fitting, arguments = TARGETS[target]
    wrong = []
    for value in HOSTILE:
        if type(value) is int and value > 10**6 and name in SIZES:
            continue  # that would be allocated
        expected = arguments[name](value)
        try:
            called(function, fitting, name, value)
        except (TypeError, ValueError) as error:
            if expected:
                wrong.append(f"{value!r} was refused: {error}")
            elif not any(word in str(error) for word in (target, name, *OTHER_WORDS.get(name, ()))):
                wrong.append(f"{value!r} was refused without a name: {error}")
        except Exception as error:
            wrong.append(f"{value!r} ended in {type(error).__name__}: {error}")
        else:
            if not expected:
                wrong.append(f"{value!r} was taken")
    assert not wrong, "\n".join(wrong)
