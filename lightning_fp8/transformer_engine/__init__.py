"""Transformer Engine's import paths: ``import lightning_fp8.transformer_engine.pytorch as te``.

Names have the meaning and the arguments that they have in :mod:`lightning_fp8`. A name that exists only in Transformer
Engine raises an error that says what to do instead; see :mod:`lightning_fp8.transformer_engine.answers`.
"""

from lightning_fp8.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
