"""Which layers stay in high precision because FP8 is slower for their sizes.

Each layer compares the sizes of its first training forward (:mod:`lightning_fp8.faster`). What they found takes effect
at the model's first optimizer step, and stays: a recomputed forward runs as its forward did, and ranks decide alike
though their sequences may have other lengths. A layer stays in high precision if FP8 is slower on every rank that has
called it. The state of the scales contains the decision, so that a resumed run computes what it would have computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_fp8.attention.models.owners import SLOWER, Owner, owner_of
from lightning_fp8.attention.models.owners import traced_comparison as traced_attention
from lightning_fp8.delayed.update import are_several_ranks
from lightning_fp8.faster import AWAITED, is_slower
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import traced_comparison
from lightning_fp8.names import clean_name
from lightning_fp8.parallel.agreement import of_all_ranks


class Choice:
    """The decision for the layers and the attention of a converted model.

    Args:
        model: the root. It is not kept alive.
        tell: called with the line that says which layers stay in high precision.

    Attributes:
        slower: the reasons by the names of the layers that do; None until it is decided.
    """

    def __init__(self, model: nn.Module, tell: Callable[[str], None]) -> None:
        self.slower: dict[str, str] | None = None
        self._model, self._tell = weakref.ref(model), tell

    def decide(self, group: dist.ProcessGroup | None) -> None:
        """Decide, at the first optimizer step; over several ranks of ``group`` this is a collective."""
        if self.slower is not None:
            return
        own = {name: said for name, each, _ in self._places() if (said := _comparison(each)) is not None}
        of_ranks = of_all_ranks(own, group) if are_several_ranks(group) else [own]
        by_name = {name: [each[name] for each in of_ranks if name in each] for each in of_ranks for name in each}
        self.load({name: found[0] for name, found in by_name.items() if all(map(is_slower, found))})
        if self.slower:
            reasons = "; ".join(dict.fromkeys(self.slower.values()))
            self._tell(
                f"{len(self.slower)} layers stay in high precision from now on, because FP8 is slower for their sizes: "
                f"{reasons}. where_faster=False runs linear layers in FP8, and attention='always' attention"
            )

    def load(self, slower: Mapping[str, str] | None) -> None:
        """Set a decision; None, of a state without one, has no effect."""
        if slower is None:
            return
        self.slower = dict(slower)
        for name, each, module in self._places():
            each.slower = slower.get(name, "")
            each.comparison = "" if each.comparison == AWAITED or isinstance(each, LinearLayer) else each.comparison
            if isinstance(each, Owner):
                setattr(module, SLOWER, each.slower)

    def _places(self) -> Iterator[tuple[str, Any, nn.Module]]:
        """The names of what is compared, the layers or owners, and the modules."""
        model = self._model()
        for name, module in () if model is None else model.named_modules():
            each = module if isinstance(module, LinearLayer) else owner_of(module)
            if each is not None and (each.comparison is not None or each.slower):
                yield clean_name(name), each, module


def _comparison(each: LinearLayer | Owner) -> str | None:
    """What a layer found; that of compiled layers is known by their sizes, or by the class of their module."""
    if each.comparison != AWAITED:
        return each.slower or each.comparison
    if each.record.fp8 or each.record.high_precision:  # it was called in eager code, in high precision
        return None
    return traced_attention(each) if isinstance(each, Owner) else traced_comparison(*each.features)
