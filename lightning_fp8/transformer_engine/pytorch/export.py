"""``transformer_engine.pytorch.export``."""

from lightning_fp8.export.context import onnx_export
from lightning_fp8.foreign_names import answering
from lightning_fp8.transformer_engine.answers import EXPORT

__all__ = ["onnx_export"]

__getattr__ = answering(__name__, EXPORT.get)
