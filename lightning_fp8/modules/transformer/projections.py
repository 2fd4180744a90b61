"""The rows of a projection to queries, keys and values, in the two orders that Transformer Engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def renamed(self, values: Mapping[str, Any], split: bool) -> dict[str, Any]:
        """Parameters of a projection as one that is ``split``, or is not, names them.

        Args:
            values: by name, without their prefix; those of a norm, and what fits nothing, stay as they are.
            split: ``query_weight``, ``query_bias``, ...; else ``weight`` and ``bias``.
        """
        found = dict(values)
        for leaf in ("weight", "bias"):
            parts = {name: found.get(f"{name}_{leaf}") for name in self.names}
            fused = found.get(leaf)
            if split and isinstance(fused, Tensor) and fused.dim() and len(fused) == sum(self.sizes.values()):
                del found[leaf]
                found |= {f"{name}_{leaf}": part for name, part in self.split_parameter(fused).items()}
            elif not split and all(isinstance(x, Tensor) and len(x) == self.sizes[n] for n, x in parts.items()):
                found = {name: value for name, value in found.items() if name not in _names(self.names, leaf)}
                found[leaf] = self.join_parameters(parts)  # type: ignore[arg-type]
        return found


def _names(names: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{name}_{leaf}" for name in names)
