"""Compares the layers that ran in FP8 in the first training steps with the conversion's table."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode
from typing_extensions import Self

from lightning_fp8.attention.models.owners import owner_of, watch
from lightning_fp8.attention.plan import judged
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary, LayerDecision
from lightning_fp8.hf_fusion.plan import WAYS_OUT, forget_what_ran, judged_casting
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import LayerRecord, was_traced
from lightning_fp8.names import clean_name
from lightning_fp8.ops.plans import fallbacks

STEPS = 50
"""The number of training steps before idle layers are reported. Some layers are called at random, or rarely."""

NOT_YET = "it was not called in the first training step; others may call it"
OUTSIDE = "it was called outside the plugin's forward, where layers run in high precision"


class StepFlops(FlopCounterMode):
    """A ``FlopCounterMode`` that does not change the step it counts, and that accumulates if it is entered again.

    It does not register global module hooks, since it only counts the total. It does not disable ``torch.compile``:
    under torch's own mode Dynamo skips every function that it traces, and does not compile it later. In compiled code
    it counts the ops that the code calls, but not products inside generated kernels.

    Attributes:
        failed: whether a formula has raised. The total is then too low.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_ATTENTION)
        self._depth = 0
        self.failed = False

    def __enter__(self) -> Self:
        if not self._depth:
            self.mode = _Counting(self)
            self.mode.__enter__()
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        if not self._depth and self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(*exception)

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super()._count_flops(func_packet, out, args, kwargs)
        except Exception:  # the formula does not support these shapes; do not stop training
            self.failed = True
            return out

    @property
    def in_fp8(self) -> int:
        """The FLOPs of the ops of this package, which all multiply in FP8."""
        return sum(flops for op, flops in self.flop_counts["Global"].items() if str(op).startswith("lightning_fp8."))


class _Counting(_FlopCounterMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (isinstance(func, torch._ops.OpOverload) and _has_kernel(func)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Unlike torch's mode, do not decompose: the decomposition of silu_backward gives other bits than its kernel.
        kwargs = kwargs or {}
        return self.counter._count_flops(func._overloadpacket, func(*args, **kwargs), args, kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):  # before torch 2.10

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True


@cache
def _has_kernel(func: torch._ops.OpOverload) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CUDA"))


Shape = Sequence[int]


def _attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of two products for each pair of a query and a key. As in torch, masks are ignored."""
    return 2 * _pairs(q, k) * (q[-1] + v[-1])


def _attention_backward_flops(do: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """The FLOPs of five products: the scores again, and the gradients of the scores, q, k and v."""
    return 2 * _pairs(q, k) * (3 * q[-1] + 2 * v[-1])


def _pairs(q: Shape, k: Shape) -> int:
    batch, heads, queries, _ = q
    return batch * heads * queries * k[2]


_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{direction}"): formula
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for direction, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}
"""torch only counts attention on GPUs, and before 2.12 its formulas raise if queries have more heads than keys."""


class FirstStep:
    """Records which layers of a model run in its first training steps.

    Args:
        model: the converted model.
        summary: the summary of its conversion, as it is before the first step.
    """

    def __init__(self, model: nn.Module, summary: ConversionSummary) -> None:
        self.summary = summary
        self.steps = 0
        self._found: ConversionSummary | None = None
        self.settled = False
        # Weak references, since a plugin holds this object until the first step, which may never come.
        self._model = weakref.ref(model)
        self._modules = WeakValueDictionary({clean_name(name): module for name, module in model.named_modules()})
        self._before = {
            name: _counts(record) for name, module in self._modules.items() if (record := _record(module)) is not None
        }
        for planned in (*summary.norms, *summary.mlps):
            forget_what_ran(planned, self._modules.get(planned.name))
        self._attentions = {
            layer.name: owner
            for layer in summary.layers
            if layer.kind == ATTENTION and layer.fp8 and (owner := owner_of(self._modules.get(layer.name))) is not None
        }
        self._entered = {name: owner.calls for name, owner in self._attentions.items()}
        for owner in self._attentions.values():
            watch(owner, True)
        self._flops = None if _is_compiled(model) else StepFlops()

    def counted(self) -> AbstractContextManager[Any]:
        """A context that counts the FLOPs of the first step. FLOPs of compiled models are not counted."""
        return nullcontext() if self._flops is None or self._found is not None else self._flops

    def _owner(self, layer: LayerDecision) -> str:
        return layer.name if layer.name in self._modules else layer.name.rpartition(".")[0]

    def after_step(self) -> ConversionSummary | None:
        """Called after each training step. It returns the table with the layers that ran if there is news, else None.

        A step that calls no layer, for example because ``training_step`` returned None, is not the first step.
        """
        self.steps += 1
        if self._found is None and (self._anything_ran() or self.steps >= STEPS):
            self._found = self.finish()
            return self.settle() if self.steps >= STEPS else self._found
        return self.settle() if self.steps >= STEPS else None

    def finish(self) -> ConversionSummary:
        """The table with the layers that ran. Planned FP8 layers that did not run in FP8 have a reason."""
        self.stop()
        layers = tuple(self._judged(layer) for layer in self.summary.layers)
        summary = replace(self.summary, layers=layers, fallbacks=fallbacks(), **self._judged_casts(NOT_YET))
        flops = 0 if self._flops is None else self._flops.get_total_flops()
        if self._flops is None or self._flops.failed or not flops or any(map(self._may_be_compiled, layers)):
            return summary
        return replace(summary, flops=flops, flops_in_fp8=self._flops.in_fp8)

    def _judged_casts(self, uncalled: str) -> dict[str, Any]:
        """The norms and MLPs that cast, and the reasons of the others."""
        model = self._model()
        modules = () if model is None else model.named_modules(remove_duplicate=False)
        now = {clean_name(name): module for name, module in modules}
        return {
            kind: tuple(
                judged_casting(planned, self._modules.get(planned.name), now.get(planned.name), uncalled)
                for planned in fused
            )
            for kind, fused in (("norms", self.summary.norms), ("mlps", self.summary.mlps))
        }

    def _may_be_compiled(self, layer: LayerDecision) -> bool:
        """Whether an FP8 layer may have run in compiled code, which does not count forwards."""
        module = self._modules.get(self._owner(layer))
        hidden = layer.fp8 and layer.ran is None and isinstance(module, LinearLayer) and was_traced(*module.features)
        return hidden and not any(self._since(self._owner(layer)))

    def settle(self) -> ConversionSummary | None:
        """The table in which layers that no step has called have that reason. It is returned once."""
        if self.settled or self.steps < 2:  # layers may run in later steps
            return None
        self.settled = True
        judged = self._found or self.finish()
        layers = tuple(self._seen_since(layer) for layer in judged.layers)
        uncalled = f"it was not called in the first {self.steps} training steps"
        return replace(judged, layers=layers, fallbacks=fallbacks(), **self._judged_casts(uncalled))

    def _seen_since(self, layer: LayerDecision) -> LayerDecision:
        if layer.reason != NOT_YET:
            return layer
        fp8, high_precision, _ = self._since(self._owner(layer))
        if fp8:
            return self._late(layer)
        if high_precision:
            return replace(layer, reason=OUTSIDE)
        return replace(layer, reason=f"it was not called in the first {self.steps} training steps")

    def later(self, summary: ConversionSummary) -> ConversionSummary:
        """``summary`` updated with layers that were idle in the first step and have run in FP8 since."""
        layers = (
            self._late(layer) if layer in summary.idle and self._since(self._owner(layer))[0] else layer
            for layer in summary.layers
        )
        return replace(summary, layers=tuple(layers), fallbacks=fallbacks())

    def _late(self, layer: LayerDecision) -> LayerDecision:
        return replace(layer, ran=True, reason="first ran after the first training step")

    def _since(self, name: str) -> tuple[int, int, int]:
        """The numbers of forwards in FP8, in high precision, and in evaluation mode, since the construction."""
        record = _record(self._modules.get(name))
        if record is None or name not in self._before:  # gone
            return 0, 0, 0
        fp8, high_precision, evaluations = (now - then for now, then in zip(_counts(record), self._before[name]))
        return fp8, high_precision, evaluations

    def _called(self, name: str) -> bool:
        """Whether a layer was called, or may have been called in compiled code, which does not count forwards."""
        module = self._modules.get(name)
        return not isinstance(module, LinearLayer) or (any(self._since(name)) or was_traced(*module.features))

    def _anything_ran(self) -> bool:
        counted = self._flops is not None and self._flops.get_total_flops() > 0
        return counted or any(
            self._called(name) for name in self._before if isinstance(self._modules.get(name), LinearLayer)
        )

    def stop(self) -> None:
        """Stop recording calls of attention."""
        for owner in self._attentions.values():
            watch(owner, False)

    def _judged(self, layer: LayerDecision) -> LayerDecision:
        owner = self._owner(layer)
        module = self._modules.get(owner)
        if layer.kind == ATTENTION:
            return self._judged_attention(layer, module)
        if not layer.fp8 or not isinstance(module, LinearLayer):
            return layer
        fp8, high_precision, evaluations = self._since(owner)
        if fp8:
            return replace(layer, ran=True)
        if evaluations or (not high_precision and was_traced(*module.features)):
            return layer
        if not high_precision and not any(parameter.requires_grad for parameter in module.parameters()):
            return layer  # not trained: an average of the weights, or the base layer of an adapter
        return replace(layer, ran=False, reason=self._why_idle(owner, module, called=bool(high_precision)))

    def _judged_attention(self, layer: LayerDecision, module: nn.Module | None) -> LayerDecision:
        owner = self._attentions.get(layer.name)
        since = self._since(layer.name)
        calls = 0 if owner is None else owner.calls - self._entered[layer.name]
        return judged(layer, module, owner, since, calls, OUTSIDE if since[1] else NOT_YET)

    def _why_idle(self, name: str, module: nn.Module, called: bool) -> str:
        if called:
            return OUTSIDE
        if "forward" in vars(module):
            return "its forward was replaced on the instance and does not call ours"
        if any(parameter.grad is not None for parameter in module.parameters(recurse=False)):
            parent = type(self._modules.get(name.rpartition(".")[0])).__name__
            return f"{parent} read its weight and did not call it in the first training step"
        return NOT_YET


def _record(module: nn.Module | None) -> LayerRecord | None:
    if isinstance(module, FP8Module):
        return module.record
    owner = owner_of(module)
    return None if owner is None else owner.record


def _counts(record: LayerRecord) -> tuple[int, int, int]:
    return record.fp8, record.high_precision, record.evaluations


def _is_compiled(model: nn.Module) -> bool:
    return getattr(model, "_compiler_ctx", None) is not None or any(
        name.endswith("_orig_mod") or module._compiled_call_impl is not None for name, module in model.named_modules()
    )


def idle_layers(idle: Iterable[LayerDecision]) -> Iterator[str]:
    """A message for each reason why planned FP8 layers did not run in FP8, with the way out.

    Layers that a later step may still call are not included.
    """
    by_reason: dict[str, list[str]] = {}
    for layer in idle:
        if layer.reason != NOT_YET:
            by_reason.setdefault(layer.reason, []).append(layer.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{', '.join(names[:8])}{more}: {reason}{_way_out(reason)}"


def _way_out(reason: str) -> str:
    if reason == OUTSIDE:
        return "; call it inside training_step or the module that Fabric set up"
    if reason in WAYS_OUT:
        return WAYS_OUT[reason]
    if reason.startswith("it was not called"):
        return ", which is harmless if it is rarely needed"
    return "; skip=(...) removes it from the table"
