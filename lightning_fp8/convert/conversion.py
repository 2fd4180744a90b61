"""Decides which layers run in FP8, and converts them in place.

It assigns ``linear.__class__ = Linear``. Parameters stay the same objects, so tied weights, optimizers, hooks and
``state_dict`` keys are preserved.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_fp8 import fp8_region
from lightning_fp8.arguments import is_dtensor, require_module
from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.convert.attention_calls import attach
from lightning_fp8.convert.attention_calls.plan import PlannedAttention, place_in, plan_attention, reached_places
from lightning_fp8.convert.blocks import (
    features_of,
    find_blocks,
    find_heads,
    find_positions,
    is_linear,
    matrices_of,
)
from lightning_fp8.convert.choice import Choice
from lightning_fp8.convert.first_step import (
    ONLY_DISABLED,
    OUTSIDE,
    FirstStep,
    idle_message,
    uncompiled,
    watch_first_steps,
)
from lightning_fp8.convert.fused.liger import READS_THE_HEAD, computed_by_liger, heads_read_by_liger
from lightning_fp8.convert.fused.plan import fuse_planned, plan_mlps, plan_norms
from lightning_fp8.convert.host_limit import watch_host
from lightning_fp8.convert.policy import Policy, Skip, globs_of_nothing, reason_for_bf16, reason_small, skipped_by
from lightning_fp8.convert.summary import LINEAR, ConversionSummary, LayerDecision
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.update import listen
from lightning_fp8.faster import AWAITED
from lightning_fp8.modules.base import require_values
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.linear_layer import LinearLayer, foreign_weight
from lightning_fp8.modules.record import RegionWatch
from lightning_fp8.modules.state import fp8_modules, fp8_state_dict, names_of_fp8_weights
from lightning_fp8.modules.swap import calls_own_forward, is_conv1d, swap_class, swap_conv1d, unsharded_class
from lightning_fp8.names import clean_name, gemm_name
from lightning_fp8.numerics.formats import CODES_NEED_SCALES, E8M0_DTYPE, holds_codes
from lightning_fp8.numerics.recipes import Recipe
from lightning_fp8.parallel.agreement import require_same_plans
from lightning_fp8.sharding.fsdp import gather_in_fp8, reasons_for_high_precision
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from lightning_fp8.weights.model_init import keep_model_in_fp8


def reason_ineligible(module: nn.Module, replace_layers: bool = True) -> str:
    """The reason why ``module`` cannot run in FP8; an empty string if it can."""
    if codes := [*codes_of(module).values()]:
        return f"its weight is {codes[0].dtype}"
    if isinstance(module, LinearLayer):
        return foreign_weight(module)
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    cls = unsharded_class(module)
    if cls is not nn.Linear and not is_conv1d(module):
        has_forward = getattr(cls, "forward", None) is not nn.Linear.forward
        return f"{type(module).__name__} is a subclass of nn.Linear{' with its own forward' * has_forward}"
    if reason := foreign_weight(module):
        return reason
    if not module.weight.is_floating_point():  # type: ignore[operator, union-attr]
        return f"its weight is {module.weight.dtype}"
    if "forward" in vars(module) and not calls_own_forward(module):
        return "its forward was replaced on the instance, by something that may not call ours"
    return "" if replace_layers else f"replace_layers=False keeps {cls.__module__.split('.')[0]}'s {cls.__name__}"


def refuse_codes(model: nn.Module, policy: Policy) -> None:
    """Refuse a model with float8 weights: only their own layers know the scales.

    Raises:
        TypeError: If a module that ``policy.skip`` does not match has such a parameter.
    """
    all_names = _all_names(model)
    found = []
    for module in model.modules():
        names, codes = all_names[id(module)], codes_of(module)
        full = [f"{name}.{key}".lstrip(".") for name in names for key in codes]
        if codes and not skipped_by(module, names, policy, full):
            found.append((full[0], names[0], next(iter(codes.values())).dtype))
    if found:
        key, name, dtype = found[0]
        more = f", and {len(found) - 1} more layers have such weights" if len(found) > 1 else ""
        raise TypeError(
            f"{key} of {type(model).__name__} is {dtype}{more}: {CODES_NEED_SCALES}. Or keep such layers as they are: "
            f"skip=({name!r},), or a module_filter_fn that does not choose them"
        )


def codes_of(module: nn.Module) -> dict[str, Tensor]:
    """The float8 parameters of ``module`` itself, and its weight if it is a linear layer with a buffer for a weight."""
    own = {"weight": module._buffers.get("weight") if is_linear(module) else None, **module._parameters}
    return {
        name: each
        for name, each in own.items()
        if each is not None and holds_codes(each) and each.dtype != E8M0_DTYPE  # scales
    }


def plan_conversion(model: nn.Module, policy: Policy, attention: bool = False) -> ConversionSummary:
    """The decision for each matrix of ``model``, which is not changed.

    The matrices are the weights of linear layers and convolutions, and all other parameters of two or more dimensions
    outside embeddings and norms. Whether a forward multiplies by them is known after the first step. With
    ``attention``, there is also a decision for each module that computes attention.
    """
    attentions = (
        {planned.decision.name: planned.decision for planned in _attentions(model, policy)} if attention else {}
    )
    output_heads = find_heads(model)
    read_by_liger = heads_read_by_liger(model)
    places = find_positions(model)
    adapted = {
        clean_name(f"{name}.base_layer".lstrip("."))
        for name, module in model.named_modules()
        if "base_layer" in module._modules  # no dict in modules of TorchScript
        and (is_linear(module._modules["base_layer"]) or hasattr(module, "adapter_layer_names"))
    }
    names = _all_names(model)
    decisions = []
    for raw_name, module in model.named_modules():
        name = clean_name(raw_name)
        if name in attentions:
            decisions.append(attentions[name])
        if is_linear(module):
            head = "" if isinstance(module, LinearLayer) else output_heads.get(name, "")
            has_own_context = isinstance(module, LinearLayer) and module.own_context is not None
            reason = (
                reason_ineligible(module, policy.replace_layers)
                or (READS_THE_HEAD if name in read_by_liger else "")
                or skipped_by(module, names[id(module)], policy, _gemm_names(module, names[id(module)]))
                or reason_for_bf16(None if has_own_context else places.get(name), policy, head)
                or ("" if isinstance(module, LinearLayer) else reason_small(name, features_of(module), adapted))
            )
            for gemm, shape in matrices_of(module).items():
                size = math.prod(shape)
                decisions.append(LayerDecision(gemm_name(name, gemm), shape, not reason, reason, parameters=size))
        decisions += _other_matrices(module, name)
    by_name = {decision.name: decision for decision in decisions}
    norms = plan_norms(model, by_name) if policy.fuse else ()
    mlps = plan_mlps(model, by_name) if policy.fuse else ()
    return ConversionSummary(tuple(decisions), norms, mlps, elsewhere=computed_by_liger(model))


_NO_MATRICES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, ParametrizationList)
"""Their parameters are looked up or scaled by. A layer that computes its weight from others is in the table itself."""


def _other_matrices(module: nn.Module, name: str) -> Iterator[LayerDecision]:
    """The matrices among the parameters of ``module``, named ``name``, that are not the weight of a linear layer."""
    if isinstance(module, _NO_MATRICES):
        return
    own: set[str] = {"weight", *getattr(module, "weight_names", ())} if is_linear(module) else set()
    if isinstance(module, nn.modules.conv._ConvNd):
        own = {"weight"}
        if not _is_depthwise(module) and not is_lazy(module.weight):
            yield _in_high_precision(name, module.weight, "convolution", _convolution(module))
    own |= _computed_from(module, own)
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter_name not in own and not is_lazy(parameter) and _is_matrix(parameter):
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            yield _in_high_precision(full_name, parameter, *_kind_and_reason(module, parameter))


def _computed_from(module: nn.Module, names: set[str]) -> set[str]:
    """The parameters from which hooks of torch.nn.utils compute the parameters ``names`` before each forward."""
    of_hooks = {
        getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)  # the former of pruning
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod))
    }
    return {f"{name}_{part}" for name in of_hooks & names for part in ("g", "v", "orig")}


def _in_high_precision(name: str, parameter: Tensor, kind: str, reason: str) -> LayerDecision:
    reason = f"it is {parameter.dtype}" if holds_codes(parameter) else reason
    return LayerDecision(name, tuple(parameter.shape), False, reason, kind, parameter.numel())


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) > 1


def _kind_and_reason(module: nn.Module, parameter: Tensor) -> tuple[str, str]:
    cls = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return "attention", "nn.MultiheadAttention multiplies by a parameter that is not in a Linear"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent", f"nn.{cls}'s products do not run in FP8"
    if parameter.dim() > 2 and ("expert" in cls.lower() or "moe" in cls.lower()):
        return "experts", f"{parameter.dim()}-D parameter of {cls}: products of experts do not run in FP8"
    return "parameter", f"a parameter of {cls}, in no linear layer"


def _is_depthwise(module: nn.modules.conv._ConvNd) -> bool:
    """Whether the convolution is depthwise, which is not a matrix product."""
    return module.groups == module.in_channels and module.groups > 1


def _convolution(module: nn.modules.conv._ConvNd) -> str:
    size = " × ".join(map(str, module.kernel_size))
    instead = "; the same as an nn.Linear would" if math.prod(module.kernel_size) == 1 and module.groups == 1 else ""
    return f"a convolution of {size} does not run in FP8{instead}"


def _attentions(model: nn.Module, policy: Policy) -> list[PlannedAttention]:
    blocks = find_blocks(model)
    modules = {clean_name(name): module for name, module in model.named_modules()}
    aliases = _all_names(model)

    def reason(name: str) -> str:
        return skipped_by(modules[name], aliases[id(modules[name])], policy) or reason_for_bf16(
            place_in(blocks, name), policy
        )

    return plan_attention(model, policy.replace_layers, reason)


def prepare_attention(model: nn.Module, policy: Policy, compares: bool = False) -> None:
    """Set which attention modules of ``model`` run in FP8 in contexts whose recipe enables FP8 attention.

    This takes effect at once for modules of this package, and for others after
    :func:`lightning_fp8.convert.attention_calls.attach.attach`. With ``compares``, those others compare FP8 with SDPA.
    """
    planned = _attentions(model, policy)
    for name, module in model.named_modules():
        if isinstance(module, DotProductAttention):
            module.fp8 = next(each.follows for each in planned if each.decision.name == clean_name(name))
    blocks = find_blocks(model)
    kept = [name for name, place in blocks.items() if reason_for_bf16(place, policy)]
    attach.prepare(model, [place._replace(compares=compares) for place in reached_places(planned, kept)])


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its ``id``. A shared module has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(clean_name(name))
    return names


def _gemm_names(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The names of the GEMMs of a linear layer with several GEMMs, for each of its ``names``."""
    made = [gemm_name(name, gemm) for name in names for gemm in matrices_of(module)]
    return [name for name in dict.fromkeys(made) if name not in names]


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
    summary = plan_conversion(model, policy)
    for wrong in globs_without_layers(model, policy, summary):
        raise ValueError(wrong)
    prepare_attention(model, policy)  # before modules of this package are assigned slots
    apply_conversion(model, summary, where_faster, partial(warnings.warn, stacklevel=2))
    if not summary.num_fp8:
        warnings.warn(f"{nothing_runs_in_fp8(summary)}:\n{summary}", stacklevel=2)
    report_first_steps(model, summary, policy)
    watch = RegionWatch(type(model).__name__)
    for module in model.modules():
        if isinstance(module, LinearLayer) and module.fp8:
            module.record.watch = watch
    return model


def report_first_steps(model: nn.Module, summary: ConversionSummary, policy: Policy) -> None:
    """Warn after the first optimizer steps of a loop without a plugin if layers do not run as ``summary`` plans."""
    again = partial(plan_conversion, policy=replace(policy, fuse=False))
    watch_first_steps(model, FirstStep(model, summary, again, partial(_warn_of_idle, set())))


def _warn_of_idle(told: set[str], summary: ConversionSummary) -> None:
    """Warn of layers of :func:`convert_module` that did not run in FP8 as planned, except those that were ``told``."""
    # The layers' RegionWatch warns of training outside every region.
    if said := idle_message(summary, told, unsaid=(OUTSIDE, ONLY_DISABLED)):
        warnings.warn(
            "layers that were planned in FP8 multiplied nothing in FP8 in the first training step, or do not any more; "
            f"see conversion_summary(model) for the reasons: {said}",
            stacklevel=2,
        )


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


def globs_without_layers(model: nn.Module, policy: Policy, summary: ConversionSummary) -> list[str]:
    """An error message for each glob of ``policy.skip`` that matches no layer of ``summary``."""
    known = {layer.name for layer in summary.layers}
    by_id = _all_names(model)
    aliases = [
        [*by_id[id(module)], *(_gemm_names(module, by_id[id(module)]) if is_linear(module) else ())]
        for module in model.modules()
    ]
    others = [name for names in aliases if known & {*names} for name in names if name not in known]
    others += [name for module in model.modules() if codes_of(module) for name in by_id[id(module)]]
    modules = [name for names in aliases for name in names if name]
    return globs_of_nothing(policy.globs, [*(layer.name for layer in summary.layers), *others], modules)


def apply_conversion(
    model: nn.Module,
    summary: ConversionSummary,
    where_faster: bool = False,
    tell: Callable[[str], None] | None = None,
) -> AmaxHistory:
    """Swap the class of each layer that runs in FP8 according to ``summary``, and create one amax history for them.

    The history keeps existing scales and amaxes of the layers.

    Args:
        where_faster: let swapped layers stay in high precision where that is faster.
        tell: called with the lines that say which layers and which attention do, and that the host limits the speed;
            None decides nothing.
    """
    decisions = {layer.name: layer for layer in summary.layers}
    for name, module in model.named_modules():
        if is_linear(module):
            decision = decisions[gemm_name(clean_name(name), next(iter(matrices_of(module))))]
            if decision.fp8 and not isinstance(module, LinearLayer):
                swap_conv1d(module) if is_conv1d(module) else swap_class(module, Linear)
                module.comparison = AWAITED
            if isinstance(module, LinearLayer):
                module.fp8 = decision.fp8
                if not where_faster or isinstance(module._parameters.get("weight"), FP8Tensor):
                    module.comparison, module.slower = None, ""
    fuse_planned(model, summary)
    history = _share_history(model)
    history.choice = None if tell is None else history.choice or Choice(uncompiled(model), tell)
    listen()
    if tell is not None:
        watch_host(tell)
    layers = [(clean_name(name), each) for name, each in model.named_modules() if isinstance(each, LinearLayer)]
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
    plain = next((each for each in layers if not _is_sharded_layer(each)), None)
    if plain is not None:
        _until_sharded[model] = _Awaited(weakref.ref(plain), list(actions))
        if _act_where_sharded not in fp8_region.waiting:
            fp8_region.waiting.append(_act_where_sharded)
    return plain is not None


def _act_where_sharded() -> bool:
    """Call the actions of models that have been sharded. It returns whether no model is left."""
    for model, (reference, actions) in list(_until_sharded.items()):
        layer = reference()
        # Without the layer, or after its class was changed, another one is looked at from now on.
        waits = not _is_sharded_layer(layer) if isinstance(layer, LinearLayer) else _await_sharding(model, actions)
        if waits:
            continue
        _until_sharded.pop(model, None)
        for action in actions:
            action(model)
    return not _until_sharded


def _is_sharded_layer(layer: Any) -> bool:
    return is_dtensor(getattr(layer, layer.weight_names[0]))


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
    modules = [(name, module) for name, module in fp8_modules(model) if module.fp8]
    names_and_roles = [slot for name, module in modules for slot in module.history_slots(name)]
    histories = [module.history for _, module in modules]
    shared = histories[0] if histories else None
    if (
        shared
        and shared.names == [name for name, _ in names_and_roles]
        and all(history is shared for history in histories)
    ):
        return shared
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    history = AmaxHistory(names_and_roles, device)
    history.load_state_dict(fp8_state_dict(model))
    first_slot = 0
    for _, module in modules:
        module.use_history(history, first_slot)
        first_slot += len(module.history_slots())
    return history
