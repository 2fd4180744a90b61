"""State dicts of models that are cut over tensor-parallel ranks: each rank's own, and those of the whole model.

A module's ``state_dict`` has this rank's pieces, as Transformer Engine's, whose users save a file for each rank. A
state dict of the whole model, of one process, loads into any number of ranks: each takes its pieces of it.
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
    """The state dict of the whole model, which loads into any number of ranks.

    Every rank of the group has to call it, and gets all of it.

    Args:
        model: whose modules have a ``tp_group``.
        state_dict: this rank's, by the names of the model's parameters: its gradients, or an optimizer's averages of
            them, for example; None is ``model.state_dict()``.

    Raises:
        TypeError: ``model`` is no module, or ``state_dict`` no mapping.
        RuntimeError: a module has no group yet.
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
    """The state dict of the whole model, of those of all ranks in their order: of a file of each, for example.

    What is not cut is the first one's.

    Args:
        model: constructed with as many ranks, ``tp_size=len(state_dicts)``; it needs no group.

    Raises:
        TypeError: ``model`` is no module, or one of ``state_dicts`` no mapping.
        ValueError: another number of ranks.
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
    """What ``rank`` has of a whole model's state dict. ``model.load_state_dict(whole)`` takes it by itself.

    Args:
        model: constructed with the number of ranks; it needs no group.

    Raises:
        TypeError: ``model`` is no module, or ``state_dict`` no mapping.
        ValueError: a parameter does not divide.
    """
    require_module("split_tensor_parallel", model)
    require_mapping("split_tensor_parallel", state_dict)
    own = dict(state_dict)
    for key, (cut, tensor_parallel) in _cuts(model).items():
        if isinstance(whole := own.get(key), Tensor):
            own[key] = cut.piece(whole, rank, tensor_parallel.size)
    return own


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes in a whole model's state dict of the parameters of which ``model`` has pieces."""
    own = model.state_dict()
    return {
        key: cut.whole_shape(own[key].shape, tensor_parallel.size)
        for key, (cut, tensor_parallel) in _cuts(model).items()
        if key in own
    }


def _cuts(model: nn.Module) -> dict[str, tuple[Cut, TensorParallel]]:
    """The parameters of ``model`` that are pieces, by their keys."""
    return {
        f"{prefix_of(name)}{parameter}": (cut, module.tensor_parallel)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, GroupTaker)
        for parameter, cut in module.cuts.items()
    }
