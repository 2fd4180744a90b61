"""Decides what runs in FP8 in a model, and why, without changing the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_fp8.convert.attention_calls.attach import AttentionPlace
from lightning_fp8.convert.attention_calls.plan import plan_attention
from lightning_fp8.convert.blocks import features_of, is_linear, matrices_of, names_of, place_of, structure_of
from lightning_fp8.convert.codes import SCALES, codes_of, layout_of_codes, note_of_codes, why_not_codes
from lightning_fp8.convert.fused.liger import READS_THE_HEAD, computed_by_liger, heads_read_by_liger
from lightning_fp8.convert.fused.plan import plan_mlps, plan_norms
from lightning_fp8.convert.policy import Policy, globs_of_nothing, reason_for_bf16, reason_small, skipped_by
from lightning_fp8.convert.summary import EXPERTS, LINEAR, ConversionSummary, LayerDecision
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.modules.experts import is_experts, weights_of_experts
from lightning_fp8.modules.linear_layer import LinearLayer, foreign_weight
from lightning_fp8.modules.swap import calls_own_forward, is_conv1d, unsharded_class
from lightning_fp8.names import clean_name, gemm_name
from lightning_fp8.numerics.formats import holds_codes


class Plan(NamedTuple):
    """What a conversion does.

    Attributes:
        policy: what it was asked for.
        summary: the decision for each matrix, norm and gated MLP, and for each attention if the table shall list it.
        attention: the modules that compute attention, and blocks in high precision in which none was found; None
            leaves attention as it is.
        wrong_globs: an error message for each glob of ``policy.skip`` that matches no layer.
    """

    policy: Policy
    summary: ConversionSummary
    attention: tuple[AttentionPlace, ...] | None
    wrong_globs: tuple[str, ...]


def plan_conversion(model: nn.Module, policy: Policy, attention: bool = False, compares: bool = False) -> Plan:
    """The decision for each matrix of ``model``, which is not changed.

    The matrices are the weights of linear layers and convolutions, and all other parameters of two or more dimensions
    outside embeddings and norms. Whether a forward multiplies by them is known after the first step. With
    ``attention``, the table has a row for each module that computes attention. With ``compares``, those of other
    packages compare FP8 with SDPA.
    """
    structure = structure_of(model)
    modules = {clean_name(name): module for name, module in model.named_modules()}
    aliases = names_of(model)

    def reason_of_attention(name: str) -> str:
        module = modules[name]
        return skipped_by(module, aliases[id(module)], policy) or reason_for_bf16(
            place_of(name, structure.blocks), policy
        )

    planned = plan_attention(modules, policy.replace_layers, reason_of_attention, compares)
    attentions = {row.name: row for row, _ in planned}
    kept = [name for name, place in structure.blocks.items() if reason_for_bf16(place, policy)]
    blind = [block for block in kept if not any(f"{name}.".startswith(f"{block}.") for name in attentions)]
    read_by_liger = heads_read_by_liger(model)
    adapted = {
        f"{name}.base_layer".lstrip(".")
        for name, module in modules.items()
        if "base_layer" in module._modules  # no dict in modules of TorchScript
        and (is_linear(module._modules["base_layer"]) or hasattr(module, "adapter_layer_names"))
    }
    decisions: list[LayerDecision] = []
    for name, module in modules.items():
        if attention and name in attentions:
            decisions.append(attentions[name])
        if is_linear(module):
            names, coded = aliases[id(module)], layout_of_codes(module)
            ours = isinstance(module, LinearLayer) and coded is None  # an adopted layer was not constructed as ours
            own = module.own_context if isinstance(module, LinearLayer) else None
            stays = (
                reason_ineligible(module, policy.replace_layers)
                or (READS_THE_HEAD if name in read_by_liger else "")
                or skipped_by(module, names, policy, _gemm_names(module, names))
            )
            reason = (
                stays
                or reason_for_bf16(
                    None if own is not None and own.chosen else place_of(name, structure.places),
                    policy,
                    "" if ours else structure.heads.get(name, ""),
                )
                or ("" if ours else reason_small(name, features_of(module), adapted))
            )
            fp8 = not reason
            if coded is not None and not stays:
                reason = "; ".join(filter(None, (reason, note_of_codes(coded, fp8))))
            if not reason and is_experts(module) and module.num_experts > MANY_EXPERTS:  # type: ignore[operator]
                reason = f"wgrad in high precision: more than {MANY_EXPERTS} experts"
            kind = EXPERTS if is_experts(module) else LINEAR
            for gemm, shape in matrices_of(module).items():
                decisions.append(LayerDecision(gemm_name(name, gemm), shape, fp8, reason, kind, math.prod(shape)))
        decisions += _other_matrices(module, name)
    by_name = {decision.name: decision for decision in decisions}
    norms = plan_norms(modules, by_name) if policy.fuse else ()
    mlps = plan_mlps(modules, by_name) if policy.fuse else ()
    return Plan(
        policy,
        ConversionSummary(tuple(decisions), norms, mlps, elsewhere=computed_by_liger(model)),
        (*(place for _, place in planned), *(AttentionPlace(name, False, compares=compares) for name in blind)),
        tuple(_wrong_globs(modules, aliases, policy, list(by_name))) if policy.globs else (),
    )


def reason_ineligible(module: nn.Module, replace_layers: bool = True) -> str:
    """The reason why ``module`` cannot run in FP8; an empty string if it can."""
    cls = unsharded_class(module)
    of_others = "" if replace_layers else f"replace_layers=False keeps {cls.__module__.split('.')[0]}'s {cls.__name__}"
    if codes := [*codes_of(module).values()]:
        return f"its weight is {codes[0].dtype}" if why_not_codes(module) else of_others
    if isinstance(module, LinearLayer):
        return foreign_weight(module)
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if cls is not nn.Linear and not is_conv1d(module) and not is_experts(module):
        has_forward = getattr(cls, "forward", None) is not nn.Linear.forward
        return f"{type(module).__name__} is a subclass of nn.Linear{' with its own forward' * has_forward}"
    if reason := foreign_weight(module):
        return reason
    weight: Any = getattr(module, weights_of_experts(module)[0] if is_experts(module) else "weight")
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if "forward" in vars(module) and not calls_own_forward(module):
        return "its forward was replaced on the instance, by something that may not call ours"
    return of_others


_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, ParametrizationList)
"""Their parameters are looked up or scaled by. A layer that computes its weight from others is in the table itself."""


def _other_matrices(module: nn.Module, name: str) -> Iterator[LayerDecision]:
    """The matrices among the parameters of ``module``, named ``name``, that are not the weight of a linear layer."""
    if isinstance(module, _NO_MATRICES):
        return
    own: set[str] = {"weight", *getattr(module, "weight_names", ())} if is_linear(module) else set()
    if is_experts(module):
        own = {f"{weight}{kind}" for weight in weights_of_experts(module) for kind in ("", "_bias", *SCALES)}
    found: list[tuple[str, Tensor, tuple[str, str]]] = []
    if isinstance(module, nn.modules.conv._ConvNd):
        own = {"weight"}
        is_depthwise = module.groups == module.in_channels and module.groups > 1  # which is not a matrix product
        if not is_depthwise and not is_lazy(module.weight):
            size = " × ".join(map(str, module.kernel_size))
            instead = "; the same as an nn.Linear would" * (math.prod(module.kernel_size) == module.groups == 1)
            reason = f"a convolution of {size} does not run in FP8{instead}"
            found.append((name, module.weight, ("convolution", reason)))
    own |= _computed_from(module, own)
    own |= {f"{codes}{scales}" for codes in codes_of(module) for scales in SCALES}
    for own_name, parameter in module.named_parameters(recurse=False):
        if own_name in own or is_lazy(parameter) or not parameter.is_floating_point():
            continue
        if sum(size > 1 for size in parameter.shape) > 1:
            found.append((f"{name}.{own_name}".lstrip("."), parameter, _kind_and_reason(module, parameter)))
    for full_name, matrix, (kind, reason) in found:
        reason = f"it is {matrix.dtype}" if holds_codes(matrix) else reason
        yield LayerDecision(full_name, tuple(matrix.shape), False, reason, kind, matrix.numel())


def _computed_from(module: nn.Module, names: set[str]) -> set[str]:
    """The parameters from which hooks of torch.nn.utils compute the parameters ``names`` before each forward."""
    of_hooks = {
        getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)  # the former of pruning
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod))
    }
    return {f"{name}_{part}" for name in of_hooks & names for part in ("g", "v", "orig")}


def _kind_and_reason(module: nn.Module, parameter: Tensor) -> tuple[str, str]:
    cls = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return "attention", "nn.MultiheadAttention multiplies by a parameter that is not in a Linear"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent", f"nn.{cls}'s products do not run in FP8"
    if "expert" in cls.lower() or (parameter.dim() > 2 and "moe" in cls.lower()):
        ways = "FP8 runs transformers' @use_experts_implementation, and experts with an nn.Linear for each matrix"
        return EXPERTS, f"a parameter of {cls}, experts with a forward of their own; {ways}"
    return "parameter", f"a parameter of {cls}, in no linear layer"


def _gemm_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of the GEMMs of a linear layer with several GEMMs, for each of its ``names``."""
    made = [gemm_name(name, gemm) for name in names for gemm in matrices_of(module)]
    return [name for name in dict.fromkeys(made) if name not in names]


def _wrong_globs(
    modules: Mapping[str, nn.Module], aliases: Mapping[int, list[str]], policy: Policy, known: Sequence[str]
) -> list[str]:
    """An error message for each glob of ``policy.skip`` that matches no layer; ``known`` are the names of rows."""
    named = [
        [*aliases[id(module)], *(_gemm_names(module, aliases[id(module)]) if is_linear(module) else ())]
        for module in modules.values()
    ]
    others = [name for names in named if {*known} & {*names} for name in names if name not in known]
    others += [name for module in modules.values() if codes_of(module) for name in aliases[id(module)]]
    return globs_of_nothing(policy.globs, [*known, *others], [name for names in named for name in names if name])
