"""The schemas of ops that compute a tensor and cast it in one go, and their shapes on fake and meta tensors.

They cast as ``quantize`` does, with the same last arguments; see :mod:`lightning_fp8.ops.schema`. ``config`` says first
what is cast: ``"rms eps=1e-05, e4m3 tensor rowwise"``, ``"gelu bias=bfloat16, e5m2 tensor rowwise"``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.config import DTYPES, NAMES, options_of, parse_quantize_config
from lightning_fp8.ops.schema import NAMESPACE, OPERANDS, UNOBSERVED, define_cast, fake_operands, refuse_batches

define_cast("norm_quantize", "Tensor x, Tensor weight, Tensor? bias", f"{OPERANDS}, Tensor statistics")
torch.library.define(
    f"{NAMESPACE}::norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor statistics, str norm) -> (Tensor dx, Tensor dweight, Tensor dbias)",
)
define_cast("activation_quantize", "Tensor x", OPERANDS)
define_cast("activation_backward_quantize", "Tensor dy, Tensor x", f"{OPERANDS}, Tensor dbias")


refuse_batches("norm_quantize", "norm_backward", "activation_quantize", "activation_backward_quantize")


class NormConfig(NamedTuple):
    """A norm, in words: ``"rms eps=1e-05"``, ``"layer eps=1e-06 zero_centered"``, of a gradient ``"layer bias"``.

    Attributes:
        rms: RMSNorm, not LayerNorm; it has no mean.
        eps: added to the variance.
        zero_centered: the weight holds the factor minus 1.
        bias: the gradient of a bias is asked for.
    """

    rms: bool
    eps: float
    zero_centered: bool
    bias: bool

    @property
    def statistics(self) -> int:
        """How many a row has: the mean, if there is one, and last 1 / the deviation."""
        return 1 if self.rms else 2


def norm_config(rms: bool, eps: float, zero_centered: bool, bias: bool = False) -> str:
    """The string for a norm."""
    return f"{'rms' if rms else 'layer'} eps={float(eps)!r}" + " zero_centered" * zero_centered + " bias" * bias


@lru_cache
def parse_norm_config(text: str) -> NormConfig:
    """What ``text`` says before a comma.

    Raises:
        ValueError: it says something else, or an ``eps`` that is none.
    """
    name, _, words = text.partition(", ")[0].partition(" ")
    if name not in ("layer", "rms"):
        raise ValueError(f"{text!r} begins with neither layer nor rms")
    said = options_of(words, ("eps", "zero_centered", "bias"))
    eps = float(said.get("eps", 0.0))
    if not 0 <= eps < math.inf:
        raise ValueError(f"{text!r} says eps={eps}; it must be a finite number of at least 0")
    return NormConfig(name == "rms", eps, "zero_centered" in said, "bias" in said)


class ActivationConfig(NamedTuple):
    """An activation, in words: ``"swiglu"``, of a gradient ``"gelu bias=bfloat16"``.

    Attributes:
        name: of the activation.
        bias: dtype of the gradient's sum over rows, if it is asked for.
    """

    name: str
    bias: torch.dtype | None


def is_gated(activation: str) -> bool:
    """Whether the second half of x multiplies the activation of its first."""
    return activation.endswith("glu")


def activated_shape(activation: str, shape: Sequence[int]) -> tuple[int, int]:
    """Of the activation of x ``[R, F or 2 F]``."""
    rows, columns = shape
    return rows, columns // 2 if is_gated(activation) else columns


def activation_config(name: str, bias: torch.dtype | None = None) -> str:
    """The string for an activation."""
    if bias is not None and bias not in NAMES:
        raise TypeError(f"bias_dtype={bias} must be None or one of {', '.join(map(str, NAMES))}")
    return name if bias is None else f"{name} bias={NAMES[bias]}"


@lru_cache
def parse_activation_config(text: str) -> ActivationConfig:
    """What ``text`` says before a comma.

    Raises:
        ValueError: it says something else.
    """
    name, _, words = text.partition(", ")[0].partition(" ")
    bias = options_of(words, ("bias",)).get("bias")
    if not (bias is None or bias in DTYPES):
        raise ValueError(f"{text!r} gives bias={bias}; use one of {', '.join(DTYPES)}")
    return ActivationConfig(name, None if bias is None else DTYPES[bias])


@torch.library.register_fake(f"{NAMESPACE}::norm_quantize")
@torch.library.register_fake(f"{NAMESPACE}::norm_quantize{UNOBSERVED}")
def _norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    statistics = x.new_empty(parse_norm_config(config).statistics, x.shape[0], dtype=torch.float32)
    return (*fake_operands(x, x.shape[0], x.shape[1], parse_quantize_config(config)), statistics)


@torch.library.register_fake(f"{NAMESPACE}::norm_backward")
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight.shape if parse_norm_config(norm).bias else 0
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(of_bias)


@torch.library.register_fake(f"{NAMESPACE}::activation_quantize")
@torch.library.register_fake(f"{NAMESPACE}::activation_quantize{UNOBSERVED}")
def _activation_quantize(
    x: Tensor, config: str, scale: Tensor | None = None, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, ...]:
    columns = x.shape[1] // 2 if is_gated(parse_activation_config(config).name) else x.shape[1]
    return fake_operands(x, x.shape[0], columns, parse_quantize_config(config))


@torch.library.register_fake(f"{NAMESPACE}::activation_backward_quantize")
@torch.library.register_fake(f"{NAMESPACE}::activation_backward_quantize{UNOBSERVED}")
def _activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    columns, dtype = x.shape[1], parse_activation_config(config).bias
    dbias = x.new_empty(columns if dtype else 0, dtype=dtype or torch.float32)
    return (*fake_operands(x, x.shape[0], columns, parse_quantize_config(config)), dbias)
