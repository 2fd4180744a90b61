"""``torchao.float8.float8_linear_utils``: the conversion."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from lightning_fp8.arguments import require_module
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.conversion import report_first_steps
from lightning_fp8.convert.pinned import is_kept, set_own_context
from lightning_fp8.convert.plan import plan_conversion, reason_ineligible, refuse_codes
from lightning_fp8.convert.policy import Policy
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.swap import swap_class
from lightning_fp8.names import clean_name
from lightning_fp8.torchao.float8.config import Float8LinearConfig

__all__ = ["convert_to_float8_training"]


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Convert the linear layers of ``module`` in place, so that they run in FP8 without ``fp8_autocast``.

    All linear layers are converted. Unlike :func:`lightning_fp8.convert_module`, the function makes no exception for
    first and last layers and output heads. Parameters stay the same objects, and ``state_dict`` keeps its keys. Inside
    ``fp8_autocast``, and under a plugin, layers use its recipe instead.

    As in torchao, layers that are not chosen stay as they are, also if an earlier call has converted them. Converted
    layers that are chosen again get the new configuration.

    Args:
        module: any module, or a single ``nn.Linear``.
        module_filter_fn: called with each ``nn.Linear`` and its name; returns True to convert it. None converts all.
        config: None is ``Float8LinearConfig()``, one scale for each tensor.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: If ``module`` is not a module, if ``config`` is not a :class:`Float8LinearConfig` of this package, or
            if the weight of a chosen layer is float8 codes.
    """
    require_module("convert_to_float8_training", module)
    config = Float8LinearConfig() if config is None else config
    if not isinstance(config, Float8LinearConfig):
        raise TypeError(f"config={config!r} must be a lightning_fp8.torchao.float8.Float8LinearConfig")
    linears = [(clean_name(name), each) for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    chosen = [pair for pair in linears if module_filter_fn is None or module_filter_fn(pair[1], pair[0])]
    others = {id(each) for each in module.modules() if module_filter_fn} - {id(each) for _, each in chosen}
    refuse_codes(module, Policy(skip=lambda each, name: id(each) in others))
    reasons = {name: reason_ineligible(each) for name, each in chosen}
    in_fp8 = [each for name, each in chosen if not reasons[name]]
    context = FP8Context(config.recipe(), chosen=True)
    for each in in_fp8:
        if not isinstance(each, Linear):
            swap_class(each, Linear)
        each.fp8 = True  # type: ignore[assignment]
    set_own_context(in_fp8, context)
    policy = Policy(first_last_layers_bf16=False, replace_layers=False, skip=is_kept, where_faster=False)
    plan = plan_conversion(module, policy)._replace(attention=None)
    apply_conversion(module, plan)
    report_first_steps(module, plan)
    if not chosen:
        warnings.warn("convert_to_float8_training converts no layer: no nn.Linear was chosen", stacklevel=2)
    if left := "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason):
        warnings.warn(f"convert_to_float8_training leaves layers in high precision: {left}", stacklevel=2)
    return module
