"""Tables of Transformer Engine's and Megatron-LM's arguments of recipes: their names here, or what to use instead.

:func:`translated` and :func:`without_defaults` apply the tables. A recipe's own fields are in its class, in
:mod:`lightning_fp8.numerics.recipes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_fp8.arguments import plain, require_bool


@dataclass(frozen=True)
class MMParams:
    """Transformer Engine's options of a matrix multiplication; only its defaults are supported."""

    use_split_accumulator: bool = True


class _Renamed(NamedTuple):
    """A flag that has another name here, or means the opposite."""

    field: str
    negated: bool = False


class _AtDefault(NamedTuple):
    """An argument that is supported only at Transformer Engine's default."""

    default: Any
    instead: str


_ONE_PRODUCT = (
    "a single product cannot be kept in high precision; Float8CurrentScaling(backward_override='high_precision') keeps "
    "both of the backward pass"
)
_ACCUMULATION = "the product of the forward accumulates fast, those of the gradients in float32; leave it out"
_BLOCKS = "blocks are 1 × 128 for inputs and gradients, 128 × 128 for weights; leave it out"


def _products(of_forward: MMParams) -> dict[str, _AtDefault]:
    """The options of the three matrix multiplications; those of the forward differ between recipes."""
    of_gradients = _AtDefault(MMParams(), _ACCUMULATION)
    return {
        "fp8_gemm_fprop": _AtDefault(of_forward, _ACCUMULATION),
        "fp8_gemm_dgrad": of_gradients,
        "fp8_gemm_wgrad": of_gradients,
    }


TE_ARGUMENTS: dict[str, dict[str, _Renamed | _AtDefault]] = {
    "DelayedScaling": {
        "scaling_factor_compute_algo": _AtDefault(None, "scales are fp8_max 2**-margin / amax; leave it out"),
        "override_linear_precision": _AtDefault((False, False, False), _ONE_PRODUCT),
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": _Renamed("power_2_scale"),
        **_products(MMParams(use_split_accumulator=False)),
    },
    "Float8BlockScaling": {
        "use_f32_scales": _Renamed("power_2_scale", negated=True),
        "x_block_scaling_dim": _AtDefault(1, _BLOCKS),
        "w_block_scaling_dim": _AtDefault(2, _BLOCKS),
        "grad_block_scaling_dim": _AtDefault(1, _BLOCKS),
        **_products(MMParams()),
    },
    "MXFP8BlockScaling": {
        "margin": _AtDefault(0, "the scale of a block leaves no headroom; leave it out"),
        "enable_2d_quantization": _AtDefault(False, "blocks are 1 × 32 of weights, too; leave it out"),
    },
}
"""For each recipe, its arguments in Transformer Engine that are not fields here."""

_OF_LAYERS = "it is an argument of FP8Precision and convert_module"
MEGATRON_KEYS = {
    "fp8_wgrad": _AtDefault(True, _ONE_PRODUCT),
    "fp8_param": _AtDefault(False, "construct or convert the model inside of fp8_model_init()"),
    "fp8_output_proj": _AtDefault(False, "make the output head as lightning_fp8.Linear"),
    "fp8_quantizer_factory": _AtDefault(None, "a recipe sets the cast of each tensor; leave it out"),
    "tp_only_amax_red": _AtDefault(False, "pass the tensor-parallel ranks as fp8_group of fp8_autocast"),
    "first_last_layers_bf16": _AtDefault(False, _OF_LAYERS),
    "num_layers_at_start_in_bf16": _AtDefault(1, _OF_LAYERS),
    "num_layers_at_end_in_bf16": _AtDefault(1, _OF_LAYERS),
}
"""Megatron-LM's keys that are supported only at their defaults."""


def without_defaults(megatron_config: Mapping[str, Any]) -> dict[str, Any]:
    """``megatron_config`` without the keys of :data:`MEGATRON_KEYS`, which must have their defaults.

    Raises:
        NotImplementedError: If one of them has another value.
    """
    for key, (default, instead) in MEGATRON_KEYS.items():
        if key in megatron_config and not _is_default(plain(megatron_config[key]), default):
            raise NotImplementedError(f"{key}={megatron_config[key]!r} is not supported by a recipe: {instead}")
    return {key: value for key, value in megatron_config.items() if key not in MEGATRON_KEYS}


def translated(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of a recipe class, some of which may be Transformer Engine's, to fields of the class.

    Args:
        recipe: the name of the class.
        given: the arguments.

    Raises:
        NotImplementedError: If an argument of Transformer Engine is not supported, and its value is not Transformer
            Engine's default.
        TypeError: If a flag is not a bool.
        ValueError: If one field is given under two names.
    """
    known = TE_ARGUMENTS.get(recipe, {})
    fields = {name: value for name, value in given.items() if name not in known}
    for name, value in given.items():
        argument = known.get(name)
        value = plain(value)
        if isinstance(argument, _Renamed):
            require_bool(name, value)
            if argument.field in fields:
                raise ValueError(f"{name}={value} and {argument.field} are the same option; pass one of them")
            fields[argument.field] = value is not argument.negated
        elif argument is not None and not _is_default(value, argument.default):
            raise NotImplementedError(f"{name}={value!r} is not supported by {recipe}: {argument.instead}")
    return fields


def _is_default(value: Any, default: Any) -> bool:
    value = tuple(value) if isinstance(value, list) else value  # as YAML has a tuple
    return value is None or (type(value) is type(default) and value == default)
