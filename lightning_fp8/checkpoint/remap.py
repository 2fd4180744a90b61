"""From the keys of a Transformer Engine checkpoint to the names of a model: parameters, and rows of an amax history.

Pure functions of a state dict and a model's shape. Nothing is loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.checkpoint.report import Entry, LoadReport, Outcome
from lightning_fp8.checkpoint.te_state import EXTRA_STATE, FUSED_ATTENTION, Row, TEState, read_te_state
from lightning_fp8.checkpoint.torch_file import TensorRecord
from lightning_fp8.checkpoint.unpickle import CheckpointError
from lightning_fp8.modules.base import row_name
from lightning_fp8.scaled import ATTENTION_ROLES, LINEAR_ROLES, Role
from lightning_fp8.state import clean_name

FP8Rows = Mapping[str, tuple[Role, ...]]
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
    return any(key.rpartition(".")[2] == EXTRA_STATE for key in keys)


def is_grouped(owner: str, keys: Container[str]) -> bool:
    """Whether ``owner`` is a GroupedLinear, which orders its columns by role: read as GEMMs they would be wrong."""
    return f"{_prefix(owner)}weight0" in keys


def remap(state_dict: Mapping[str, Any], model: nn.Module, rows: FP8Rows) -> Remapped:
    """Translate a Transformer Engine checkpoint for ``model``.

    Args:
        state_dict: parameters and ``_extra_state`` values by name. Prefixes of Lightning, DDP, FSDP and torch.compile
            may differ from the model's.
        model: decides the names; its values are not read.
        rows: which of its modules keep history rows.

    Raises:
        CheckpointError: a state is damaged or foreign; the message names its key.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    model_keys = {clean_name(key): key for key in model.state_dict()}
    rename = _alignment([clean_name(key) for key in state_dict], set(model_keys), set(modules))

    parameters: dict[str, Any] = {}
    states: dict[str, tuple[str, TEState]] = {}
    kept: dict[str, Any] = {}
    entries: list[Entry] = []
    for key, value in state_dict.items():
        name = rename(clean_name(key))
        if name.rpartition(".")[2] != EXTRA_STATE:
            parameters[name] = value
            continue
        owner = name.rpartition(".")[0]
        if _keeps_its_own_extra_state(modules.get(owner)):
            kept[key] = value
            continue
        try:
            state = read_te_state(value)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from None
        target = _attention_owner(owner, modules)
        if target in states and target != owner:  # the file holds both layouts: the later one wins
            entries.append(Entry(key, "ignored", f"{states[target][0]} is newer", state.writer))
            continue
        if target in states:
            older = states[target]
            entries.append(Entry(older[0], "ignored", f"{key} is newer", older[1].writer))
        states[target] = key, state

    renamed = dict(_rename_parameters(parameters, modules, set(model_keys)))
    state_rows: dict[str, Row] = {}
    for owner, (key, state) in states.items():
        if is_grouped(owner, parameters):
            entries.append(Entry(key, "ignored", "GroupedLinear's states are not read", state.writer))
            continue
        found, outcome, reason = _place(owner, key, state, modules, rows)
        state_rows |= found
        entries.append(Entry(key, outcome, reason, state.writer))
    missing = [name for name in rows if not any(row_name(name, role) in state_rows for role in rows[name])]
    told = {owner for owner, (_, state) in states.items() if state.forward is None}
    entries += [Entry(name, "defaulted", "not in the file") for name in missing if name not in told]
    result = {model_keys.get(name, name): value for name, value in renamed.items()} | kept
    return Remapped(result, _history_state(state_rows), LoadReport(tuple(entries)))


def rows_by_name(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, int]:
    """A checkpoint by its own names, where no model is at hand.

    Returns:
        The parameters; the states as ``AmaxHistory.state_dict`` gives them, or None; the number of states.

    Raises:
        CheckpointError: a state is damaged or foreign; the message names its key.
    """
    parameters: dict[str, Any] = {}
    states: dict[str, TEState] = {}
    for key, value in state_dict.items():
        if key.rpartition(".")[2] != EXTRA_STATE:
            parameters[key] = value
            continue
        owner = clean_name(key).rpartition(".")[0]
        target = _attention_owner(owner, {})
        if target == owner or target not in states:
            try:
                states[target] = read_te_state(value.load() if isinstance(value, TensorRecord) else value)
            except CheckpointError as error:
                raise CheckpointError(f"{key}: {error}") from None
    read = {owner: state for owner, state in states.items() if not is_grouped(owner, parameters)}
    rows = {name: row for owner, state in read.items() for name, row in state.named_rows(owner).items()}
    return parameters, _history_state(rows), len(read)


def _prefix(owner: str) -> str:
    return f"{owner}." if owner else ""


def _keeps_its_own_extra_state(module: nn.Module | None) -> bool:
    return module is not None and type(module).set_extra_state is not nn.Module.set_extra_state


def _attention_owner(owner: str, modules: Mapping[str, nn.Module]) -> str:
    parent, _, last = owner.rpartition(".")
    return parent if last == FUSED_ATTENTION and owner not in modules else owner


def _place(
    owner: str, key: str, state: TEState, modules: Mapping[str, nn.Module], rows: FP8Rows
) -> tuple[dict[str, Row], Outcome, str]:
    """The rows that a state becomes, and what to say of it."""
    if state.forward is None:
        return {}, "defaulted", f"{state.recipe} keeps no state" if state.recipe else "the module had no FP8 state"
    note = f"; {state.dropped} infinite or NaN amaxes dropped" if state.dropped else ""
    roles = rows.get(owner)
    if roles == ATTENTION_ROLES or (roles and state.num_gemms == 1):
        assert roles is not None
        try:
            found = {row_name(owner, role): state.row(role) for role in roles}
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}") from None
        moved = clean_name(key) != f"{_prefix(owner)}{EXTRA_STATE}"
        return found, "remapped" if moved else "loaded", f"to {owner}{note}"
    linears = _linears(owner, modules)
    if not linears or len(linears) != state.num_gemms:
        where = f"{type(modules[owner]).__name__} has no rows" if owner in modules else "the model has no such module"
        return {}, "ignored", f"{where} for its {state.num_gemms} GEMMs"
    in_fp8 = [(gemm, name) for gemm, name in enumerate(linears) if rows.get(name) == LINEAR_ROLES]
    found = {row_name(name, role): state.row(role, gemm) for gemm, name in in_fp8 for role in LINEAR_ROLES}
    if not found:
        return {}, "ignored", f"{', '.join(linears)} runs in BF16"
    return found, "remapped", f"to {', '.join(name for _, name in in_fp8)}{note}"


def _linears(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The linear layers that stand for a module: itself, or those inside it."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and (name == owner or name.startswith(_prefix(owner)))
    ]


def _norms(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    return [
        name
        for name, module in modules.items()
        if name.startswith(_prefix(owner)) and type(module).__name__.endswith("Norm")
    ]


_TE_PARAMETER = re.compile(r"(?:(\w+)_)?(weight|bias)")


def _rename_parameters(
    parameters: Mapping[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> Iterator[tuple[str, Any]]:
    """Parameters under the model's keys, split and joined where it holds them so. What fits nothing stays as it is."""
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in parameters.items():
        owner, _, last = name.rpartition(".")
        by_owner.setdefault(owner, {})[last] = value
    for owner, own in by_owner.items():
        foreign = {last: value for last, value in own.items() if f"{_prefix(owner)}{last}" not in model_keys}
        for last in own.keys() - foreign.keys():
            yield f"{_prefix(owner)}{last}", own[last]
        if foreign and owner in modules and all(_TE_PARAMETER.fullmatch(last) for last in foreign):
            yield from _translate(owner, foreign, modules, model_keys).items()
        else:
            yield from ((f"{_prefix(owner)}{last}", value) for last, value in foreign.items())


def _translate(
    owner: str, foreign: dict[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> dict[str, Any]:
    prefix = _prefix(owner)
    unchanged = {f"{prefix}{last}": value for last, value in foreign.items()}
    parts: dict[str, list[str]] = {"norm": [], "gemm": []}
    for last in foreign:
        stem = last.removesuffix("weight").removesuffix("bias").rstrip("_")
        found = parts["norm" if stem == "layer_norm" else "gemm"]
        if stem not in found:
            found.append(stem)
    module = modules[owner]
    if isinstance(module, nn.Linear) and not parts["norm"]:
        return _split_or_join(prefix, foreign, parts["gemm"], module) or unchanged
    # One module of Transformer Engine, several of the model: its norm and its linear layers, in their order.
    targets = {"norm": _norms(owner, modules), "gemm": _linears(owner, modules)}
    if any(parts[kind] and len(parts[kind]) != len(targets[kind]) for kind in parts):
        return unchanged
    translated = {}
    for kind, stems in parts.items():
        for stem, target in zip(stems, targets[kind]):
            for leaf in ("weight", "bias"):
                if (last := f"{stem}_{leaf}" if stem else leaf) in foreign:
                    translated[f"{target}.{leaf}"] = foreign[last]
    return translated if translated.keys() <= model_keys else unchanged


def _split_or_join(prefix: str, foreign: dict[str, Any], stems: list[str], module: nn.Linear) -> dict[str, Any] | None:
    """``query_weight``, ``key_weight``, ... to ``weight``, or ``weight`` to them; their rows follow each other."""
    names = {leaf: [f"{stem}_{leaf}" for stem in stems] for leaf in ("weight", "bias")}
    if "weight" in module._parameters and all(stems):
        joined = {
            f"{prefix}{leaf}": torch.cat([foreign[name] for name in names[leaf]])
            for leaf in names
            if all(isinstance(foreign.get(name), Tensor) for name in names[leaf])
        }
        complete = len(joined) * len(stems) == len(foreign)
        return joined if complete and all(len(value) == module.out_features for value in joined.values()) else None
    split: dict[str, Any] = {}
    for leaf, value in foreign.items():
        own = [(name, p) for name, p in module._parameters.items() if name.endswith(f"_{leaf}") and p is not None]
        sizes = [parameter.shape[0] for _, parameter in own]
        if not own or not isinstance(value, Tensor) or value.shape[0] != sum(sizes):
            return None
        split |= {f"{prefix}{name}": part for (name, _), part in zip(own, value.split(sizes))}
    return split


def _alignment(file_names: list[str], model_keys: set[str], modules: set[str]) -> Any:
    """How to turn a name of the file into one of the model: a leading path dropped, another put before it.

    The pair that lets most names fit; where none does better, names stay as they are.
    """
    drops = ["", *_leading_paths(file_names)]
    adds = ["", *sorted({f"{name}." for name in modules if name.count(".") <= 1 and name})]

    def fits(drop: str, add: str) -> int:
        names = [add + name.removeprefix(drop) for name in file_names]
        return sum(name in model_keys or name.rpartition(".")[0] in named for name in names)

    named = modules - {""}
    if fits("", "") == len(file_names):
        return lambda name: name
    drop, add = max(((drop, add) for drop in drops for add in adds), key=lambda pair: (fits(*pair), not any(pair)))
    return lambda name: add + name.removeprefix(drop)


def _leading_paths(names: list[str]) -> list[str]:
    """The dotted prefixes that all names share, shortest first."""
    shared: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names)):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return [".".join(shared[: count + 1]) + "." for count in range(len(shared))]


def _history_state(rows: Mapping[str, Row]) -> dict[str, Any] | None:
    """The rows as one amax history; shorter windows are padded at their old end."""
    if not rows:
        return None
    length = max(len(row.amax_history) for row in rows.values())
    window = torch.zeros(length, len(rows))
    for index, row in enumerate(rows.values()):
        window[length - len(row.amax_history) :, index] = row.amax_history
    return {
        "names": list(rows),
        "scale": torch.tensor([row.scale for row in rows.values()], dtype=torch.float32),
        "amax_history": window,
        "updates": 0,
    }
