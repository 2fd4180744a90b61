"""Probes start something to see whether it works; run as a program with a probe's name and its seconds.

Success is exit status 0 and a line that says what ran; a failure says why on its last line. Just before the limit, the
stack is dumped, so that a hang has a place.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.doctor.checks import FP8_CAPABILITY, SEES_NONE
from lightning_fp8.formats import E4M3
from lightning_fp8.scaled import Cast, Layout, ScaledTensor

SCALE = 2.0**5
"""Of the cast: exact in every format, and large enough that some values saturate."""

CAST = Cast(E4M3, Layout.TENSOR)


def see() -> str:
    """Import torch and print the GPUs that it sees."""
    if not torch.cuda.is_available():
        return SEES_NONE
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def cast() -> str:
    """A cast with its transposed copy, each value compared with the nearest of the format, found in float64.

    Raises:
        ArithmeticError: a value differs.
    """
    x = _values(320, 200)
    on_card = cast_both_ways(x.to(_device()))
    exact = (x.double() * SCALE).clamp(-E4M3.max, E4M3.max)
    for adjective, codes, wanted in (("", on_card[0], exact), ("transposed ", on_card[1], exact.t())):
        wrong = int((_nearest(wanted) != codes.cpu().double()).sum())
        if wrong:
            raise ArithmeticError(f"{wrong} of {wanted.numel()} {adjective}values are not the nearest of {E4M3.name}")
    return f"[320, 200] in bfloat16 to E4M3 and its transpose, all {2 * x.numel():,} values right, on {_where()}"


def cast_both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cast that :func:`cast` starts: codes of ``x [R, K]`` in E4M3, and those of its transpose."""
    of_x, of_xt = ops.quantize(x, CAST, scale=_scale(x.device), columnwise=True)
    assert of_x is not None
    assert of_xt is not None
    return of_x.data, of_xt.data


def product() -> str:
    """A product of FP8 operands, compared with float64.

    Hopper's tensor cores keep about 14 bits of a sum (DeepSeek-V3, arXiv:2412.19437); a wrong tile is further off.

    Raises:
        ArithmeticError: a value is further off than rounding to bfloat16 and 11 bits of accumulator explain.
    """
    a, b = (
        ops.quantize(_values(rows, 512).to(_device()), CAST, scale=_scale(_device())).rowwise for rows in (256, 384)
    )
    assert a is not None
    assert b is not None
    result = ops.scaled_mm(a, b).cpu().double()
    left, right = _exact(a), _exact(b)
    wanted = left @ right.t()
    allowed = wanted.abs() * 2**-8 + (left.abs() @ right.abs().t()) * 2**-10
    off = ((result - wanted).abs() / allowed).max().item()
    if not off <= 1:  # also where it is NaN
        raise ArithmeticError(f"a value is {off:.3g} times as far from the float64 product as rounding explains")
    return f"[256, 512] x [384, 512]ᵀ in E4M3 equals float64 within rounding, on {_where()}"


def compiled() -> str:
    """One kernel, compiled for Hopper; the caller gives an empty cache."""
    from cuda_kernels.casts.amax import amax_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host import compile_cache

    kernel = amax_kernel(tensor_loader("bfloat16", True), True)
    return f"{kernel.name} for sm_90a: {len(compile_cache.cubin(kernel, '90a')):,} bytes of machine code"


def refuse_fallbacks() -> None:
    """Let the warnings that something slower runs instead be errors, which say why."""
    fallbacks = r"(An )?FP8 kernels? (do|does) not run|torch\._scaled_mm refuses"
    warnings.filterwarnings("error", fallbacks, RuntimeWarning)


PROBES = {"torch": see, "cast": cast, "product": product, "compile": compiled}


def _loaded_compilers(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Their libraries in this process: one that torch brought along is taken before those that the doctor finds."""
    return sorted(set(re.findall(r"/\S*/lib(?:nvvm|nvJitLink)\.so\S*", maps.read_text()))) if maps.exists() else []


@cache
def _device() -> torch.device:
    """The first card with tensor cores for FP8, or else the first one, or the processor."""
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    index = next((card for card in cards if torch.cuda.get_device_capability(card) >= FP8_CAPABILITY), 0)
    return torch.device("cuda", index) if cards else torch.device("cpu")


def _where() -> str:
    return torch.cuda.get_device_name(_device()) if _device().type == "cuda" else "the processor"


def _scale(device: torch.device) -> Tensor:
    return torch.tensor(SCALE, device=device)


def _values(rows: int, columns: int) -> Tensor:
    """From subnormal to saturated, of both signs."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (x * torch.logspace(-3, 1, columns)).bfloat16()


def _nearest(x: Tensor) -> Tensor:
    """The nearest value of E4M3 to each of ``x``, of two the one whose code is even."""
    codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448; 127 is NaN
    table = codes.view(torch.float8_e4m3fn).double()
    middle = (table[1:] + table[:-1]) / 2
    below = torch.searchsorted(middle, x.abs().contiguous())  # at a middle, the smaller one
    tied = (below < len(middle)) & (x.abs() == middle[below.clamp(max=len(middle) - 1)])
    return table[below + (tied & (below % 2 == 1))] * x.sign()


def _exact(operand: ScaledTensor) -> Tensor:
    return operand.data.cpu().double() * operand.scale_inv.cpu().double()


def main(name: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(0.9 * float(seconds))
    if _device().type == "cuda" and torch.cuda.get_device_capability(_device()) >= FP8_CAPABILITY:
        refuse_fallbacks()
    try:
        print(PROBES[name]())
    except Exception as error:
        loaded = _loaded_compilers()
        where = f" (loaded: {', '.join(loaded)})" if loaded else ""
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}{where}") from None
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
