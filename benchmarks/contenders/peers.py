"""Alternatives for the same work: torch, torch.compile, and hand-written Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.operations import SCALE, codes
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import reference_quantize


@dataclass(frozen=True)
class Peer:
    """Another implementation of the work ``name`` in E4M3.

    Attributes:
        name: of the work.
        by: the implementation's name.
        prepare: from the tensor x, the function to time; its first result is the codes. Raises ImportError if a
            requirement is not installed.
        same_codes: whether its codes equal ours, up to rounding.
    """

    name: str
    by: str
    prepare: Callable[[Tensor], Callable[[], Any]]
    same_codes: bool = True


def peers() -> list[Peer]:
    return [
        Peer("cast", "torch, without a scale", lambda x: lambda: (x.to(E4M3.dtype),), same_codes=False),
        Peer("cast", "torch", _with_scale(_cast)),
        Peer("cast", "torch.compile", _with_scale(_cast, compiled=True)),
        Peer("cast", "triton", _triton_cast),
        Peer("cast + transposed", "torch", _with_scale(_cast_and_transpose)),
        Peer("cast + transposed", "torch.compile", _with_scale(_cast_and_transpose, compiled=True)),
        Peer("transpose of codes", "torch", _transpose),
        Peer("1x128", "torch.compile", _compiled_blocks),
        Peer("1x128", "triton", _triton_blocks),
    ]


def _cast(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ((x * scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype),)


def _cast_and_transpose(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    (codes,) = _cast(x, scale)
    return codes, codes.t().contiguous()


def _transpose(x: Tensor) -> Callable[[], Any]:
    of_x = codes(x, E4M3.dtype)
    return lambda: (of_x.t().contiguous(),)


def _with_scale(
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]], compiled: bool = False
) -> Callable[[Tensor], Callable[[], Any]]:
    def prepare(x: Tensor) -> Callable[[], Any]:
        scale = torch.full((), SCALE, device=x.device)
        prepared = _compile(function, x.device) if compiled else function
        return lambda: prepared(x, scale)

    return prepare


def _compiled_blocks(x: Tensor) -> Callable[[], Any]:
    quantize = _compile(reference_quantize, x.device)
    cast = Cast(E4M3, Layout.BLOCK_1X128, power_2_scale=True)
    return lambda: quantize(x, cast, None, None)


def _compile(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function`` compiled for one shape. On the CPU it is only traced, because compiled C++ is not compared here."""
    return torch.compile(function, dynamic=False, backend="inductor" if device.type == "cuda" else "eager")


def _triton_cast(x: Tensor) -> Callable[[], Any]:
    kernels = _triton(x.device)
    scale = torch.full((), SCALE, device=x.device)
    return lambda: (kernels.cast(x, scale, E4M3),)


def _triton_blocks(x: Tensor) -> Callable[[], Any]:
    kernels = _triton(x.device)
    return lambda: kernels.cast_blocks(x, E4M3)


def _triton(device: torch.device) -> ModuleType:
    """The Triton kernels. Raises ImportError on the CPU; torch installs Triton even without a driver."""
    if device.type != "cuda":
        raise ImportError("Triton needs a GPU")
    from benchmarks.contenders import triton_casts

    return triton_casts
