"""``checkpoint()``: Transformer Engine's arguments on torch's non-reentrant activation checkpointing.

FP8 layers need nothing of their own here: scales are constant within a step, and the amaxes of a recomputation are
those of its forward.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_fp8.parallel.collectives import all_gather

T = TypeVar("T")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What the function runs in, and what its recomputation does."""


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> T:
    """``function(*args, **kwargs)``, which keeps its arguments alone and is computed again in the backward pass.

    Outputs, gradients and FP8 scales are equal to the bit to those of ``function(*args, **kwargs)``.

    Args:
        function: a module, or any function.
        args: its arguments; gradients flow to the tensors among them.
        distribute_saved_activations: keep 1/n of the first argument on each of the n ranks of ``tp_group``, and gather
            it in the backward pass. The first argument must be equal on these ranks, as between tensor-parallel layers;
            under sequence parallelism it is not, and is split already.
        get_rng_state_tracker: gives a tracker of random states with ``get_states`` and ``set_states``, as Megatron's;
            the recomputation draws what the forward did. torch's own generators need no tracker.
        tp_group: the ranks over which ``distribute_saved_activations`` distributes.
        use_reentrant: has no effect; checkpointing is always non-reentrant.
        context_fn, determinism_check, debug: those of :func:`torch.utils.checkpoint.checkpoint`.
        kwargs: keyword arguments of ``function``, and ``preserve_rng_state``, which is torch's.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: a ``function`` that cannot be called, a tracker without states, or a first argument that is
            distributed and not a local tensor.
        ValueError: ``distribute_saved_activations`` without ``tp_group``, or a first argument whose number of elements
            the group's size does not divide.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function={function!r} cannot be called; pass a module or a function")
    get_rng_state_tracker = kwargs.pop("get_cuda_rng_tracker", None) or get_rng_state_tracker  # its former name
    if use_reentrant and torch.is_grad_enabled() and not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        warnings.warn(
            "checkpoint(use_reentrant=True): no argument requires a gradient. Reentrant checkpointing would give the "
            "function's parameters no gradients; this one is non-reentrant, and gives them",
            stacklevel=2,
        )
    if distribute_saved_activations:
        function, args = _distributed(function, args, tp_group)  # type: ignore[assignment]
    if get_rng_state_tracker is not None and torch.is_grad_enabled():
        forward, recomputation = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
        contexts = forward, SavedStates(get_rng_state_tracker(), recomputation)
        context_fn = lambda: contexts  # noqa: E731
    if context_fn is not None:
        kwargs["context_fn"] = context_fn
    return torch_checkpoint(  # type: ignore[no-any-return]
        function, *args, use_reentrant=False, determinism_check=determinism_check, debug=debug, **kwargs
    )


# --- Distributed arguments --------------------------------------------------------------------------------------------


def _distributed(
    function: Callable[..., T], args: Sequence[Any], group: dist.ProcessGroup | None
) -> tuple[Callable[..., T], Sequence[Any]]:
    """A function of this rank's piece of the first argument, and its arguments."""
    if group is None:
        raise ValueError(
            "checkpoint: distribute_saved_activations=True needs the ranks to distribute over; pass tp_group, or leave "
            "distribute_saved_activations out"
        )
    first = args[0] if args else None
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if not isinstance(first, Tensor) or isinstance(first, sharded):
        raise TypeError(
            f"checkpoint: distribute_saved_activations=True distributes the first argument, which is a "
            f"{type(first).__name__} and must be a local torch.Tensor; pass the activation first"
        )
    ranks = dist.get_world_size(group)
    if first.numel() % ranks:
        raise ValueError(
            f"checkpoint: the {first.numel()} elements of the first argument, {list(first.shape)}, do not divide by "
            f"the {ranks} ranks of tp_group; pad it, or leave distribute_saved_activations out"
        )
    if ranks == 1 or not torch.is_grad_enabled():
        return function, args
    shape, requires_grad = first.shape, first.requires_grad
    piece = first.detach().reshape(ranks, -1)[dist.get_rank(group)].clone()
    of_forward = [first]  # the forward takes it out; only the piece is kept

    def of_piece(piece: Tensor, *others: Any, **kwargs: Any) -> T:
        if of_forward:
            return function(of_forward.pop(), *others, **kwargs)
        whole = piece.new_empty(shape)
        all_gather(whole.view(-1), piece, group=group)
        return function(whole.requires_grad_(requires_grad), *others, **kwargs)

    return of_piece, (piece, *args[1:])


# --- Trackers of random states ----------------------------------------------------------------------------------------


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

    Args:
        tracker: holds the states.
        context: entered within.

    Raises:
        TypeError: the tracker gives and takes no states.
    """

    def __init__(self, tracker: Any, context: AbstractContextManager[Any]) -> None:
        if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
            raise TypeError(
                "a recomputation restores the states of get_rng_state_tracker's tracker, and "
                f"{type(tracker).__name__} has no get_states and set_states; add them, as Megatron's "
                "CudaRNGStatesTracker has them, or pass checkpoint_core_attention=False (checkpoint(): leave "
                "get_rng_state_tracker out)"
            )
        self.tracker: RNGStatesTracker = tracker
        self.context = context
        self.states = _copies(tracker.get_states())
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.before = dict(self.tracker.get_states())  # generators themselves: a CUDA graph may hold them
        self.tracker.set_states(_copies(self.states))
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.context.__exit__(*error)
        finally:
            self.tracker.set_states(self.before)


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    """Generators advance in place."""
    return {name: _copy(rng_state) for name, rng_state in states.items()}


def _copy(rng_state: Any) -> Any:
    return rng_state.clone_state() if isinstance(rng_state, torch.Generator) else rng_state.clone()
