"""Translation of a Transformer Engine checkpoint's keys to a model's names: parameters, and rows of an amax history.

Pure functions of a state dict and a model's shape. Nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_fp8.checkpoint.report import Entry, LoadReport, Outcome
from lightning_fp8.checkpoint.te_parameters import linears_of, prefix_of, rename_parameters
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.names import clean_name, gemm_name, row_name
from lightning_fp8.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role
from lightning_fp8.te.te_state import EXTRA_STATE, FUSED_ATTENTION, Row, TEState, read_te_state
from lightning_fp8.te.torch_file import TensorRecord
from lightning_fp8.te.unpickle import CheckpointError

FP8Roles = Mapping[str, tuple[Role, ...]]
"""The modules of a model that keep history rows, by name, and their roles."""


@dataclass(frozen=True)
class Remapped:
    """A checkpoint in a model's own terms.

    Attributes:
        state_dict: parameters under the model's keys, without Transformer Engine's states.
        fp8_state: as ``AmaxHistory.state_dict`` gives it; ``None`` where the file has no state for the model.
        report: what became of each state.
    """

    state_dict: dict[str, Any]
    fp8_state: dict[str, Any] | None
    report: LoadReport


def has_te_state(keys: Iterable[str]) -> bool:
    """Whether a ``state_dict`` with these keys holds FP8 state of Transformer Engine."""
    return any(key.rpartition(".")[2] == EXTRA_STATE for key in keys)


def is_grouped(owner: str, keys: Container[str]) -> bool:
    """Whether ``owner`` is a GroupedLinear, which orders its columns by role: read as GEMMs they would be wrong."""
    return f"{prefix_of(owner)}weight0" in keys


def remap(state_dict: Mapping[str, Any], model: nn.Module, fp8_roles: FP8Roles) -> Remapped:
    """Translate a Transformer Engine checkpoint for ``model``.

    Args:
        state_dict: parameters and ``_extra_state`` values by name. Prefixes of Lightning, DDP, FSDP and torch.compile
            may differ from the model's.
        model: decides the names; its values are not read.
        fp8_roles: which of its modules keep history rows, and for what.

    Raises:
        CheckpointError: a state is damaged or foreign; the message names its key.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    model_keys = {clean_name(key): key for key in model.state_dict()}
    rename = _alignment([clean_name(key) for key in state_dict], set(model_keys), set(modules))

    parameters: dict[str, Any] = {}
    te_values: list[tuple[str, str, Any]] = []
    passthrough: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = rename(clean_name(key))
        if name.rpartition(".")[2] != EXTRA_STATE:
            parameters[name] = value
        elif _keeps_its_own_extra_state(modules.get(name.rpartition(".")[0])):
            passthrough[key] = value
        else:
            te_values.append((key, name, value))
    states, entries = _read_states(te_values, modules)

    renamed = dict(rename_parameters(parameters, modules, set(model_keys)))
    state_rows: dict[str, Row] = {}
    for owner, (key, state) in states.items():
        if is_grouped(owner, parameters):
            entries.append(Entry(key, "ignored", "GroupedLinear's states are not read", state.writer))
            continue
        found, outcome, reason = _place(owner, key, state, modules, fp8_roles)
        state_rows |= found
        entries.append(Entry(key, outcome, reason, state.writer))
    missing = [name for name in fp8_roles if not state_rows.keys() & _rows_of(name, fp8_roles[name], modules)]
    reported = {owner for owner, (_, state) in states.items() if state.forward is None}
    entries += [Entry(name, "defaulted", "not in the file") for name in missing if name not in reported]
    result = {model_keys.get(name, name): value for name, value in renamed.items()} | passthrough
    return Remapped(result, _history_state(state_rows), LoadReport(tuple(entries)))


def rows_by_name(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    """A checkpoint by its own names, where no model is at hand.

    Returns:
        The parameters; the states as ``AmaxHistory.state_dict`` gives them, or None; the number of states.

    Raises:
        CheckpointError: a state is damaged or foreign; the message names its key.
    """
    parameters = {key: value for key, value in state_dict.items() if key.rpartition(".")[2] != EXTRA_STATE}
    te_values = [(key, clean_name(key), value) for key, value in state_dict.items() if key not in parameters]
    states, _ = _read_states(te_values, {})
    read = {owner: state for owner, (_, state) in states.items() if not is_grouped(owner, parameters)}
    named_rows = {name: row for owner, state in read.items() for name, row in state.named_rows(owner).items()}
    return parameters, _history_state(named_rows), len(read)


def _read_states(
    te_values: Iterable[tuple[str, str, Any]], modules: Mapping[str, nn.Module]
) -> tuple[dict[str, tuple[str, TEState]], list[Entry]]:
    """The states of ``(key, name, value)`` triples by the module they belong to; an older layout's is left out."""
    states: dict[str, tuple[str, TEState]] = {}
    entries: list[Entry] = []
    for key, name, value in te_values:
        try:
            state = read_te_state(value.load() if isinstance(value, TensorRecord) else value)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from None
        owner = name.rpartition(".")[0]
        target = _attention_owner(owner, modules)
        newer, older = (key, state), states.get(target)
        if older and target != owner:  # the file holds both layouts
            newer, older = older, newer
        if older:
            entries.append(Entry(older[0], "ignored", f"{newer[0]} is newer", older[1].writer))
        states[target] = newer
    return states, entries


def _keeps_its_own_extra_state(module: nn.Module | None) -> bool:
    return module is not None and type(module).set_extra_state is not nn.Module.set_extra_state


def _attention_owner(owner: str, modules: Mapping[str, nn.Module]) -> str:
    parent, _, last = owner.rpartition(".")
    return parent if last == FUSED_ATTENTION and owner not in modules else owner


def _place(
    owner: str, key: str, state: TEState, modules: Mapping[str, nn.Module], fp8_roles: FP8Roles
) -> tuple[dict[str, Row], Outcome, str]:
    """The rows that a state becomes, and what to say of it."""
    if state.forward is None:
        return {}, "defaulted", f"{state.recipe} keeps no state" if state.recipe else "the module had no FP8 state"
    note = f"; {state.dropped} infinite or NaN amaxes dropped" if state.dropped else ""
    roles = fp8_roles.get(owner)
    if roles and (roles == ATTENTION_ROLES or state.num_gemms == len(_gemms_of(owner, modules))):
        try:
            found = {row: state.row(role, gemm) for row, (role, gemm) in _rows_of(owner, roles, modules).items()}
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from None
        moved = clean_name(key) != f"{prefix_of(owner)}{EXTRA_STATE}"
        return found, "remapped" if moved else "loaded", f"to {owner}{note}"
    linears = linears_of(owner, modules)
    if not linears or len(linears) != state.num_gemms:
        where = f"{type(modules[owner]).__name__} has no rows" if owner in modules else "the model has no such module"
        return {}, "ignored", f"{where} for its {state.num_gemms} GEMMs"
    in_fp8 = [(gemm, name) for gemm, name in enumerate(linears) if fp8_roles.get(name) == LINEAR_ROLES]
    found = {row_name(name, role): state.row(role, gemm) for gemm, name in in_fp8 for role in LINEAR_ROLES}
    if not found:
        return {}, "ignored", f"{', '.join(linears)} runs in BF16"
    return found, "remapped", f"to {', '.join(name for _, name in in_fp8)}{note}"


def _gemms_of(owner: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The names of the linear layers in a module that keeps rows, or will: one without a name, if it is one itself."""
    module = modules.get(owner)
    return module.gemms if isinstance(module, FP8Module) else ("",)


def _rows_of(owner: str, roles: tuple[Role, ...], modules: Mapping[str, nn.Module]) -> dict[str, tuple[Role, int]]:
    """Names of the rows of a module, with the role and the index of the GEMM that each is for."""
    return {
        row_name(gemm_name(owner, gemm), role): (role, index)
        for index, gemm in enumerate(_gemms_of(owner, modules))
        for role in roles
    }


def _alignment(file_names: list[str], model_keys: set[str], modules: set[str]) -> Any:
    """A function from a name of the file to one of the model: it strips a leading path and prepends another.

    The pair is the one that lets most names fit; where none does better, names stay as they are.
    """
    strips = ["", *_leading_paths(file_names)]
    prepends = ["", *sorted({f"{name}." for name in modules if name.count(".") <= 1 and name})]

    def fits(strip: str, prepend: str) -> int:
        names = [prepend + name.removeprefix(strip) for name in file_names]
        return sum(name in model_keys or name.rpartition(".")[0] in named for name in names)

    named = modules - {""}
    if fits("", "") == len(file_names):
        return lambda name: name
    strip, prepend = max(
        ((strip, prepend) for strip in strips for prepend in prepends), key=lambda pair: (fits(*pair), not any(pair))
    )
    return lambda name: prepend + name.removeprefix(strip)


def _leading_paths(names: list[str]) -> list[str]:
    """The dotted prefixes that all names share, shortest first."""
    shared: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names)):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return [".".join(shared[: count + 1]) + "." for count in range(len(shared))]


def _history_state(named_rows: Mapping[str, Row]) -> dict[str, Any] | None:
    """The rows as one amax history; shorter windows are padded at their old end."""
    if not named_rows:
        return None
    length = max(len(row.amax_history) for row in named_rows.values())
    amax_history = torch.zeros(length, len(named_rows), dtype=torch.float32, device="cpu")
    for index, row in enumerate(named_rows.values()):
        amax_history[length - len(row.amax_history) :, index] = row.amax_history
    return {
        "names": list(named_rows),
        "scale": torch.tensor([row.scale for row in named_rows.values()], dtype=torch.float32, device="cpu"),
        "amax_history": amax_history,
        "updates": 0,
    }
