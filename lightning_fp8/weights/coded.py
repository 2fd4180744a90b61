"""Frozen weights that a checkpoint stores as FP8 codes with scales: as FP8Tensors, and in a ``state_dict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import E4M3, holds_codes
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.weights.fp8_tensor import FP8Tensor, StoredScale


def coded_weight(codes: Tensor, scale: Tensor, name: str, layout: Layout, dtype: torch.dtype) -> FP8Tensor:
    """The weight ``codes * scale`` in ``dtype``, in the memory of ``codes [N, K]``.

    Args:
        scale: the scales of ``layout``, in float32, bfloat16 or E8M0 and any shape with as many elements.
        name: the key of ``scale`` in a ``state_dict``, beside the weight's.
    """
    scale_inv = scale.float().reshape(layout.scale_shape(*codes.shape)).contiguous()
    # If values are cast into it, its new scales must be values of the stored dtype: powers of two are.
    cast = Cast(E4M3, layout, power_2_scale=scale.dtype is not torch.float32)
    weight = FP8Tensor(Quantized(ScaledTensor(codes.contiguous(), scale_inv, layout), None), cast, codes.shape, dtype)
    weight.stored = StoredScale(name, scale.dtype, scale.shape)
    return weight


def save_codes(weight: FP8Tensor, destination: dict[str, Any], prefix: str, name: str) -> None:
    """Put the codes and scales of ``weight`` into a ``state_dict``, as the checkpoint stores them."""
    row, stored = weight.operands.rowwise, weight.stored
    assert row is not None
    assert stored is not None
    destination[prefix + name] = row.data
    destination[prefix + stored.name] = row.scale_inv.to(stored.dtype).reshape(stored.shape)


def replace_codes(weight: FP8Tensor, state_dict: dict[str, Any], prefix: str, name: str) -> tuple[dict[str, Any], str]:
    """A ``state_dict`` in which one value ``name``, an FP8Tensor, stands for the codes and the scales of ``weight``.

    Returns:
        The dictionary, in which ``weight`` itself stands for what cannot be loaded, and the error message or "".
    """
    stored = weight.stored
    assert stored is not None
    key, scale_key = prefix + name, prefix + stored.name
    codes, scale = state_dict.get(key), state_dict.get(scale_key)
    if isinstance(codes, FP8Tensor) or (codes is None and scale is None):
        return state_dict, ""
    loaded: FP8Tensor = weight
    error = ""
    if isinstance(codes, Tensor) and not holds_codes(codes):
        error = (
            f"{key} is {codes.dtype} in the state dict, and FP8 codes with {stored.name} in the model, which are "
            "not trained and not cast from values: load these values into a model of "
            "quantization_config=FineGrainedFP8Config(dequantize=True)"
        )
    elif not (
        isinstance(codes, Tensor)
        and isinstance(scale, Tensor)
        and (codes.dtype, codes.shape) == (weight.codes, weight.shape)
        and (scale.dtype, scale.shape) == stored[1:]
    ):
        found = [
            f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else "nothing" for each in (codes, scale)
        ]
        error = (
            f"{key} and {stored.name} are {' and '.join(found)} in the state dict, and {weight.codes} "
            f"{list(weight.shape)} and {stored.dtype} {list(stored.shape)} in the model: load the state dict of a "
            "model with the same quantization_config"
        )
    else:
        loaded = coded_weight(codes, scale, stored.name, weight.scaling, weight.dtype)
    return {**{other: value for other, value in state_dict.items() if other != scale_key}, key: loaded}, error
