"""Attention computed again in the backward pass, under the random states of its forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class RNGStatesTracker(Protocol):
    """What Megatron's and Transformer Engine's ``CudaRNGStatesTracker`` have in common."""

    def get_states(self) -> dict[str, Any]:
        """The states by name: tensors, or generators."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Take states that :meth:`get_states` gave."""


class SavedStates:
    """A context manager in which a tracker has the states that it had when this was made; it may be entered again.

    ``torch.utils.checkpoint`` restores torch's default generators alone, and a recomputation under other states would
    draw another dropout mask than its forward.

    Raises:
        TypeError: the tracker gives and takes no states.
    """

    def __init__(self, tracker: Any) -> None:
        if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
            raise TypeError(
                "checkpoint_core_attention=True with attention_dropout in training recomputes under the states of "
                f"get_rng_state_tracker's tracker, and {type(tracker).__name__} has no get_states and set_states; add "
                "them, as Megatron's CudaRNGStatesTracker has them, or pass checkpoint_core_attention=False"
            )
        self.tracker: RNGStatesTracker = tracker
        self.states = _copies(tracker.get_states())
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.before = dict(self.tracker.get_states())  # generators themselves: a CUDA graph may hold them
        self.tracker.set_states(_copies(self.states))

    def __exit__(self, *error: object) -> None:
        self.tracker.set_states(self.before)


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    """Generators advance in place."""
    return {name: _copy(rng_state) for name, rng_state in states.items()}


def _copy(rng_state: Any) -> Any:
    return rng_state.clone_state() if isinstance(rng_state, torch.Generator) else rng_state.clone()


def checkpointed(
    core: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    get_tracker: Callable[[], Any] | None,
) -> Tensor:
    """``core(q, k, v)``, computed again in the backward pass; what a tracker draws there is what it drew here.

    Raises:
        TypeError: the tracker gives and takes no states.
    """
    if get_tracker is None:
        return checkpoint(core, q, k, v, use_reentrant=False)
    contexts = nullcontext(), SavedStates(get_tracker())
    return checkpoint(core, q, k, v, use_reentrant=False, context_fn=lambda: contexts)
