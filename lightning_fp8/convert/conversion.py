"""``convert_module``: plans a conversion, applies it, and reports what ran."""

from __future__ import annotations

import warnings
from functools import partial

from torch import nn

from lightning_fp8.arguments import naming_arguments, require_module
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.first_step import ONLY_DISABLED, OUTSIDE, FirstStep, idle_message, watch_first_steps
from lightning_fp8.convert.plan import Plan, plan_conversion, refuse_codes
from lightning_fp8.convert.policy import Policy, Skip
from lightning_fp8.convert.summary import LINEAR, ConversionSummary
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import RegionWatch


@naming_arguments
def convert_module(
    model: nn.Module,
    *,
    first_last_layers_bf16: bool = True,
    num_layers_at_start_in_bf16: int = 1,
    num_layers_at_end_in_bf16: int = 1,
    replace_layers: bool = True,
    skip: Skip = (),
    fuse: bool = True,
    where_faster: bool = True,
) -> nn.Module:
    """Convert the linear layers of ``model`` (and GPT-2's ``Conv1D``) to FP8 layers, in place. It is idempotent.

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
            for the sizes of their first training forward; see docs/models.md. Layers that are constructed as a
            ``lightning_fp8.Linear`` run in FP8.

    Returns:
        ``model``.

    Raises:
        ValueError, TypeError: If a count is negative, if ``skip`` is neither globs nor functions, or if one of its
            globs matches no module.
        TypeError: If the weight of a layer that ``skip`` does not match is float8 codes, as in ``FP8Linear`` of
            transformers.
    """
    require_module("convert_module", model)
    policy = Policy(
        first_last_layers_bf16,
        num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16,
        replace_layers,
        skip,
        fuse,
        where_faster,
    )
    refuse_codes(model, policy)
    plan = plan_conversion(model, policy)
    for wrong in plan.wrong_globs:
        raise ValueError(wrong)
    apply_conversion(model, plan, partial(warnings.warn, stacklevel=2))
    if not plan.summary.num_fp8:
        warnings.warn(f"{nothing_runs_in_fp8(plan.summary)}:\n{plan.summary}", stacklevel=3)
    report_first_steps(model, plan)
    watch = RegionWatch(type(model).__name__)
    for module in model.modules():
        if isinstance(module, LinearLayer) and module.fp8:
            module.record.watch = watch
    return model


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
    reasons = list(dict.fromkeys(layer.reason for layer in summary.layers if layer.kind == LINEAR))
    ways = {
        ", one of the ": "lower num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16, or pass "
        "first_last_layers_bf16=False",
        "skip=": "pass a skip= that matches fewer layers",
        "replace_layers=False": "pass replace_layers=True, or construct layers as lightning_fp8.Linear",
        "output head": "construct an output head as lightning_fp8.Linear",
    }
    fitting = [way for phrase, way in ways.items() if any(phrase in reason for reason in reasons)]
    others = [reason for reason in reasons if not any(phrase in reason for phrase in ways)]
    said = "; ".join([*fitting, *others[:3]]) if reasons else "it has no linear layer"
    return f"no layer of the model runs in FP8 (the table says why); {said}"
