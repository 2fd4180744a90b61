"""NormedLayer: what a norm and the linear layers that read it have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import plain, refuse_sharded, require_positive
from lightning_fp8.functions.linear import without_gradient
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.modules.tensor_parallel import CutLayer
from lightning_fp8.parallel.regions import gathered, sum_gradients
from lightning_fp8.te.arguments import PassesContextParallelGroup


def register_norm(module: nn.Module, norm: Norm, size: int, **factory: Any) -> None:
    """Register ``layer_norm_weight [size]`` and, for LayerNorm, ``layer_norm_bias [size]``."""
    module.layer_norm_weight = nn.Parameter(torch.empty(size, **factory))
    module.register_parameter("layer_norm_bias", None if norm.rms else nn.Parameter(torch.empty(size, **factory)))


def reset_norm(module: Any, norm: Norm) -> None:
    """Begin with the identity: gamma 1 and beta 0."""
    nn.init.constant_(module.layer_norm_weight, 0.0 if norm.zero_centered else 1.0)
    if module.layer_norm_bias is not None:
        nn.init.zeros_(module.layer_norm_bias)


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, without gradients where none are enabled: a function keeps and casts only what those need."""
    if torch.is_grad_enabled():
        return [*tensors]
    return [None if tensor is None else without_gradient(tensor) for tensor in tensors]


class NormedLayer(PassesContextParallelGroup, CutLayer):
    """A linear layer, or several, that read a norm of the module's own.

    Attributes:
        norm: its formula; its parameters are ``layer_norm_weight`` and ``layer_norm_bias``.
        return_layernorm_output: give its output, too.
        return_layernorm_output_gathered: of sequence parallelism, give it whole.
    """

    norm: Norm
    layer_norm_weight: Tensor
    layer_norm_bias: Any
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool

    def _keep(self, flags: Mapping[str, bool], **sizes: Any) -> None:
        """Keep flags and sizes of the constructor under their names.

        Raises:
            ValueError: a size that is no positive integer.
        """
        sizes = {name: plain(size) for name, size in sizes.items()}
        for name, size in sizes.items():
            require_positive(name, size)
        for name, value in {**sizes, **flags}.items():
            setattr(self, name, value)

    def _check_sharded(self, input: Tensor, weight: Tensor) -> None:
        refuse_sharded(self.kind, input=input, weight=weight)

    def _normalized(self, x: Tensor) -> Tensor:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self.tensor_parallel.sequence:  # each rank has a piece of x
            weight, bias = sum_gradients(weight, bias, parallel=self.tensor_parallel.over("column"))
        return normalize(x, weight, bias, self.norm, (x.shape[-1],), autocast_dtype(x.device.type))

    def _given_norm(self, normalized: Tensor) -> Tensor:
        """The norm's output as it is returned."""
        if not (self.return_layernorm_output_gathered and self.tensor_parallel.sequence):
            return normalized
        return gathered(normalized, self.tensor_parallel.over("column"))

    def _shaped(self, outputs: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """y and the norm's output of an input of ``shape``; the function gives y alone where nobody asks for more."""
        y, normalized = outputs if self.return_layernorm_output else (outputs, None)
        if len(shape) == 2:
            return y, normalized
        # Here, not in the function: views that one makes cannot be changed in place.
        return y.view(*shape[:-1], self.out_features), None if normalized is None else normalized.view(shape)

    def _returned(self, y: Tensor, bias: Any, normalized: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """What the forward gives: y, and what is asked for beside it."""
        more = [bias] * self.return_bias + [normalized] * self.return_layernorm_output
        return (y, *more) if more else y
