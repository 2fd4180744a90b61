"""One plan of each kind of kernel, which ``lightning-fp8 doctor --prove`` proves in advance.

A kind has a name, and a plan's name and key as in :mod:`lightning_fp8.proofs.cases`. Simple kinds come first, so that
the first failure is the most informative. Training proves the plans that it uses; many of them are listed here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from cuda_kernels.gemm.spec import MMA_ARCHITECTURES, WGMMA_ARCHITECTURES
from cuda_kernels.host import launch
from cuda_kernels.kernel import ARCHITECTURES, Kernel
from lightning_fp8.attention.ops import Attention, Band
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.memory import OperandKey, PlainKey, operand_allocations
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.cases import Case, cases_of
from lightning_fp8.proofs.comparing import WrongResult

BF16, FP32 = torch.bfloat16, torch.float32
ATTENTION = (*WGMMA_ARCHITECTURES, *MMA_ARCHITECTURES)


@dataclass(frozen=True)
class Kind:
    """A plan whose kernels are of one kind.

    Attributes:
        plan, key: the plan's name, and the rest of its key.
        architectures: the architectures that have these kernels.
    """

    plan: str
    key: tuple[Any, ...]
    architectures: tuple[str, ...] = ARCHITECTURES

    def cases(self) -> list[Case]:
        """The cases that prove the plan."""
        return cases_of(self.plan, self.key)


def kernels_of_kind(kind: Kind) -> list[Kernel]:
    """The kernels launched by the first case of a kind, on its first architecture; nothing runs."""
    started: list[Kernel] = []
    clear_plan_cache()
    with launch.executing(lambda kernel, *rest: started.append(kernel), kind.architectures[0]), suppress(WrongResult):
        kind.cases()[0].run("cpu")
    clear_plan_cache()
    return started


# --- Keys -------------------------------------------------------------------------------------------------------------


def _tensor(rows: int, columns: int, dtype: torch.dtype = BF16) -> PlainKey:
    return dtype, torch.Size((rows, columns)), (columns, 1), 0


def _variant(
    layout: Layout = Layout.TENSOR, *, scale: bool = False, amax: bool = False,
    float8: Float8 = E4M3, known: bool = False, power_2: bool = False, rowwise: bool = True, columnwise: bool = True,
) -> Any:  # fmt: skip
    cast = Cast(float8, layout, power_2, 0.0, rowwise, columnwise, known)
    return *cast.key, scale, amax


def _operand(layout: Layout, rows: int, k: int, float8: Float8 = E4M3) -> OperandKey:
    data, scale_inv = operand_allocations(layout, float8.dtype, rows, k)
    return float8.dtype, torch.Size((rows, k)), data.strides, 0, scale_inv.strides, 0


def _product(
    tile: tuple[int, ...], layouts: tuple[Layout, Layout], *, fast: bool = False, out: torch.dtype = BF16,
    bias: torch.dtype | None = None, accumulate: bool = False,
    formats: tuple[Float8, Float8] = (E4M3, E4M3), n: int = 4096, groups: int = 0,
) -> Kind:  # fmt: skip
    gemm = Gemm(*layouts, out, fast)
    operands = _operand(layouts[0], 4096, 4096, formats[0]), _operand(layouts[1], n, 4096, formats[1])
    bias_key = None if bias is None else (bias, torch.Size((n,)), (1,), 0)
    added = _tensor(4096, n, FP32) if accumulate else None
    architectures = WGMMA_ARCHITECTURES if len(tile) > 2 else MMA_ARCHITECTURES
    if groups:
        return Kind("grouped_gemm", (*operands, groups, gemm.flat, tile), architectures)
    return Kind("gemm", (*operands, gemm.flat, bias_key, added, tile), architectures)


def _heads(channels: int, rows: int = 256, heads: int = 2) -> PlainKey:
    return BF16, torch.Size((1, rows, heads, channels)), (rows * heads * channels, heads * channels, channels, 1), 0


def _call(band: Band, qkv_format: str = "bshd", sequences: int | None = None, centered: bool = True) -> Any:
    return Attention(qkv_format, band, centered).flat, None, sequences


X, HALF, LONG, RAGGED = _tensor(4096, 4096), _tensor(4096, 2048), _tensor(64, 16400), _tensor(131, 203)
OF_GRADIENT = _variant(scale=True, amax=True, float8=E5M2)
ONE = Layout.TENSOR, Layout.TENSOR
ROWS = Layout.ROW, Layout.ROW
BLOCK = Layout.BLOCK_1X128, Layout.BLOCK_128X128
BLOCKS = Layout.BLOCK_1X128, Layout.BLOCK_1X128
RMS, LAYER = (1e-5, True, False), (1e-5, False, False)
CAUSAL, OF_CODES = _call(Band(right=0)), _call(Band(), centered=False)

KINDS: dict[str, Kind] = {
    "amax": Kind("observe", (X,)),
    "quantize": Kind("quantize", (X, _variant(scale=True, amax=True))),
    "quantize, own scale": Kind("quantize", (X, _variant(columnwise=False))),
    "quantize ragged rows": Kind("quantize", (RAGGED, _variant(scale=True, known=True, float8=E5M2))),
    "quantize rows": Kind("quantize", (X, _variant(Layout.ROW))),
    "quantize 1x128": Kind("quantize", (X, _variant(Layout.BLOCK_1X128))),
    "quantize 128x128": Kind("quantize", (X, _variant(Layout.BLOCK_128X128, columnwise=False, power_2=True))),
    "quantize 1x32": Kind("quantize", (X, _variant(Layout.MX_1X32))),
    "quantize experts": Kind("quantize_experts", (X, _variant(scale=True, amax=True), 8)),
    "quantize experts' rows": Kind("quantize_experts", (X, _variant(Layout.ROW), 8)),
    "quantize by columns' scales": Kind("quantize_columns", (X, E4M3.dtype)),
    "transpose": Kind("transpose", (_tensor(4096, 4096, E4M3.dtype), 0)),
    "transpose experts": Kind("transpose", (_tensor(4096, 4096, E4M3.dtype), 8)),
    "update_scales": Kind("update_scales", ((1024, 70), 0.0, "max")),
    "normalize": Kind("norm", (X, BF16, 0, False, RMS, _variant(scale=True, amax=True, columnwise=False))),
    "normalize, transposed": Kind("norm", (X, BF16, 0, False, RMS, _variant(scale=True, amax=True, known=True))),
    "statistics": Kind("norm", (X, BF16, 0, True, LAYER, _variant(Layout.BLOCK_1X128))),
    "statistics of long rows": Kind("norm", (LONG, FP32, 0, True, LAYER, _variant(Layout.ROW))),
    "RMSNorm": Kind("rms_norm", (X, BF16, 0, RMS, BF16, True)),
    "norm backward": Kind("norm_backward", (X, X, BF16, 0, RMS, False)),
    "norm backward of long rows": Kind("norm_backward", (LONG, LONG, BF16, 0, LAYER, True)),
    "SwiGLU": Kind("activation", (X, _variant(scale=True, amax=True), "swiglu")),
    "SwiGLU backward": Kind("activation_backward", (X, HALF, "swiglu", BF16, OF_GRADIENT)),
    "gated": Kind("gated", (X, X, _variant(scale=True, amax=True), "silu")),
    "gated backward": Kind("gated_backward", (X, X, X, OF_GRADIENT, "silu")),
    "product, 1 warpgroup": _product((1, 1, 128), ONE, out=torch.float16),
    "product, stored from registers": _product((1, 1, 128), ONE, fast=True, n=4098),
    "product, 2 warpgroups": _product((2, 1, 256), ONE, fast=True, bias=BF16),
    "product, 128 × 192": _product((2, 1, 192), ONE, fast=True, formats=(E4M3, E5M2), bias=FP32),
    "product of rows": _product((2, 1, 256), ROWS, fast=True, bias=BF16),
    "product, added": _product((2, 2, 128), ONE, out=FP32, accumulate=True, formats=(E4M3, E5M2)),
    "product, 1x128 by 128x128": _product((2, 2, 128), BLOCK, bias=BF16),
    "product, 1x128 by 1x128": _product((2, 2, 128), BLOCKS, out=FP32, accumulate=True),
    "product of groups": _product((2, 1, 256), ONE, fast=True, n=8 * 4096, groups=8),
    "product of groups, 1x128 by 128x128": _product((2, 2, 128), BLOCK, n=8 * 4096, groups=8),
    "product, mma.sync": _product((128, 128), ONE, fast=True, formats=(E4M3, E5M2)),
    "product of rows, mma.sync": _product((128, 128), ROWS, bias=BF16),
    "product, 1x128 by 128x128, mma.sync": _product((128, 128), BLOCK, bias=BF16),
    "product, 1x128 by 1x128, mma.sync": _product((64, 64), BLOCKS, out=FP32, accumulate=True),
    "attention's cast": Kind("attention_cast", (_heads(128),), ATTENTION),
    **{
        f"attention {which}, {channels} channels": Kind(f"attention_{which}", key(_heads(channels)), ATTENTION)
        for channels in (64, 128, 96, 256)
        for which, key in {
            "forward": lambda heads: (heads, heads, heads, CAUSAL),
            "backward": lambda heads: (heads, 2, 256, CAUSAL),
        }.items()
    },
    "attention over codes": Kind("attention_forward_of_codes", (_heads(128), 2, 256, OF_CODES), ATTENTION),
}  # fmt: skip
"""Kinds by name."""


def kinds_for(architecture: str) -> dict[str, Kind]:
    """The kinds that have kernels for an architecture."""
    return {name: kind for name, kind in KINDS.items() if architecture in kind.architectures}
