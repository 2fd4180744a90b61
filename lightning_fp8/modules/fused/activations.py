"""The activations of LayerNormMLP in high precision, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.arguments import one_of
from lightning_fp8.ops.activation import is_gated


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_gelu = partial(F.gelu, approximate="tanh")

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "geglu": _gelu,
    "qgelu": _qgelu,
    "qgeglu": _qgelu,
    "relu": F.relu,
    "reglu": F.relu,
    "srelu": _srelu,
    "sreglu": _srelu,
    "silu": F.silu,
    "swiglu": F.silu,
    "glu": torch.sigmoid,
}
_OLDER_NAMES = {"squared_relu": "srelu"}


def activation_named(name: str) -> str:
    """The newest of Transformer Engine's names of the activation that it calls, or called, ``name``.

    Raises:
        ValueError: no activation has the name.
    """
    one_of("activation", name, (*_FUNCTIONS, *_OLDER_NAMES))
    return _OLDER_NAMES.get(name, name)


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation(x)``; a gated one is ``activation(x[..., :F]) * x[..., F:]`` of ``x [..., 2 F]``."""
    if not is_gated(activation):
        return _FUNCTIONS[activation](x)
    x, gate = x.chunk(2, -1)
    return _FUNCTIONS[activation](x) * gate
