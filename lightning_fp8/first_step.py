"""What really ran in a training step, beside what the table said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.autocast import in_backward
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import was_traced
from lightning_fp8.state import clean_name
from lightning_fp8.summary import ConversionSummary, LayerDecision


@dataclass
class _Calls:
    """Rows that a module's forwards were given; of them those with gradients enabled, and with a gradient of their own.

    ``routed`` counts a row for each expert that it goes to.
    """

    rows: int = 0
    graded: int = 0
    with_gradient: int = 0
    routed: int = 0


class FirstStep:
    """Watches a model for one training step.

    Args:
        model: the converted model; hooks of its modules count rows until :meth:`finish`.
        summary: its table, of which nothing has run yet.
        count_rows: False sets no hooks, and leaves FLOPs unknown.
    """

    def __init__(self, model: nn.Module, summary: ConversionSummary, count_rows: bool = True) -> None:
        self.summary = summary
        self._modules = {clean_name(name): module for name, module in model.named_modules()}
        self._before = {
            name: _counts(module) for name, module in self._modules.items() if isinstance(module, FP8Module)
        }
        self._calls: dict[str, _Calls] = {}
        # A hook that comes or goes would have a compiled model compiled again.
        self._counting = count_rows and not _is_compiled(model)
        self._hooks = [
            self._modules[name].register_forward_hook(self._counter(name), with_kwargs=True)
            for name in (self._watched() if self._counting else ())
        ]

    def _watched(self) -> set[str]:
        """Modules that own a matrix, and their parents, which may read it without a call."""
        owners = {self._owner(layer) for layer in self.summary.layers}
        return {name for owner in owners for name in (owner, owner.rpartition(".")[0]) if name in self._modules}

    def _owner(self, layer: LayerDecision) -> str:
        return layer.name if layer.name in self._modules else layer.name.rpartition(".")[0]

    def _counter(self, name: str) -> Any:
        calls = self._calls.setdefault(name, _Calls())

        def count(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or in_backward():
                return
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
            x = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
            if x is None:
                return
            where = output if isinstance(module, nn.modules.conv._ConvNd) else x
            rows = where.numel() // (where.shape[1] if where is output else x.shape[-1] or 1)
            calls.rows += rows
            calls.graded += rows * torch.is_grad_enabled()
            calls.with_gradient += rows * (torch.is_grad_enabled() and x.requires_grad)
            calls.routed += next((tensor.numel() for tensor in tensors if not tensor.is_floating_point()), rows)

        return count

    def finish(self) -> ConversionSummary:
        """The table with what ran. Layers that should have run in FP8 and did not have the reason in theirs."""
        self.stop()
        layers = tuple(self._judged(layer) for layer in self.summary.layers)
        if all(layer.ran is not None for layer in layers if layer.fp8) and self._counting:
            layers = tuple(replace(layer, flops=self._flops(layer)) for layer in layers)
        return ConversionSummary(layers)

    def later(self, summary: ConversionSummary) -> ConversionSummary:
        """``summary``, in which layers that were idle in the first step and have run in FP8 since are idle no more."""
        reason = "first ran after the first training step"
        return ConversionSummary(
            tuple(
                replace(layer, ran=True, reason=reason)
                if layer in summary.idle and self._has_run(layer.name)
                else layer
                for layer in summary.layers
            )
        )

    def _has_run(self, name: str) -> bool:
        return _counts(self._modules[name])[0] > self._before[name][0]  # type: ignore[arg-type]

    def stop(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _judged(self, layer: LayerDecision) -> LayerDecision:
        module = self._modules.get(layer.name)
        if not layer.fp8 or not isinstance(module, LinearLayer):
            return layer
        fp8, high_precision, evaluations = (now - then for now, then in zip(_counts(module), self._before[layer.name]))
        if fp8:
            return replace(layer, ran=True)
        if evaluations or (not high_precision and was_traced(module.in_features, module.out_features)):
            return layer
        return replace(layer, ran=False, reason=self._why_idle(layer.name, module, called=bool(high_precision)))

    def _why_idle(self, name: str, module: nn.Module, called: bool) -> str:
        if called:
            return "it was called outside the plugin's forward, where layers run in high precision"
        if "forward" in vars(module):
            return "its forward was replaced on the instance and does not call ours"
        if any(parameter.grad is not None for parameter in module.parameters(recurse=False)):
            parent = type(self._modules.get(name.rpartition(".")[0])).__name__
            return f"{parent} read its weight and did not call it in the first training step"
        return "it was not called in the first training step"

    def _flops(self, layer: LayerDecision) -> int:
        owner = self._owner(layer)
        calls, own = self._calls.get(owner, _Calls()), list(self._modules[owner].parameters(recurse=False))
        if not calls.rows and any(parameter.grad is not None for parameter in own):
            calls = self._calls.get(owner.rpartition(".")[0], calls)  # its parent read the weight
        trained = any(parameter.requires_grad for parameter in own if parameter.dim() > 1)
        rows = calls.rows + calls.graded * trained + calls.with_gradient
        if layer.kind == "experts" and calls.rows:
            rows = rows * calls.routed // (calls.rows * layer.shape[0])
        return 2 * rows * layer.parameters


def _counts(module: FP8Module) -> tuple[int, int, int]:
    return module.record.fp8, module.record.high_precision, module.record.evaluations


def _is_compiled(model: nn.Module) -> bool:
    return getattr(model, "_compiler_ctx", None) is not None or any(
        name.endswith("_orig_mod") or module._compiled_call_impl is not None for name, module in model.named_modules()
    )


def idle_layers(summary: ConversionSummary) -> Iterator[str]:
    """A sentence for each reason for which layers of ``summary`` that should run in FP8 did not."""
    by_reason: dict[str, list[str]] = {}
    for layer in summary.idle:
        by_reason.setdefault(layer.reason, []).append(layer.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{', '.join(names[:8])}{more}: {reason}"
