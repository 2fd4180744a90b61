"""The rows of a projection to queries, keys and values, in the two orders that Transformer Engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
