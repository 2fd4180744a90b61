"""Which layers stay in high precision because FP8 is slower for their sizes.

Each layer compares the sizes of its first training forward (:mod:`lightning_fp8.faster`). What they found takes effect
at the model's first optimizer step, and stays: a recomputed forward runs as its forward did, and ranks decide alike
though their sequences may have other lengths. A layer stays in high precision if FP8 is slower on every rank that has
called it. The state of the scales contains the decision, so that a resumed run computes what it would have computed.
Steps before the first forward, as those that create an optimizer's state, decide nothing.

Ranks that share nothing else decide alone, since a collective that other ranks do not begin would wait for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_fp8.attention.models.owners import SLOWER, Owner, owner_of
from lightning_fp8.attention.models.owners import any_traced as any_traced_attention
from lightning_fp8.attention.models.owners import traced_comparison as traced_attention
from lightning_fp8.delayed.update import are_several_ranks
from lightning_fp8.faster import AWAITED, is_slower
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.record import any_traced, traced_comparison
from lightning_fp8.names import clean_name
from lightning_fp8.parallel.agreement import of_all_ranks
from lightning_fp8.parallel.sharded_linear import is_sharded

STEPS_BEFORE_FORWARDS = 10
"""The number of optimizer steps without any forward after which nothing is compared any more."""


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
        self._model = weakref.ref(getattr(model, "_orig_mod", model))  # a caller may drop a compiled module
        self._tell = tell
        self._steps = 0

    def decide(self, group: dist.ProcessGroup | None, together: bool = True) -> None:
        """Decide, at the first optimizer step after a forward.

        Args:
            together: whether all ranks of ``group`` decide now, by a collective. They do if weights are sharded.
        """
        if self.slower is not None:
            return
        places = [*self._places()]
        own = {name: said for name, each, _ in places if (said := _comparison(each)) is not None}
        together |= any(is_sharded(module._parameters.get("weight")) for _, _, module in places)
        found_by_rank = [(own, bool(own) or not places or self._ran())]
        if together and are_several_ranks(group):
            found_by_rank = of_all_ranks(found_by_rank[0], group)
        self._steps += 1
        if self._steps < STEPS_BEFORE_FORWARDS and not any(ran for _, ran in found_by_rank):
            return
        of_ranks = [of_rank for of_rank, _ in found_by_rank]
        by_name = {name: [each[name] for each in of_ranks if name in each] for each in of_ranks for name in each}
        self.load({name: found[0] for name, found in by_name.items() if all(map(is_slower, found))})
        if self.slower:
            reasons = "; ".join(dict.fromkeys(self.slower.values()))
            self._tell(
                f"{len(self.slower)} layers stay in high precision from now on, because FP8 is slower for their sizes: "
                f"{reasons}. where_faster=False runs linear layers in FP8, and attention='always' attention"
            )

    def load(self, slower: Mapping[str, str] | None, part: nn.Module | None = None) -> None:
        """Set a decision; None, of a state without one, has no effect.

        Args:
            part: a part of the model, whose names those of ``slower`` are. The decision of the others stays open.
        """
        if slower is None:
            return
        model = self._model()
        part_is_all = part is None or getattr(part, "_orig_mod", part) is model
        names = {} if part_is_all or part is None else {id(each): name for name, each in part.named_modules()}
        chosen = {} if part_is_all else dict(self.slower or {})
        for name, each, module in self._places():
            if not part_is_all and id(module) not in names:
                continue
            reason = slower.get(name if part_is_all else clean_name(names[id(module)]), "")
            if each.slower != reason:  # or compiled code that has a guard on the missing attribute is compiled again
                each.slower = reason
            each.comparison = "" if each.comparison == AWAITED or isinstance(each, LinearLayer) else each.comparison
            if isinstance(each, Owner):
                setattr(module, SLOWER, each.slower)
            chosen |= {name: each.slower}
        if part_is_all:
            self.slower = dict(slower)
        elif self.slower is not None:
            self.slower = {name: reason for name, reason in chosen.items() if reason}

    def of_part(self, part: nn.Module) -> dict[str, str] | None:
        """The decision for the layers of ``part``, by their names in it; None until it is decided."""
        if self.slower is None or (model := self._model()) is None:
            return None
        reasons = {id(each): self.slower.get(clean_name(name), "") for name, each in model.named_modules()}
        named = {clean_name(name): reasons.get(id(each), "") for name, each in part.named_modules()}
        return {name: reason for name, reason in named.items() if reason}

    def _ran(self) -> bool:
        """Whether anything that may be compared was called, or may have been in compiled code."""
        records = [each.record for _, each, _ in self._places()]
        return any(record.ran for record in records) or any_traced() or any_traced_attention()

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
