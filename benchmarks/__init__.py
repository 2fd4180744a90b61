"""Numbers of lightning_fp8: ``python -m benchmarks`` makes them, ``docs/benchmarks.md`` says how and what they mean."""

from __future__ import annotations

import os

os.environ.setdefault("LIGHTNING_FP8_PROVE", "0")  # what is measured is compared here, too
