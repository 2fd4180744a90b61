"""Checks that ranks agree on what determines their collectives.

If one rank has another recipe, plan or sharding than the others, their collectives do not match: some backends hang,
others mix up bytes of different tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.names import clean_name


def require_same(what: str, here: str, group: dist.ProcessGroup) -> None:
    """Compare ``here`` over the ranks of ``group``; collective.

    Raises:
        RuntimeError: If values differ, on all ranks. The message contains ``what``, and each value with its ranks.
    """
    found = of_all_ranks(here, group)
    if len(set(found)) > 1:
        raise RuntimeError(f"{what}, but have {_said(found, group)}")


def require_same_plans(model: nn.Module, in_fp8: Collection[str]) -> None:
    """Compare over ranks how a model is sharded, and which of its weights run in FP8.

    Only DTensors are compared. With DTensors, this is a collective of all ranks of their meshes; without, it does
    nothing.

    Args:
        model: the sharded model.
        in_fp8: names of the weights that run in FP8, without parts added by wrappers.

    Raises:
        RuntimeError: If ranks of a group differ, on all its ranks. The message contains the first difference, with
            ranks.
    """
    if not dist.is_initialized():
        return
    groups: dict[str, tuple[dist.ProcessGroup, list[str]]] = {}
    sharded: dict[str, str] = {}
    for prefix, module in model.named_modules():
        within = f"{clean_name(prefix)}." if prefix else ""
        if hasattr(module, "_get_fsdp_state"):
            sharded[within] = _policies(module)
        shards = max((each for each in sharded if within.startswith(each)), key=len, default=None)
        for own, parameter in module.named_parameters(recurse=False):
            if not is_dtensor(parameter):
                continue
            said = f"{within}{own} {tuple(parameter.shape)}, {parameter.dtype}, {parameter.placements}"
            said += "" if parameter.requires_grad else ", frozen"
            said += "" if shards is None else f", gathered with {shards[:-1] or 'the model'} ({sharded[shards]})"
            said += ", in FP8" if f"{within}{own}" in in_fp8 else ", in high precision"
            for group in _groups(parameter):
                groups.setdefault(group.group_name, (group, []))[1].append(said)
    for group, lines in groups.values():
        digests = of_all_ranks(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
        if len(set(digests)) > 1:
            _raise_difference(of_all_ranks(lines, group), group)


def _policies(module: Any) -> str:
    """How FSDP2 gathers the parameters of a sharded module, as far as this torch version exposes it."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    kept = [not getattr(each, "_reshard_after_forward", True) for each in groups if each is not None]
    return f"kept={any(kept)}, {getattr(state, '_mp_policy', '')}"


def _groups(parameter: Any) -> list[dist.ProcessGroup]:
    """Process groups of several ranks that share it; empty if this rank is not in its mesh."""
    mesh = parameter.device_mesh
    if mesh.get_coordinate() is None:
        return []
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def _raise_difference(of_ranks: Sequence[Sequence[str]], group: dist.ProcessGroup) -> None:
    first = next(
        index
        for index in range(max(map(len, of_ranks)))
        if len({tuple(lines[index : index + 1]) for lines in of_ranks}) > 1
    )
    found = [lines[first] if first < len(lines) else "no more parameters" for lines in of_ranks]
    raise RuntimeError(
        "ranks must cut, shard and convert a model in the same way, but the first parameter that differs is "
        f"{_said(found, group)}"
    )


def of_all_ranks(here: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of each rank; with torch's ``"fake"`` backend only this rank's."""
    if dist.get_backend(group) == "fake":
        return [here]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, here, group=group)
    return found


def _said(found: Sequence[str], group: dist.ProcessGroup) -> str:
    """Each distinct value of ``found``, after the ranks that have it."""
    ranks = dist.get_process_group_ranks(group)
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, found):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(having) > 1)} {', '.join(map(str, having))}: {value}" for value, having in by_value.items()
    )
