"""An import path of torch's tensor-parallel styles for FP8 layers, which are in ``sharding/styles.py``."""

from lightning_fp8.sharding.styles import *  # noqa: F403
