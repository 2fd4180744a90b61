"""The schemas of ``norm_quantize`` and ``norm_backward``, and their options' text form.

``norm_quantize`` casts as ``quantize`` does, with the same last arguments. Its ``options`` says first what is cast:
``"rms eps=1e-05, e4m3 tensor rowwise"``. The backward op takes ``dy`` first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.core.checks import Described, require
from lightning_fp8.ops.core.options import HIGH_PRECISION, parse_options
from lightning_fp8.ops.core.registration import define, fake, refuse_vmap
from lightning_fp8.ops.quantize.options import parse_quantize_options
from lightning_fp8.ops.quantize.outputs import fake_outputs
from lightning_fp8.ops.quantize.schema import OPERANDS, UNOBSERVED, define_cast

Results = tuple[Tensor, ...]
"""The four results of a cast, and float32 statistics ``[1 or 2, R]``."""

define_cast("norm_quantize", "Tensor x, Tensor weight, Tensor? bias", f"{OPERANDS}, Tensor statistics")
define(
    "norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor statistics, str options) -> (Tensor dx, Tensor dweight, Tensor dbias)",
)
refuse_vmap("norm_quantize", "norm_backward")


class NormOptions(NamedTuple):
    """The options of a norm, ``"rms eps=1e-05"``, ``"layer eps=1e-06 zero_centered"``; of a gradient ``"layer bias"``.

    Attributes:
        rms: RMSNorm, not LayerNorm; it has no mean.
        eps: added to the variance.
        zero_centered: the weight holds the factor minus 1.
        bias_gradient: whether the gradient of a bias is asked for.
    """

    rms: bool
    eps: float
    zero_centered: bool
    bias_gradient: bool

    @property
    def num_statistics(self) -> int:
        """Statistics of a row: the mean, if there is one, and last 1 / the deviation."""
        return 1 if self.rms else 2


def format_norm_options(rms: bool, eps: float, zero_centered: bool, bias_gradient: bool = False) -> str:
    """The text form of a norm's options."""
    return (
        f"{'rms' if rms else 'layer'} eps={float(eps)!r}" + " zero_centered" * zero_centered + " bias" * bias_gradient
    )


@lru_cache
def parse_norm_options(text: str) -> NormOptions:
    """Parse what :func:`format_norm_options` gives; a comma and what follows it are left alone.

    Raises:
        ValueError: ``text`` has another form, or its ``eps`` is negative or not finite.
    """
    name, _, words = text.partition(", ")[0].partition(" ")
    if name not in ("layer", "rms"):
        raise ValueError(f"{text!r} begins with neither layer nor rms")
    options = parse_options(words, ("eps", "zero_centered", "bias"))
    eps = float(options.get("eps", 0.0))
    if not 0 <= eps < math.inf:
        raise ValueError(f"{text!r} says eps={eps}; it must be a finite number of at least 0")
    return NormOptions(name == "rms", eps, "zero_centered" in options, "bias" in options)


def check_parameters(
    shape: Sequence[int], device: torch.device, weight: Described | None, bias: Described | None = None
) -> None:
    """Check a norm's parameters, which have ``shape`` ``[K]``.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("weight", weight, HIGH_PRECISION, shape, device)
    require("bias", bias, HIGH_PRECISION if weight is None else weight.dtype, shape, device)


@fake("norm_quantize", "norm_quantize" + UNOBSERVED)
def _norm_quantize(x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, *io: Tensor | None) -> Results:
    num_statistics = parse_norm_options(options_text).num_statistics
    statistics = x.new_empty(num_statistics, x.shape[0], dtype=torch.float32)
    return (*fake_outputs(x, parse_quantize_options(options_text), x.shape[0], x.shape[1]), statistics)


@fake("norm_backward")
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, options_text: str
) -> tuple[Tensor, Tensor, Tensor]:
    bias_shape = weight.shape if parse_norm_options(options_text).bias_gradient else 0
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(bias_shape)
