"""Lightning callbacks."""

from lightning_fp8.callbacks.fp8 import FP8Callback

__all__ = ["FP8Callback"]
