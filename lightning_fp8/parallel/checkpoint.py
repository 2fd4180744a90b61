"""``checkpoint()``: torch's non-reentrant activation checkpointing with Transformer Engine's arguments.

FP8 layers need no special treatment: scales are constant within a step, and a recomputation does not change amaxes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.parallel.collectives import all_gather

T = TypeVar("T")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the function and of its recomputation."""


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
    """``function(*args, **kwargs)``, which saves only its arguments and is computed again in the backward pass.

    Outputs, gradients and FP8 scales are bitwise equal to those of ``function(*args, **kwargs)``.

    Args:
        function: a module, or any function.
        args: the arguments of ``function``; gradients flow to the tensors among them.
        distribute_saved_activations: save 1/n of the first argument on each of the n ranks of ``tp_group``, and gather
            it in the backward pass. The first argument must be equal on these ranks, as between tensor-parallel layers.
            Under sequence parallelism it is not, and is split already.
        get_rng_state_tracker: returns a tracker of random states with ``get_states`` and ``set_states``, such as
            Megatron's; the recomputation uses the random states of the forward. torch's own generators need no
            tracker.
        tp_group: the ranks for ``distribute_saved_activations``.
        use_reentrant: has no effect; checkpointing is always non-reentrant.
        context_fn, determinism_check, debug: see :func:`torch.utils.checkpoint.checkpoint`.
        kwargs: keyword arguments of ``function``, and torch's ``preserve_rng_state``.

    Returns:
        The result of ``function``.

    Raises:
        TypeError: If ``function`` is not callable, if the tracker has no states, or if the first argument is to be
            distributed and is not a local tensor.
        ValueError: If ``distribute_saved_activations`` is set without ``tp_group``, or if the number of elements of the
            first argument is not divisible by the group's size.
    """
    if not callable(function):
        raise TypeError(f"checkpoint: function={function!r} cannot be called; pass a module or a function")
    get_rng_state_tracker = kwargs.pop("get_cuda_rng_tracker", None) or get_rng_state_tracker  # its former name
    if use_reentrant and torch.is_grad_enabled() and not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        warnings.warn(
            "checkpoint(use_reentrant=True): no argument requires a gradient. Reentrant checkpointing would not "
            "compute gradients of the function's parameters; this function is non-reentrant, and computes them",
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
    """A function of this rank's piece of the first argument, and the arguments to pass to it."""
    if group is None:
        raise ValueError(
            "checkpoint: distribute_saved_activations=True needs the ranks to distribute over; pass tp_group, or leave "
            "distribute_saved_activations out"
        )
    first = args[0] if args else None
    if not isinstance(first, Tensor) or is_dtensor(first):
        raise TypeError(
            f"checkpoint: distribute_saved_activations=True distributes the first argument, which is a "
            f"{type(first).__name__} and must be a local torch.Tensor; pass the activation first"
        )
    ranks = dist.get_world_size(group)
    if first.numel() % ranks:
        raise ValueError(
            f"checkpoint: the {first.numel()} elements of the first argument, {list(first.shape)}, are not divisible "
            f"by the {ranks} ranks of tp_group; pad it, or leave distribute_saved_activations out"
        )
    if ranks == 1 or not torch.is_grad_enabled():
        return function, args
    shape, requires_grad = first.shape, first.requires_grad
    piece = first.detach().reshape(ranks, -1)[dist.get_rank(group)].clone()
    of_forward = [first]  # removed by the forward, so that only the piece is saved

    def of_piece(piece: Tensor, *others: Any, **kwargs: Any) -> T:
        if of_forward:
            return function(of_forward.pop(), *others, **kwargs)
        whole = piece.new_empty(shape)
        all_gather(whole.view(-1), piece, group=group)
        return function(whole.requires_grad_(requires_grad), *others, **kwargs)

    return of_piece, (piece, *args[1:])


# --- Trackers of random states ----------------------------------------------------------------------------------------


class RNGStatesTracker(Protocol):
    """The common interface of Megatron's and Transformer Engine's ``CudaRNGStatesTracker``."""

    def get_states(self) -> dict[str, Any]:
        """The states by name: tensors, or generators."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Set states that :meth:`get_states` returned."""


class SavedStates:
    """A reusable context manager that restores the states a tracker had when this object was created.

    ``torch.utils.checkpoint`` restores only torch's default generators. With other states, a recomputation would draw
    another dropout mask than its forward.

    Args:
        tracker: has the states.
        context: entered within this one.

    Raises:
        TypeError: If the tracker has no ``get_states`` and ``set_states``.
    """

    def __init__(self, tracker: Any, context: AbstractContextManager[Any]) -> None:
        if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
            raise TypeError(
                "a recomputation restores the states of get_rng_state_tracker's tracker, but "
                f"{type(tracker).__name__} has no get_states and set_states; add them, as in Megatron's "
                "CudaRNGStatesTracker, or pass checkpoint_core_attention=False (checkpoint(): leave "
                "get_rng_state_tracker out)"
            )
        self.tracker: RNGStatesTracker = tracker
        self.context = context
        self.states = _copies(tracker.get_states())
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.before = dict(self.tracker.get_states())  # not copies: a CUDA graph may use these generators
        self.tracker.set_states(_copies(self.states))
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.context.__exit__(*error)
        finally:
            self.tracker.set_states(self.before)


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    """Copies of the states; generators would advance in place."""
    return {name: _copy(rng_state) for name, rng_state in states.items()}


def _copy(rng_state: Any) -> Any:
    return rng_state.clone_state() if isinstance(rng_state, torch.Generator) else rng_state.clone()
