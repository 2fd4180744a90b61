"""What torch.compile has traced in FP8. Compiled code does not count forwards.

Sizes or classes are noted and not modules, because equal blocks share one compiled code and only the first is traced.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

_traced: set[tuple[Hashable, ...]] = set()


@torch.compiler.assume_constant_result
def note_traced(*what: Hashable) -> bool:
    """Note that torch.compile traces ``what``, such as the sizes of a layer. The compiled code omits this call."""
    _traced.add(what)
    return True


def was_traced(*what: Hashable) -> bool:
    """Whether ``what`` was ever compiled. If so, modules without counts may have run in FP8."""
    return what in _traced


def any_traced() -> bool:
    """Whether anything in FP8 was ever compiled in this process."""
    return bool(_traced)
