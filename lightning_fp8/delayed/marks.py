"""Marks: numbers that tell the host which rows of a history are equal, without asking a GPU.

Rows of equal marks hold the same scale, amax and window, to the bit. Rows that begin equal stay so while the same
tensors feed them; a row that a tensor feeds alone gets a mark of its own. What another rank or compiled code feeds to
one of two such rows alone goes unnoticed: both rows then serve, but no longer to the bit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_numbers = itertools.count()


def new_mark() -> int:
    """A mark that no row of this process has had."""
    return next(_numbers)


def compared_marks(columns: Tensor) -> list[int]:
    """New marks for the columns of float32 ``[m, n]``, compared bit by bit; waits for the GPU that they lie on."""
    bits = columns.t().contiguous().view(torch.int32)
    _, indices = torch.unique(bits, dim=0, return_inverse=True)
    first = [new_mark() for _ in range(len(bits))]
    return [first[index] for index in indices.tolist()]
