"""The projections of Transformer Engine's attention: which modules they are, and in what order their rows are.

Transformer Engine fuses the projections to queries, keys and values into one parameter or keeps one for each
(``fuse_qkv_params``), and orders the rows of a fused one by groups of heads or by names (``qkv_weight_interleaved``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ProjectionRows:
    """The order of a projection's rows, in its weight, its bias and its output.

    Attributes:
        names: what is projected to: ``("query", "key", "value")``, or some of them.
        heads_per_group: the number of heads of each.
        groups: heads of keys and values.
        channels: of a head.
        interleaved: groups follow each other, each with its query heads, its key and its value; else all queries come
            first, then all keys, then all values.
    """

    names: tuple[str, ...]
    heads_per_group: tuple[int, ...]
    groups: int
    channels: int
    interleaved: bool

    def with_order(self, interleaved: bool) -> ProjectionRows:
        """The same rows in the order that ``interleaved`` says."""
        return replace(self, interleaved=interleaved)

    @property
    def sizes(self) -> dict[str, int]:
        """Rows by name."""
        return {name: heads * self.groups * self.channels for name, heads in zip(self.names, self.heads_per_group)}

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """``[..., rows]`` as ``[..., heads, channels]`` of each name; views, where they are not interleaved."""
        if not self.interleaved:
            parts = x.split([*self.sizes.values()], -1)
            return tuple(
                part.unflatten(-1, (heads * self.groups, self.channels))
                for part, heads in zip(parts, self.heads_per_group)
            )
        grouped = x.unflatten(-1, (self.groups, sum(self.heads_per_group), self.channels))
        return tuple(part.flatten(-3, -2) for part in grouped.split(self.heads_per_group, -2))

    def split_parameter(self, fused: Tensor) -> dict[str, Tensor]:
        """A weight ``[rows, in]`` or a bias ``[rows]`` by names, each with the rows of its heads in their order."""
        heads = self.split_heads(fused.movedim(0, -1))
        return {name: part.flatten(-2).movedim(-1, 0) for name, part in zip(self.names, heads)}

    def join_parameters(self, parts: Mapping[str, Tensor]) -> Tensor:
        """What :meth:`split_parameter` takes, of what it gives."""
        if not self.interleaved:
            return torch.cat([parts[name] for name in self.names])
        grouped = [
            parts[name].unflatten(0, (self.groups, heads, self.channels))
            for name, heads in zip(self.names, self.heads_per_group)
        ]
        return torch.cat(grouped, 1).flatten(0, 2)


def rows_of_projections(
    heads: int, groups: int, channels: int, self_attention: bool, interleaved: bool, input_layernorm: bool
) -> dict[str, ProjectionRows]:
    """The rows of each projection of attention, by the name of its module.

    Args:
        heads: of queries.
        groups: heads of keys and values.
        channels: of a head.
        self_attention: queries, keys and values are projected from one tensor, by one module.
        interleaved: see :class:`ProjectionRows`.
        input_layernorm: the module that projects to queries has a norm in front.
    """
    share = heads // groups
    of = (groups, channels, interleaved)
    if self_attention:
        name = "layernorm_qkv" if input_layernorm else "qkv"
        return {name: ProjectionRows(("query", "key", "value"), (share, 1, 1), *of)}
    name = "layernorm_query" if input_layernorm else "query_layer"
    return {
        name: ProjectionRows(("query",), (share,), *of),
        "key_value": ProjectionRows(("key", "value"), (1, 1), *of),
    }


def has_split_parameters(projection: str, fuse_qkv_params: bool) -> bool:
    """Whether the projection's parameters are named by what it projects to: ``query_weight``.

    Those of ``query_layer``, which projects to queries alone, never are; those of ``layernorm_query`` may be.
    """
    return not fuse_qkv_params and projection != "query_layer"


class Projecting(Protocol):
    """Attention with projections, as our ``MultiheadAttention`` is.

    Attributes:
        projection_rows: the order of each projection's rows, by the name of its module.
        fuse_qkv_params: a projection to several tensors has one weight.
        qkv_weight_interleaved: its rows are by groups of heads.
    """

    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    projection_rows: dict[str, ProjectionRows]


def projection_parameters(attention: Projecting, projection: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a projection as ``attention`` names them, split or joined, their rows in its order.

    Args:
        projection: the name of its module in ``attention``.
        parameters: by name, without prefix; what fits nothing stays as it is.
    """
    if (order := attention.projection_rows.get(projection)) is None:
        return dict(parameters)
    split = has_split_parameters(projection, attention.fuse_qkv_params)
    return _split_or_joined(parameters, order.with_order(attention.qkv_weight_interleaved), split)


def _split_or_joined(parameters: Mapping[str, Any], order: ProjectionRows, split: bool) -> dict[str, Any]:
    """Parameters of a projection as one that is ``split``, or is not, names them.

    Args:
        parameters: by name, without their prefix; those of a norm, and what fits nothing, stay as they are.
        order: of the projection's rows.
        split: ``query_weight``, ``query_bias``, ...; else ``weight`` and ``bias``.
    """
    sizes = order.sizes
    renamed = dict(parameters)
    for leaf in ("weight", "bias"):
        parts = {name: renamed.get(f"{name}_{leaf}") for name in sizes}
        fused = renamed.get(leaf)
        if split and isinstance(fused, Tensor) and fused.dim() and len(fused) == sum(sizes.values()):
            del renamed[leaf]
            renamed |= {f"{name}_{leaf}": part for name, part in order.split_parameter(fused).items()}
        elif not split and all(isinstance(x, Tensor) and len(x) == sizes[name] for name, x in parts.items()):
            split_names = {f"{name}_{leaf}" for name in sizes}
            renamed = {name: value for name, value in renamed.items() if name not in split_names}
            renamed[leaf] = order.join_parameters(parts)  # type: ignore[arg-type]
    return renamed
