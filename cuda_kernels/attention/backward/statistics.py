"""What the backward pass knows of each query beside its codes: float32 ``[H, 5, R]``.

``attention_delta`` writes all of it but :data:`CORRECTED`, ``attention_dq`` that one, and ``attention_dkv`` copies the
last four, next to each other, with a tile of queries: the scales, too, though they are one number for 128 rows, since a
copy of them costs less than a load that every tile would wait for.
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
"""``m + log2(l)``: ``2 ** (score - total)`` is a probability; inf where there is none."""
GRADIENT_SCALE_INV = 3
"""dO's ``scale_inv``."""
QUERY_SCALE_INV = 4
"""Q's ``scale_inv``."""

LARGEST_CODE = FP8_MAX["e4m3"]
CODE_UNIT = np.float32(1) / LARGEST_CODE
NO_AMAX = np.float32(2.0**-119)
"""A smaller amax counts as this: 448 over it is float32's largest power of two but for the mantissa of 448."""

SMALLEST = np.finfo(np.float32).tiny
"""A factor of scores is not smaller: at 0, what is hidden would be -inf 0, NaN."""
