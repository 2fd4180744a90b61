"""torchao's configurations. Options that are not supported raise an error that says what to do instead."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_fp8.arguments import one_of, require_bool
from lightning_fp8.numerics.formats import E4M3, E5M2, Format
from lightning_fp8.numerics.recipes import Float8CurrentScaling, Float8RowwiseScaling

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
]


class ScalingType(enum.Enum):
    """Whether a tensor is scaled and cast."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"


class ScalingGranularity(enum.Enum):
    """Which elements share a scale: those of a tensor, or of each row of an operand along its contraction."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


class Float8LinearRecipeName(enum.Enum):
    """torchao's recipes."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class CastConfig:
    """How one tensor is cast.

    Attributes:
        scaling_type: DISABLED is not supported.
        scaling_granularity: the same for all tensors of a layer.
        target_dtype: ``torch.float8_e4m3fn``, or for gradients also ``torch.float8_e5m2``. None is E4M3 for inputs and
            weights, and E5M2 for gradients.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one matrix multiplication accumulates; only the defaults of :class:`Float8LinearConfig` are supported."""

    use_fast_accum: bool = False


_AT_DEFAULT = {
    **dict.fromkeys(
        ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight"),
        "the product of the forward accumulates fast, those of the gradients in float32; leave it out",
    ),
    "emulate": "FP8 layers run without FP8 tensor cores as they are; leave it out",
}
"""What to do instead of a value that is not the default."""


@dataclass(frozen=True)
class Float8LinearConfig:
    """How the layers of a model are cast.

    Attributes:
        cast_config_input, cast_config_weight, cast_config_grad_output: how each tensor is cast; all must have the same
            granularity.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input, cast_config_grad_output_for_grad_weight:
            how each tensor is cast for the second GEMM that uses it; None, or equal to the former.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight, emulate: supported only at their defaults.
        enable_fsdp_float8_all_gather: has no effect. Weights that ``fully_shard`` has sharded before the conversion are
            gathered in FP8 with either value, with the same results.
        pad_inner_dim: has no effect; sizes need no padding.
        force_recompute_fp8_weight_in_bwd: has no effect, as in torchao.
        round_scales_to_power_of_2: round scales down to powers of two; must be True for scales of rows.

    Raises:
        NotImplementedError: If a configuration is not supported. The message says what to do instead.
        TypeError: If a value has another type.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(field.default, bool):
                require_bool(name, value)
            if name in _AT_DEFAULT and value != field.default:
                raise NotImplementedError(f"{name}={value!r} is not supported: {_AT_DEFAULT[name]}")
            if name.startswith("cast_config"):
                self._require_cast(name, value)
        self.recipe()

    def _require_cast(self, name: str, value: Any) -> None:
        tensor, _, other_product = name.removeprefix("cast_config_").partition("_for_")
        if other_product and value is None:
            return
        if not isinstance(value, CastConfig):
            raise TypeError(f"{name}={value!r} must be a CastConfig{', or None' if other_product else ''}")
        why = ""
        if other_product and value != getattr(self, f"cast_config_{tensor}"):
            why = "a tensor is cast for both of its products alike; leave it out"
        elif value.scaling_type is not ScalingType.DYNAMIC:
            why = (
                "a single product cannot be kept in high precision; keep the whole layer in high precision by "
                "module_filter_fn"
            )
        elif value.scaling_granularity is not self.cast_config_input.scaling_granularity:
            why = "all tensors of a layer must have the same granularity"
        elif value.target_dtype not in (None, E4M3.dtype, *([E5M2.dtype] if tensor == "grad_output" else ())):
            why = "inputs and weights are cast to E4M3, gradients to E4M3 or E5M2"
        if why:
            raise NotImplementedError(f"{name}={value!r} is not supported: {why}")

    def recipe(self) -> Float8CurrentScaling | Float8RowwiseScaling:
        """The recipe that it describes."""
        in_e4m3 = self.cast_config_grad_output.target_dtype == E4M3.dtype
        fp8_format = Format.E4M3 if in_e4m3 else Format.HYBRID
        if self.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE:
            return Float8CurrentScaling(fp8_format=fp8_format, power_2_scale=self.round_scales_to_power_of_2)
        if not self.round_scales_to_power_of_2:
            raise NotImplementedError(
                "round_scales_to_power_of_2=False is not supported with ScalingGranularity.AXISWISE: the scales of "
                "rows are powers of two; pass True, as from_recipe_name('rowwise') does"
            )
        return Float8RowwiseScaling(fp8_format=fp8_format)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The configuration of the torchao recipe with this name.

        Raises:
            ValueError: If the name is unknown.
            NotImplementedError: If the name is ``rowwise_with_gw_hp``.
        """
        name = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
        if name == Float8LinearRecipeName.ROWWISE_WITH_GW_HP.value:
            raise NotImplementedError(
                f"recipe_name={name!r} is not supported: a single product cannot be kept in high precision; use "
                "'rowwise', or fp8_autocast with Float8RowwiseScaling(backward_override='high_precision'), which keeps "
                "both of the backward pass"
            )
        if one_of("recipe_name", name, ("tensorwise", "rowwise")) == "tensorwise":
            return Float8LinearConfig()
        cast = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=E4M3.dtype)
        return Float8LinearConfig(
            cast_config_input=cast,
            cast_config_weight=cast,
            cast_config_grad_output=cast,
            round_scales_to_power_of_2=True,
        )
