"""The sizes for which high precision is faster than FP8 on a GPU, by rates that ``benchmarks/rates.py`` fits."""

from __future__ import annotations

import math
import os

import torch

from cuda_kernels.host import cache_folder, gemm_measurements, gemm_selection
from cuda_kernels.host.launch import name_of

AWAITED = "awaited"
"""The comparison of a layer whose first training forward is compared."""
NOT_TIMED = "not compared with SDPA, which was not timed for this"

HAD = ", and it had "
"""What separates the limit in a comparison from the number of rows or keys that was compared with it."""
_LINEAR, _ATTENTION = "BF16 is faster ", "SDPA is faster "


def is_slower(comparison: str) -> bool:
    """Whether a comparison says that FP8 is slower."""
    return comparison.startswith((_LINEAR, _ATTENTION))


def _limit(least: float) -> str:
    return "for any number of" if least == math.inf else f"below {least:,}"


def compared(least: float, why: str, had: int) -> str:
    """The comparison for ``had`` rows or keys by :func:`least_rows` or :func:`least_keys`; empty if FP8 is faster."""
    return why if not least else f"{why}{HAD}{had:,}" if had < least else ""


def least_rows(device: torch.device, recipe: str, n: int, k: int) -> tuple[float, str]:
    """The least M from which a linear layer, ``[M, K]`` to ``[M, N]``, is not slower in FP8; what is said below it.

    There, three products take ``6 M N K / bf16``, or ``6 M N K / flops`` and the casts
    ``4 (M K + M N + N K) / bytes``. It is 0 on a GPU, or for a ``recipe``, that was not timed.
    """
    rates = gemm_measurements.rates_on(name_of(device)).get("linear", {})
    if recipe not in rates:
        return 0, ""
    saved = 6 * (1 / rates["bf16"] - 1 / rates[recipe]["flops"])
    spare = saved * rates[recipe]["bytes"] / 4 - 1 / n - 1 / k
    least = math.ceil(1 / spare) if spare > 0 else math.inf
    return least, f"{_LINEAR}{_limit(least)} rows of {k:,} × {n:,} ({recipe}, {name_of(device)})"


def loop_over(experts: int, device: torch.device, recipe: str) -> str:
    """The comparison of many experts, whose FP8 GEMMs are a loop where no kernel multiplies groups; else empty."""
    off = gemm_selection.backend() == "cublaslt" or os.environ.get(cache_folder.CARRIED_VARIABLE) == cache_folder.OFF
    loops = device.type == "cuda" and (off or torch.cuda.get_device_capability(device) != (9, 0) or recipe == "mxfp8")
    return f"{_LINEAR}than a loop over {experts} experts ({recipe}, {name_of(device)})" if loops else ""


def least_keys(
    device: torch.device, dtype: torch.dtype, channels: int, causal: bool, shared: bool
) -> tuple[float, str]:
    """The least number of keys from which attention of plain sequences is not slower in FP8; what is said below it.

    A query takes a fixed time, and one for each tile of keys. For numbers of channels that were not timed, FP8 takes
    the time of the next larger one, and SDPA its share of it. It is 0, with a note, on a GPU that was not timed.

    Args:
        shared: whether several heads share keys.
    """
    card = name_of(device)
    fits = gemm_measurements.rates_on(card).get("attention", ())
    by = _back_end(device, dtype, channels, causal) if fits else ""
    fits = [fit for fit in fits if fit["causal"] is causal and fit["channels"] >= channels and by in fit]
    if not fits:
        return 0, f"{NOT_TIMED} on {card}"
    fit = min(fits, key=lambda fit: (fit["channels"], fit["shared"] is not shared))
    sdpa, fp8 = [time * channels / fit["channels"] for time in fit[by]], fit["fp8"]
    saved = (sdpa[1] - fp8[1]) / 128
    least = max(math.ceil((fp8[0] - sdpa[0]) / saved), 0) if saved > 0 else math.inf
    return least, f"{_ATTENTION}{_limit(least)} keys of {channels} channels ({by}, {card})" if least else ""


def _back_end(device: torch.device, dtype: torch.dtype, channels: int, causal: bool) -> str:
    """What computes torch's scaled_dot_product_attention: ``cudnn``, ``flash``, ``efficient`` or ``math``."""
    x = torch.empty(1, 1, 256, channels, dtype=dtype, device=device, requires_grad=True)
    chosen = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(x, x, x, None, 0.0, causal))
    return chosen.name.partition("_")[0].lower()
