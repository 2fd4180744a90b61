"""The table that tells ``torch.onnx.export`` how FP8 ops are written in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_fp8 import ops as _ops  # noqa: F401  (defines torch.ops.lightning_fp8)
from lightning_fp8.attention import ops as _attention_ops  # noqa: F401  (likewise)

PACKAGES = ("onnx", "onnx_ir", "onnxscript", "ml_dtypes")
"""What the translations are written with."""


def translation_table() -> dict[Any, Callable[..., Any]]:
    """The ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True, opset_version=21)``.

    Of every FP8 op that an inference runs: casts become ``QuantizeLinear`` to FLOAT8E4M3FN, products ``Gemm`` of
    ``DequantizeLinear``. One scale for a tensor (``delayed``, ``tensorwise``) needs opset 19; scales of rows and blocks
    need 21.

    Raises:
        ImportError: ``onnx`` or ``onnxscript`` is not installed.
    """
    try:
        from lightning_fp8.export import translations
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        raise ImportError(
            f'export to ONNX needs {error.name}; pip install "lightning-fp8[onnx]" (torch.export needs nothing)',
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
