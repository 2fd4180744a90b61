"""The layers that really ran in FP8 in the first training steps, compared with the conversion's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_fp8.attention.owners import owner_of, watch
from lightning_fp8.autocast import in_backward
from lightning_fp8.convert.attention_ran import judged
from lightning_fp8.convert.fusion.ran import MLP_CAST_NOTHING, NORM_CAST_NOTHING, forget_what_ran, judged_casting
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary, LayerDecision
from lightning_fp8.modules import LayerNormLinear, LayerNormMLP
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import LayerRecord, was_traced
from lightning_fp8.names import clean_name

STEPS = 50
"""Training steps after which a layer that none of them called is named: some are drawn by chance, or rarely needed."""

NOT_YET = "it was not called in the first training step; others may call it"
OUTSIDE = "it was called outside the plugin's forward, where layers run in high precision"


@dataclass
class _Calls:
    """Rows of the inputs of a module's forwards.

    Attributes:
        rows: all of them.
        graded: those of forwards with gradients enabled.
        with_gradient: of these, the ones whose input requires a gradient.
        routed: a row counts once for each expert that it goes to.
        again: rows recomputed by activation checkpointing: (as ``graded``, as ``with_gradient``).
        unknown: a forward was given nothing whose rows could be counted.
    """

    rows: int = 0
    graded: int = 0
    with_gradient: int = 0
    routed: int = 0
    again: tuple[int, int] = (0, 0)
    unknown: bool = False

    def add(self, rows: int, x: Tensor) -> None:
        """Count a forward of ``rows`` rows whose input is ``x``."""
        graded = rows * torch.is_grad_enabled()
        with_gradient = rows * (torch.is_grad_enabled() and x.requires_grad)
        if in_backward():
            self.again = (self.again[0] + graded, self.again[1] + with_gradient)
            return
        self.rows += rows
        self.graded += graded
        self.with_gradient += with_gradient

    def products(self, trained: bool, behind_trained: bool = False) -> int:
        """Rows of all products of a step. Reentrant checkpoints run forwards without gradients first.

        Args:
            trained: the matrix has a gradient.
            behind_trained: so has what it multiplies, by a parameter of its own module.
        """
        graded, with_gradient = (min(self.rows - self.graded, again) for again in self.again)
        derived = self.graded + graded if behind_trained else self.with_gradient + with_gradient
        return self.rows + (self.graded + graded) * trained + derived


class FirstStep:
    """Watches a model for its first training steps.

    Args:
        model: the converted model; hooks of its modules count rows until :meth:`finish`.
        summary: its table, of which nothing has run yet.
        count_rows: False sets no hooks, and leaves FLOPs unknown.
    """

    def __init__(self, model: nn.Module, summary: ConversionSummary, count_rows: bool = True) -> None:
        self.summary = summary
        self.steps = 0
        self._found: ConversionSummary | None = None
        self.settled = False
        # Weak, since a plugin keeps this until a step comes: a model that is gone before is nobody's.
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
        self._calls: dict[str, _Calls] = {}
        # A hook that comes or goes would have a compiled model compiled again.
        self._counting = count_rows and not _is_compiled(model)
        self._hooks = [
            self._modules[name].register_forward_hook(self._counter(name, sizes), with_kwargs=True)
            for name, sizes in (self._watched() if self._counting else {}).items()
        ]

    def _watched(self) -> dict[str, set[int]]:
        """Modules that own a matrix, and their parents, which may read it without a call; and the matrices' sizes."""
        watched: dict[str, set[int]] = {}
        for layer in self.summary.layers:
            if layer.kind == ATTENTION:
                continue
            owner = self._owner(layer)
            for name in (owner, owner.rpartition(".")[0]):
                if name in self._modules:
                    watched.setdefault(name, set()).update(layer.shape)
        return watched

    def _owner(self, layer: LayerDecision) -> str:
        return layer.name if layer.name in self._modules else layer.name.rpartition(".")[0]

    def _counter(self, name: str, sizes: set[int]) -> Any:
        calls = self._calls.setdefault(name, _Calls())

        def count(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
            x = next((t for t in tensors if t.is_floating_point() and _fits(module, t, sizes)), None)
            if x is None:
                calls.unknown = True
                return
            before = calls.rows
            calls.add(_rows(module, x, output), x)
            if calls.rows > before:
                indices = (tensor.numel() for tensor in tensors if not tensor.is_floating_point())
                calls.routed += next(indices, calls.rows - before)
            if isinstance(module, nn.MultiheadAttention):
                for role, operand in zip(
                    "qkv", (*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs))
                ):
                    self._calls.setdefault(f"{name}.{role}", _Calls()).add(
                        operand.numel() // operand.shape[-1], operand
                    )

        return count

    def after_step(self) -> ConversionSummary | None:
        """Called after each training step: the table with what ran, where it has something new to say.

        A step that calls nothing, whose ``training_step`` gave None for example, is not the first.
        """
        self.steps += 1
        if self._found is None and (self._anything_ran() or self.steps >= STEPS):
            self._found = self.finish()
            return self.settle() if self.steps >= STEPS else self._found
        return self.settle() if self.steps >= STEPS else None

    def finish(self) -> ConversionSummary:
        """The table with what ran. Layers that should have run in FP8 and did not have the reason in theirs."""
        self.stop()
        layers = tuple(self._judged(layer) for layer in self.summary.layers)
        with_matrix = [layer for layer in layers if layer.kind != ATTENTION]
        known = all(layer.ran is not None or not self._called(self._owner(layer)) for layer in with_matrix if layer.fp8)
        if known and self._counting:
            layers = tuple(
                replace(layer, flops=self._flops(layer)) if layer in with_matrix else layer for layer in layers
            )
        norms, mlps = (
            tuple(judged_casting(planned, self._modules.get(planned.name)) for planned in fused)
            for fused in (self.summary.norms, self.summary.mlps)
        )
        return replace(self.summary, layers=layers, norms=norms, mlps=mlps)

    def settle(self) -> ConversionSummary | None:
        """The table in which layers that no step so far has called are said to be such, once."""
        if self.settled or self.steps < 2:  # one step says nothing of the others
            return None
        self.settled = True
        judged = self._found or self.finish()
        return replace(judged, layers=tuple(self._seen_since(layer) for layer in judged.layers))

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
        """``summary``, in which layers that were idle in the first step and have run in FP8 since are idle no more."""
        layers = (
            self._late(layer) if layer in summary.idle and self._since(self._owner(layer))[0] else layer
            for layer in summary.layers
        )
        return replace(summary, layers=tuple(layers))

    def _late(self, layer: LayerDecision) -> LayerDecision:
        return replace(layer, ran=True, reason="first ran after the first training step")

    def _since(self, name: str) -> tuple[int, int, int]:
        """Forwards in FP8, in high precision, and in evaluation mode, since this watches."""
        record = _record(self._modules.get(name))
        if record is None or name not in self._before:  # gone
            return 0, 0, 0
        fp8, high_precision, evaluations = (now - then for now, then in zip(_counts(record), self._before[name]))
        return fp8, high_precision, evaluations

    def _called(self, name: str) -> bool:
        """Whether a layer was called, or may have been: compiled code counts nothing."""
        module = self._modules.get(name)
        return not isinstance(module, LinearLayer) or (any(self._since(name)) or was_traced(*module.features))

    def _anything_ran(self) -> bool:
        calls = any(calls.rows or calls.unknown for calls in self._calls.values())
        return calls or any(
            self._called(name) for name in self._before if isinstance(self._modules.get(name), LinearLayer)
        )

    def stop(self) -> None:
        """Take the hooks away."""
        for owner in self._attentions.values():
            watch(owner, False)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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
            return layer  # an average of the weights, or the original of an adapted layer: nobody trains it
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

    def _flops(self, layer: LayerDecision) -> int | None:
        owner = self._owner(layer)
        module = self._modules.get(owner)
        if module is None:  # gone
            return None
        calls = self._calls.get(owner, _Calls())
        parameters = _own_parameters(module)
        parent = owner.rpartition(".")[0]
        reads = isinstance(self._modules.get(parent), nn.MultiheadAttention)
        if not calls.rows and (reads or any(parameter.grad is not None for parameter in parameters)):
            calls = self._calls.get(parent, calls)  # its parent read the weight
        trained = any(parameter.requires_grad for parameter in parameters if parameter.dim() > 1)
        if calls.unknown:
            return None
        if layer.kind == "attention" and layer.name != owner:
            parameter_name = layer.name.rpartition(".")[2]
            roles = "qkv" if parameter_name == "in_proj_weight" else parameter_name[0]
            product_rows = sum(self._calls.get(f"{owner}.{role}", _Calls()).products(trained) for role in roles)
            return 2 * product_rows * layer.parameters // len(roles)
        norm = module.layer_norm_weight if isinstance(module, (LayerNormLinear, LayerNormMLP)) else None
        product_rows = calls.products(trained, norm is not None and norm.requires_grad)
        if layer.kind == "experts" and calls.rows:
            product_rows = product_rows * calls.routed // (calls.rows * layer.shape[0])
        return 2 * product_rows * layer.parameters


def _fits(module: nn.Module, x: Tensor, sizes: set[int]) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) or x.shape[-1] in sizes


def _rows(module: nn.Module, x: Tensor, output: Any) -> int:
    """The number of rows that a matrix multiplies; of a convolution that is positions, with a batch or without."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return x.numel() // module.in_channels
    if isinstance(module, nn.modules.conv._ConvNd):
        return int(output.numel() // module.out_channels)
    return x.numel() // (x.shape[-1] or 1)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module, and those that its weight is computed from."""
    computed = getattr(module, "parametrizations", None)
    return [*module.parameters(recurse=False), *(computed.parameters() if isinstance(computed, nn.Module) else ())]


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
    """A sentence for each reason for which layers that should run in FP8 did not, and the way out; others may yet."""
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
    if reason == NORM_CAST_NOTHING:
        return "; weights_dtype=torch.bfloat16 without compute_dtype lets norms cast"
    if reason == MLP_CAST_NOTHING:
        return ", which is a pass more over memory and no harm else; fuse=False takes it out of the table"
    if reason.startswith("it was not called"):
        return ", which is no harm if it is rarely needed"
    return "; skip=(...) takes it out of the table"
