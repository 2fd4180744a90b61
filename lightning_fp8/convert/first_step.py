"""Compares the layers that ran in FP8 in the first training steps with the conversion's table."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_fp8.arguments import require_module
from lightning_fp8.convert.attention_calls.owners import Owner, owner_of
from lightning_fp8.convert.attention_calls.plan import judged
from lightning_fp8.convert.flops import StepFlops
from lightning_fp8.convert.fused.liger import computed_by_liger
from lightning_fp8.convert.fused.plan import WAY_OUT, forget_what_ran, judged_fused
from lightning_fp8.convert.plan import Plan, plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ATTENTION, GONE, MLP, NORM, ConversionSummary, LayerDecision
from lightning_fp8.faster import is_slower
from lightning_fp8.fp8_region import in_backward, num_enabled_regions, waiting
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer, foreign_weight
from lightning_fp8.modules.swap import calls_own_forward
from lightning_fp8.names import clean_name
from lightning_fp8.ops.plans import fallbacks
from lightning_fp8.optimizer_steps import after, leave, listen, parameter_ids
from lightning_fp8.traced import was_traced

STEPS = 50
"""The number of training steps before idle layers are reported. Some layers are called at random, or rarely."""

STEPS_OF_OTHERS = 1000
"""The number of steps of other models' optimizers after which a model is not watched any more."""

NOT_YET = "it was not called in the first training step; others may call it"
NOT_CALLED = "it was not called"
OUTSIDE = "it was called outside the plugin's forward and every fp8_autocast, where layers run in high precision"
DISABLED_REGION = "it was called inside fp8_autocast(enabled=False)"
ONLY_DISABLED = "every region was fp8_autocast(enabled=False)"
FROZEN = "it is frozen and was not called; code that reads its weight multiplies in high precision"
APPEARED = "it was added after the conversion"
LATE = "first ran after the first training step"


class FirstStep:
    """Compares the layers that run in the first training steps with those that a conversion planned.

    Args:
        model: the converted model. It is not kept alive.
        plan: the plan of its conversion.
        report: called with each table that has news.
        begins: count forwards from now on; otherwise from :meth:`begin` on.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        report: Callable[[ConversionSummary], None] | None = None,
        begins: bool = True,
    ) -> None:
        self.summary = plan.summary
        self.steps = self.steps_of_others = 0
        self.settled = False
        self._found: ConversionSummary | None = None
        self._model = weakref.ref(uncompiled(model))  # a caller may drop a compiled module
        self._policy: Policy | None = replace(plan.policy, fuse=False)
        self._report = report
        self._idle_at_first: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._never = NOT_YET
        self._readers: dict[str, str] = {}
        self._modules = WeakValueDictionary({clean_name(name): module for name, module in model.named_modules()})
        self._names = frozenset(self._modules)
        self._before: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
        self._attentions: dict[str, Owner] = {}
        self._entered: dict[str, int] = {}
        self._flops: StepFlops | None = None
        self.begun = False
        if begins:
            self.begin()

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and pickles of a model are not watched

    def begin(self) -> None:
        """Count forwards from now on."""
        self.begun = True
        self._enabled_before = num_enabled_regions()
        model = self._model()
        for module in () if model is None else model.modules():
            if (counts := _counts(module)) is not None:
                self._before[module] = counts
        for planned in (*self.summary.norms, *self.summary.mlps):
            forget_what_ran(planned, self._modules.get(planned.name))
        self._attentions = {
            layer.name: owner
            for layer in self.summary.layers
            if layer.kind == ATTENTION and layer.fp8 and (owner := owner_of(self._modules.get(layer.name))) is not None
        }
        self._entered = {name: owner.calls for name, owner in self._attentions.items()}
        for owner in self._attentions.values():
            owner.watched = True
        self._flops = None if model is None or _is_compiled(model) else StepFlops()

    def counted(self) -> AbstractContextManager[Any]:
        """A context that counts the FLOPs of the first step. FLOPs of compiled models are not counted."""
        flops = None if self._found is not None else self._flops
        return nullcontext() if flops is None or flops in _get_current_dispatch_mode_stack() else flops

    def after_step(self) -> ConversionSummary | None:
        """Called after each training step. It returns the table with the layers that ran if there is news, else None.

        A step that calls no layer, for example because ``training_step`` returned None, is not the first step.
        """
        self.steps += 1
        if self.steps >= STEPS:
            return self.settle()
        return self.finish() if self._found is None and self._anything_ran() else None

    def finish(self) -> ConversionSummary:
        """The table with the layers that ran. Planned FP8 layers that did not run in FP8 have a reason."""
        self.stop()
        found = self._updated()
        layers = [each for each in self._before if isinstance(each, LinearLayer)]
        self._idle_at_first.update(
            each for each in layers if not self._since(each)[0] and not self._may_be_traced(each)
        )
        if self._flops is None or self._flops.failed or not (flops := self._flops.total):
            return found
        modules = [self._modules.get(self._owner(layer)) for layer in found.layers if layer.fp8 and layer.ran is None]
        if not any(  # compiled code does not count forwards
            isinstance(each, LinearLayer) and self._may_be_traced(each) and not any(self._since(each))
            for each in modules
        ):
            self._found = replace(found, flops=flops, flops_in_fp8=self._flops.in_fp8)
        return self._found or found

    def settle(self) -> ConversionSummary | None:
        """The table in which layers that no step has called have that reason. It is returned once."""
        if self.settled or self.steps < 2:  # layers may run in later steps
            return None
        if self._found is None:
            self.finish()
        self.settled = True
        self._never = f"{NOT_CALLED} in the first {self.steps} training steps"
        return self._updated()

    def later(self) -> ConversionSummary:
        """The table with layers that have run or changed since; of a model without a first step, the plan."""
        return self.summary if self._found is None else self._updated()

    def _updated(self) -> ConversionSummary:
        """The table with the rows of now, which is kept."""
        model, found = self._model(), self._found or self.summary
        named = () if model is None else model.named_modules(remove_duplicate=False)
        now = {clean_name(name): module for name, module in named}
        norms, mlps = (
            tuple(judged_fused(each, self._modules.get(each.name), now.get(each.name), self._never) for each in fused)
            for fused in (self.summary.norms, self.summary.mlps)
        )
        rows = self.summary.layers if model is None else self._judged_rows(model, now)
        elsewhere = found.elsewhere if model is None else computed_by_liger(model)
        self._found = replace(found, layers=rows, norms=norms, mlps=mlps, elsewhere=elsewhere, fallbacks=fallbacks())
        return self._found

    def stop(self) -> None:
        """Stop recording calls of attention."""
        for owner in self._attentions.values():
            owner.watched = False

    # Optimizer steps, outside a Trainer

    def stepped(self) -> bool:
        """Report the table after an optimizer step if there is news, and return True; later in a backward pass."""
        if in_backward():  # where steps of one parameter, and regions of recomputed forwards, may be
            if self.stepped not in waiting:
                waiting.append(self.stepped)
            return False
        if (summary := self.after_step()) is not None and self._report is not None:
            self._report(summary)
        return True

    # What a layer did

    def _owner(self, layer: LayerDecision) -> str:
        return layer.name if layer.name in self._names else layer.name.rpartition(".")[0]

    def _judged_rows(self, model: nn.Module, now: dict[str, nn.Module]) -> tuple[LayerDecision, ...]:
        """The rows of the model as it is ``now``, modules by all of their names, and of layers that are gone."""
        names = {id(module): name for name, module in reversed(now.items())}  # the first of several
        places = {name: names[id(each)] for name, each in self._modules.items() if id(each) in names}
        taken = set(places.values())
        rows: dict[str, LayerDecision] = {}
        gone = []
        replaced: dict[str, tuple[LayerDecision, nn.Module | None]] = {}
        for layer in self.summary.layers:
            owner = self._owner(layer)
            module = now.get(owner)
            if (place := places.get(owner)) is not None:
                name = place + layer.name.removeprefix(owner)
                rows[name] = replace(self._judged(layer, now[place]), name=name)
            elif layer.fp8 and (module is None or owner in taken):
                gone.append(_gone(layer, "removed from the model"))
            elif layer.fp8:
                replaced[layer.name] = layer, module
        for row in self._planned_again(model):
            if (name := row.name) not in rows:
                rows[name] = self._appeared(row, now.get(name, now.get(name.rpartition(".")[0])))
        for name, (layer, module) in replaced.items():
            owner = self._owner(layer)
            first = names[id(module)]
            other = None if first == owner else rows.get(first + name.removeprefix(owner))
            rows[name] = _of_replaced(layer, module, rows.get(name), other)
        order = {name: index for index, name in enumerate(now)}
        in_order = sorted(rows.values(), key=lambda row: order.get(row.name, order.get(row.name.rpartition(".")[0], 0)))
        return (*in_order, *gone)

    def _planned_again(self, model: nn.Module) -> Sequence[LayerDecision]:
        """The rows of the model as it is now, which has those of layers that have appeared since."""
        try:
            return () if self._policy is None else plan_conversion(model, self._policy).summary.layers
        except Exception as error:  # a function in skip does not know the new layers; do not stop training
            self._policy = None
            warnings.warn(
                "the table of layers has no rows of those that were added after the conversion, which run in high "
                f"precision: skip raises {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return ()

    def _appeared(self, row: LayerDecision, module: nn.Module | None) -> LayerDecision:
        """The row of a layer that was not there when the model was converted."""
        row = replace(row, high_precision=next((layer.high_precision for layer in self.summary.layers), "BF16"))
        if isinstance(module, LinearLayer):
            return self._judged(replace(row, fp8=module.fp8, reason="" if module.fp8 else row.reason), module)
        return replace(row, ran=False, reason=APPEARED) if row.fp8 else row

    def _judged(self, layer: LayerDecision, module: nn.Module) -> LayerDecision:
        fp8, high_precision = since = self._since(module)
        if layer.kind == ATTENTION:
            owner = self._attentions.get(layer.name)
            calls = 0 if owner is None else owner.calls - self._entered[layer.name]
            return judged(layer, module, owner, since, calls, OUTSIDE if high_precision else NOT_YET)
        if not isinstance(module, LinearLayer):
            if not layer.fp8:
                return layer
            return replace(
                layer, ran=False, reason=f"it was changed to the class {type(module).__name__} after the conversion"
            )
        if module.slower:
            return replace(layer, ran=False, reason=module.slower)
        if fp8:
            reasons = (
                layer.reason if layer.fp8 else "",
                LATE if module in self._idle_at_first else "",
                f"{high_precision} of {fp8 + high_precision} forwards ran in high precision" if high_precision else "",
                _other_recipe(module),
            )
            return replace(layer, fp8=True, ran=True, reason="; ".join(filter(None, reasons)))
        if not layer.fp8 or (not high_precision and self._may_be_traced(module)):
            return layer
        return replace(layer, ran=False, reason=self._why_idle(layer, module, bool(high_precision)))

    def _why_idle(self, layer: LayerDecision, module: LinearLayer, called: bool) -> str:
        if not module.fp8:
            return "a later conversion keeps it in high precision"
        if why := foreign_weight(module):
            return why
        if called:
            context = module._last_context
            if context is None or context.outside:
                return OUTSIDE
            return DISABLED_REGION if num_enabled_regions() > self._enabled_before else ONLY_DISABLED
        if "forward" in vars(module) and not calls_own_forward(module):
            return "its forward was replaced on the instance and does not call ours"
        if any(parameter.grad is not None for parameter in module.parameters(recurse=False)):
            model = self._model() or module
            parent = next((each for each in model.modules() if module in each._modules.values()), model)
            self._readers[layer.name] = type(parent).__name__
        if layer.name in self._readers:  # later its gradient may be gone
            return f"{self._readers[layer.name]} read its weight and did not call it in the first training step"
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return FROZEN  # an average of the weights, or the base layer of an adapter
        return self._never

    def _since(self, module: nn.Module) -> tuple[int, int]:
        """The numbers of training forwards in FP8 and in high precision since :meth:`begin`.

        Those of a module that was only called in evaluation mode are its evaluations.
        """
        nothing = 0, 0, 0, 0
        counts, before = _counts(module) or nothing, self._before.get(module, nothing)
        fp8, high_precision, evaluations, in_fp8 = (now - then for now, then in zip(counts, before))
        return (fp8, high_precision) if fp8 or high_precision else (in_fp8, evaluations - in_fp8)

    def _anything_ran(self) -> bool:
        """Whether a layer was called, or may have been called in compiled code, which does not count forwards."""
        if self._flops is not None and self._flops.total > 0:
            return True
        layers = [each for each in self._before if isinstance(each, LinearLayer)]
        if any(any(self._since(each)) or was_traced(*each.features) for each in layers):
            return True
        model = self._model()
        return model is not None and any(parameter.grad is not None for parameter in model.parameters())

    def _may_be_traced(self, layer: LinearLayer) -> bool:
        """Whether compiled code may have multiplied in FP8 for ``layer``; the ops that it calls are counted."""
        flops = self._flops
        nothing_in_fp8 = flops is not None and not flops.failed and flops.total > 0 and not flops.in_fp8
        return was_traced(*layer.features) and not nothing_in_fp8


def _gone(layer: LayerDecision, what: str) -> LayerDecision:
    """The row of a planned layer that is not in the model any more."""
    return replace(layer, kind=GONE, ran=False, reason=f"it was {what} after the conversion", parameters=0)


def _of_replaced(
    layer: LayerDecision, module: nn.Module | None, row: LayerDecision | None, other: LayerDecision | None
) -> LayerDecision:
    """The row of a planned layer that ``module`` replaces.

    Args:
        row: the row of ``module`` by the name of ``layer``, if there is one.
        other: its row by its first name, if it has several.
    """
    if other is not None:  # what ran is in that row
        return replace(_gone(layer, f"replaced by {other.name}"), ran=None if other.precision == "FP8" else False)
    gone = _gone(layer, f"replaced by an instance of {type(module).__name__}")
    if row is None:
        return gone
    reasons = [gone.reason, *([row.reason] if row.reason not in ("", APPEARED) else [])]
    ran = row.ran if isinstance(module, LinearLayer) else False
    return replace(row, fp8=True, ran=ran, reason="; ".join(reasons))


def _counts(module: nn.Module | None) -> tuple[int, int, int, int] | None:
    """The forwards of a layer, or calls of attention; None of other modules."""
    known = module if isinstance(module, FP8Module) else owner_of(module)
    if known is None:
        return None
    record = known.record
    return record.fp8, record.high_precision, record.evaluations, record.evaluations_in_fp8


def _other_recipe(layer: LinearLayer) -> str:
    """The note that the last forward ran by another recipe than the plugin's; empty if it did not."""
    context, history = layer._last_context, layer.history
    planned = None if history is None else history.plugin_recipe
    if planned is None or context is None or context.recipe == planned:
        return ""
    return f"by recipe={context.recipe.name!r} of an fp8_autocast inside the plugin's forward"


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wrapped, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def _is_compiled(model: nn.Module) -> bool:
    return getattr(model, "_compiler_ctx", None) is not None or any(
        name.endswith("_orig_mod") or module._compiled_call_impl is not None for name, module in model.named_modules()
    )


_ATTRIBUTE = "_fp8_first_step"
"""Holds the :class:`FirstStep` of a model. A table would keep alive a model that a function in ``skip`` refers to."""

_stepping: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that optimizer steps report."""


def watch_first_steps(model: nn.Module, first_step: FirstStep, by_optimizers: bool = True) -> None:
    """Give ``model`` its ``first_step``; those of its parts end.

    Args:
        by_optimizers: optimizer steps report what ran.
    """
    for module in model.modules():
        _stepping.discard(module)
    setattr(uncompiled(model), _ATTRIBUTE, first_step)
    if by_optimizers:
        _stepping.add(uncompiled(model))
        listen(after, report_after_step)


def watched(model: nn.Module) -> FirstStep | None:
    """The first steps of the root of a conversion."""
    return vars(uncompiled(model)).get(_ATTRIBUTE)


def report_after_step(optimizer: Any) -> None:
    """Report what ran of the models of which ``optimizer`` holds a parameter, until there are none."""
    held = parameter_ids(optimizer)
    if not _stepping:
        leave(after, report_after_step)
    for model in list(_stepping):
        first_step = watched(model)
        if first_step is None or first_step.settled:
            _stepping.discard(model)
        elif any(id(parameter) in held for parameter in model.parameters()):
            first_step.stepped()
        else:  # a teacher, or a network that trains later
            first_step.steps_of_others += 1
            first_step.settled = first_step.steps_of_others == STEPS_OF_OTHERS


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """The table of a model that :func:`convert_module` converted: what is planned, or what ran.

    It shows what ran after the first step of a ``torch.optim.Optimizer`` that holds a parameter of the model. Under a
    plugin, ``plugin.summary`` is the same for the last model.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If it is not the root of a conversion.
    """
    require_module("conversion_summary", model)
    if (first_step := watched(model)) is None:
        inner = next((name for name, each in model.named_modules() if watched(each) is not None), None)
        way_out = f"pass its {inner}, which was" if inner else "pass its root, or call convert_module(model) first"
        raise ValueError(f"this {type(model).__name__} is not a model that convert_module converted; {way_out}")
    return first_step.later()


_NOT_MULTIPLIED = (
    "layers that the table lists as FP8 multiplied nothing in FP8 in the first training step, or do not any more"
)
_NOT_FUSED = "norms and MLPs that the table lists as fused run as the model's own"


def idle_message(summary: ConversionSummary, told: set[str], table: str, unsaid: Collection[str] = ()) -> str:
    """A message that names what did not multiply in FP8, or was not fused, as planned; empty if there is no news.

    Layers that were not called in the first step, and may be called in a later one, are named only if less than half
    of what is planned ran, by numbers of parameters.

    Args:
        told: the names of layers that a message has named. The named ones are added.
        table: where the user finds the table.
        unsaid: reasons of layers that are not named.
    """
    planned = [layer for layer in summary.layers if layer.fp8 and not _is_expected(layer.reason)]
    ran = sum(layer.parameters for layer in planned if layer.ran is not False)
    half = 2 * ran >= sum(layer.parameters for layer in planned)
    named = [
        layer
        for layer in summary.idle
        if not _is_expected(layer.reason)
        and layer.reason not in unsaid
        and layer.name not in told
        and not (half and layer.reason == NOT_YET)
    ]
    told |= {layer.name for layer in named}
    fused = [layer for layer in named if layer.kind in (NORM, MLP)]
    others = [layer for layer in named if layer not in fused]
    return "\n".join(
        f"{what}; see {table} for the reasons: {'; '.join(idle_layers(layers))}"
        for what, layers in ((_NOT_MULTIPLIED, others), (_NOT_FUSED, fused))
        if layers
    )


def _is_expected(reason: str) -> bool:
    return reason == FROZEN or is_slower(reason)


def idle_layers(idle: Iterable[LayerDecision]) -> Iterator[str]:
    """A message for each reason why planned FP8 layers did not run in FP8, with the way out."""
    by_reason: dict[str, list[str]] = {}
    for layer in idle:
        by_reason.setdefault(f"{layer.reason}{_way_out(layer)}", []).append(layer.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{', '.join(names[:8])}{more}: {reason}"


def _way_out(layer: LayerDecision) -> str:
    reason = layer.reason
    if reason == OUTSIDE:
        return "; call it inside training_step or the module that Fabric set up"
    if reason in (NOT_YET, DISABLED_REGION, ONLY_DISABLED):
        return ""
    if layer.kind in (NORM, MLP) and not reason.startswith(NOT_CALLED):
        return WAY_OUT
    if "after the conversion" in reason:
        return "; change the model before it is converted, in configure_model for example, or convert it again"
    if reason.startswith(NOT_CALLED):
        return ", which is harmless if it is rarely needed"
    return "; skip=(...) removes it from the table"
