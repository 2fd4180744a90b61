"""Transformer Engine's tensor and sequence parallelism: layers that are sharded over the ranks of a group.

With sequence parallelism, each rank applies replicated parameters (those of norms, and biases of row-parallel layers)
to a shard of the sequence, and their gradients are summed here. Megatron sums the gradients of parameters whose
attribute ``sequence_parallel`` is True, so it is False here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.product import Product, without_gradient
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.parallel.collectives import require_shared_scales
from lightning_fp8.parallel.function import Parallel, parallel_linear
from lightning_fp8.parallel.pieces import Cut
from lightning_fp8.parallel.regions import high_precision_linear, sum_gradients
from lightning_fp8.te.arguments import ParallelArguments

Mode = Literal["column", "row"]


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that a module is sharded over.

    Copies of a module share one instance. A pickle does not hold the group: set it again by
    :meth:`GroupTaker.set_tensor_parallel_group`.

    Attributes:
        size: the number of ranks; 1 if the module is not sharded.
        group: the process group; None until it is set.
        sequence: True if activations outside column- and row-parallel layers are sharded along their first dimension.
    """

    size: int = 1
    group: dist.ProcessGroup | None = None
    sequence: bool = False

    @classmethod
    def asked(cls, parallel: ParallelArguments) -> TensorParallel:
        """Read the parallel arguments of a module.

        Raises:
            ValueError: If ``tp_size`` differs from the size of the group.
        """
        size, group = parallel.get("tp_size", 1), parallel.get("tp_group")
        if group is not None:
            ranks = dist.get_world_size(group)
            if size not in (1, ranks):
                raise ValueError(f"tp_size={size}, but tp_group has {ranks} ranks; leave tp_size out")
            size = ranks
        return cls(size, group, size > 1 and parallel.get("sequence_parallel", False))

    @classmethod
    def of_several_layers(cls, parallel: ParallelArguments) -> TensorParallel:
        """:meth:`asked` for a module of several layers, which ``set_parallel_mode`` shards.

        Raises:
            ValueError: If there is sequence parallelism without ``set_parallel_mode``.
        """
        asked = cls.asked(parallel)
        if parallel.get("set_parallel_mode", False):
            return asked
        if asked.sequence:
            raise ValueError(
                f"sequence_parallel=True with tp_size={asked.size} needs set_parallel_mode=True, which shards "
                "the linear layers over the ranks"
            )
        return ALONE

    def over(self, mode: Mode) -> Parallel:
        """The parallel arguments of a linear layer with this ``mode``.

        Raises:
            RuntimeError: If the group is not set.
        """
        if self.group is None:
            raise RuntimeError(
                f"a layer of tp_size={self.size} has no process group: call set_tensor_parallel_group(tp_group) of the "
                "layer, or of the module around it, or pass tp_group to the constructor"
            )
        return Parallel(mode, self.group, 0 if self.sequence else None)

    @property
    def rank(self) -> int:
        """The rank of this process in the group; 0 if the group is not set."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def part_of(self, name: str, value: int) -> int:
        """``value / size``, this rank's share.

        Raises:
            ValueError: If ``value`` is not divisible by :attr:`size`.
        """
        if value % self.size:
            raise ValueError(f"{name}={value} does not divide into tp_size={self.size} equal parts; pass a multiple")
        return value // self.size

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "group": None, "sequence": self.sequence}


ALONE = TensorParallel()


class GroupTaker(nn.Module):
    """A module with Transformer Engine's ``set_tensor_parallel_group``, which also sets the group of its children."""

    tensor_parallel: TensorParallel = ALONE
    cuts: Mapping[str, Cut] = MappingProxyType({})
    """For each sharded parameter, how it is cut into shards."""

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Set the group of ranks that the module is sharded over. It has no effect on a module that is not sharded.

        Raises:
            TypeError: If ``tp_group`` is not a process group.
            ValueError: If its number of ranks is not ``tp_size``.
        """
        if not (tp_group is None or isinstance(tp_group, dist.ProcessGroup)):
            raise TypeError(
                f"tp_group={tp_group!r} must be a process group of torch.distributed; for a mesh pass mesh.get_group()"
            )
        size = self.tensor_parallel.size
        if size > 1 and tp_group is not None and (ranks := dist.get_world_size(tp_group)) != size:
            raise ValueError(
                f"tp_group has {ranks} ranks, but the module has tp_size={size}; pass a group of that size"
            )
        self.tensor_parallel = replace(self.tensor_parallel, group=tp_group)
        for child in self.children():
            if isinstance(child, GroupTaker):
                child.set_tensor_parallel_group(tp_group)


class CutLayer(GroupTaker, LinearLayer):
    """One or several linear layers whose parameters may be sharded.

    Attributes:
        parallel_mode: ``"column"``, ``"row"``, or None for a layer that is not sharded.
    """

    parallel_mode: Mode | None = None

    def cut(self, tensor_parallel: TensorParallel, cuts: Mapping[str, Cut]) -> None:
        """Replace each full parameter named in ``cuts`` by this rank's shard.

        Raises:
            ValueError: If a size is not divisible by the number of ranks.
        """
        self.tensor_parallel = tensor_parallel
        self.cuts = {name: cut for name, cut in cuts.items() if self._parameters[name] is not None}
        for name, cut in self.cuts.items():
            whole: Any = self._parameters[name]
            try:
                piece = cut.piece(whole.detach(), tensor_parallel.rank, tensor_parallel.size)
            except ValueError as error:
                what = "columns" if cut.dim else "rows"
                raise ValueError(
                    f"{name} {list(whole.shape)}: its {what} are sharded over tp_size={tensor_parallel.size}, and "
                    f"{error}; pass a number of features that is divisible by tp_size"
                ) from None
            self.register_parameter(name, nn.Parameter(piece, whole.requires_grad))
        self._mark_parameters()
        first: Any = getattr(self, "initialization", None) or getattr(self, "initializations", (None,))[0]
        tracked = first is not None and first.get_rng_state_tracker is not None
        if tensor_parallel.group is None and not tracked:
            warnings.warn(
                f"tp_size={tensor_parallel.size} without tp_group: the constructor does not know this rank, and "
                "initializes parameters with the shards of rank 0. Pass tp_group, or get_rng_state_tracker, or load a "
                "state_dict",
                UserWarning,
                stacklevel=1,  # the same line for all layers, so the warning is shown once
            )

    def _mark_parameters(self) -> None:
        """Set the attributes of parameters that Megatron reads; see the docstring of this file."""
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if (cut := self.cuts.get(name)) is not None:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim = cut.dim  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
            else:
                parameter.sequence_parallel = False  # type: ignore[attr-defined]

    @contextmanager
    def _as_whole(self) -> Iterator[None]:
        """Initialize full parameters inside this context; on exit, this rank keeps its shards of them.

        Ranks with the same seed get shards of the parameters that a single process would have.
        """
        pieces: dict[str, Any] = {name: self._parameters[name] for name in self.cuts}
        for name, piece in pieces.items():
            shape = self.cuts[name].whole_shape(piece.shape, self.tensor_parallel.size)
            self._parameters[name] = nn.Parameter(piece.new_empty(shape), piece.requires_grad)
        try:
            yield
            with torch.no_grad():
                for name, piece in pieces.items():
                    whole: Any = self._parameters[name]
                    piece.copy_(self.cuts[name].piece(whole, self.tensor_parallel.rank, self.tensor_parallel.size))
        finally:
            self._parameters.update(pieces)
        if pieces:
            self._mark_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load shards, or this rank's shards of full parameters."""
        for name, cut in self.cuts.items():
            own, given = getattr(self, name), state_dict.get(prefix + name)
            ranks = self.tensor_parallel.size
            if isinstance(given, Tensor) and tuple(given.shape) == cut.whole_shape(own.shape, ranks):
                self.tensor_parallel.over("column")  # raises if the rank is not known
                state_dict[prefix + name] = cut.piece(given, self.tensor_parallel.rank, ranks)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- Products -----------------------------------------------------------------------------------------------------

    def _multiply(
        self, mode: Mode, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None, dtype: torch.dtype
    ) -> Tensor:
        """``x wᵀ + bias`` of one of the layers, in FP8, or in high precision if ``product`` is None."""
        parallel = self.tensor_parallel.over(mode)
        if parallel.sequence is not None and x.dim() < 2:
            raise ValueError(
                f"{self.kind} with sequence_parallel=True shards the first dimension of its input, but the input has "
                f"shape {tuple(x.shape)}; pass [sequence, ..., features]"
            )
        if product is None:
            return high_precision_linear(x.to(autocast_dtype(x.device.type) or x.dtype), weight, bias, parallel)
        self._refuse_backward_override(product, "tensor-parallel layers; leave it out")
        require_shared_scales(self.running_context().group, parallel.group)
        if not torch.is_grad_enabled():
            weight = without_gradient(weight)
        return parallel_linear(x.to(dtype), weight, bias, product, dtype, parallel)

    def _product_of_piece(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        context: FP8Context,
        is_first_microbatch: bool | None,
    ) -> Tensor:
        """The output of a module that is one linear layer, with ``bias`` added unless ``return_bias`` is set."""
        added_bias = None if self.return_bias else bias
        if not (context.enabled and self.fp8):
            return self._forward_outside_fp8(x, weight, added_bias, context, is_first_microbatch)
        (product, *_), dtype = self._products(x, (weight,), (added_bias,), context, is_first_microbatch)
        assert self.parallel_mode is not None
        return self._multiply(self.parallel_mode, x, weight, added_bias, product, dtype)

    def _high_precision(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.parallel_mode is None:
            return super()._high_precision(input, weight, bias)
        return self._multiply(self.parallel_mode, input, weight, bias, None, input.dtype)

    def _returned_bias(self, bias: Any, mode: Mode | None) -> Any:
        """The bias that is returned with y. Callers add it to a shard of the sequence, so its gradient is summed."""
        if mode != "row" or not self.tensor_parallel.sequence:
            return bias
        return sum_gradients(bias, group=self.tensor_parallel.over(mode).group)[0]


def cut_linear(
    layer: CutLayer, mode: str | None, tensor_parallel: TensorParallel, sections: tuple[int, ...] | int = 1
) -> None:
    """Replace the parameters of a module that is one linear layer by this rank's shards.

    Args:
        mode: ``"column"``, ``"row"`` or None, which does not shard.
        sections: the sections of the rows in column mode, see :class:`~lightning_fp8.parallel.pieces.Cut`.

    Raises:
        ValueError: If there is sequence parallelism without a mode, or if the number of features is not divisible.
    """
    if mode is None and tensor_parallel.sequence:
        raise ValueError(
            "sequence_parallel=True needs parallel_mode='column' or 'row': the gradients of a weight that is not "
            "sharded, and that each rank applies to a shard of the sequence, are not summed"
        )
    if mode is None or tensor_parallel.size == 1:
        return
    if mode == "column":
        cuts = dict.fromkeys((*layer.weight_names, *layer.bias_names), Cut(0, sections))
        layer.out_features = tensor_parallel.part_of("out_features", layer.out_features)
    else:
        cuts = dict.fromkeys(layer.weight_names, Cut(1))
        layer.in_features = tensor_parallel.part_of("in_features", layer.in_features)
    layer.parallel_mode = "column" if mode == "column" else "row"
    layer.cut(tensor_parallel, cuts)
