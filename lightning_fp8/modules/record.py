"""LayerRecord counts a layer's forwards in FP8 and in high precision, and warns about those outside every region."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from lightning_fp8.traced import was_traced

FORWARDS = 3
"""The number of a layer's forwards outside every region before they are reported. Fewer may be a look at the output."""


class RegionWatch:
    """Warns once if a model of ``convert_module`` runs with gradients enabled outside every ``fp8_autocast``.

    All layers of a model share one. Forwards in compiled code are not seen. A copy starts anew.

    Attributes:
        model: the name of the model's class.
        settled: whether a layer ran in FP8 with gradients, or the warning was issued.
    """

    __slots__ = ("model", "settled")

    def __init__(self, model: str) -> None:
        self.model, self.settled = model, False

    def __reduce__(self) -> Any:
        return RegionWatch, (self.model,)

    def warn(self) -> None:
        if not self.settled:
            self.settled = True
            warnings.warn(
                f"a layer of {self.model}, a model of convert_module, ran {FORWARDS} times outside every fp8_autocast "
                "with gradients enabled, in high precision. Call convert_module(model, recipe='delayed'), or run "
                "training inside `with fp8_autocast():`, and evaluations inside torch.no_grad()",
                stacklevel=2,
            )


class LayerRecord:
    """The forwards of one layer since the record was last cleared.

    Forwards in compiled code are not counted. Those that activation checkpointing repeats only count as ``outside``.

    Attributes:
        fp8: the number of training forwards (``module.training``) that multiplied in FP8.
        high_precision: the number of training forwards that did not multiply in FP8.
        evaluations: the number of forwards outside training, in either precision.
        evaluations_in_fp8: the number of ``evaluations`` that multiplied in FP8.
        outside: the number of forwards outside every ``fp8_autocast`` with gradients enabled, while the layer is
            watched.
        watch: the watch of the layer's model, if it is of ``convert_module``.
    """

    COUNTS: ClassVar = ("evaluations", "evaluations_in_fp8", "fp8", "high_precision", "outside")
    __slots__ = (*COUNTS, "watch")

    def __init__(self) -> None:
        self.watch: RegionWatch | None = None
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.fp8 = self.high_precision = self.evaluations = self.evaluations_in_fp8 = self.outside = 0

    @property
    def ran(self) -> bool:
        """Whether the layer was called at all."""
        return bool(self.fp8 or self.high_precision or self.evaluations)

    def note(self, fp8: bool, training: bool) -> None:
        """Count one forward."""
        if not training:
            self.evaluations += 1
            self.evaluations_in_fp8 += fp8
        elif fp8:
            self.fp8 += 1
        else:
            self.high_precision += 1

    def note_region(self, fp8: bool, outside: bool) -> None:
        """Tell the watch in what a forward or its recomputation ran."""
        if self.watch is None or not torch.is_grad_enabled():
            return
        if fp8:
            self.watch.settled = True
        elif outside:
            self.outside += 1
            if self.outside == FORWARDS:
                self.watch.warn()

    def __repr__(self) -> str:
        return f"LayerRecord({', '.join(f'{name}={getattr(self, name)}' for name in self.COUNTS)})"


@torch.compiler.assume_constant_result
def note_traced_outside_fp8(*features: int) -> bool:
    """Called when torch.compile traces an FP8 layer of these sizes outside ``fp8_autocast``.

    In a backward pass, this is activation checkpointing, which repeats a forward that ran in FP8: it warns.
    """
    if was_traced(*features) and torch._C._current_graph_task_id() >= 0:
        warnings.warn(
            "a compiled layer that ran in FP8 is recomputed in high precision in the backward pass, which runs outside "
            "fp8_autocast: its gradients do not match its output. Call backward() inside fp8_autocast, or compile "
            "the module that applies activation checkpointing, not the module inside it",
            stacklevel=2,
        )
    return True
