"""Casts in numpy: scales from the formulas of the recipes in float64, codes of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

MAX = 448.0
Blocks = tuple[int, int]


def power_of_2_below(x: np.ndarray) -> np.ndarray:
    """The largest power of two that is not above x: x is ``m 2**e`` with ``0.5 <= m < 1``."""
    return np.exp2(np.frexp(x)[1] - 1.0)


def scale_inv_of(recipe: str, amax: np.ndarray) -> np.ndarray:
    """float32; an amax of 0 takes the scale 1, whose codes are 0 as those of any other."""
    amax = np.where(amax > 0, amax, MAX).astype(np.float64)
    if recipe == "mxfp8":  # the exponent of amax / max rounded up
        quotient = amax / MAX
        below = power_of_2_below(quotient)
        return np.where(below == quotient, below, 2 * below).astype(np.float32)
    scale = (np.float32(MAX) / amax.astype(np.float32)).astype(np.float32)
    if recipe in ("rowwise", "blockwise"):
        scale = power_of_2_below(scale).astype(np.float32)
    return (np.float32(1) / scale).astype(np.float32)


def blocks_of(recipe: str, is_weight: bool, shape: tuple[int, int]) -> Blocks:
    """Rows and columns that share a scale."""
    return {
        "tensorwise": shape,
        "rowwise": (1, shape[1]),
        "blockwise": (128, 128) if is_weight else (1, 128),
        "mxfp8": (1, 32),
    }[recipe]


def fake_quantized(x: np.ndarray, recipe: str, is_weight: bool = False) -> np.ndarray:
    """float32 ``[R, K]`` cast to E4M3 and back, in float64; block by block."""
    result = np.zeros(x.shape)
    rows, columns = blocks_of(recipe, is_weight, x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale_inv = scale_inv_of(recipe, np.abs(block).max())
            result[i : i + rows, j : j + columns] = cast_back(block, scale_inv)
    return result


def cast_back(x: np.ndarray, scale_inv: np.ndarray | float) -> np.ndarray:
    """``x`` as its E4M3 code stands for it, by a given scale."""
    scale_inv = np.float32(scale_inv)
    codes = np.clip(x / scale_inv, -MAX, MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * np.float64(scale_inv)
