"""Statistics of queries in the backward pass, besides their codes: float32 ``[H, 5, R]``.

``quantize_gradients`` writes all except :data:`CORRECTED`, which ``attention_dq`` writes. ``attention_dkv`` copies the
last four, which are adjacent, with a tile of queries. This includes the scales, although 128 rows have equal ones:
copying them is cheaper than a load that every tile would wait for.
"""

from __future__ import annotations

import numpy as np

from cuda_kernels.device.codec import FP8_MAX

STATISTICS = 5
DELTA = 0
"""``D``, the sum of a row of ``dO ∘ O``."""
CORRECTED = 1
"""``D`` plus the sum of the row of dS."""
TOTAL = 2
"""``m + log2(l)``: ``2 ** (score - total)`` is a probability; inf in rows without keys."""
GRADIENT_SCALE_INV = 3
"""dO's ``scale_inv``."""
QUERY_SCALE_INV = 4
"""Q's ``scale_inv``."""

LARGEST_CODE = FP8_MAX["e4m3"]
CODE_UNIT = np.float32(1) / LARGEST_CODE
NO_AMAX = np.float32(2.0**-119)
"""Lower bound of amaxes: 448 over it is float32's largest power of two times the mantissa of 448."""

SMALLEST = np.finfo(np.float32).tiny
"""Lower bound of the factor of scores: with 0, masked scores would be -inf * 0, NaN."""
