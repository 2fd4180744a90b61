"""Marks: numbers that tell the host which slots of a history are equal, without asking a GPU.

Slots of equal marks hold the same scale, amax and window, to the bit. Slots that begin equal stay so while the same
tensors feed them; a slot that a tensor feeds alone gets a mark of its own. What another rank or compiled code feeds to
one of two such slots alone goes unnoticed: both then serve, but no longer to the bit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_numbers = itertools.count()


def new_mark() -> int:
    """A mark that no slot of this process has had."""
    return next(_numbers)


def compared_marks(slots: Tensor) -> list[int]:
    """New marks for the n slots of float32 ``[m, n]``, compared bit by bit; waits for the GPU that they lie on."""
    bits = slots.t().contiguous().view(torch.int32)
    _, indices = torch.unique(bits, dim=0, return_inverse=True)
    marks = [new_mark() for _ in range(len(bits))]
    return [marks[index] for index in indices.tolist()]
