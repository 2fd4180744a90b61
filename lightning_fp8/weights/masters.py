"""Float32 master weights in an optimizer, for weights that are stored in FP8."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fp8.weights.fp8_tensor import CODES_ARE_FROZEN, FP8Tensor

MASTER = "master_param"
"""Key of the master weight in a parameter's state in ``optimizer.state_dict()``; the same as Transformer Engine's."""

_with_masters: WeakSet[Optimizer] = WeakSet()
_known: WeakSet[Optimizer] = WeakSet()


def with_master_weights(optimizer: Optimizer) -> Optimizer:
    """Let ``optimizer`` step float32 masters of ``fp8_model_init``'s weights, and cast them to FP8 after each step.

    Masters are created when the optimizer first steps or loads: from the weight's preserved high-precision initial
    values if there are any, else from its FP8 values. ``optimizer.state_dict()`` contains them as ``master_param`` in
    each parameter's state. ``param_groups`` still contains the FP8 weights, and their gradients are clipped and zeroed
    as usual. Other parameters are stepped as before.

    Args:
        optimizer: any ``torch.optim.Optimizer``, before its first step.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: If ``optimizer`` is not a ``torch.optim.Optimizer``.
        RuntimeError: If it has stepped FP8 weights before, or is a copy of an optimizer with masters.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"with_master_weights takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if optimizer in _with_masters:
        return optimizer
    if any(isinstance(parameter, FP8Tensor) for parameter in optimizer.state):
        raise RuntimeError(
            "the optimizer already has state for FP8 weights: it has stepped them, or creates state when constructed "
            "(Adagrad), which is not supported; call with_master_weights(optimizer) before its first step"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(isinstance(parameter, Tensor) and id(parameter) not in held for parameter in optimizer.state):
        raise RuntimeError(
            "the optimizer has state for parameters that are not in its param_groups, as a copy of an optimizer with "
            "masters has; make a new optimizer, and load the first one's state_dict() into it"
        )
    masters = _Masters()
    optimizer.register_step_pre_hook(masters.before_step)
    optimizer.register_step_post_hook(masters.after_step)
    optimizer.register_state_dict_pre_hook(masters.swap_in)
    optimizer.register_state_dict_post_hook(masters.after_state_dict)
    optimizer.register_load_state_dict_pre_hook(masters.before_load)
    optimizer.register_load_state_dict_post_hook(masters.after_load)
    _with_masters.add(optimizer)
    return optimizer


class _Master:
    """The float32 master of one FP8 weight.

    Attributes:
        weight: the FP8 weight.
        master: float32, the parameter that the optimizer steps.
        version: ``weight._version`` when weight and master last agreed.
        master_version: the same of the master.
    """

    def __init__(self, weight: FP8Tensor) -> None:
        self.weight = weight
        self.master = nn.Parameter(_values(weight).to(weight.device, torch.float32, copy=True))
        self._agree()

    def _agree(self) -> None:
        self.version, self.master_version = self.weight._version, self.master._version

    def follow(self) -> None:
        """Copy the weight's values if they were changed by anything but :meth:`write`."""
        if self.weight.device != self.master.device:
            self.master.data = self.master.data.to(self.weight.device)
        if self.version != self.weight._version:
            if not self.weight.is_cast_of(self.master.detach()):
                with torch.no_grad():
                    self.master.copy_(_values(self.weight))
            self._agree()

    def take_gradient(self) -> None:
        gradient = self.weight.grad
        self.master.grad = None if gradient is None else gradient.float()

    def write(self) -> None:
        """Cast the master to the weight, if it has a gradient or was changed without one, as LBFGS does."""
        if self.master.grad is not None or self.master_version != self.master._version:
            with torch.no_grad():
                self.weight.copy_(self.master)
            self._agree()


def _is_frozen(weight: FP8Tensor) -> bool:
    """Whether the codes of ``weight`` are those of a checkpoint.

    Raises:
        RuntimeError: If they require a gradient.
    """
    if weight.stored is not None and weight.requires_grad:
        raise RuntimeError(CODES_ARE_FROZEN)
    return weight.stored is not None


def _values(weight: FP8Tensor) -> Tensor:
    """The preserved high-precision values that ``weight`` was cast from; its dequantized values if there are none."""
    preserved = weight.get_high_precision_init_val()
    return weight.dequantize().detach() if preserved is None or not weight.is_cast_of(preserved) else preserved


class _Masters:
    """The masters of one optimizer.

    They replace the FP8 weights in its ``param_groups`` while it steps, saves or loads.
    """

    def __init__(self) -> None:
        self._of_weight: dict[int, _Master] = {}
        self._of_master: dict[int, _Master] = {}
        self._current: list[_Master] = []  # of the weights in param_groups
        self._loaded: list[tuple[_Master, Tensor]] = []

    def swap_in(self, optimizer: Optimizer) -> None:
        """Replace FP8 weights in ``param_groups`` by their masters; creates masters of new weights."""
        self._current = []
        for group in optimizer.param_groups:
            parameters = group["params"]  # changed in place: LBFGS keeps this list
            for index, parameter in enumerate(parameters):
                if isinstance(parameter, FP8Tensor) and not _is_frozen(parameter):
                    found = self._of_weight.get(id(parameter))
                    if found is None:
                        found = self._of_weight[id(parameter)] = _Master(parameter)
                        self._of_master[id(found.master)] = found
                    found.follow()
                    parameters[index] = found.master
                if (current := self._of_master.get(id(parameters[index]))) is not None:
                    self._current.append(current)

    def swap_out(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                if (found := self._of_master.get(id(parameter))) is not None:
                    parameters[index] = found.weight

    def _take_gradients(self) -> None:
        for each in self._current:
            each.take_gradient()

    def _write(self) -> None:
        for each in self._current:
            each.write()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.swap_in(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._take_gradients()
            return None
        kwargs = {**kwargs, "closure": self._around(optimizer, closure)}
        return args[:1], kwargs

    def _around(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``closure``, so that it computes, clips and zeroes gradients of the FP8 weights."""
        is_first = True

        def wrapped() -> Any:
            nonlocal is_first
            if not is_first:  # LBFGS evaluates the closure at other points
                self._write()
            is_first = False
            self.swap_out(optimizer)
            loss = closure()
            self.swap_in(optimizer)
            self._take_gradients()
            return loss

        return wrapped

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._write()
        for each in self._current:
            each.master.grad = None
        self.swap_out(optimizer)

    def _indexed(self, optimizer: Optimizer) -> dict[int, _Master]:
        """The masters by their parameters' indices in a ``state_dict``."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            index: found
            for index, parameter in enumerate(parameters)
            if (found := self._of_master.get(id(parameter))) is not None
        }

    def after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        masters = {index: {MASTER: each.master.detach()} for index, each in self._indexed(optimizer).items()}
        self.swap_out(optimizer)
        state = {**state_dict["state"]}
        for index, of_master in masters.items():
            state[index] = {**state.get(index, {}), **of_master}
        return {**state_dict, "state": state}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Remove the masters from ``state_dict``; :meth:`after_load` copies them once torch has loaded the rest.

        Raises:
            ValueError: If the shapes of a master and its weight differ. Nothing is changed then.
        """
        saved = [group["params"] for group in state_dict["param_groups"]]
        held = [group["params"] for group in optimizer.param_groups]
        if [len(each) for each in saved] != [len(each) for each in held]:
            return state_dict  # torch's error
        self.swap_in(optimizer)
        masters, self._loaded = self._indexed(optimizer), []
        state = {**state_dict["state"]}
        for position, index in enumerate(index for group in saved for index in group):
            if index not in state or position not in masters:
                continue
            of_parameter = dict(state[index])
            value = of_parameter.pop(MASTER, None)
            if isinstance(value, Tensor):
                if value.shape != masters[position].master.shape:
                    self.swap_out(optimizer)
                    raise ValueError(
                        f"{MASTER} of parameter {index} has shape {list(value.shape)}, but the weight has "
                        f"{list(masters[position].master.shape)}; load the state of the same model"
                    )
                self._loaded.append((masters[position], value))
            state[index] = of_parameter
            if not of_parameter:
                del state[index]
        return {**state_dict, "state": state}

    def after_load(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for held, value in self._loaded:
                held.master.copy_(value)
                held.write()
        self._loaded = []
        self.swap_out(optimizer)


def warn_without_masters(optimizer: Any) -> None:
    """Warn once per optimizer that it steps FP8 weights without masters."""
    if optimizer in _known or optimizer in _with_masters:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    in_fp8 = [parameter for parameter in parameters if isinstance(parameter, FP8Tensor)]
    trained = [parameter for parameter in in_fp8 if not _is_frozen(parameter)]
    if any(parameter.requires_grad for parameter in trained):
        warnings.warn(
            f"{type(optimizer).__name__} steps weights that are stored in FP8: each update is rounded to FP8, and "
            "updates below half the spacing of FP8 values are lost. Keep float32 masters in it: "
            "lightning_fp8.with_master_weights(optimizer), before the first step",
            stacklevel=2,
        )
    if len(trained) == len(in_fp8):  # else each step looks whether codes are still frozen
        _known.add(optimizer)
