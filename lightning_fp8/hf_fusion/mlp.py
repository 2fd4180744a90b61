"""Gated MLPs of Hugging Face models, such as Llama's, that cast their activation for their last layer, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import fp8_region, ops
from lightning_fp8.functions.shared_input import offer
from lightning_fp8.hf_fusion import casting
from lightning_fp8.hf_fusion.deferred_gated import GatedCastFunction
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype

KNOWN = {
    "LlamaMLP": "transformers.models.llama.modeling_llama",
    "MistralMLP": "transformers.models.mistral.modeling_mistral",
    "Qwen2MLP": "transformers.models.qwen2.modeling_qwen2",
    "Qwen3MLP": "transformers.models.qwen3.modeling_qwen3",
    "GemmaMLP": "transformers.models.gemma.modeling_gemma",
    "Gemma2MLP": "transformers.models.gemma2.modeling_gemma2",
    "Gemma3MLP": "transformers.models.gemma3.modeling_gemma3",
}
"""Classes whose forward is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, and their modules."""

ACTIVATIONS = {
    ("SiLU", "torch.nn.modules.activation"): "silu",
    ("SiLUActivation", "transformers.activations"): "silu",
    ("GELUTanh", "transformers.activations"): "gelu",
    ("PytorchGELUTanh", "transformers.activations"): "gelu",
}
"""By an activation's class and module, its name in the ops."""

LAYERS = ("gate_proj", "up_proj", "down_proj")


class CastingMLP(casting.CastingModule):
    """A gated MLP whose last layer reads FP8 copies of its input.

    Any other reader of this input, or of its gradients, gets the values, which are then computed.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if torch.compiler.is_compiling():
            return super().forward(x)  # type: ignore[misc, no-any-return]
        layers = self.gate_proj, self.up_proj, self.down_proj
        contexts = [layer.running_context() for layer in layers if isinstance(layer, LinearLayer)]
        if not self._is_fp8(layers):
            self._note(False, contexts[0] if contexts else fp8_region.current_context())
            return super().forward(x)  # type: ignore[misc, no-any-return]
        gate, up = self.gate_proj(x), self.up_proj(x)
        activated = self._cast(gate, up) if _is_castable(gate, up) else None
        self._note(activated is not None, contexts[0])
        return self.down_proj(self.act_fn(gate) * up if activated is None else activated)  # type: ignore[no-any-return]

    @property
    def features(self) -> tuple[int, ...]:
        """Those of its last layer, which notes that it is compiled."""
        return self.down_proj.features if isinstance(self.down_proj, LinearLayer) else ()

    def _cast(self, gate: Tensor, up: Tensor) -> Tensor | None:
        down: Any = self.down_proj
        begun = casting.begin_cast(gate, down)
        if begun is None:
            return None
        columnwise = torch.is_grad_enabled() and down.weight.requires_grad
        activation = activation_of(self)
        output: Tensor = GatedCastFunction.apply(gate, up, activation, *begun, columnwise)  # type: ignore[no-untyped-call]
        offer(output, begun.cast)
        return output

    def _is_fp8(self, layers: tuple[nn.Module, ...]) -> bool:
        """Whether all layers run in FP8 now, uncompiled, with only the activation between them."""
        return (
            all(
                isinstance(layer, LinearLayer)
                and layer.fp8
                and layer.running_context().enabled
                and layer._compiled_call_impl is None
                for layer in layers
            )
            and not hooks_of(self.act_fn)
            and activation_of(self) is not None
            and not casting.in_transform()
        )


def _is_castable(gate: Any, up: Any) -> bool:
    """Whether a kernel supports these tensors."""
    return (
        type(gate) is type(up) is Tensor
        and (gate.shape, gate.dtype, gate.device) == (up.shape, up.dtype, up.device)
        and gate.dtype in ops.HIGH_PRECISION
        and autocast_dtype(gate.device.type) in (None, gate.dtype)
        and gate.is_contiguous()
        and up.is_contiguous()
        and gate.numel() > 0
    )


def is_known_mlp(module: nn.Module) -> bool:
    """Whether the formula of ``module`` is known, also if it casts already."""
    return casting.is_known(module, KNOWN, CastingMLP)


def activation_of(mlp: nn.Module) -> str | None:
    """The ops' name for the activation of a known MLP; None if it is not supported."""
    cls = type(mlp.act_fn)
    return None if "forward" in vars(mlp.act_fn) else ACTIVATIONS.get((cls.__name__, cls.__module__))


def hooks_of(module: Any) -> bool:
    """Whether ``module`` has hooks, which would observe or change its input or output."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def cast_activation(mlp: nn.Module) -> None:
    """Make ``mlp`` cast its activation for its last layer, in place."""
    casting.make_casting(mlp, CastingMLP)


def __getattr__(name: str) -> Any:  # unpickling looks up classes here
    return casting.class_named(name, KNOWN, CastingMLP)
