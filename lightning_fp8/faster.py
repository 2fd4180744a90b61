"""The sizes for which high precision is faster than FP8 on a GPU, by rates that ``benchmarks/rates.py`` fits."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from cuda_kernels.host import gemm_measurements
from cuda_kernels.host.launch import name_of

AWAITED = "awaited"
"""The comparison of a layer whose first training forward is compared."""

_LINEAR, _ATTENTION = "BF16 is faster ", "SDPA is faster "


def is_slower(comparison: str | None) -> bool:
    """Whether a comparison says that FP8 is slower."""
    return comparison is not None and comparison.startswith((_LINEAR, _ATTENTION))


def _limit(least: float) -> str:
    return "for any number of" if least == math.inf else f"below {least:,}"


# --- Linear layers ----------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def least_rows(device: torch.device, recipe: str, n: int, k: int) -> tuple[float, str]:
    """The least M from which a linear layer, ``[M, K]`` to ``[M, N]``, is not slower in FP8; what is said below it.

    Its three products and their casts, ``4 (M K + M N + N K)`` bytes, take as long as in BF16 where
    ``6 M N K / bf16 = 6 M N K / flops + 4 (M K + M N + N K) / bytes``. It is 0 on a GPU, or for a ``recipe``, that was
    not timed.
    """
    return _least_rows(name_of(device), recipe, n, k)


@cache
def _least_rows(card: str, recipe: str, n: int, k: int) -> tuple[float, str]:
    rates = gemm_measurements.rates_on(card).get("linear", {})
    if recipe not in rates:
        return 0, ""
    saved = 6 * (1 / rates["bf16"] - 1 / rates[recipe]["flops"])
    spare = saved * rates[recipe]["bytes"] / 4 - 1 / n - 1 / k
    least = math.ceil(1 / spare) if spare > 0 else math.inf
    return least, f"{_LINEAR}{_limit(least)} rows of {k:,} × {n:,} ({recipe}, {card})"


# --- Attention --------------------------------------------------------------------------------------------------------


class _Fit(NamedTuple):
    """Nanoseconds of a query of a head, forward and backward: a fixed time, and one for each key."""

    sdpa: tuple[float, float]
    fp8: tuple[float, float]
    by: str


@torch.compiler.assume_constant_result
def least_keys(
    device: torch.device, dtype: torch.dtype, channels: int, causal: bool, shared: bool
) -> tuple[float, str]:
    """The least number of keys from which attention of plain sequences is not slower in FP8; what is said below it.

    ``shared``: several heads share keys. It is 0, with a note, on a GPU that was not timed.
    """
    fit = _fit(device, dtype, channels, causal, shared)
    if fit is None:
        return 0, f"not compared with SDPA, which was not timed for this on {name_of(device)}"
    saved = fit.sdpa[1] - fit.fp8[1]
    least = max(math.ceil((fit.fp8[0] - fit.sdpa[0]) / saved), 0) if saved > 0 else math.inf
    said = f"{_ATTENTION}{_limit(least)} keys of {channels} channels ({fit.by}, {name_of(device)})"
    return least, said if least else ""


def compared_attention(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, channels: int, causal: bool, shared: bool
) -> str:
    """Why attention is slower in FP8, a note if it is not known, or empty. ``queries``: those of all heads."""
    least, said = least_keys(device, dtype, channels, causal, shared)
    fit = _fit(device, dtype, channels, causal, shared)
    if fit is None or keys >= least:
        return "" if least else said
    sdpa, fp8 = (queries * (fixed + each * keys) / 1e6 for fixed, each in fit[:2])
    at = f"at {keys:,} keys of {channels} channels: {sdpa:.2g} ms against {fp8:.2g}"
    return f"{_ATTENTION}{at} ({fit.by}, {name_of(device)})"


@cache
def _fit(device: torch.device, dtype: torch.dtype, channels: int, causal: bool, shared: bool) -> _Fit | None:
    """The fit, or an estimate: FP8's time for the next larger number of channels, and their share of SDPA's time."""
    fits = gemm_measurements.rates_on(name_of(device)).get("attention", ())
    by = _back_end(device, dtype, channels, causal) if fits else ""
    fits = [fit for fit in fits if fit["causal"] is causal and fit["channels"] >= channels and by in fit]
    if not fits:
        return None
    fit = min(fits, key=lambda fit: (fit["channels"], fit["shared"] is not shared))
    (a, b), (c, d), part = fit[by], fit["fp8"], channels / fit["channels"]
    return _Fit((a * part, b * part / 128), (c, d / 128), by)


def _back_end(device: torch.device, dtype: torch.dtype, channels: int, causal: bool) -> str:
    """What computes torch's scaled_dot_product_attention: ``cudnn``, ``flash``, ``efficient`` or ``math``."""
    x = torch.empty(1, 1, 256, channels, dtype=dtype, device=device, requires_grad=True)
    chosen = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(x, x, x, None, 0.0, causal))
    return chosen.name.partition("_")[0].lower()
