"""Benchmarks of lightning_fp8: run by ``python -m benchmarks``, described in ``docs/benchmarks.md``."""

from __future__ import annotations

import os

os.environ.setdefault("LIGHTNING_FP8_PROVE", "0")  # benchmarks compare results themselves
