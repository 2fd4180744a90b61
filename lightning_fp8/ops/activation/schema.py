"""The schemas of the ops that cast activations and their gradients, and their options' text form.

They cast as ``quantize`` does, with the same last arguments. Their ``options`` says first what is cast:
``"swiglu, e4m3 tensor rowwise"``, ``"gelu bias=bfloat16, e5m2 tensor rowwise"``. Backward ops take ``dy`` first. The
``gated`` ops take what multiplies the activation as a tensor of its own, all tensors of one shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.core.options import DTYPE_NAMES, DTYPES, parse_options
from lightning_fp8.ops.core.registration import fake, refuse_vmap
from lightning_fp8.ops.quantize.options import parse_quantize_options
from lightning_fp8.ops.quantize.outputs import Outputs, fake_outputs
from lightning_fp8.ops.quantize.schema import OPERANDS, UNOBSERVED, define_cast

Results = tuple[Tensor, ...]
"""The four results of a cast of the gradient, and its sum over rows."""

define_cast("activation_quantize", "Tensor x", OPERANDS)
define_cast("activation_backward_quantize", "Tensor dy, Tensor x", f"{OPERANDS}, Tensor dbias")
define_cast("gated_quantize", "Tensor x, Tensor factor", OPERANDS)
define_cast("gated_backward_quantize", "Tensor dy, Tensor x, Tensor factor", OPERANDS)
refuse_vmap("activation_quantize", "activation_backward_quantize", "gated_quantize", "gated_backward_quantize")


class ActivationOptions(NamedTuple):
    """The options of an activation, ``"swiglu"``; of a gradient ``"gelu bias=bfloat16"``.

    Attributes:
        name: the activation's name.
        bias_dtype: the dtype of the gradient's sum over rows, if it is asked for.
    """

    name: str
    bias_dtype: torch.dtype | None


def is_gated(activation: str) -> bool:
    """Whether the second half of x multiplies the activation of its first."""
    return activation.endswith("glu")


def activated_shape(activation: str, shape: Sequence[int]) -> tuple[int, int]:
    """The shape ``[R, F]`` of the activation of x ``[R, F or 2 F]``."""
    rows, columns = shape
    return rows, columns // 2 if is_gated(activation) else columns


def format_activation_options(name: str, bias_dtype: torch.dtype | None = None) -> str:
    """The text form of an activation's options.

    Raises:
        TypeError: ``bias_dtype`` is not bfloat16, float16 or float32.
    """
    if bias_dtype is not None and bias_dtype not in DTYPE_NAMES:
        raise TypeError(f"bias_dtype={bias_dtype} must be None or one of {', '.join(map(str, DTYPE_NAMES))}")
    return name if bias_dtype is None else f"{name} bias={DTYPE_NAMES[bias_dtype]}"


@lru_cache
def parse_activation_options(text: str) -> ActivationOptions:
    """Parse what :func:`format_activation_options` gives; a comma and what follows it are left alone.

    Raises:
        ValueError: ``text`` has another form.
    """
    name, _, words = text.partition(", ")[0].partition(" ")
    bias_dtype_name = parse_options(words, ("bias",)).get("bias")
    if not (bias_dtype_name is None or bias_dtype_name in DTYPES):
        raise ValueError(f"{text!r} gives bias={bias_dtype_name}; use one of {', '.join(DTYPES)}")
    return ActivationOptions(name, None if bias_dtype_name is None else DTYPES[bias_dtype_name])


@fake("activation_quantize", "activation_quantize" + UNOBSERVED)
def _activation_quantize(x: Tensor, options_text: str, *io: Tensor | None) -> Outputs:
    shape = activated_shape(parse_activation_options(options_text).name, x.shape)
    return fake_outputs(x, parse_quantize_options(options_text), *shape)


@fake("activation_backward_quantize", "activation_backward_quantize" + UNOBSERVED)
def _activation_backward_quantize(dy: Tensor, x: Tensor, options_text: str, *io: Tensor | None) -> Results:
    bias_dtype = parse_activation_options(options_text).bias_dtype
    dbias = x.new_empty(x.shape[1] if bias_dtype else 0, dtype=bias_dtype or torch.float32)
    return (*fake_outputs(x, parse_quantize_options(options_text), x.shape[0], x.shape[1]), dbias)


@fake("gated_quantize", "gated_quantize" + UNOBSERVED)
def _gated_quantize(x: Tensor, factor: Tensor, options_text: str, *io: Tensor | None) -> Outputs:
    return fake_outputs(x, parse_quantize_options(options_text), x.shape[0], x.shape[1])


@fake("gated_backward_quantize", "gated_backward_quantize" + UNOBSERVED)
def _gated_backward_quantize(dy: Tensor, x: Tensor, factor: Tensor, options_text: str, *io: Tensor | None) -> Outputs:
    return fake_outputs(x, parse_quantize_options(options_text), x.shape[0], x.shape[1])
