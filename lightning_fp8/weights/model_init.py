"""``fp8_model_init``: layers whose weights are stored only in FP8, one byte per value."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import plain, require_bool
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.recipes import make_recipe
from lightning_fp8.numerics.scaled import Cast, Layout, Role
from lightning_fp8.optimizer_steps import before, listen
from lightning_fp8.threads import thread
from lightning_fp8.weights.fp8_tensor import FP8Tensor, quantized_tensor
from lightning_fp8.weights.masters import warn_without_masters

TENSOR_CAST = Cast(E4M3, Layout.TENSOR, power_2_scale=True)
"""Cast of a primary weight: one power-of-two scale, so that casting its values again does not change them."""


@dataclass(frozen=True)
class _Init:
    """How weights are stored inside a region; in high precision if ``cast`` is None."""

    cast: Cast | None = None
    preserve_high_precision_init_val: bool = False


_OUTSIDE = _Init()


class fp8_model_init(ContextDecorator):
    """Context manager in which FP8 layers are constructed, and models converted, with weights stored only in FP8.

    It applies to :class:`lightning_fp8.Linear`, :class:`LayerNormLinear`, :class:`LayerNormMLP` and layers that
    contain them when they are constructed, and to every layer that ``convert_module`` runs in FP8. Biases, norms and
    layers in high precision do not change. An FP8 weight has the dtype and shape of the weight it replaces. Its values
    are E4M3 codes times a power of two: one per tensor, or one per 128 × 128 block with the blockwise recipe. Layers
    multiply by the codes if the recipe's weights have the same blocks, and otherwise cast the values (rowwise, MXFP8).
    All other operations compute with the values.

    A ``state_dict`` contains the values as plain tensors of the weight's dtype; loading casts them to FP8.

    To train such weights, keep float32 masters in the optimizer with :func:`lightning_fp8.with_master_weights`;
    ``FP8Precision`` calls it for you.

    Args:
        enabled: if False, layers are constructed as outside, also within an enabled region.
        recipe: the recipe that the layers will run with, or anything :func:`make_recipe` accepts.
        preserve_high_precision_init_val: keep each weight's values before the cast on the CPU, for
            ``weight.get_high_precision_init_val()``, until ``weight.clear_high_precision_init_val()``. Values loaded by
            ``load_state_dict`` replace them.

    Raises:
        TypeError: If ``enabled`` or ``preserve_high_precision_init_val`` is not a bool.
        ValueError, TypeError: If ``recipe`` is not a recipe; see :func:`make_recipe`.
    """

    def __init__(
        self, enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        enabled = plain(enabled)
        require_bool("enabled", enabled)
        require_bool("preserve_high_precision_init_val", preserve_high_precision_init_val)
        cast = TENSOR_CAST
        if recipe is not None:
            of_recipe = make_recipe(recipe).cast(Role.WEIGHT)
            if of_recipe.layout.transposes:  # other layouts need a copy per direction: two bytes per value
                cast = Cast(of_recipe.float8, of_recipe.layout, power_2_scale=True)
        self.init = _Init(cast if enabled else None, preserve_high_precision_init_val)
        self._outer: list[_Init] = []

    def _recreate_cm(self) -> fp8_model_init:
        region = fp8_model_init.__new__(fp8_model_init)
        region.init, region._outer = self.init, []
        return region

    def __enter__(self) -> fp8_model_init:
        self._outer.append(thread.weights)
        thread.weights = self.init
        return self

    def __exit__(self, *_: Any) -> None:
        thread.weights = self._outer.pop()


class _Concatenated(torch.autograd.Function):
    """FP8 weights ``[N_i, K]`` concatenated along dimension 0 as an FP8 weight, with gradients."""

    @staticmethod
    def forward(ctx: Any, *weights: FP8Tensor) -> Tensor:
        ctx.sizes = [len(weight) for weight in weights]
        return quantized_tensor(torch.cat([weight.dequantize() for weight in weights]), weights[0].cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient.split(ctx.sizes)


def concatenated(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate ``weights [N_i, K]`` along dimension 0; FP8 weights give an FP8 weight with the cast of the first.

    The result has the scale of the largest weight. It changes only values of the other weights that become subnormal.
    """
    if all(isinstance(weight, FP8Tensor) for weight in weights):
        joined: Tensor = _Concatenated.apply(*weights)
        return joined
    return torch.cat([*weights])


def keep_weights_in_fp8(module: nn.Module, names: Iterable[str]) -> None:
    """Inside an enabled ``fp8_model_init``, turn the parameters ``names`` of ``module`` into FP8 weights, in place.

    Raises:
        TypeError: If a weight is sharded.
        RuntimeError: If other objects refer to a parameter that would be changed.
    """
    init: _Init = thread.weights or _OUTSIDE
    if init.cast is None:
        return
    listen(before, warn_without_masters)
    for name in names:
        weight = module._parameters.get(name)
        if weight is None or isinstance(weight, FP8Tensor):
            continue
        if not isinstance(weight.data, Tensor) or type(weight.data) is not Tensor:
            raise TypeError(
                f"fp8_model_init: the {name} of {type(module).__name__} is a {type(weight.data).__name__}, and sharded "
                "weights cannot be kept in FP8. FSDP2 gathers the weights of FP8 layers in FP8 by itself: shard "
                "high-precision weights, and construct the model outside of fp8_model_init"
            )
        fp8_weight = quantized_tensor(weight.detach(), init.cast)
        if init.preserve_high_precision_init_val:
            fp8_weight.high_precision_init_val = weight.detach().to("cpu", copy=True)
        _put_in_place(weight, fp8_weight, name)


def keep_model_in_fp8(model: nn.Module, layers: Sequence[tuple[str, nn.Module, Sequence[str], bool]]) -> None:
    """Inside an enabled ``fp8_model_init``, turn the weights of the converted ``layers`` into FP8 weights.

    FP8 weights of layers that run in high precision are turned back into high-precision weights.

    Args:
        layers: a tuple for each layer: its name, the module, the names of its weights, and whether it runs in FP8.
    """
    uses = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    shared: list[str] = []
    rounded: list[str] = []
    for name, module, weights, runs_in_fp8 in layers:
        if runs_in_fp8:
            alone = [weight for weight in weights if uses[id(module._parameters.get(weight))] < 2]
            if thread.weights is not None and thread.weights.cast is not None:
                shared += [f"{name}.{weight}" for weight in weights if weight not in alone]
            keep_weights_in_fp8(module, alone)
            continue
        for weight in weights:
            parameter = module._parameters.get(weight)
            if isinstance(parameter, FP8Tensor) and parameter.stored is None:
                preserved = parameter.get_high_precision_init_val()
                if preserved is None or not parameter.is_cast_of(preserved):
                    rounded.append(f"{name}.{weight}")
                    preserved = parameter.dequantize()
                _put_in_place(parameter, preserved.to(parameter.device, parameter.dtype), weight)
    if shared:
        warnings.warn(
            f"fp8_model_init: {', '.join(shared)} stay in high precision, because other modules use them, too",
            stacklevel=2,
        )
    if rounded:
        warnings.warn(
            f"fp8_model_init: {', '.join(rounded)} were constructed in FP8, but their layers run in high precision: "
            "the weights are in high precision again, but their values were rounded to FP8. Construct these layers "
            "outside of fp8_model_init, or with preserve_high_precision_init_val=True",
            stacklevel=2,
        )


def _put_in_place(parameter: nn.Parameter, new: Tensor, name: str) -> None:
    """Give ``parameter`` the content of ``new``; the object stays the same, for optimizers and hooks."""
    attributes = {key: value for key, value in vars(parameter).items() if key not in FP8Tensor.ATTRIBUTES}
    made = nn.Parameter(new, requires_grad=parameter.requires_grad)
    vars(made).update(attributes)
    try:
        torch.utils.swap_tensors(parameter, made)
    except RuntimeError as error:
        raise RuntimeError(
            f"fp8_model_init: {name} cannot be changed in place ({error}); enter it before DistributedDataParallel, "
            "torch.compile and the first backward pass use the model"
        ) from error
