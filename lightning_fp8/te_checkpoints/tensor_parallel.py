"""Converts between sharded and full state dicts of tensor-parallel models.

As in Transformer Engine, the ``state_dict`` of a module has this rank's shards, and users save one file per rank. A
full state dict, as a single process saves it, loads with any number of ranks: each rank loads its shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_fp8.arguments import require_mapping, require_module
from lightning_fp8.modules.tensor_parallel import GroupTaker, TensorParallel
from lightning_fp8.parallel.collectives import start_gather
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.te.keys import prefix_of


def gather_tensor_parallel(model: nn.Module, state_dict: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Gather the full state dict of a model, which loads with any number of ranks.

    All ranks of the group must call it, and all get the full state dict.

    Args:
        model: a model whose modules have a ``tp_group``.
        state_dict: this rank's shards by the names of the model's parameters. They may also be gradients or an
            optimizer's state. None is ``model.state_dict()``.

    Raises:
        TypeError: If ``model`` is not a module, or ``state_dict`` not a mapping.
        RuntimeError: If a module has no group.
    """
    require_module("gather_tensor_parallel", model)
    whole = model.state_dict() if state_dict is None else dict(state_dict)
    require_mapping("gather_tensor_parallel", whole)
    for key, (cut, tensor_parallel) in _cuts(model).items():
        if isinstance(piece := whole.get(key), Tensor):
            group = tensor_parallel.over("column").group
            pieces = start_gather(piece.detach()[None], group, 0)()
            whole[key] = cut.join(pieces.unbind(0))
    return dict(whole)


def join_tensor_parallel(model: nn.Module, state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the state dicts of all ranks, in the order of ranks, to a full state dict. They may come from files.

    Entries that are not sharded are taken from the first one.

    Args:
        model: a model constructed with ``tp_size=len(state_dicts)``. It does not need a group.

    Raises:
        TypeError: If ``model`` is not a module, or one of ``state_dicts`` not a mapping.
        ValueError: If the number of state dicts is not ``tp_size``.
    """
    require_module("join_tensor_parallel", model)
    for state_dict in state_dicts:
        require_mapping("join_tensor_parallel", state_dict)
    whole = dict(state_dicts[0])
    for key, (cut, tensor_parallel) in _cuts(model).items():
        if len(state_dicts) != tensor_parallel.size:
            raise ValueError(
                f"{len(state_dicts)} state dicts for a model of tp_size={tensor_parallel.size}; give one of each rank"
            )
        if isinstance(whole.get(key), Tensor):
            whole[key] = cut.join([state_dict[key] for state_dict in state_dicts])
    return whole


def split_tensor_parallel(model: nn.Module, state_dict: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The shards of ``rank``, given a full state dict. ``model.load_state_dict(full)`` does not need this function.

    Args:
        model: a model constructed with the number of ranks. It does not need a group.

    Raises:
        TypeError: If ``model`` is not a module, or ``state_dict`` not a mapping.
        ValueError: If the size of a parameter is not divisible by the number of ranks.
    """
    require_module("split_tensor_parallel", model)
    require_mapping("split_tensor_parallel", state_dict)
    own = dict(state_dict)
    for key, (cut, tensor_parallel) in _cuts(model).items():
        if isinstance(whole := own.get(key), Tensor):
            own[key] = cut.piece(whole, rank, tensor_parallel.size)
    return own


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The full shapes of the sharded parameters of ``model``."""
    own = model.state_dict()
    return {
        key: cut.whole_shape(own[key].shape, tensor_parallel.size)
        for key, (cut, tensor_parallel) in _cuts(model).items()
        if key in own
    }


def _cuts(model: nn.Module) -> dict[str, tuple[Cut, TensorParallel]]:
    """The sharded parameters of ``model``, by their keys."""
    return {
        f"{prefix_of(name)}{parameter}": (cut, module.tensor_parallel)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, GroupTaker)
        for parameter, cut in module.cuts.items()
    }
