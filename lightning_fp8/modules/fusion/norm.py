"""Norms of Hugging Face's Llama and its like that give FP8 layers their result as FP8 copies, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import autocast, ops
from lightning_fp8.functions.norm_cast import NormCastFunction
from lightning_fp8.functions.shared_input import cast_before_reading, offer
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.modules.swap import swap_class, unsharded_class
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import Role

KNOWN = {
    "LlamaRMSNorm": "transformers.models.llama.modeling_llama",
    "MistralRMSNorm": "transformers.models.mistral.modeling_mistral",
    "Qwen2RMSNorm": "transformers.models.qwen2.modeling_qwen2",
    "Qwen3RMSNorm": "transformers.models.qwen3.modeling_qwen3",
}
"""Classes whose forward is ``weight * (x rstd)``, with ``weight`` and ``variance_epsilon``, and where they are."""


class CastingNorm(nn.Module):
    """An RMSNorm whose result FP8 layers alone read; in high precision, and compiled, it is what it was.

    Anything else that reads the result gets its values; they are computed then.
    """

    weight: Tensor
    variance_epsilon: float
    _readers: tuple[LinearLayer, ...] = ()
    cast: bool | None = None
    """Whether a training forward inside an FP8 context has cast, since somebody watches; None before the first of them,
    and of compiled code."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``x [..., K]`` to the same shape."""
        if torch.compiler.is_compiling():
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        casts = self._casts(hidden_states)
        if self.training and not self.cast and self.cast is not casts and self._context().enabled:
            self.cast = casts  # slow in a module, so only where it changes
        if not casts:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        first = self._readers[0]
        context = first.running_context()
        recipe = context.recipe
        (slots, *_) = first.ensure_slots(hidden_states.device)
        slot = slots[Role.INPUT]
        grad = torch.is_grad_enabled()
        observe = grad and first.training and context.observe
        if observe and isinstance(recipe, DelayedScaling):
            slot.history.follow(recipe)
        cast = cast_before_reading(hidden_states, recipe, slot, observe=observe)
        if cast is None:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        columnwise = grad and any(
            parameter.requires_grad for reader in self._readers for parameter in reader.parameters(recurse=False)
        )
        weight = self.weight if grad else self.weight.detach()
        output = NormCastFunction.apply(hidden_states, weight, self.variance_epsilon, cast, slots, observe, columnwise)
        offer(output, cast)
        return output  # type: ignore[no-any-return]

    def _context(self) -> autocast.FP8Context:
        return self._readers[0].running_context() if self._readers else autocast.DISABLED

    def _casts(self, x: Any) -> bool:
        """Whether all readers run in FP8 now, and ``x`` is a tensor whose norm a kernel casts."""
        return (
            self._context().enabled
            and all(isinstance(reader, LinearLayer) and reader.fp8 for reader in self._readers)
            and type(x) is Tensor
            and type(self.weight) is nn.Parameter
            and x.dtype == self.weight.dtype
            and x.dtype in ops.HIGH_PRECISION
            and x.is_contiguous()
            and x.numel() > 0
            and autocast_dtype(x.device.type) is None
            and not torch._C._are_functorch_transforms_active()
            and torch.autograd.forward_ad._current_level < 0
        )


def is_known_norm(module: nn.Module) -> bool:
    """Whether the formula of ``module`` is known, told without importing transformers; also where it casts already."""
    cls = unsharded_class(module)
    return isinstance(module, CastingNorm) or KNOWN.get(cls.__name__) == cls.__module__


def cast_for(norm: nn.Module, readers: Sequence[LinearLayer]) -> None:
    """Make ``norm`` cast for ``readers``, of which the first is the first to be called, in place."""
    if not isinstance(norm, CastingNorm):
        swap_class(norm, _casting(unsharded_class(norm)))
    norm._readers = tuple(readers)  # type: ignore[assignment]


@lru_cache
def _casting(norm: type) -> type:
    return type(norm.__name__, (CastingNorm, norm), {"__module__": __name__})


def __getattr__(name: str) -> Any:  # where a pickled model looks for its class
    if name in KNOWN:
        return _casting(getattr(import_module(KNOWN[name]), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
