"""Frozen weights that a checkpoint stores as FP8 codes with scales: as FP8Tensors, and in a ``state_dict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.weights.fp8_tensor import CodesShard, FP8Tensor, StoredScale


def coded_weight(codes: Tensor, scale: Tensor, name: str, layout: Layout, dtype: torch.dtype) -> FP8Tensor:
    """The weight ``codes * scale`` in ``dtype``, in the memory of ``codes``, ``[N, K]`` or ``[E, N, K]``.

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


def codes_in(weight: Any) -> Any:
    """The FP8Tensor ``weight``, or this rank's shard of it, if its codes are those of a checkpoint; else None."""
    held = weight._local_tensor if is_dtensor(weight) else weight
    return held if isinstance(held, FP8Tensor) and held.stored is not None else None


def save_codes(weight: Any, destination: dict[str, Any], prefix: str, name: str) -> None:
    """Put the codes and scales of ``weight`` into a ``state_dict``, as the checkpoint stores them.

    If ``weight`` is sharded, both are DTensors, but one scale for all rows is not.
    """
    (row, _), stored = codes_in(weight).operands, codes_in(weight).stored
    scale = row.scale_inv.to(stored.dtype)
    if is_dtensor(weight) and not row.layout.has_one_scale:
        scale = _placed(scale.reshape(-1, *stored.shape[1:]), weight, stored.shape)
    destination[prefix + name] = _placed(row.data, weight, weight.shape)
    destination[prefix + stored.name] = scale.reshape(stored.shape)


def _placed(shard: Tensor, like: Any, shape: torch.Size) -> Tensor:
    """The tensor of ``shape`` of which this rank has ``shard``, if ``like`` is sharded; else ``shard``."""
    if not is_dtensor(like):
        return shard
    stride = torch._prims_common.make_contiguous_strides_for(shape)
    return DTensor.from_local(shard, like.device_mesh, like.placements, shape=shape, stride=stride)


def _shard_of(values: Any, like: Any) -> Any:
    """This rank's shard of ``values``, if ``like`` is sharded; else ``values``."""
    if is_dtensor(like) and not is_dtensor(values):
        values = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
    return values.to_local() if is_dtensor(values) else values


def replace_codes(weight: Any, state_dict: dict[str, Any], prefix: str, name: str) -> tuple[dict[str, Any], str]:
    """A ``state_dict`` in which one FP8Tensor stands for the codes and the scales of ``weight``.

    Returns:
        The dictionary, in which ``weight`` itself stands for what cannot be loaded, and the error message or "".
    """
    held = codes_in(weight)
    stored = held.stored
    key, scale_key = prefix + name, prefix + stored.name
    given = codes, scale = state_dict.get(key), state_dict.get(scale_key)
    if codes_in(codes) is not None or (codes is None and scale is None):
        return state_dict, ""
    kept = {other: value for other, value in state_dict.items() if other != scale_key}
    expected = (held.codes, weight.shape), stored[1:]
    if [(each.dtype, each.shape) for each in given if isinstance(each, Tensor)] == [*expected]:
        scale = scale if held.scaling.has_one_scale else _shard_of(scale, weight)
        made: Any = coded_weight(_shard_of(codes, weight), scale, stored.name, held.scaling, weight.dtype)  # type: ignore[arg-type]
        if is_dtensor(weight):
            made.stored = stored
            made = _placed(CodesShard.of(made, 0, len(made)), weight, weight.shape)
        return {**kept, key: made}, ""
    if codes is None and isinstance(scale, Tensor) and (scale.dtype, scale.shape) == stored[1:] and not held.is_meta:
        row = held.operands.rowwise
        own = scale if row.layout.has_one_scale else _shard_of(scale, weight)
        if torch.allclose(own.to(row.scale_inv).view_as(row.scale_inv), row.scale_inv, rtol=0, atol=0, equal_nan=True):
            return kept, ""  # a state dict without frozen parameters, of this model
    found = [f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else "nothing" for each in given]
    needed = [f"{dtype} {list(shape)}" for dtype, shape in expected]
    return {**kept, key: weight}, (
        f"{key} and {stored.name} are {' and '.join(found)} in the state dict, {' and '.join(needed)} in the model: "
        "FP8 codes are not cast from values. Load codes with their scales, or load values into a model of "
        "quantization_config=FineGrainedFP8Config(dequantize=True)"
    )
