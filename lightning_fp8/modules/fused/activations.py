"""The activations of LayerNormMLP in high precision, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.arguments import one_of, require_number
from lightning_fp8.numerics.scaling import FLOAT32_MAX
from lightning_fp8.ops.activation import is_gated


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("gelu", "geglu"), partial(F.gelu, approximate="tanh")),
    **dict.fromkeys(("qgelu", "qgeglu"), _qgelu),
    **dict.fromkeys(("relu", "reglu"), F.relu),
    **dict.fromkeys(("srelu", "sreglu"), _srelu),
    **dict.fromkeys(("silu", "swiglu"), F.silu),
    "glu": torch.sigmoid,
}
_CLAMPED = "clamped_swiglu"
_CLAMPED_PARAMS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
"""Transformer Engine's defaults."""
_OLDER_NAMES = {"squared_relu": "srelu"}


def activation_named(name: str) -> str:
    """Transformer Engine's current name of the activation that it calls, or once called, ``name``.

    Raises:
        ValueError: If no activation has this name.
    """
    one_of("activation", name, (*_FUNCTIONS, _CLAMPED, *_OLDER_NAMES))
    return _OLDER_NAMES.get(name, name)


def activation_function(activation: str, params: Mapping[str, float] | None = None) -> Callable[[Tensor], Tensor]:
    """The function named ``activation``. It maps ``x [..., F]``, or ``[..., 2 F]`` if it is gated, to ``[..., F]``.

    Raises:
        ValueError, TypeError: If ``params`` has parameters that the activation does not have, or that are not numbers.
    """
    if activation != _CLAMPED:
        if params:
            raise ValueError(f"activation={activation!r} has no activation_params; {_CLAMPED!r} does")
        return partial(_activate, activation)
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"activation_params={params!r} must be a mapping of {', '.join(_CLAMPED_PARAMS)} to numbers")
    for name, value in (params or {}).items():
        one_of("activation_params", name, _CLAMPED_PARAMS)
        require_number(name, value, largest=FLOAT32_MAX)
    return partial(_clamped_swiglu, params={**_CLAMPED_PARAMS, **(params or {})})


def _activate(activation: str, x: Tensor) -> Tensor:
    if not is_gated(activation):
        return _FUNCTIONS[activation](x)
    x, gate = x.chunk(2, -1)
    return _FUNCTIONS[activation](x) * gate


def _clamped_swiglu(x: Tensor, params: Mapping[str, float]) -> Tensor:
    limit = params["limit"]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, gate = wide.chunk(2, -1)
    a, gate = a.clamp(max=limit), gate.clamp(-limit, limit)
    return (a * torch.sigmoid(params["alpha"] * a) * (gate + params["glu_linear_offset"])).to(x.dtype)
