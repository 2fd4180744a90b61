"""Norms of Hugging Face models, such as Llama's, that pass FP8 layers their output as FP8 copies, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import fp8_region, ops
from lightning_fp8.functions.shared_input import offer
from lightning_fp8.hf_fusion.casting import (
    CastingModule,
    begin_cast,
    class_named,
    in_transform,
    is_known,
    make_casting,
)
from lightning_fp8.hf_fusion.deferred_norm import NormCastFunction
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.modules.record import note_traced

KNOWN = {
    "LlamaRMSNorm": "transformers.models.llama.modeling_llama",
    "MistralRMSNorm": "transformers.models.mistral.modeling_mistral",
    "Qwen2RMSNorm": "transformers.models.qwen2.modeling_qwen2",
    "Qwen3RMSNorm": "transformers.models.qwen3.modeling_qwen3",
}
"""Classes whose forward is ``weight * (x rstd)``, with ``weight`` and ``variance_epsilon``, and their modules."""


class CastingNorm(CastingModule):
    """An RMSNorm whose output is read only by FP8 layers.

    Any other reader of the output gets its values, which are then computed.
    """

    weight: Tensor
    variance_epsilon: float
    _readers: tuple[LinearLayer, ...] = ()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``x [..., K]`` to the same shape."""
        if torch.compiler.is_compiling():
            note_traced(*self.features)
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        casts = self._casts(hidden_states)
        self._note(casts, self._context())
        begun = begin_cast(hidden_states, self._readers[0]) if casts else None
        if begun is None:
            return super().forward(hidden_states)  # type: ignore[misc, no-any-return]
        grad = torch.is_grad_enabled()
        columnwise = grad and any(
            parameter.requires_grad for reader in self._readers for parameter in reader.parameters(recurse=False)
        )
        weight = self.weight if grad else self.weight.detach()
        output = NormCastFunction.apply(hidden_states, weight, self.variance_epsilon, *begun, columnwise)
        offer(output, begun.cast)
        return output  # type: ignore[no-any-return]

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def _context(self) -> fp8_region.FP8Context:
        return self._readers[0].running_context() if self._readers else fp8_region.DISABLED

    def _casts(self, x: Any) -> bool:
        """Whether all readers run in FP8 now, and a kernel supports the norm of ``x``."""
        return (
            bool(self._readers)
            and all(
                isinstance(each, LinearLayer) and each.fp8 and each.running_context().enabled for each in self._readers
            )
            and type(x) is Tensor
            and type(self.weight) is nn.Parameter
            and x.dtype == self.weight.dtype
            and x.dtype in ops.HIGH_PRECISION
            and x.is_contiguous()
            and x.numel() > 0
            and autocast_dtype(x.device.type) is None
            and not in_transform()
        )


def is_known_norm(module: nn.Module) -> bool:
    """Whether the formula of ``module`` is known, also if it casts already."""
    return is_known(module, KNOWN, CastingNorm)


def cast_for(norm: nn.Module, readers: Sequence[LinearLayer]) -> None:
    """Make ``norm`` cast for ``readers``, in order of their calls, in place."""
    make_casting(norm, CastingNorm)
    norm._readers = tuple(readers)  # type: ignore[assignment]


def __getattr__(name: str) -> Any:  # unpickling looks up classes here
    return class_named(name, KNOWN, CastingNorm)
