"""FP8 attention, which ONNX cannot say in nodes that a runtime would know."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(
    q: Any,
    k: Any,
    v: Any,
    options_text: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    tables: Any = None,
) -> NoReturn:
    """Raises:
    NotImplementedError: always; it casts tile by tile inside the softmax.
    """
    raise NotImplementedError(
        "FP8 attention is not exported to ONNX: it casts tile by tile inside the softmax. Export under a recipe with "
        "fp8_dpa=False: attention is then exported in high precision, and linear layers in FP8"
    )
