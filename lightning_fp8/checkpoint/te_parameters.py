"""Transformer Engine's parameter names (``layer_norm_weight``, ``fc1_weight``, ``query_weight``, ...) to a model's.

Pure functions of names; weights are split and joined along their rows, nothing is loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def prefix_of(owner: str) -> str:
    """What precedes the names of ``owner``'s parameters."""
    return f"{owner}." if owner else ""


def linears_of(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The linear layers that stand for a module: itself, or those inside it."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and (name == owner or name.startswith(prefix_of(owner)))
    ]


def _norms(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    return [
        name
        for name, module in modules.items()
        if name.startswith(prefix_of(owner)) and type(module).__name__.endswith("Norm")
    ]


_TE_PARAMETER = re.compile(r"(?:(\w+)_)?(weight|bias)")


def rename_parameters(
    parameters: Mapping[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> Iterator[tuple[str, Any]]:
    """Parameters under the model's keys, split and joined where it holds them so. What fits nothing stays as it is."""
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in parameters.items():
        owner, _, last = name.rpartition(".")
        by_owner.setdefault(owner, {})[last] = value
    for owner, own in by_owner.items():
        foreign = {last: value for last, value in own.items() if f"{prefix_of(owner)}{last}" not in model_keys}
        for last in own.keys() - foreign.keys():
            yield f"{prefix_of(owner)}{last}", own[last]
        if foreign and owner in modules and all(_TE_PARAMETER.fullmatch(last) for last in foreign):
            yield from _translate(owner, foreign, modules, model_keys).items()
        else:
            yield from ((f"{prefix_of(owner)}{last}", value) for last, value in foreign.items())


def _translate(
    owner: str, foreign: dict[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> dict[str, Any]:
    prefix = prefix_of(owner)
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
    targets = {"norm": _norms(owner, modules), "gemm": linears_of(owner, modules)}
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
