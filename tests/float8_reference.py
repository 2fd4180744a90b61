"""FP8 from the formats' definitions, in float64 and Python integers: what the casts are compared with."""

from __future__ import annotations

import numpy as np

MAX = {"E4M3": 448.0, "E5M2": 57344.0}
_EXPONENT_BITS = {"E4M3": 4, "E5M2": 5}


def value_of_code(name: str, code: int) -> float:
    """The value of an 8-bit code: sign, exponent, mantissa (OCP 8-bit floating point, revision 1.0)."""
    exponent_bits = _EXPONENT_BITS[name]
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if name == "E4M3" and (code & 0x7F) == 0x7F:
        return float("nan")
    if name == "E5M2" and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def cast(values: np.ndarray, scale: float, name: str) -> np.ndarray:
    """Codes of ``round_to_nearest_even(clamp(values * scale))``: the nearest finite value, ties to the even code.

    The product is rounded to float32 first, as the numerics say; NaN has no one code and is given as 0x7F.
    """
    finite = [code for code in range(128) if np.isfinite(value_of_code(name, code))]
    grid = np.array([value_of_code(name, code) for code in finite])
    with np.errstate(over="ignore", invalid="ignore"):
        product = (values.astype(np.float32) * np.float32(scale)).astype(np.float64)
    magnitude = np.minimum(np.abs(product), MAX[name])
    magnitude = np.where(np.isnan(product), 0.0, magnitude)
    upper = np.searchsorted(grid, magnitude)
    lower = np.maximum(upper - 1, 0)
    below, above = magnitude - grid[lower], grid[upper] - magnitude
    nearest = np.where(below < above, lower, np.where(above < below, upper, np.where(lower % 2 == 0, lower, upper)))
    codes = np.array(finite, dtype=np.uint8)[nearest] | (np.signbit(product).astype(np.uint8) << 7)
    return np.where(np.isnan(product), np.uint8(0x7F), codes)
