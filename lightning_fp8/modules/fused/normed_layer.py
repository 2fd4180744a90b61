"""NormedLayer: the common base of modules that fuse a norm with linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import plain, refuse_sharded, require_positive
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.functions.product import without_gradient
from lightning_fp8.modules.initialization import Initialization, InitMethod, refuse_meta
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.modules.tensor_parallel import CutLayer
from lightning_fp8.parallel.regions import gathered, sum_gradients
from lightning_fp8.te.arguments import ParallelArguments, PassesContextParallelGroup


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, detached if gradients are disabled, so that a function saves and casts nothing for its backward."""
    if torch.is_grad_enabled():
        return [*tensors]
    return [None if tensor is None else without_gradient(tensor) for tensor in tensors]


def positive(name: str, size: Any) -> int:
    """Raises:
    ValueError: If the size is not a positive integer.
    """
    require_positive(name, plain(size))
    return int(size)


class NormedLayer(PassesContextParallelGroup, CutLayer):
    """One or several linear layers that read the output of a norm.

    Attributes:
        norm: the formula of the norm, whose parameters are ``layer_norm_weight`` and ``layer_norm_bias``.
        return_layernorm_output: also return the norm's output.
        return_layernorm_output_gathered: with sequence parallelism, also gather the norm's output over the ranks.
    """

    norm: Norm
    initializations: tuple[Initialization, ...]
    layer_norm_weight: Tensor
    layer_norm_bias: Any
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool

    def _register_norm(self, norm: Norm, size: int, parallel: ParallelArguments, **factory: Any) -> None:
        """Register ``layer_norm_weight [size]`` and, for LayerNorm, ``layer_norm_bias [size]``."""
        self.norm = norm
        self.return_layernorm_output_gathered = parallel.get("return_layernorm_output_gathered", False)
        self.layer_norm_weight = nn.Parameter(torch.empty(size, **factory))
        self.register_parameter("layer_norm_bias", None if norm.rms else nn.Parameter(torch.empty(size, **factory)))

    def _initialize(self, parallel: ParallelArguments, *init_methods: InitMethod | None) -> None:
        """Initialize the parameters, the weights of each layer by its own of ``init_methods``."""
        self._delay_wgrads(parallel.get("delay_wgrad_compute", False))
        self.initializations = tuple(Initialization.told(each, parallel) for each in init_methods)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters as the constructor does. Call it after ``to_empty`` of a module on meta.

        Raises:
            RuntimeError: If parameters are on meta, or if the module was loaded from a pickle that omits an
                ``init_method``.
        """
        refuse_meta(self)
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.norm.zero_centered else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        with self._as_whole():
            weights, biases = self.weights_and_biases()
            step = len(weights) // len(self.initializations)
            for index, initialization in enumerate(self.initializations):
                own = slice(index * step, (index + 1) * step)
                initialization.fill(weights[own], biases[own])
        self.forget_weight()

    def _check_sharded(self, input: Tensor, weight: Tensor) -> None:
        refuse_sharded(self.kind, input=input, weight=weight)

    def _normalized(self, x: Tensor) -> Tensor:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self.tensor_parallel.sequence:  # x is sharded
            weight, bias = sum_gradients(weight, bias, group=self.tensor_parallel.over("column").group)
        return normalize(x, weight, bias, self.norm, (x.shape[-1],), autocast_dtype(x.device.type))

    def _shaped(self, outputs: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """y and the norm's output, which is None without ``return_layernorm_output``, for an input of ``shape``."""
        y, normalized = outputs if self.return_layernorm_output else (outputs, None)
        if len(shape) == 2:
            return y, normalized
        # Not inside the autograd function: the views that a function returns cannot be changed in place.
        return y.view(*shape[:-1], self.out_features), None if normalized is None else normalized.view(shape)

    def _returned(self, y: Tensor, bias: Any, normalized: Tensor | None) -> Tensor | tuple[Tensor | None, ...]:
        """The result of the forward: y, or a tuple of y and the other outputs that are requested."""
        if normalized is not None and self.return_layernorm_output_gathered and self.tensor_parallel.sequence:
            normalized = gathered(normalized, self.tensor_parallel.over("column"))
        more = [bias] * self.return_bias + [normalized] * self.return_layernorm_output
        return (y, *more) if more else y
