"""Does what a plan says to a model, in place.

It assigns ``linear.__class__ = Linear``. Parameters stay the same objects, so tied weights, optimizers, hooks and
``state_dict`` keys are preserved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fp8 import fp8_region, optimizer_steps
from lightning_fp8.arguments import is_dtensor
from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.convert.attention_calls import attach
from lightning_fp8.convert.blocks import is_linear, matrices_of
from lightning_fp8.convert.choice import Choice
from lightning_fp8.convert.first_step import uncompiled
from lightning_fp8.convert.fused.plan import fuse_planned
from lightning_fp8.convert.host_limit import watch_host
from lightning_fp8.convert.plan import Plan
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.update import listen
from lightning_fp8.faster import AWAITED
from lightning_fp8.modules.base import require_values
from lightning_fp8.modules.experts import is_experts, swap_experts
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.state import fp8_modules, fp8_state_dict, names_of_fp8_weights
from lightning_fp8.modules.swap import is_conv1d, swap_class, swap_conv1d
from lightning_fp8.names import clean_name, gemm_name
from lightning_fp8.numerics.recipes import Recipe
from lightning_fp8.parallel.agreement import require_same_plans
from lightning_fp8.sharding.fsdp import gather_in_fp8, reasons_for_high_precision
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from lightning_fp8.weights.model_init import keep_model_in_fp8


def apply_conversion(model: nn.Module, plan: Plan, tell: Callable[[str], None] | None = None) -> AmaxHistory:
    """Swap the class of each layer that ``plan`` runs in FP8, and create one amax history for them.

    The history keeps existing scales and amaxes of the layers. FP8 contexts apply to attention as planned: at once in
    modules of this package, in others after :func:`lightning_fp8.convert.attention_calls.attach.attach`.

    Args:
        tell: called with the lines that say which layers and which attention stay in high precision where that is
            faster, and that the host limits the speed; None decides nothing.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    if plan.attention is not None:  # before modules of this package are assigned slots
        others = []
        for place in plan.attention:
            if isinstance(module := modules[place.name], DotProductAttention):
                module.fp8 = place.fp8
            else:
                others.append(place)
        attach.prepare(model, others)
    decisions = {layer.name: layer for layer in plan.summary.layers}
    layers: list[tuple[str, LinearLayer]] = []
    for name, module in modules.items():
        if is_linear(module):
            decision = decisions[gemm_name(name, next(iter(matrices_of(module))))]
            if decision.fp8 and not isinstance(module, LinearLayer):
                if is_experts(module):
                    swap_experts(module)
                else:
                    swap_conv1d(module) if is_conv1d(module) else swap_class(module, Linear)
                module.comparison = AWAITED
            if isinstance(module, LinearLayer):
                layers.append((name, module))
                module.fp8 = decision.fp8
                if not plan.policy.where_faster or isinstance(module._parameters.get("weight"), FP8Tensor):
                    module.comparison, module.slower = None, ""
    fuse_planned(modules, plan.summary)
    history = _share_history(model)
    history.choice = None if tell is None else history.choice or Choice(uncompiled(model), tell)
    listen()
    if tell is not None:
        watch_host(tell)
    keep_model_in_fp8(model, [(name, each, each.weight_names, each.fp8) for name, each in layers])
    if not any(getattr(hook, "hook", None) is require_values for hook in model._load_state_dict_pre_hooks.values()):
        model.register_load_state_dict_pre_hook(require_values)
    history.add_module(model)  # so that an optimizer of only adapters or embeddings updates frozen layers, too
    require_same_plans(model, names_of_fp8_weights(model))
    gather_in_fp8(model)
    _await_sharding(model, [gather_in_fp8])
    return history


class _Awaited(NamedTuple):
    """What is called once a layer's weight is a DTensor. Fabric shards models after their conversion."""

    layer: weakref.ref[LinearLayer]
    actions: list[Callable[[nn.Module], None]]


_until_sharded: weakref.WeakKeyDictionary[nn.Module, _Awaited] = weakref.WeakKeyDictionary()


def when_sharded(model: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Call ``action`` once a converted model has been sharded, unless it is sharded or converted again before.

    The check, at the beginning of an ``fp8_autocast`` region, reads one weight: the first that is not a DTensor.
    """
    if (awaited := _until_sharded.get(uncompiled(model))) is not None:
        awaited.actions.append(action)


def _await_sharding(model: nn.Module, actions: Sequence[Callable[[nn.Module], None]]) -> bool:
    """Whether ``model`` has a layer whose weight is not a DTensor; if so, ``actions`` replace those of the model."""
    model = uncompiled(model)  # a caller may drop a compiled module
    _until_sharded.pop(model, None)
    layers = (each for each in model.modules() if isinstance(each, LinearLayer) and each.fp8)
    plain = next((each for each in layers if not is_dtensor(getattr(each, each.weight_names[0]))), None)
    if plain is not None:
        _until_sharded[model] = _Awaited(weakref.ref(plain), list(actions))
        if _act_where_sharded not in fp8_region.waiting:
            fp8_region.waiting.append(_act_where_sharded)
        optimizer_steps.listen(optimizer_steps.after, _act_after_step)
    return plain is not None


def _act_where_sharded() -> bool:
    """Call the actions of models that have been sharded. It returns whether no model is left."""
    for model, (reference, actions) in list(_until_sharded.items()):
        layer = reference()
        if isinstance(layer, LinearLayer):
            name, own = layer.weight_names[0], layer._parameters  # each region looks here: few calls
            waits = not isinstance(own[name] if name in own else getattr(layer, name), DTensor)
        else:  # it is gone, or its class was changed: another one is looked at from now on
            waits = _await_sharding(model, actions)
        if waits:
            continue
        _until_sharded.pop(model, None)
        for action in actions:
            action(model)
    return not _until_sharded


def _act_after_step(optimizer: Any) -> None:
    """Look at sharded models after a step, too: compiled layers do not tell that a forward begins."""
    if _act_where_sharded():
        optimizer_steps.leave(optimizer_steps.after, _act_after_step)


def with_gathers(summary: ConversionSummary, model: nn.Module, recipe: Recipe) -> ConversionSummary:
    """``summary`` with the reasons why FSDP2 gathers the weights of some FP8 layers in high precision."""
    reasons = reasons_for_high_precision(model, recipe)
    layers = tuple(
        replace(layer, reason=f"{layer.reason}; FSDP2 gathers it in {layer.high_precision}: {reasons[layer.name]}")
        if layer.fp8 and layer.name in reasons
        else layer
        for layer in summary.layers
    )
    return replace(summary, layers=layers)


def _share_history(model: nn.Module) -> AmaxHistory:
    """The one history of the layers of ``model``, which is created if their names or roles have changed."""
    modules = [(name, module) for name, module in fp8_modules(model) if module.fp8]
    names_and_roles = [slot for name, module in modules for slot in module.history_slots(name)]
    histories = [module.history for _, module in modules]
    shared = histories[0] if len({*map(id, histories)}) == 1 else None
    if shared is not None and shared.names == [name for name, _ in names_and_roles]:
        return shared
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    history = AmaxHistory(names_and_roles, device)
    history.load_state_dict(fp8_state_dict(model))
    first_slot = 0
    for _, module in modules:
        module.use_history(history, first_slot)
        first_slot += len(module.history_slots())
    return history
