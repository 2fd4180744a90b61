"""Gated MLPs of other libraries, such as those of Hugging Face's Llama, as one autograd function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_fp8.fp8_tensor import FP8Tensor
from lightning_fp8.functions.gated_mlp import GatedMLP, GatedMLPFunction
from lightning_fp8.functions.linear import without_gradient
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.hf_fusion.fused import (
    FusedModule,
    computes,
    forward_of,
    fuse,
    has_global_hooks,
    has_hooks,
    in_transform,
)
from lightning_fp8.modules.linear import Linear
from lightning_fp8.scaled import Role

if TYPE_CHECKING:  # calls of imported names are compiled differently, so a template imports what its model does
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

ACTIVATIONS = {
    ("SiLU", "torch.nn.modules.activation"): "silu",
    ("SiLUActivation", "transformers.activations"): "silu",
    ("GELUTanh", "transformers.activations"): "gelu",
    ("PytorchGELUTanh", "transformers.activations"): "gelu",
}
"""By an activation's class and module, its name in the ops."""

LAYERS = ("gate_proj", "up_proj", "down_proj")


def _is_whole(weight: Any) -> bool:
    """Whether an op can read the weight: a parameter, or one in FP8, as FSDP2 gathers; not a DTensor."""
    return type(weight) is nn.Parameter or type(weight) is Tensor or isinstance(weight, FP8Tensor)


def _gated(self: Any, x: Any) -> Any:  # templates, of which only the code is read
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504


def _gated_at_once(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _gated_by_liger(self: Any, x: Any) -> Any:
    return self.down_proj(_swiglu_dispatch(self.gate_proj(x), self.up_proj(x)))  # type: ignore[name-defined]  # noqa: F821


def _gated_by_older_liger(self: Any, x: Any) -> Any:
    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def _gated_gelu_by_liger(self: Any, x: Any) -> Any:
    return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class FusedMLP(FusedModule):
    """A gated MLP whose three FP8 layers are one autograd function."""

    _by_liger: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if not self._context().enabled:
            return self._unfused(x)  # type: ignore[no-any-return]
        modules = self._modules
        layers = modules["gate_proj"], modules["up_proj"], modules["down_proj"]
        activation = self._runs_fused(x, layers)
        self._note(activation is not None)
        if activation is None:
            return self._unfused(x)  # type: ignore[no-any-return]
        return _forward(x, *cast(tuple[Linear, Linear, Linear], layers), activation)

    def _runs_fused(self, x: Any, layers: tuple[Any, ...]) -> str | None:
        """The activation, if all layers run in FP8 now, with nothing between them that would have to be called."""
        for layer in layers:
            if not (
                type(layer) is Linear
                and layer.fp8
                and layer.parallel_mode is None
                and not layer.return_bias
                and layer._compiled_call_impl is None
                and "forward" not in layer.__dict__
                and not has_hooks(layer)
                and _is_whole(layer._parameters.get("weight"))
            ):
                return None
        fits = (
            type(x) in (Tensor, nn.Parameter)
            and layers[0]._parameters["bias"] is None
            and layers[1]._parameters["bias"] is None
            and x.numel() > 0
            and self._last_recipe_allows()
            and not has_global_hooks()
            and not in_transform()
        )
        return (self._by_liger or activation_of(self)) if fits else None

    def _last_recipe_allows(self) -> bool:
        return self._context().recipe.backward_override is None


def _forward(x: Tensor, gate: Linear, up: Linear, down: Linear, activation: str) -> Tensor:
    wg, wu, wd = gate._parameters["weight"], up._parameters["weight"], down._parameters["weight"]
    bd = down._parameters["bias"]
    assert wg is not None and wu is not None and wd is not None
    context = gate._begin(x, wg, None)
    up._begin(x, wu, None)
    down._begin_inside(None)
    (of_gate, *_), dtype = gate._products(x, (wg,), (), context, None)
    (of_up, *_), _ = up._products(x, (wu,), (), context, None)
    (of_down, *_), _ = down._products(x, (wd,), (bd,), context, None)
    shared = None
    if not torch.compiler.is_compiling():
        shared = input_cast(x, dtype, of_gate.recipe, of_gate.slots[Role.INPUT], observe=of_gate.observe)
    if not torch.is_grad_enabled():
        wg, wu, wd = without_gradient(wg), without_gradient(wu), without_gradient(wd)
    mlp = GatedMLP(activation, of_gate, of_up, of_down, dtype, shared)
    y: Tensor = GatedMLPFunction.apply(mlp, x if x.dtype is dtype else x.to(dtype), wg, wu, wd, bd)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], wd.shape[0])


def is_known_mlp(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is the known formula, also if it is fused already."""
    return activation_by_liger(module) is not None or computes(forward_of(module), _gated, _gated_at_once)


def activation_by_liger(mlp: nn.Module) -> str | None:
    """The ops' name for the activation of an MLP whose forward is Liger's, which calls no ``act_fn``; else None."""
    forward = forward_of(mlp)
    if computes(forward, _gated_by_liger, _gated_by_older_liger):
        return "silu"
    return "gelu" if computes(forward, _gated_gelu_by_liger) else None


def activation_of(mlp: nn.Module) -> str | None:
    """The ops' name for the activation that the ``act_fn`` of an MLP computes; None if unsupported, or with hooks."""
    act_fn = mlp.act_fn
    cls = type(act_fn)
    return None if "forward" in vars(act_fn) or has_hooks(act_fn) else ACTIVATIONS.get((cls.__name__, cls.__module__))


def fuse_mlp(mlp: nn.Module) -> None:
    """Make ``mlp`` run as one autograd function, in place."""
    fuse(mlp, FusedMLP)
    mlp._by_liger = activation_by_liger(mlp)  # type: ignore[assignment]


__all__ = ["ACTIVATIONS", "LAYERS", "FusedMLP", "activation_by_liger", "activation_of", "fuse_mlp", "is_known_mlp"]
