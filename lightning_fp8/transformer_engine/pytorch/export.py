"""``transformer_engine.pytorch.export``."""

from lightning_fp8.export.context import onnx_export

__all__ = ["onnx_export"]
