"""``convert_module``: plans a conversion, applies it, and reports what ran."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import nn

from lightning_fp8.arguments import naming_arguments, plain, require_bool, require_module
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.codes import adopt_codes
from lightning_fp8.convert.first_step import ONLY_DISABLED, OUTSIDE, FirstStep, idle_message, watch_first_steps
from lightning_fp8.convert.pinned import Pinned, pin
from lightning_fp8.convert.plan import Plan, plan_conversion
from lightning_fp8.convert.policy import Policy, Skip
from lightning_fp8.convert.summary import ATTENTION, EXPERTS, LINEAR, ConversionSummary
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import RegionWatch
from lightning_fp8.numerics.recipes import Recipe, make_recipe


@naming_arguments
def convert_module(
    model: nn.Module,
    *,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    first_last_layers_bf16: bool = True,
    num_layers_at_start_in_bf16: int = 1,
    num_layers_at_end_in_bf16: int = 1,
    replace_layers: bool = True,
    skip: Skip = (),
    fuse: bool = True,
    where_faster: bool = True,
    attention: bool | Literal["always"] = False,
    cache_fp8_weights: bool = False,
) -> nn.Module:
    """Convert linear layers, GPT-2's ``Conv1D`` and experts of ``model`` to FP8 layers, in place. It is idempotent.

    With ``recipe``, layers run by it wherever they are called, in training and in evaluations, so that loops of others
    need no change. Inside ``fp8_autocast``, and in forwards under a plugin, its recipe is used instead;
    ``fp8_autocast(enabled=False)`` is high precision. Copies and pickles of the model keep the recipe. Without
    ``recipe``, layers run in FP8 only inside ``fp8_autocast``, and a recipe of an earlier call is removed.

    A *layer* is an element of a ``ModuleList`` or ``Sequential`` of blocks of the same class. An encoder and a decoder
    each have such a list. In a model without one, a layer is a Linear, in registration order. No dtype changes: BF16
    means the dtype of the weights here, or that of ``torch.autocast``. Besides the first and last layers, some stay in
    BF16:

    - an output head: tied to an embedding, named by the model's ``get_output_embeddings()``, or the last Linear after
      the blocks, of the model or of a later part. It runs in FP8 if it is constructed as a ``lightning_fp8.Linear``.
    - adapters (LoRA).
    - narrow layers, which are slower in FP8: at most 64 features on one side, more than 8 times as many on the other.
    - layers that cannot run in FP8, such as those of a subclass of Linear. The table has the reasons.

    Layers of torchao's ``convert_to_float8_training`` run in FP8 wherever they are, unless ``skip`` matches them.

    Args:
        model: any module. Its parameters stay the same objects, and its ``state_dict`` keeps its keys.
        recipe: the model's own recipe: a name, a recipe or a mapping, see :func:`make_recipe`. The ranks of a delayed
            one share their scales as those of ``fp8_autocast`` do.
        first_last_layers_bf16: keep the first and last layers in BF16.
        num_layers_at_start_in_bf16: the number of first layers to keep.
        num_layers_at_end_in_bf16: the number of last layers to keep.
        replace_layers: False converts no linear layer; only existing modules of ``lightning_fp8`` run in FP8.
        skip: the modules that stay in BF16: globs of module names, or a function that is called with each candidate
            module and its name and returns True to keep it in BF16, or a sequence of both.
        fuse: run each RMSNorm in one kernel and each gated MLP (SwiGLU, GeGLU) as one autograd function, in Hugging
            Face's Llama and in all models whose norms and MLPs have a known forward. The table lists them, and the
            reasons of those that run as the model's own. False leaves all as they are, also after an earlier True.
        where_faster: on a GPU that was timed, let layers stay in BF16 from the first optimizer step on if FP8 is slower
            for the sizes of their first training forward, or, on any GPU, if it is a loop over many experts; see
            docs/models.md. Layers that are constructed as a ``lightning_fp8.Linear`` run in FP8.
        attention: with ``recipe``, also run attention in FP8; True and ``"always"`` as in :class:`FP8Precision`.
        cache_fp8_weights: with ``recipe``, cast weights once per optimizer step, frozen ones without delayed scaling
            only once, and keep both FP8 copies, 2 bytes for each parameter. In-place changes of ``weight.data`` are
            not detected before the next cast; call :func:`update_fp8_scales` after them.

    Returns:
        ``model``.

    Raises:
        ValueError: If ``attention`` or ``cache_fp8_weights`` is given without ``recipe``.
        ValueError, TypeError: If ``recipe`` is not one, if a count is negative, if ``skip`` is neither globs nor
            functions, or if one of its globs matches no module.
        TypeError: If ``attention`` or ``cache_fp8_weights`` has another type.
        TypeError: If a layer that ``skip`` does not match has float8 codes that cannot be multiplied; see
            docs/fp8_checkpoints.md.
    """
    require_module("convert_module", model)
    require_bool("cache_fp8_weights", cache_fp8_weights := plain(cache_fp8_weights))
    own, compares = attending(make_recipe("delayed" if recipe is None else recipe), attention)
    if recipe is None and (attention or cache_fp8_weights):
        given = f"attention={attention!r}" if attention else "cache_fp8_weights=True"
        raise ValueError(f"{given} needs a recipe: convert_module(model, recipe='delayed', {given})")
    context = FP8Context(own, enabled=recipe is not None, weight_period=0 if cache_fp8_weights else None)
    policy = Policy(
        first_last_layers_bf16,
        num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16,
        replace_layers,
        skip,
        fuse,
        where_faster,
    )
    plan = plan_conversion(model, policy, context.attention, compares)
    for wrong in plan.wrong_globs:
        raise ValueError(wrong)
    adopt_codes(model, policy)
    history = apply_conversion(model, plan, partial(warnings.warn, stacklevel=2))
    pin(model, Pinned(context, policy, history) if context.enabled else None)
    if context.attention and not any(layer.kind == ATTENTION for layer in plan.summary.layers):
        text = f"attention={attention!r}: no module of {type(model).__name__} was found that computes attention"
        warnings.warn(text, stacklevel=3)
    if not plan.summary.num_fp8:
        warnings.warn(f"{nothing_runs_in_fp8(plan.summary)}:\n{plan.summary}", stacklevel=3)
    report_first_steps(model, plan)
    watch = RegionWatch(type(model).__name__)
    for module in model.modules():
        if isinstance(module, LinearLayer) and module.fp8:
            module.record.watch = watch
    return model


def attending(recipe: Recipe, attention: bool | Literal["always"]) -> tuple[Recipe, bool]:
    """``recipe`` with attention as asked, and whether attention compares FP8 with SDPA.

    Raises:
        TypeError: If ``attention`` is not True, False or ``"always"``.
    """
    attention = plain(attention)
    if not isinstance(attention, bool) and not (isinstance(attention, str) and attention == "always"):
        raise TypeError(f"attention={attention!r} must be True, False or 'always'")
    compares = attention is True and not FP8Context(recipe).attention
    return (replace(recipe, fp8_dpa=True) if attention else recipe), compares


def report_first_steps(model: nn.Module, plan: Plan) -> None:
    """Warn after the first optimizer steps of a loop without a plugin if layers do not run as planned."""
    watch_first_steps(model, FirstStep(model, plan, partial(_warn_of_idle, set())))


def _warn_of_idle(told: set[str], summary: ConversionSummary) -> None:
    """Warn of layers of :func:`convert_module` that did not run in FP8 as planned, except those that were ``told``."""
    # The layers' RegionWatch warns of training outside every region.
    if said := idle_message(summary, told, "conversion_summary(model)", unsaid=(OUTSIDE, ONLY_DISABLED)):
        warnings.warn(said, stacklevel=2)


def nothing_runs_in_fp8(summary: ConversionSummary) -> str:
    """The message that no layer runs in FP8, with ways out that match the reasons in ``summary``."""
    reasons = list(dict.fromkeys(layer.reason for layer in summary.layers if layer.kind in (LINEAR, EXPERTS)))
    ways = {
        ", one of the ": "lower num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16, or pass "
        "first_last_layers_bf16=False",
        "skip=": "pass a skip= that matches fewer layers",
        "replace_layers=False": "pass replace_layers=True, or construct layers as lightning_fp8.Linear",
        "output head": "construct an output head as lightning_fp8.Linear",
    }
    fitting = [way for phrase, way in ways.items() if any(phrase in reason for reason in reasons)]
    others = [reason for reason in reasons if not any(phrase in reason for phrase in ways)]
    if any("its weight is" in reason or "is a subclass of" in reason for reason in others):
        others = [*others[:3], "if the model was quantized, load it unquantized"]
    said = "; ".join([*fitting, *others[:4]]) if reasons else "it has no linear layer"
    return f"no layer of the model runs in FP8 (the table says why); {said}"
