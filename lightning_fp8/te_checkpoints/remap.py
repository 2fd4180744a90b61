"""Converts a Transformer Engine checkpoint to a model's names: its parameters, and its states as an amax history.

:mod:`lightning_fp8.te.keys` has the table of names. These functions only read a state dict and the structure of a
model. They load nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fp8.delayed.history import STATE_VERSION
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.names import clean_name, gemm_name
from lightning_fp8.numerics.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role
from lightning_fp8.te.keys import (
    is_grouped,
    is_state,
    module_of_state,
    prefix_of,
    prefix_renamer,
    slots_of_gemms,
    slots_of_state,
    state_key,
)
from lightning_fp8.te.te_state import TensorState, TEState, read_state_of, te_states_in
from lightning_fp8.te.torch_file import CheckpointError
from lightning_fp8.transformer import MultiheadAttention

FP8Roles = Mapping[str, tuple[Role, ...]]
"""The modules of a model that have slots of a history, by name, with their roles."""

_PARAMETER = re.compile(r"(?:\w+_)?(?:weight|bias)")
"""A parameter of Transformer Engine: ``weight``, ``fc1_bias``, ``query_weight``, ``layer_norm_weight``."""
_NORM = "layer_norm"

Outcome = Literal["loaded", "remapped", "defaulted", "ignored"]


@dataclass(frozen=True)
class Entry:
    """The report on one module of the file or of the model.

    Attributes:
        key: the file's key, or the name of a module of the model that is missing in the file.
        outcome: ``loaded`` with the same name; ``remapped`` to another name; ``defaulted`` to Transformer Engine's
            initial state, scale 1 and amax 0; or ``ignored``.
        reason: the new name, or the reason.
        writer: the versions of Transformer Engine that write this format.
    """

    key: str
    outcome: Outcome
    reason: str
    writer: str = ""


@dataclass(frozen=True)
class LoadReport:
    """The report on one load. ``str()`` is a summary, with all entries whose outcome is not ``loaded``.

    Attributes:
        missing_keys: parameters and buffers of the model that are not in the file, and that were not changed.
        unexpected_keys: names in the file that the model does not have, after renaming. As in torch, both are empty
            if the load was strict.
        note: a possible mistake that the file does not allow to check.
    """

    entries: tuple[Entry, ...]
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    note: str = ""

    def with_outcome(self, outcome: Outcome) -> tuple[Entry, ...]:
        """The entries with this outcome, for example for scripts that must not ignore any."""
        return tuple(entry for entry in self.entries if entry.outcome == outcome)

    @property
    def writers(self) -> tuple[str, ...]:
        """The versions that wrote the file's states, without duplicates."""
        return tuple(dict.fromkeys(entry.writer for entry in self.entries if entry.writer))

    def __str__(self) -> str:
        counts = Counter(entry.outcome for entry in self.entries)
        numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome.__args__)  # type: ignore[attr-defined]
        written_by = f" written by {'; '.join(self.writers)}" if self.writers else ""
        others = [entry for entry in self.entries if entry.outcome != "loaded"]
        lines = [f"Transformer Engine state{written_by}: {numbers}"]
        lines += [f"  {entry.key}: {entry.outcome}, {entry.reason}" for entry in others]
        if self.missing_keys:
            lines.append(f"  not in the file, and as they were: {first_few(self.missing_keys)}")
        if self.unexpected_keys:
            lines.append(f"  not in the model: {first_few(self.unexpected_keys)}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def first_few(names: Sequence[str]) -> str:
    """The first five names, and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(frozen=True)
class Remapped:
    """A checkpoint with a model's names.

    Attributes:
        state_dict: the parameters by the model's keys, without Transformer Engine's states.
        fp8_state: a state in the format of ``AmaxHistory.state_dict``; ``None`` if the file has none for the model.
        beside: names outside the model's part of the file that equal names of parameters inside it.
    """

    state_dict: dict[str, Any]
    fp8_state: dict[str, Any] | None
    report: LoadReport
    beside: tuple[str, ...] = ()


def remap(state_dict: Mapping[str, Any], model: nn.Module, fp8_roles: FP8Roles) -> Remapped:
    """Convert a Transformer Engine checkpoint to the names of ``model``.

    Args:
        state_dict: parameters and ``_extra_state`` values by name. Prefixes of Lightning, DDP, FSDP and torch.compile
            may differ from the model's.
        model: determines the names. Its values are not read.
        fp8_roles: the modules of the model with slots of a history, and their roles.

    Raises:
        CheckpointError: If a state is damaged or not Transformer Engine's. The message has its key.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    own_setter = nn.Module.set_extra_state
    with_own_state = {name for name, module in modules.items() if type(module).set_extra_state is not own_setter}
    model_keys = {clean_name(key): key for key in model.state_dict()}
    rename = prefix_renamer([clean_name(key) for key in state_dict], set(model_keys), set(modules))

    parameters: dict[str, Any] = {}
    te_states: list[tuple[str, str, TEState]] = []
    beside: list[str] = []
    passthrough: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = rename(clean_name(key))
        if name is None:
            beside.append(key)
        elif not is_state(name):
            parameters[name] = value
        elif name.rpartition(".")[0] in with_own_state:
            passthrough[key] = value
        else:
            te_states.append((key, name, read_state_of(key, value)))
    states, entries = _by_module(te_states, modules)
    tensor_states: dict[str, TensorState] = {}
    for owner, (key, state) in states.items():
        if is_grouped(owner, parameters):
            entries.append(Entry(key, "ignored", "GroupedLinear's states are not read", state.writer))
            continue
        placed, outcome, reason = _place(owner, key, state, modules, fp8_roles)
        tensor_states |= placed
        entries.append(Entry(key, outcome, reason, state.writer))
    missing = [name for name in fp8_roles if not tensor_states.keys() & _slots_of(name, fp8_roles[name], modules)]
    reported = {owner for owner, (_, state) in states.items() if state.forward is None}
    entries += [Entry(name, "defaulted", "not in the file") for name in missing if name not in reported]
    renamed = _renamed(parameters, modules, set(model_keys))
    result = {model_keys.get(name, name): value for name, value in renamed} | passthrough
    return Remapped(result, _history_state(tensor_states), LoadReport(tuple(entries)), tuple(beside))


def states_by_name(state_dict: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, Any] | None, int]:
    """Convert a checkpoint without a model, with the checkpoint's own names.

    Returns:
        All entries except Transformer Engine's states; these states in the format of ``AmaxHistory.state_dict``, or
        None; and the number of modules with a state.

    Raises:
        CheckpointError: If a state is damaged. The message has its key.
    """
    te_states = dict(te_states_in(state_dict))
    parameters = {key: value for key, value in state_dict.items() if key not in te_states}
    states, _ = _by_module([(key, clean_name(key), state) for key, state in te_states.items()], {})
    read = {owner: state for owner, (_, state) in states.items() if not is_grouped(owner, parameters)}
    tensor_states: dict[str, TensorState] = {}
    for owner, state in read.items():
        tensor_states |= state.tensor_states(slots_of_state(owner, state.num_gemms))
    return parameters, _history_state(tensor_states), len(read)


# --- Parameters -------------------------------------------------------------------------------------------------------


def _renamed(
    parameters: Mapping[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> Iterator[tuple[str, Any]]:
    """The parameters by the model's keys, split or joined as in the model. Unknown parameters are not changed."""
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in parameters.items():
        owner, _, last = name.rpartition(".")
        by_owner.setdefault(owner, {})[last] = value
    for owner, params in by_owner.items():
        prefix = prefix_of(owner)
        te_params = {last: value for last, value in params.items() if f"{prefix}{last}" not in model_keys}
        known = te_params and owner in modules and all(map(_PARAMETER.fullmatch, te_params))
        translated = _translate(owner, te_params, modules, model_keys) if known else None
        unchanged = [last for last in params if translated is None or last not in te_params]
        yield from ((f"{prefix}{last}", params[last]) for last in unchanged)
        yield from (translated or {}).items()


def _translate(
    owner: str, te_params: dict[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> dict[str, Any] | None:
    """A module's parameters by the model's keys; None if the model has no place for them."""
    prefix = prefix_of(owner)
    parent, _, projection = owner.rpartition(".")
    if isinstance(attention := modules.get(parent), MultiheadAttention):  # it has the order of rows
        own_params = attention.projection_parameters(projection, te_params)
        return {f"{prefix}{last}": value for last, value in own_params.items()}
    names = {last: _stem_and_leaf(last) for last in te_params}
    stems = list(dict.fromkeys(stem for stem, _ in names.values()))
    of_norm, of_gemms = [s for s in stems if s == _NORM], [s for s in stems if s != _NORM]
    module = modules[owner]
    if isinstance(module, (nn.Linear, LinearLayer)) and not of_norm:
        return _split_or_join(prefix, te_params, stems, module)
    # One module of Transformer Engine may be several modules of the model: a norm and linear layers, in this order.
    norms, linears = _norms(owner, modules), _linears(owner, modules)
    if len(of_norm) not in (0, len(norms)) or len(of_gemms) not in (0, len(linears)):
        return None
    targets = dict(zip([*of_norm, *of_gemms], [*norms[: len(of_norm)], *linears]))
    translated = {f"{targets[stem]}.{leaf}": te_params[last] for last, (stem, leaf) in names.items()}
    return translated if translated.keys() <= model_keys else None


def _stem_and_leaf(last: str) -> tuple[str, str]:
    """``("fc1", "weight")`` for ``fc1_weight``, ``("", "weight")`` for ``weight``."""
    stem, _, leaf = last.rpartition("_")
    return stem, leaf


def _split_or_join(
    prefix: str, te_params: dict[str, Any], stems: list[str], module: nn.Linear | LinearLayer
) -> dict[str, Any] | None:
    """Join ``query_weight``, ``key_weight``, ... to ``weight``, or split ``weight``, in this order of rows."""
    names = {leaf: [f"{stem}_{leaf}" for stem in stems] for leaf in ("weight", "bias")}
    if "weight" in module._parameters and all(stems):
        joined = {
            f"{prefix}{leaf}": torch.cat([te_params[name] for name in names[leaf]])
            for leaf in names
            if all(isinstance(te_params.get(name), Tensor) for name in names[leaf])
        }
        complete = len(joined) * len(stems) == len(te_params)
        return joined if complete and all(len(value) == module.out_features for value in joined.values()) else None
    split: dict[str, Any] = {}
    for leaf, value in te_params.items():
        own_names = getattr(module, f"{leaf}_names", ())
        model_params = [(name, p) for name in own_names if (p := module._parameters[name]) is not None]
        sizes = [parameter.shape[0] for _, parameter in model_params]
        if not model_params or not isinstance(value, Tensor) or value.shape[0] != sum(sizes):
            return None
        split |= {f"{prefix}{name}": part for (name, _), part in zip(model_params, value.split(sizes))}
    return split


def _linears(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the linear layers that represent a module: the module itself, or the layers inside it."""
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    return [name for name in linears if name == owner or name.startswith(prefix_of(owner))]


def _norms(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    norms = [name for name, module in modules.items() if type(module).__name__.endswith("Norm")]
    return [name for name in norms if name.startswith(prefix_of(owner))]


# --- States -----------------------------------------------------------------------------------------------------------


def _by_module(
    te_states: Iterable[tuple[str, str, TEState]], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, tuple[str, TEState]], list[Entry]]:
    """The states of ``(key, name, state)`` triples by their modules. States in the older layout are left out."""
    states: dict[str, tuple[str, TEState]] = {}
    entries: list[Entry] = []
    for key, name, state in te_states:
        target = module_of_state(name, modules)
        newer, older = (key, state), states.get(target)
        if older and target != name.rpartition(".")[0]:  # the file has both layouts
            newer, older = older, newer
        if older:
            entries.append(Entry(older[0], "ignored", f"{newer[0]} is newer", older[1].writer))
        states[target] = newer
    return states, entries


def _place(
    owner: str, key: str, state: TEState, modules: Mapping[str, nn.Module], fp8_roles: FP8Roles
) -> tuple[dict[str, TensorState], Outcome, str]:
    """The states of tensors by slot, given the state of a module, and the entry for the report."""
    if state.forward is None:
        why = f"{state.recipe_name} keeps no state" if state.recipe_name else "the module had no FP8 state"
        return {}, "defaulted", why
    note = f"; {state.dropped} infinite or NaN amaxes dropped" if state.dropped else ""
    roles = fp8_roles.get(owner)
    if roles and (roles == ATTENTION_ROLES or state.num_gemms == len(_gemms_of(owner, modules))):
        try:
            placed = state.tensor_states(_slots_of(owner, roles, modules))
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from None
        moved = clean_name(key) != state_key(owner)
        return placed, "remapped" if moved else "loaded", f"to {owner}{note}"
    linears = _linears(owner, modules)
    if not linears or len(linears) != state.num_gemms:
        where = f"{type(modules[owner]).__name__} has no slots" if owner in modules else "the model has no such module"
        return {}, "ignored", f"{where} for its {state.num_gemms} GEMMs"
    in_fp8 = [(gemm, name) for gemm, name in enumerate(linears) if fp8_roles.get(name) == LINEAR_ROLES]
    placed = state.tensor_states(slots_of_gemms(in_fp8, LINEAR_ROLES))
    if not placed:
        return {}, "ignored", f"{', '.join(linears)} runs in BF16"
    return placed, "remapped", f"to {', '.join(name for _, name in in_fp8)}{note}"


def _gemms_of(owner: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The names of the GEMMs of a module with slots, now or after the conversion; ``""`` for a linear layer."""
    module = modules.get(owner)
    return module.gemms if isinstance(module, FP8Module) else ("",)


def _slots_of(owner: str, roles: tuple[Role, ...], modules: Mapping[str, nn.Module]) -> dict[str, tuple[Role, int]]:
    """The names of the slots of a module, each with its role and the index of its GEMM."""
    names = [gemm_name(owner, gemm) for gemm in _gemms_of(owner, modules)]
    return slots_of_gemms(enumerate(names), roles)


def _history_state(named_states: Mapping[str, TensorState]) -> dict[str, Any] | None:
    """The states as one amax history. Shorter histories are padded at their old end."""
    if not named_states:
        return None
    states = named_states.values()
    length = max(len(state.amax_history) for state in states)
    on_cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    scale = torch.tensor([state.scale for state in states], **on_cpu)
    amax_history = torch.zeros(length, len(states), **on_cpu)
    for index, state in enumerate(states):
        amax_history[length - len(state.amax_history) :, index] = state.amax_history
    values = {"scale": scale, "amax_history": amax_history}
    return {"version": STATE_VERSION, "names": list(named_states), **values, "updates": 0}
