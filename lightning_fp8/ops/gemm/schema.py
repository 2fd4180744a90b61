"""The schemas of ``scaled_mm``, and its shapes on fake and meta tensors.

Operands are K-major: ``a [M, K]`` and ``b [N, K]``, each with its ``scale_inv``, which the schemas call ``scale_a`` and
``scale_b`` as ``torch._scaled_mm`` does; the result is ``[M, N]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fp8.ops.core.checks import Described, require
from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.core.registration import define, fake, refuse_vmap
from lightning_fp8.ops.gemm.options import parse_scaled_mm_options

Operand = tuple[Tensor, Tensor]
"""``data [rows, K]`` and ``scale_inv``. A plain tuple: a :class:`~lightning_fp8.scaled.ScaledTensor` takes the host
longer to make than all else that a call does here."""

Gemm = Callable[[Operand, Operand, str, "Tensor | None", "Tensor | None", "Tensor | None"], Tensor]
"""``(a, b, options_text, bias, amax, out) -> out``; ``out`` is what to add to, or None for a new tensor."""

_OPERANDS = "Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str options"

define("scaled_mm", f"({_OPERANDS}, Tensor? bias=None) -> Tensor")
# An op of its own: Inductor takes none that gives one tensor and may write to another, or not.
define("scaled_mm_observed", f"({_OPERANDS}, Tensor? bias, Tensor(a!) amax) -> Tensor")
define("scaled_mm_accumulate", f"(Tensor(a!) out, {_OPERANDS}) -> ()")
refuse_vmap("scaled_mm", "scaled_mm_observed", "scaled_mm_accumulate")


def gemm_ops(gemm: Gemm) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., None]]:
    """The functions ``scaled_mm``, ``scaled_mm_observed`` and ``scaled_mm_accumulate`` that ``gemm`` computes."""

    def scaled_mm(
        a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, options_text: str, bias: Tensor | None = None
    ) -> Tensor:
        return gemm((a, scale_a), (b, scale_b), options_text, bias, None, None)

    def scaled_mm_observed(
        a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, options_text: str, bias: Tensor | None, amax: Tensor
    ) -> Tensor:
        return gemm((a, scale_a), (b, scale_b), options_text, bias, amax, None)

    def scaled_mm_accumulate(
        out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, options_text: str
    ) -> None:
        gemm((a, scale_a), (b, scale_b), options_text, None, None, out)

    return scaled_mm, scaled_mm_observed, scaled_mm_accumulate


def check_epilogue(
    shape: tuple[int, int],
    device: torch.device,
    bias: Described | None,
    out: Described | None = None,
    amax: Described | None = None,
) -> None:
    """Check what a GEMM of ``shape [M, N]`` takes beside its operands: a bias ``[N]``, what to add to, and an amax.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("bias", bias, HIGH_PRECISION, shape[1:], device)
    require("out", out, HIGH_PRECISION, shape, device)
    require("amax", amax, torch.float32, (), device)


@fake("scaled_mm", "scaled_mm_observed")
def _scaled_mm(a: Tensor, _: Tensor, b: Tensor, __: Tensor, options_text: str, *epilogue: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=parse_scaled_mm_options(options_text).out_dtype)


@fake("scaled_mm_accumulate")
def _scaled_mm_accumulate(*args: object) -> None:
    return None
