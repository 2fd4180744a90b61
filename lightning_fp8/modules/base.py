"""FP8Module: a module that keeps slots of an amax history."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fp8.delayed.history import AmaxHistory, Slot
from lightning_fp8.delayed.update import listen
from lightning_fp8.fp8_region import FP8Context, current_context
from lightning_fp8.functions.product import Slots
from lightning_fp8.modules.record import LayerRecord
from lightning_fp8.names import gemm_name, slot_name
from lightning_fp8.numerics.formats import CODES_NEED_SCALES, holds_codes
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.te.keys import take_state
from lightning_fp8.weights.fp8_tensor import FP8Tensor

if TYPE_CHECKING:
    from lightning_fp8.te.te_state import TEState


class FP8Module(nn.Module):
    """The base of modules that cast to FP8. It registers no buffers, so its ``state_dict`` holds only parameters.

    Attributes:
        roles: the tensors that the module casts. Each has one slot of the amax history, in this order.
        gemms: the names of the module's linear layers, each of which has those roles. A module that is itself one
            linear layer has the single name ``""``.
        fp8: False keeps the module in high precision.
        own_context: the context of forwards outside every region; None runs them in high precision.
        comparison: what :mod:`lightning_fp8.faster` says of its first training forward; None compares nothing.
        slower: why FP8 is slower for its sizes, so that it stays in high precision; empty if it is not.
    """

    roles: ClassVar[tuple[Role, ...]] = ()
    gemms: ClassVar[tuple[str, ...]] = ("",)
    fp8: bool = True
    own_context: FP8Context | None = None
    comparison: str | None = None
    slower: str = ""
    _ran_slower: bool = False
    """Whether the last forward was one that ``slower`` keeps in high precision."""
    _slots: tuple[Slots, ...] | None = None
    _record: LayerRecord | None = None

    @property
    def record(self) -> LayerRecord:
        """The counts of this module's forwards since its record was last cleared."""
        if self._record is None:  # the class was swapped in place, or no forward has run
            self._record = LayerRecord()
        return self._record

    @property
    def slots(self) -> Slots | None:
        """For each role, the slot of the amax history that this module reads scales from and writes amaxes to.

        For a module with several :attr:`gemms`, these are the slots of the first; see :attr:`slots_of_gemms`.
        """
        return self._slots[0] if self._slots else None

    @property
    def slots_of_gemms(self) -> tuple[Slots, ...]:
        """The :attr:`slots` of each of :attr:`gemms`; empty until they are allocated."""
        return self._slots or ()

    @property
    def history(self) -> AmaxHistory | None:
        """The history that owns :attr:`slots`."""
        return self._slots[0][self.roles[0]].history if self._slots else None

    def history_slots(self, name: str = "") -> list[tuple[str, Role]]:
        """The names and roles of the slots of a module named ``name``, for example ``layers.0.fc1.input``."""
        return [(slot_name(gemm_name(name, gemm), role), role) for gemm in self.gemms for role in self.roles]

    def named_slots(self, name: str = "") -> list[tuple[str, Slot]]:
        """The names of :meth:`history_slots` with their slots; empty until they are allocated."""
        slots = [slot for of_gemm in self.slots_of_gemms for slot in of_gemm.values()]
        return [(full_name, slot) for (full_name, _), slot in zip(self.history_slots(name), slots)]

    def use_history(self, history: AmaxHistory, first_slot: int = 0) -> None:
        """Use the slots of ``history`` from ``first_slot`` on, in the order of :meth:`history_slots`."""
        if self.history is not None:
            self.history.remove_module(self)
        indices = count(first_slot)
        self._slots = tuple({role: history.slot(next(indices)) for role in self.roles} for _ in self.gemms)
        self._join(history)

    def _join(self, history: AmaxHistory) -> None:
        """Register the slots with ``history``, which updates them when an optimizer of these parameters steps."""
        history.add_module(self, [slot.index for slots in self.slots_of_gemms for slot in slots.values()])

    def ensure_slots(self, device: torch.device | None = None) -> tuple[Slots, ...]:
        """Allocate an amax history for this module if it has none, and return :attr:`slots_of_gemms`.

        Args:
            device: the device of a new history. The default is the device of the first parameter that is not on the
                meta device, or the CPU if there is none.
        """
        if self._slots is None:
            device = device or next((p.device for p in self.parameters() if not p.is_meta), torch.device("cpu"))
            self.use_history(AmaxHistory(self.history_slots(), device))
        assert self._slots is not None
        return self._slots

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle. It omits the last context, whose process group cannot be copied or pickled."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_last_context", "_last_products", "_weight_cache")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.history is not None:
            self._join(self.history)
        if self.own_context is not None:
            listen()

    def _replicate_for_data_parallel(self) -> Any:
        """A replica of ``torch.nn.DataParallel``, whose threads do not inherit this thread's ``fp8_autocast``.

        Raises:
            RuntimeError: If the replica would run in another precision than this thread's region asks for, or by a
                recipe that :func:`convert_module` gave the model: replicas would share its state.
        """
        context, own = current_context(), self.own_context
        pinned = own is not None and not (context.outside and own.chosen)
        if self.fp8 and (context.enabled or context.calibrating or pinned):
            raise RuntimeError(
                "torch.nn.DataParallel runs each replica in a separate thread, where fp8_autocast has no effect: "
                f"{type(self).__name__} would run in {f'FP8, {own.recipe.name},' if own else 'high precision'} there. "
                "Use DistributedDataParallel, as torchrun starts it, strategy='ddp' of a Trainer, or a single GPU"
            )
        self._record = self.record  # replicas count in it
        return super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script does not support {type(self).__name__}: use torch.compile, or script the model with "
            "torch.nn.Linear in its place, which takes the same state_dict"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # torch swaps a tensor subclass with a new tensor, which lacks the attributes that others set on the old one.
        own = [(name, dict(vars(each))) for name, each in self._parameters.items() if isinstance(each, FP8Tensor)]
        try:
            super()._apply(fn, recurse)
        except RuntimeError as error:
            if not own or "Couldn't swap" not in str(error):
                raise
            raise RuntimeError(
                f"{type(self).__name__}.{own[0][0]} is stored in FP8, and cannot be moved or converted while a graph "
                "or another object holds it. Finish the backward pass before this call, or delete the loss and all "
                "outputs of the model (del loss). Then repeat the call: modules before this one are moved or converted "
                "already, this one and those after it are not"
            ) from error
        for name, attributes in own:
            of_others = {key: value for key, value in attributes.items() if key not in FP8Tensor.ATTRIBUTES}
            vars(self._parameters[name]).update(of_others)
        history = self.history
        if history is not None:
            device = next((parameter.device for parameter in self.parameters()), None)
            if device is None:  # attention has no parameters: see where fn moves a tensor of its slots
                device = fn(history.scale.new_empty(0)).device
            if device.type != "meta":
                history.to(device)  # the dtype stays float32
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load Transformer Engine's ``_extra_state``, if there is one, as this module's scales and histories.

        Raises:
            RuntimeError: If a value for a high-precision parameter is float8.
        """
        require_values(self, state_dict, prefix)
        if (entry := take_state(state_dict, prefix)) is not None:
            from lightning_fp8.te.te_state import CheckpointError, read_te_state  # imported late: few runs need it

            key, extra_state = entry
            try:
                self._load_te_state(read_te_state(extra_state))
            except CheckpointError as error:
                *_, error_msgs = args
                error_msgs.append(f"{key}: {error}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_te_state(self, te_state: TEState) -> None:
        if te_state.forward is not None:
            tensor_states = [
                te_state.tensor_state(role, gemm) for gemm in range(len(self.gemms)) for role in self.roles
            ]
            self.ensure_slots()
            for (_, slot), tensor_state in zip(self.named_slots(), tensor_states):
                slot.history.set_slot(slot.index, tensor_state.scale, tensor_state.amax_history)


def require_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A load-state-dict pre-hook of a model.

    Raises:
        RuntimeError: If a value for a high-precision parameter is float8. Nothing is loaded then.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(f"{prefix}{name}")
        if isinstance(value, Tensor) and holds_codes(value) and not holds_codes(parameter):
            raise RuntimeError(
                f"{prefix}{name} is {value.dtype} in the state dict and {parameter.dtype} in the model: "
                f"{CODES_NEED_SCALES}, and then its state dict"
            )
