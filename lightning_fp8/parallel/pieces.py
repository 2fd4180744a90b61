"""How a parameter is divided over tensor-parallel ranks, and reassembled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """The dimension along which a parameter is divided, section by section.

    A rank's piece is the concatenation of an equal piece of each section. Sections are SwiGLU's two halves, or queries,
    keys and values, so that a rank gets matching parts of each.

    Attributes:
        dim: the dimension.
        sections: the number of equal sections, or the sections' sizes in the whole parameter if they differ.
    """

    dim: int
    sections: int | tuple[int, ...] = 1

    def whole_shape(self, piece: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of the whole parameter, if each of ``ranks`` ranks has a piece of this shape."""
        return (*piece[: self.dim], piece[self.dim] * ranks, *piece[self.dim + 1 :])

    def piece(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The piece of ``rank``, as a copy.

        Raises:
            ValueError: If a section is not divisible by ``ranks``.
        """
        sizes = self._sizes(whole.shape[self.dim])
        if wrong := [size for size in sizes if size % ranks]:
            raise ValueError(f"{wrong[0]} does not divide into {ranks} equal pieces")
        pieces = [section.chunk(ranks, self.dim)[rank] for section in whole.split(sizes, self.dim)]
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole parameter, from the pieces of all ranks in order."""
        ranks = len(pieces)
        sizes = self._sizes(pieces[0].shape[self.dim] * ranks)
        sections = [piece.split([size // ranks for size in sizes], self.dim) for piece in pieces]
        return torch.cat([part for parts in zip(*sections) for part in parts], self.dim)

    def _sizes(self, whole: int) -> list[int]:
        if isinstance(self.sections, tuple):
            return list(self.sections)
        return [whole // self.sections] * self.sections
