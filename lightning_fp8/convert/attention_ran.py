"""Whether attention that should run in FP8 did in a training step, and why not."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_fp8.attention.owners import COMPILED_WHOLE, Owner, was_compiled_whole, was_traced
from lightning_fp8.convert.summary import LayerDecision

OTHER_MEANS = "its forward did not come to torch.nn.functional.scaled_dot_product_attention"
WEIGHTS = "need_weights=True has nn.MultiheadAttention compute the weights themselves; call it with need_weights=False"


def judged(
    layer: LayerDecision,
    module: nn.Module | None,
    owner: Owner | None,
    counts: tuple[int, int, int],
    calls: int,
    otherwise: str,
) -> LayerDecision:
    """``layer`` with what its attention did.

    Args:
        owner: None of a module of ours.
        counts: calls of attention in FP8, in high precision, and in evaluation mode.
        calls: forwards of the module, as far as they are counted.
        otherwise: what to say where nothing was called, or outside FP8 contexts: see ``first_step``.
    """
    fp8, high_precision, evaluations = counts
    if not layer.fp8:  # as its module was then
        return replace(layer, fp8=True, ran=True, reason="eligible") if fp8 else layer
    why = owner.why if owner is not None else getattr(module, "reason", "")
    if fp8:
        also = f"{high_precision} of {fp8 + high_precision} calls ran in high precision: {why}"
        return replace(layer, ran=True, reason=also if high_precision and why else layer.reason)
    if evaluations or (owner is not None and not high_precision and not calls and was_traced(owner)):
        return layer
    if high_precision and why:
        return replace(layer, ran=False, reason=why)
    if calls and not high_precision:
        return replace(layer, ran=False, reason=WEIGHTS if isinstance(module, nn.MultiheadAttention) else OTHER_MEANS)
    whole = not calls and was_compiled_whole(module)
    return replace(layer, ran=False, reason=COMPILED_WHOLE if whole else otherwise)
