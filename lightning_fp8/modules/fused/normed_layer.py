"""NormedLayer: what a norm and the linear layers that read it have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.arguments import plain, require_bools, require_positive
from lightning_fp8.arguments.initialization import require_init_method
from lightning_fp8.arguments.parallel import ParallelArguments, SetsNoGroups, refuse_parallel
from lightning_fp8.autocast import FP8Context
from lightning_fp8.functions.linear import Slots
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.functions.product import Product
from lightning_fp8.modules.linear_layer import LinearLayer


class NormedLayer(SetsNoGroups, LinearLayer):
    """A linear layer, or several, that read a norm of the module's own.

    Attributes:
        norm: its formula; its parameters are ``layer_norm_weight`` and ``layer_norm_bias``.
        return_layernorm_output: give its output, too.
    """

    norm: Norm
    layer_norm_weight: Tensor
    layer_norm_bias: Any
    return_layernorm_output: bool

    def _keep(
        self,
        sizes: Mapping[str, Any],
        flags: Mapping[str, bool],
        init_methods: Mapping[str, Any],
        parallel: ParallelArguments,
    ) -> None:
        """Check arguments of the constructor, and keep sizes and flags under their names.

        Raises:
            ValueError, TypeError: one that does not fit.
            NotImplementedError: a parallel argument that is not at its default.
        """
        require_bools(**flags)
        for name, init_method in init_methods.items():
            require_init_method(name, init_method)
        refuse_parallel(self.kind, parallel)
        for name, size in sizes.items():
            require_positive(name, plain(size))
        for name, value in {**{name: plain(size) for name, size in sizes.items()}, **flags}.items():
            setattr(self, name, value)

    def _normalized(self, x: Tensor) -> Tensor:
        return normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.norm, (self.in_features,))

    def _product(
        self,
        weight: Tensor,
        parameter_names: tuple[str, ...],
        slots: Slots,
        observe: bool,
        is_first_microbatch: bool | None,
        context: FP8Context,
    ) -> Product:
        """How the linear layer of ``weight``, which the parameters of these names hold, multiplies in this forward."""
        cached = self._cached_weight(
            weight, parameter_names, context.recipe, slots, observe, is_first_microbatch, context
        )
        main_grad = self._main_grad(weight, is_first_microbatch) if self.fuse_wgrad_accumulation else None
        return Product(context.recipe, slots, observe, cached, main_grad)

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
