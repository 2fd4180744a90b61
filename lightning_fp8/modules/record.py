"""LayerRecord counts a layer's forwards, which tell whether a layer that should run in FP8 did."""

from __future__ import annotations

import warnings

import torch

_traced: set[tuple[int, ...]] = set()


class LayerRecord:
    """The forwards of one layer since the record was last cleared.

    Compiled code counts nothing, and neither does a forward that activation checkpointing repeats.

    Attributes:
        fp8: training forwards (``module.training``) that multiplied in FP8.
        high_precision: training forwards that did not multiply in FP8.
        evaluations: forwards of either kind outside training.
    """

    __slots__ = ("evaluations", "fp8", "high_precision")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.fp8 = self.high_precision = self.evaluations = 0

    @property
    def ran(self) -> bool:
        """Whether the layer was called at all."""
        return bool(self.fp8 or self.high_precision or self.evaluations)

    def note(self, fp8: bool, training: bool) -> None:
        """Count one forward."""
        if not training:
            self.evaluations += 1
        elif fp8:
            self.fp8 += 1
        else:
            self.high_precision += 1

    def __repr__(self) -> str:
        return f"LayerRecord({', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)})"


@torch.compiler.assume_constant_result
def note_traced(*features: int) -> bool:
    """Called while torch.compile traces a layer of these sizes in FP8; nothing of it remains in the compiled code.

    Equal blocks share one compiled code, so that the second is never traced: sizes are noted, not layers.
    """
    _traced.add(features)
    return True


@torch.compiler.assume_constant_result
def note_traced_outside_fp8(*features: int) -> bool:
    """Called while torch.compile traces such a layer outside of every region of FP8.

    Inside a backward pass that is activation checkpointing, which runs a forward again that ran in FP8.
    """
    if features in _traced and torch._C._current_graph_task_id() >= 0:
        warnings.warn(
            "a compiled layer that ran in FP8 is recomputed in the backward pass outside of a region of FP8, in high "
            "precision: its gradients are of other values than its output. Run backward() inside the region, too, or "
            "compile around activation checkpointing and not inside of it",
            stacklevel=2,
        )
    return True


def was_traced(*features: int) -> bool:
    """Whether an FP8 layer of these sizes was ever compiled: then one that counted nothing may have run nonetheless."""
    return features in _traced


def any_traced() -> bool:
    """Whether an FP8 layer was ever compiled in this process."""
    return bool(_traced)
