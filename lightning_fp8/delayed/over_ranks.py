"""Amaxes reduced over ranks, which then share their scales: in one collective, by position.

Ranks of which only some began a collective would wait for ever. So whether one begins does not depend on what ran on a
rank. A plugin reduces if its own recipe says so. ``fp8_autocast`` reduces if the recipe of the region that begins says
so. All ranks have the same list of histories (``collect_unreachable``); their names are compared before they are first
reduced.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_fp8.delayed.history import AmaxHistory


def reduce_amaxes(histories: Sequence[AmaxHistory], group: dist.ProcessGroup | None) -> None:
    """Replace the amaxes of ``histories`` by their maximum over ``group``, ``None`` being all ranks.

    Raises:
        RuntimeError: on all ranks, if the names of one differ from those of another.
    """
    if not histories or not are_several_ranks(group):
        return
    _compare_names(histories, group)
    amaxes = torch.cat([history.amax for history in histories])
    # A collective's maximum may drop a NaN, and ranks must agree; inf keeps the old scale just as well.
    torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for history, amax in zip(histories, amaxes.split([len(history.names) for history in histories])):
        history.amax.copy_(amax)


def are_several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group``, or torch.distributed where it is ``None``, has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


_compared: weakref.WeakKeyDictionary[AmaxHistory, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""By the first of them, the lists of histories whose names were compared: group, creation indices, numbers of slots."""


@torch.compiler.disable
def _compare_names(histories: Sequence[AmaxHistory], group: dist.ProcessGroup | None) -> None:
    """Compare the names of slots over ``group``, once for each list of histories; the host waits for a GPU."""
    compared = _compared.setdefault(histories[0], set())
    key = id(group), *((history.creation_index, len(history.names)) for history in histories)
    device = histories[0].amax.device
    if key in compared or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    names = [name for history in histories for name in history.names]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    own = torch.tensor([len(names), int.from_bytes(digest[:7], "big")], device=device)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    gathered = torch.stack(everyones).tolist()
    if any(everyone != gathered[0] for everyone in gathered):
        names_by_rank: list[list[str]] = [[] for _ in everyones]
        dist.all_gather_object(names_by_rank, names, group=group)
        raise RuntimeError(_difference(dict(zip(dist.get_process_group_ranks(group), names_by_rank))))
    compared.add(key)


def _difference(names_by_rank: dict[int, list[str]]) -> str:
    """What the error says where the names of slots are not the same on all ranks."""
    ranks_by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in names_by_rank.items():
        ranks_by_names.setdefault(tuple(names), []).append(rank)
    first, other = list(ranks_by_names)[:2]
    index = next(index for index, pair in enumerate(itertools.zip_longest(first, other)) if len(set(pair)) > 1)
    counts = "; ".join(f"{len(names)} on ranks {ranks}" for names, ranks in ranks_by_names.items())
    differing = " and ".join(
        f"{names[index]!r} on ranks {ranks_by_names[names]}"
        if index < len(names)
        else f"none on ranks {ranks_by_names[names]}"
        for names in (first, other)
    )
    return (
        f"ranks are to share the FP8 scales of unlike tensors: there are {counts}; number {index} is {differing}. Give "
        "fp8_autocast as fp8_group the ranks that hold the same layers, or take DelayedScaling(reduce_amax=False), "
        "with which each rank has its own scales"
    )
