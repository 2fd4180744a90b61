"""``transformer_engine.pytorch.graph``: modules as CUDA graphs."""

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.arguments import require_module
from lightning_fp8.delayed.history import all_histories
from lightning_fp8.fp8_region import autocast

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, **options: Any
) -> Any:
    """``torch.cuda.make_graphed_callables`` that captures inside an ``autocast`` region, after 3 training steps.

    It drops amaxes of the warm-up, whose gradients are uninitialized, and copies parameters' gradients after replays.

    Args:
        modules: a module, or a tuple of them. After ``train()`` or ``eval()`` changes their mode, they run eagerly.
        sample_args: the tensors of its forward, or a tuple of them for each module.
        options: torch's ``pool``, and the arguments of ``autocast`` (``enabled`` is False by default), also with their
            former names: ``fp8_enabled``, ``fp8_calibrating``, ``fp8_recipe``, ``fp8_group``.

    Raises:
        NotImplementedError: If another argument of Transformer Engine is neither None nor False.
        ValueError: If an argument and its former name differ, or the values of ``enabled`` in a tuple for all modules.
    """
    graphed = modules if isinstance(modules, tuple) else (modules,)
    for module in graphed:
        require_module("make_graphed_callables", module)
    new = {f"fp8_{name}": name for name in ("enabled", "calibrating", "recipe")} | {"fp8_group": "amax_reduction_group"}
    given: dict[str, list[Any]] = {}
    for name, value in options.items():
        if value is not None and not (name == "sample_kwargs" and not any(value or ())):
            of_each = name.endswith("enabled") and isinstance(value, tuple)
            given.setdefault(new.get(name, name), []).extend(value if of_each else [value])
    for name, values in given.items():
        if any(value != values[0] for value in values):
            said = f"{name} is {' and '.join(map(repr, values))}; pass one value, for all modules of a call"
            raise ValueError(f"make_graphed_callables: {said}")
    options = {name: values[0] for name, values in given.items() if values and values[0] is not False}
    pool = options.pop("pool", None)
    if others := ", ".join(sorted(options.keys() - new.values())):
        said = "pass all tensors in sample_args, and leave the others out; each replay casts the weights"
        raise NotImplementedError(f"{others} of make_graphed_callables: {said}")
    region = autocast(**{"enabled": False, **options})
    amaxes = {history: history.amax.clone() for history in all_histories()}
    calls = [(module, module._compiled_call_impl) for module in graphed]  # if it is set, a module's __call__ calls it
    try:
        for module in graphed:
            module._compiled_call_impl = region(module._call_impl)
        made = torch.cuda.make_graphed_callables(modules, sample_args, num_warmup_iters, allow_unused_input, pool)
    finally:
        for module, call in calls:
            module._compiled_call_impl = call
        for history in all_histories():
            history.amax.copy_(amaxes.get(history, torch.zeros_like(history.amax)))
    for parameter in {each for module in graphed for each in module.parameters() if each.requires_grad}:
        if Tensor.clone not in (parameter._backward_hooks or {}).values():  # a module that is captured again has it
            parameter.register_hook(Tensor.clone)
    return made
