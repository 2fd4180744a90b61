"""How a parameter is cut over tensor-parallel ranks: one piece of each, and the whole of all pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """A dimension of a parameter that is cut, section by section.

    Each rank has an equal piece of each section, one after the other: of SwiGLU's two halves, and of queries, keys and
    values, so that what a rank multiplies together belongs together.

    Attributes:
        dim: the dimension.
        sections: the number of equal sections of it, or their sizes in the whole where they differ.
    """

    dim: int
    sections: int | tuple[int, ...] = 1

    def whole_shape(self, piece: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The shape of the whole of which ``ranks`` have pieces of this shape."""
        return (*piece[: self.dim], piece[self.dim] * ranks, *piece[self.dim + 1 :])

    def piece(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What ``rank`` has of ``whole``; a copy.

        Raises:
            ValueError: a section does not divide into ``ranks`` equal pieces.
        """
        sizes = self._sizes(whole.shape[self.dim])
        if wrong := [size for size in sizes if size % ranks]:
            raise ValueError(f"{wrong[0]} does not divide into {ranks} equal pieces")
        pieces = [section.chunk(ranks, self.dim)[rank] for section in whole.split(sizes, self.dim)]
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of the pieces of all ranks, in their order."""
        ranks = len(pieces)
        sizes = self._sizes(pieces[0].shape[self.dim] * ranks)
        sections = [piece.split([size // ranks for size in sizes], self.dim) for piece in pieces]
        return torch.cat([part for parts in zip(*sections) for part in parts], self.dim)

    def _sizes(self, whole: int) -> list[int]:
        if isinstance(self.sections, tuple):
            return list(self.sections)
        return [whole // self.sections] * self.sections
