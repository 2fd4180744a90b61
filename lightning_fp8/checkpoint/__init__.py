"""Checkpoints of Transformer Engine, remapped for a model, loaded into it and written from it."""

import sys
from types import ModuleType
from typing import NoReturn


class _NoFunction(ModuleType):
    """Where Transformer Engine has a function of this name, for activation checkpointing."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises:
        NotImplementedError: always; it says what to call.
        """
        raise NotImplementedError(
            "lightning_fp8.checkpoint is a package, for checkpoints on disk; to recompute activations call "
            "torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False), which FP8 modules go with"
        )


sys.modules[__name__].__class__ = _NoFunction
