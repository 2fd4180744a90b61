"""The initialization of a layer's parameters, which its ``reset_parameters`` repeats."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.te.arguments import ParallelArguments

InitMethod = Callable[[Tensor], Any]
"""Fills a tensor in place."""


def default_init_method(weight: Tensor) -> None:
    """Transformer Engine's default: a normal distribution with a standard deviation of 0.023."""
    nn.init.normal_(weight, 0.0, 0.023)


def refuse_meta(module: nn.Module) -> None:
    """Refuse to initialize parameters on meta, except in a constructor and inside ``torch.device("meta")``.

    Raises:
        RuntimeError: If parameters of ``module`` are on meta.
    """
    if not getattr(module, "constructed", False) or torch.get_default_device().type == "meta":
        return
    if any(each.is_meta for each in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__}.reset_parameters: its parameters are on meta and have no memory; call "
            "to_empty(device=...) of the module, or of the model around it, before"
        )


@dataclass(frozen=True)
class Initialization:
    """Fills weights and biases when a layer is constructed, and again in ``reset_parameters``.

    Copies of a layer share one instance. A function that cannot be pickled, such as a lambda or a nested function, is
    omitted from a pickle of the layer. A layer that is loaded from such a pickle trains, but ``reset_parameters``
    raises.

    Attributes:
        weight: called on each weight. None leaves weights unchanged.
        bias: called on each bias. None leaves biases unchanged.
        get_rng_state_tracker: returns Megatron's RNG tracker, whose state is forked while weights are filled.
        rng_tracker_name: the name of a state of that tracker. None uses the tracker's default.
    """

    weight: InitMethod | None = None
    bias: InitMethod | None = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None

    @classmethod
    def told(cls, weight: InitMethod | None, parallel: ParallelArguments) -> Initialization:
        """Zeros for biases, the default for weights if None is given, the RNG tracker of parallel arguments."""
        tracker, name = parallel.get("get_rng_state_tracker"), parallel.get("rng_tracker_name")
        return cls(weight or default_init_method, nn.init.zeros_, tracker, name)

    def fill(self, weights: Iterable[Tensor], biases: Iterable[Tensor | None] = ()) -> None:
        """Fill the parameters in place.

        Raises:
            RuntimeError: If a function was omitted from the pickle that the layer was loaded from.
        """
        with torch.no_grad():
            if self.weight is not None:
                with self._rng():
                    for weight in weights:
                        self.weight(weight)
            if self.bias is not None:
                for bias in biases:
                    if bias is not None:
                        self.bias(bias)

    def _rng(self) -> AbstractContextManager[Any]:
        if self.get_rng_state_tracker is None:
            return nullcontext()
        tracker, name = self.get_rng_state_tracker(), self.rng_tracker_name
        fork: AbstractContextManager[Any] = tracker.fork() if name is None else tracker.fork(name)
        return fork

    def __deepcopy__(self, memo: dict[int, Any]) -> Initialization:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value if _is_picklable(value) else partial(_lost, repr(value)) for name, value in vars(self).items()
        }


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # an object's own methods may raise anything
        return False
    return True


def _lost(name: str, *args: Any) -> None:
    raise RuntimeError(
        f"this layer was pickled, and {name}, which fills its parameters, cannot be: fill them yourself, or construct "
        "the layer with a function of a module"
    )
