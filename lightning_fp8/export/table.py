"""The table by which ``torch.onnx.export`` translates FP8 ops to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_kernels.host.toolchain import install
from lightning_fp8 import ops as _ops  # noqa: F401  (defines torch.ops.lightning_fp8)
from lightning_fp8.attention import ops as _attention_ops  # noqa: F401  (likewise)

PACKAGES = ("onnx", "onnx_ir", "onnxscript", "ml_dtypes")
"""Packages that the translations import."""


def translation_table() -> dict[Any, Callable[..., Any]]:
    """The ``custom_translation_table`` for ``torch.onnx.export(..., dynamo=True, opset_version=21)``.

    It contains every FP8 op of inference: casts become ``QuantizeLinear`` to FLOAT8E4M3FN, GEMMs become ``Gemm`` of
    ``DequantizeLinear``. Recipes with one scale per tensor (``delayed``, ``tensorwise``) need opset 19; scales of rows
    and blocks need opset 21.

    Raises:
        ImportError: If ``onnx`` or ``onnxscript`` is not installed.
    """
    try:
        from lightning_fp8.export import translations
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise ImportError(
            f"export to ONNX needs {error.name}: {install('onnx')} (torch.export needs nothing)",
            name=error.name,
        ) from error
    by_name: dict[str, Callable[..., Any]] = {
        "quantize_unobserved": translations.quantize,
        "norm_quantize_unobserved": translations.norm_quantize,
        "activation_quantize_unobserved": translations.activation_quantize,
        "scaled_mm": translations.scaled_mm,
        "attention_forward": translations.attention_forward,
    }
    return {getattr(torch.ops.lightning_fp8, name).default: function for name, function in by_name.items()}
