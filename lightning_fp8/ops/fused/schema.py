"""The schemas of ops that compute a tensor and cast it in one go, and their shapes on fake and meta tensors.

They give operands as ``quantize`` does (see :mod:`lightning_fp8.ops.schema`), with ``scale`` as
``quantize_with_scale`` takes it: None scales from the tensor itself as ``layout``, ``power_2`` and ``epsilon`` say; a
given one needs layout ``tensor``, and where it is 0 the tensor's own amax is taken; ``may_be_0`` False promises that
it is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops import schema as _schema  # noqa: F401  (defines quantize)
from lightning_fp8.ops.schema import NAMESPACE

_CAST = (
    "Tensor? scale, Tensor(a!)? seen, ScalarType dtype, str layout, bool power_2, float epsilon, bool rowwise,"
    " bool columnwise, Tensor(b!)? counts, bool may_be_0"
)
_OPERANDS = "Tensor data, Tensor scale_inv, Tensor data_t, Tensor scale_inv_t"

torch.library.define(
    f"{NAMESPACE}::norm_quantize",
    f"(Tensor x, Tensor weight, Tensor? bias, bool rms, float eps, bool zero_centered, {_CAST})"
    f" -> ({_OPERANDS}, Tensor mean, Tensor rstd)",
)
torch.library.define(
    f"{NAMESPACE}::norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool rms, bool zero_centered, bool bias)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
)
torch.library.define(f"{NAMESPACE}::activation_quantize", f"(Tensor x, str activation, {_CAST}) -> ({_OPERANDS})")
torch.library.define(
    f"{NAMESPACE}::activation_backward_quantize",
    f"(Tensor dy, Tensor x, str activation, ScalarType? bias_dtype, {_CAST}) -> ({_OPERANDS}, Tensor dbias)",
)


def is_gated(activation: str) -> bool:
    """Whether the second half of x multiplies the activation of its first."""
    return activation.endswith("glu")


def _operands(
    x: Tensor, columns: int, dtype: torch.dtype, layout: str, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``quantize`` gives of a tensor ``[rows of x, columns]``."""
    y = x.new_empty(x.shape[0], columns)
    return torch.ops.lightning_fp8.quantize(y, dtype, layout, False, 0.0, rowwise, columnwise)


@torch.library.register_fake(f"{NAMESPACE}::norm_quantize")
def _norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rms: bool,
    eps: float,
    zero_centered: bool,
    scale: Tensor | None,
    seen: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None,
    may_be_0: bool,
) -> tuple[Tensor, ...]:
    rows = x.shape[0]
    statistics = (x.new_empty(0 if rms else rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32))
    return (*_operands(x, x.shape[1], dtype, layout, rowwise, columnwise), *statistics)


@torch.library.register_fake(f"{NAMESPACE}::norm_backward")
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, rms: bool, zero_centered: bool, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if bias else 0)


@torch.library.register_fake(f"{NAMESPACE}::activation_quantize")
def _activation_quantize(
    x: Tensor,
    activation: str,
    scale: Tensor | None,
    seen: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None,
    may_be_0: bool,
) -> tuple[Tensor, ...]:
    columns = x.shape[1] // 2 if is_gated(activation) else x.shape[1]
    return _operands(x, columns, dtype, layout, rowwise, columnwise)


@torch.library.register_fake(f"{NAMESPACE}::activation_backward_quantize")
def _activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    bias_dtype: torch.dtype | None,
    scale: Tensor | None,
    seen: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    power_2: bool,
    epsilon: float,
    rowwise: bool,
    columnwise: bool,
    counts: Tensor | None,
    may_be_0: bool,
) -> tuple[Tensor, ...]:
    columns = x.shape[1]
    dbias = x.new_empty(columns if bias_dtype else 0, dtype=bias_dtype or torch.float32)
    return (*_operands(x, columns, dtype, layout, rowwise, columnwise), dbias)
