"""The specification of norms in plain torch: values in float32, cast as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.core.checks import require, require_contiguous
from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.norm.schema import NormOptions, Results, check_parameters, parse_norm_options
from lightning_fp8.ops.quantize.reference import cast
from lightning_fp8.ops.quantize.schema import CastIO, cast_op, implement_cast


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, io: CastIO) -> Results:
    """See :func:`lightning_fp8.ops.norm_quantize`."""
    check_parameters(x.shape[1:], x.device, weight, bias)
    norm_options = parse_norm_options(options_text)
    x = x.float()
    means = [] if norm_options.rms else [x.mean(1)]
    centered = x if norm_options.rms else x - means[0][:, None]
    rstd = torch.rsqrt(centered.square().mean(1) + norm_options.eps)
    y = centered * rstd[:, None] * _gamma(weight, norm_options)
    if bias is not None:
        y = y + bias.float()
    return *cast(y, options_text, io), torch.stack((*means, rstd))


norm_quantize = cast_op(normalize, num_inputs=3)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, options_text: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`lightning_fp8.ops.norm_backward`."""
    norm_options = parse_norm_options(options_text)
    require("dy", dy, HIGH_PRECISION, x.shape, x.device)
    check_parameters(x.shape[1:], x.device, weight)
    require_contiguous("statistics", statistics)
    require("statistics", statistics, torch.float32, (norm_options.num_statistics, x.shape[0]), x.device)
    dy, rstd = dy.float(), statistics[-1]
    normalized = (x.float() if norm_options.rms else x.float() - statistics[0][:, None]) * rstd[:, None]
    g = dy * _gamma(weight, norm_options)
    dx = g - normalized * (g * normalized).mean(1, keepdim=True)
    if not norm_options.rms:
        dx = dx - g.mean(1, keepdim=True)
    dweight = (dy * normalized).sum(0).to(weight.dtype)
    dbias = dy.sum(0).to(weight.dtype) if norm_options.bias_gradient else weight.new_empty(0)
    return (dx * rstd[:, None]).to(x.dtype), dweight, dbias


def _gamma(weight: Tensor, norm_options: NormOptions) -> Tensor:
    return weight.float() + (1.0 if norm_options.zero_centered else 0.0)


implement_cast("norm_quantize", "cpu", norm_quantize)
implement("norm_backward", "cpu", norm_backward)
