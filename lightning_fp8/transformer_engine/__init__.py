"""Transformer Engine's import paths: ``import lightning_fp8.transformer_engine.pytorch as te``.

Each name is that of :mod:`lightning_fp8` with the same meaning and arguments. A name that exists in Transformer Engine
and not here raises an error that says what to do instead; :mod:`lightning_fp8.transformer_engine.answers` has them all.
"""

from lightning_fp8.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
