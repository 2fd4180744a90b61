"""What FP8 layers do not have, refused before anything runs: torch.func's transforms, forward-mode derivatives, and
tensor parallelism.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

WAYS_OUT = (
    "take gradients with backward() or torch.autograd.grad, one at a time, give a batch as leading dimensions, or run "
    "this part in high precision: with fp8_autocast(enabled=False)"
)


def refuse_transforms(layer: str, *tensors: Tensor | None) -> None:
    """Called by FP8 layers with what they compute from.

    Raises:
        RuntimeError: a transform is active, or one of ``tensors`` carries a tangent.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{layer} does not run in FP8 under torch.func's transforms (vmap, grad, vjp, jvp, ...); {WAYS_OUT}"
        )
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise RuntimeError(f"{layer} has no forward-mode derivative in FP8; {WAYS_OUT}")


def refuse_sharded(layer: str, **tensors: Tensor | None) -> None:
    """Check that a layer computes with local tensors, as it does under FSDP2, which gathers its weights first.

    Raises:
        TypeError: one of ``tensors`` is a DTensor, as tensor parallelism makes them.
    """
    if torch.compiler.is_compiling():
        return
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, tensor in tensors.items():
        if isinstance(tensor, sharded):
            raise TypeError(
                f"{layer}'s {name} is a DTensor ({', '.join(map(str, tensor.placements))}): tensor parallelism of FP8 "
                "layers is not supported. Leave this layer in high precision, FP8Precision(skip=[...]) or "
                "convert_module(skip=[...]), or shard the model with fully_shard (FSDP2)"
            )


def _has_tangent(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
