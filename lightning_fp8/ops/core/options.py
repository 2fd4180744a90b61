"""The text form of ops' options: ``"e4m3 tensor epsilon=0.5"``.

An op takes its options as one string, because each argument costs the dispatcher time at every call. The string is
parsed once, when a plan is made. In ``ops`` such a string is called ``options_text``, and what it says ``options``.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from cuda_kernels.device.codec import DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names of the dtypes that are not FP8, in option strings and for kernels."""

HIGH_PRECISION = tuple(DTYPE_NAMES)
"""The dtypes that ops cast from, and give GEMMs' results in."""


def parse_options(text: str, known: Collection[str]) -> dict[str, str]:
    """Parse ``"a b=1"`` to ``{"a": "", "b": "1"}``.

    Raises:
        ValueError: a name is not ``known``.
    """
    options = {name: value for name, _, value in (word.partition("=") for word in text.split())}
    if unknown := options.keys() - set(known):
        raise ValueError(f"{text!r} says {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return options
