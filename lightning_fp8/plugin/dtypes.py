"""The dtypes of parameters and activations: supported pairs, Lightning's names, casts of a model and of a batch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fp8 import ops
from lightning_fp8.arguments import dtype_named


def weights_and_compute_dtypes(
    weights_dtype: torch.dtype | str, compute_dtype: torch.dtype | str | None
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of parameters and of activations, from dtypes or names; equal without ``compute_dtype``.

    Raises:
        ValueError: If a dtype is not supported, or if the two are not supported together.
    """
    weights: torch.dtype = dtype_named(weights_dtype)
    compute: torch.dtype = weights if compute_dtype is None else dtype_named(compute_dtype)
    for name, dtype in (("weights_dtype", weights), ("compute_dtype", compute)):
        if not isinstance(dtype, torch.dtype) or dtype not in ops.HIGH_PRECISION:
            raise ValueError(f"{name}={dtype!r} is not supported; use one of {', '.join(map(str, ops.HIGH_PRECISION))}")
    if weights != torch.float32 and compute != weights:
        raise ValueError(
            f"compute_dtype={compute} with weights_dtype={weights}: only float32 weights can compute "
            "in another dtype; pass weights_dtype=torch.float32 or leave compute_dtype out"
        )
    if compute == torch.float16:
        name = "weights_dtype" if weights == compute else "compute_dtype"
        rank_zero_warn(
            f"{name}=torch.float16 runs without a loss scaler: small gradients become 0; compute in bfloat16, or "
            "scale the loss yourself"
        )
    return weights, compute


def precision_name(weights_dtype: torch.dtype, compute_dtype: torch.dtype) -> str:
    """Lightning's name for the precision of the rest of the model, which its summaries and monitors accept."""
    short = {torch.bfloat16: "bf16", torch.float16: "16", torch.float32: "32"}
    return f"{short[compute_dtype]}-{'true' if weights_dtype == compute_dtype else 'mixed'}"


def table_name(compute_dtype: torch.dtype) -> str:
    """The name of a dtype in the table of layers: ``"BF16"``, ``"FP16"`` or ``"FP32"``."""
    return {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}[compute_dtype]


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place; ``Module.to`` alone would make complex ones real."""
    of_modules = [tensors for each in module.modules() for tensors in (each._parameters, each._buffers)]
    complex_ones = [
        (tensors, name, tensor)
        for tensors in of_modules
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_complex()
    ]
    for tensors, name, _ in complex_ones:
        tensors[name] = None
    try:
        module.to(dtype=dtype)  # some classes note their dtype there
    finally:
        for tensors, name, tensor in complex_ones:
            tensors[name] = tensor  # type: ignore[assignment]


def cast_floating_point(data: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, function=cast, dtype=Tensor)
