"""The schemas of ops that compute a tensor and cast it in one go, and their shapes on fake and meta tensors.

They cast as ``quantize`` does, with the same last arguments; see :mod:`lightning_fp8.ops.schema`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.how import options_of, parsed
from lightning_fp8.ops.schema import CAST, NAMESPACE, OPERANDS, fake_operands

torch.library.define(
    f"{NAMESPACE}::norm_quantize",
    f"(Tensor x, Tensor weight, Tensor? bias, str norm, {CAST}) -> ({OPERANDS}, Tensor statistics)",
)
torch.library.define(
    f"{NAMESPACE}::norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor statistics, str norm, bool bias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
)
torch.library.define(f"{NAMESPACE}::activation_quantize", f"(Tensor x, str activation, {CAST}) -> ({OPERANDS})")
torch.library.define(
    f"{NAMESPACE}::activation_backward_quantize",
    f"(Tensor dy, Tensor x, str activation, ScalarType? bias_dtype, {CAST}) -> ({OPERANDS}, Tensor dbias)",
)


class NormKind(NamedTuple):
    """What ``norm`` says, in words: ``"rms eps=1e-05"``, ``"layer eps=1e-06 zero_centered"``.

    Attributes:
        rms: RMSNorm, not LayerNorm; it has no mean.
        eps: added to the variance.
        zero_centered: the weight holds the factor minus 1.
    """

    rms: bool
    eps: float
    zero_centered: bool

    @property
    def statistics(self) -> int:
        """How many a row has: the mean, if there is one, and last 1 / the deviation."""
        return 1 if self.rms else 2


def norm_to(rms: bool, eps: float, zero_centered: bool) -> str:
    """The string for a norm."""
    return f"{'rms' if rms else 'layer'} eps={eps!r}" + " zero_centered" * zero_centered


@lru_cache
def parsed_norm(text: str) -> NormKind:
    """What ``text`` says.

    Raises:
        ValueError: it says something else.
    """
    name, _, words = text.partition(" ")
    if name not in ("layer", "rms"):
        raise ValueError(f"norm={text!r} begins with neither layer nor rms")
    said = options_of(words, ("eps", "zero_centered"))
    return NormKind(name == "rms", float(said.get("eps", 0.0)), "zero_centered" in said)


def is_gated(activation: str) -> bool:
    """Whether the second half of x multiplies the activation of its first."""
    return activation.endswith("glu")


@torch.library.register_fake(f"{NAMESPACE}::norm_quantize")
def _norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    statistics = x.new_empty(parsed_norm(norm).statistics, x.shape[0], dtype=torch.float32)
    return (*fake_operands(x, x.shape[0], x.shape[1], parsed(how)), statistics)


@torch.library.register_fake(f"{NAMESPACE}::norm_backward")
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if bias else 0)


@torch.library.register_fake(f"{NAMESPACE}::activation_quantize")
def _activation_quantize(
    x: Tensor,
    activation: str,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    columns = x.shape[1] // 2 if is_gated(activation) else x.shape[1]
    return fake_operands(x, x.shape[0], columns, parsed(how))


@torch.library.register_fake(f"{NAMESPACE}::activation_backward_quantize")
def _activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    bias_dtype: torch.dtype | None,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    columns = x.shape[1]
    dbias = x.new_empty(columns if bias_dtype else 0, dtype=bias_dtype or torch.float32)
    return (*fake_operands(x, x.shape[0], columns, parsed(how)), dbias)
