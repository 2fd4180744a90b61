"""``transformer_engine.pytorch.graph``: modules as CUDA graphs."""

from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.arguments import require_module
from lightning_fp8.delayed.history import all_histories
from lightning_fp8.fp8_region import autocast

__all__ = ["make_graphed_callables"]

_NAMES = {
    **{"fp8_enabled": "enabled", "fp8_calibrating": "calibrating", "fp8_recipe": "recipe"},
    "fp8_group": "amax_reduction_group",
}
_INSTEAD = {
    **dict.fromkeys(("fp8_weight_caching", "cache_quantized_params"), "each replay casts the weights; leave it out"),
    "sample_kwargs": "pass all tensors by position, in sample_args",
}


def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False, **options: Any
) -> Any:
    """``torch.cuda.make_graphed_callables`` whose forwards are captured inside an ``autocast`` region.

    Amaxes of the warm-up are dropped, since torch passes uninitialized gradients there. Gradients of parameters are
    copied, since replays overwrite them. With delayed scaling, train 3 steps before.

    Args:
        modules: a module, or a tuple of them. After a call of ``train()`` or ``eval()`` they run without a graph.
        sample_args: the tensors of its forward, or a tuple of them for each module.
        num_warmup_iters, allow_unused_input: torch's; so is the option ``pool``.
        options: ``enabled``, by default False, and the other arguments of ``autocast`` or, with their names before
            2.8 (``fp8_enabled``), of ``fp8_autocast``.

    Raises:
        NotImplementedError: If another argument of Transformer Engine is neither None nor False.
    """
    graphed = modules if isinstance(modules, tuple) else (modules,)
    for module in graphed:
        require_module("make_graphed_callables", module)
    options = {_NAMES.get(name, name): value for name, value in options.items() if value not in (None, False)}
    pool = options.pop("pool", None)
    for name in options.keys() - _NAMES.values():
        raise NotImplementedError(f"{name}={options[name]!r} is not supported: {_INSTEAD.get(name, 'leave it out')}")
    region = partial(autocast, **{"enabled": False, **options})
    capturing = True

    def in_region(forward: Any) -> Any:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with region() if capturing else nullcontext():
                return forward(*args, **kwargs)

        return run

    amaxes = {history: history.amax.clone() for history in all_histories()}
    for module in graphed:
        module.forward = in_region(module.forward)
    made = torch.cuda.make_graphed_callables(modules, sample_args, num_warmup_iters, allow_unused_input, pool)
    capturing = False
    for history in all_histories():
        history.amax.copy_(amaxes.get(history, torch.zeros_like(history.amax)))
    for parameter in {each for module in graphed for each in module.parameters() if each.requires_grad}:
        parameter.register_hook(Tensor.clone)
    return made
