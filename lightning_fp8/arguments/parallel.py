"""Transformer Engine's arguments of tensor, sequence and context parallelism: taken at their defaults, else refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from lightning_fp8.arguments import refuse_what_is_not_here


class ParallelArguments(TypedDict, total=False):
    """Transformer Engine's arguments of tensor and sequence parallelism, and of what overlaps with it.

    A layer takes them at their defaults. ``get_rng_state_tracker`` gives the tracker whose state is forked, under
    ``rng_tracker_name``, while weights are initialized; ``ub_name`` and ``name`` are labels without effect.
    """

    sequence_parallel: bool
    tp_group: Any
    tp_size: int
    parallel_mode: str | None
    set_parallel_mode: bool
    get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None
    return_layernorm_output_gathered: bool
    ub_bulk_wgrad: bool
    ub_bulk_dgrad: bool
    ub_overlap_ag: bool
    ub_overlap_rs: bool
    ub_overlap_rs_dgrad: bool
    ub_name: str | None
    delay_wgrad_compute: bool
    symmetric_ar_type: str | None
    save_original_input: bool
    name: str | None


NO_TENSOR_PARALLELISM = "layers are not tensor-parallel; leave it out, and shard the model with fully_shard (FSDP2)"
NO_CONTEXT_PARALLELISM = "context parallelism is not here; split the batch"
_NO_OVERLAP = "no communication to overlap with: layers are not tensor-parallel; leave it out"

_INSTEAD_OF_PARALLEL = {
    **dict.fromkeys(
        (
            "sequence_parallel",
            "tp_group",
            "tp_size",
            "parallel_mode",
            "set_parallel_mode",
            "symmetric_ar_type",
            "return_layernorm_output_gathered",
        ),
        NO_TENSOR_PARALLELISM,
    ),
    **dict.fromkeys([name for name in ParallelArguments.__annotations__ if name.startswith("ub_")], _NO_OVERLAP),
    "delay_wgrad_compute": "backward computes the weight's gradient at once; leave it out",
    "save_original_input": "backward keeps the FP8 copy; leave it out",
}
_REMOVED = {
    "skip_weight_param_allocation": "a layer has its own weight",
    "attention_softmax_in_fp32": "softmax is computed in float32",
    "apply_query_key_layer_scaling": "scores are scaled once, in float32",
}
_OF_NO_EFFECT = ("get_rng_state_tracker", "rng_tracker_name", "ub_name", "name")


def refuse_parallel(layer_name: str, arguments: ParallelArguments) -> None:
    """Check that the parallel arguments of the layer called ``layer_name`` ask for nothing that is not here.

    Raises:
        TypeError: an argument that Transformer Engine does not have, or has removed.
        NotImplementedError: tensor or sequence parallelism, or what comes with it, is asked for.
    """
    for name in [name for name in arguments if name in _REMOVED]:
        raise TypeError(f"{layer_name}: {name} was removed from Transformer Engine: {_REMOVED[name]}; leave it out")
    if unknown := [name for name in arguments if name not in ParallelArguments.__annotations__]:
        raise TypeError(f"{layer_name} got an unexpected keyword argument {unknown[0]!r}")
    asked = {name: value for name, value in arguments.items() if name not in _OF_NO_EFFECT}
    refuse_what_is_not_here(asked, _INSTEAD_OF_PARALLEL)


class SetsNoGroups:
    """The methods of Transformer Engine's modules that give them ranks to compute with, which is refused."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take None.

        Raises:
            NotImplementedError: any group.
        """
        refuse_what_is_not_here({"tp_group": tp_group}, _INSTEAD_OF_PARALLEL)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Take None.

        Raises:
            NotImplementedError: any group.
        """
        refuse_what_is_not_here({"cp_group": cp_group}, {"cp_group": NO_CONTEXT_PARALLELISM})


def refuse_sharded(layer_name: str, **tensors: Tensor | None) -> None:
    """Check that a layer computes with local tensors, as it does under FSDP2, which gathers its weights first.

    Raises:
        TypeError: one of ``tensors`` is a DTensor, as tensor parallelism makes them.
    """
    if torch.compiler.is_compiling():
        return
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, tensor in tensors.items():
        if isinstance(tensor, sharded):
            raise TypeError(
                f"{layer_name}'s {name} is a DTensor ({', '.join(map(str, tensor.placements))}): tensor parallelism of "
                "FP8 layers is not supported. Leave this layer in high precision, FP8Precision(skip=[...]) or "
                "convert_module(skip=[...]), or shard the model with fully_shard (FSDP2)"
            )
