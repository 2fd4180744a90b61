"""Transformer Engine's parameter names (``layer_norm_weight``, ``fc1_weight``, ``query_weight``, ...) to a model's.

Pure functions of names; weights are split and joined along their rows, nothing is loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.modules import MultiheadAttention
from lightning_fp8.modules.linear_layer import LinearLayer


def prefix_of(owner: str) -> str:
    """The prefix of the names of ``owner``'s parameters: ``layers.0.``."""
    return f"{owner}." if owner else ""


def linears_of(owner: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the linear layers that stand for a module: itself, or those inside it."""
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
    for owner, params in by_owner.items():
        te_params = {last: value for last, value in params.items() if f"{prefix_of(owner)}{last}" not in model_keys}
        for last in params.keys() - te_params.keys():
            yield f"{prefix_of(owner)}{last}", params[last]
        if te_params and owner in modules and all(_TE_PARAMETER.fullmatch(last) for last in te_params):
            yield from _translate(owner, te_params, modules, model_keys).items()
        else:
            yield from ((f"{prefix_of(owner)}{last}", value) for last, value in te_params.items())


def _translate(
    owner: str, te_params: dict[str, Any], modules: Mapping[str, nn.Module], model_keys: set[str]
) -> dict[str, Any]:
    prefix = prefix_of(owner)
    parent, _, projection = owner.rpartition(".")
    if isinstance(attention := modules.get(parent), MultiheadAttention):  # it knows which row is of which head
        return {f"{prefix}{last}": value for last, value in attention.renamed(projection, te_params).items()}
    unchanged = {f"{prefix}{last}": value for last, value in te_params.items()}
    parts: dict[str, list[str]] = {"norm": [], "gemm": []}
    for last in te_params:
        stem = last.removesuffix("weight").removesuffix("bias").rstrip("_")
        found = parts["norm" if stem == "layer_norm" else "gemm"]
        if stem not in found:
            found.append(stem)
    module = modules[owner]
    if isinstance(module, (nn.Linear, LinearLayer)) and not parts["norm"]:
        return _split_or_join(prefix, te_params, parts["gemm"], module) or unchanged
    # One module of Transformer Engine, several of the model: its norm and its linear layers, in their order.
    targets = {"norm": _norms(owner, modules), "gemm": linears_of(owner, modules)}
    if any(parts[kind] and len(parts[kind]) != len(targets[kind]) for kind in parts):
        return unchanged
    translated = {}
    for kind, stems in parts.items():
        for stem, target in zip(stems, targets[kind]):
            for leaf in ("weight", "bias"):
                if (last := f"{stem}_{leaf}" if stem else leaf) in te_params:
                    translated[f"{target}.{leaf}"] = te_params[last]
    return translated if translated.keys() <= model_keys else unchanged


def _split_or_join(
    prefix: str, te_params: dict[str, Any], stems: list[str], module: nn.Linear | LinearLayer
) -> dict[str, Any] | None:
    """``query_weight``, ``key_weight``, ... to ``weight``, or ``weight`` to them; their rows follow each other."""
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
