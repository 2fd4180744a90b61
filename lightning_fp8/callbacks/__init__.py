"""Lightning callbacks; an import path."""

from lightning_fp8.plugin.callback import FP8Callback

__all__ = ["FP8Callback"]
