"""Which layers stay in high precision because FP8 is slower for their sizes.

Each layer compares the sizes of its first training forward (:mod:`lightning_fp8.faster`). Compiled layers do not: equal
layers share compiled code, and only the first is traced. The result takes effect at the model's first optimizer step
after a forward, and stays, so that a recomputed forward runs as its forward did. The state of the scales contains it,
so that a resumed run computes what the original run would have computed.

Ranks that share amaxes or shards decide together, although their sequences may have different lengths: a layer stays in
high precision if FP8 is slower on every rank that has called it. Other ranks, such as those of other pipeline stages,
decide alone, since they may not all begin a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_fp8.arguments import is_dtensor
from lightning_fp8.convert.attention_calls.owners import SLOWER, Owner, owner_of
from lightning_fp8.delayed.update import are_several_ranks
from lightning_fp8.faster import AWAITED, HAD, is_slower
from lightning_fp8.fp8_region import num_enabled_regions
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.names import clean_name
from lightning_fp8.parallel.agreement import of_all_ranks

STEPS_BEFORE_FORWARDS = 10
"""The number of optimizer steps without any forward after which nothing is compared any more."""


class Choice:
    """The decision for the layers and the attention of a converted model, which keep the reasons.

    Attributes:
        decided: whether it was made, or loaded.

    Args:
        model: the root. It is not kept alive.
        tell: called with the line that says which layers stay in high precision.
    """

    def __init__(self, model: nn.Module, tell: Callable[[str], None]) -> None:
        self.decided = False
        self._model = weakref.ref(getattr(model, "_orig_mod", model))  # a caller may drop a compiled module
        self._tell = tell
        self._steps, self._regions_before = 0, num_enabled_regions()

    def __deepcopy__(self, memo: dict[int, Any]) -> Choice | None:
        """The choice of a copied model, which it makes itself if it is not made yet; None if only a part is copied."""
        if (copied := memo.get(id(self._model()))) is None:
            return None
        choice = Choice(copied, self._tell)
        choice.decided = self.decided
        return choice

    def slower(self, part: nn.Module | None = None) -> dict[str, str] | None:
        """The reasons by the names of the layers of ``part``, or of all, that stay in high precision, if decided."""
        part = self._model() if part is None else part
        if not self.decided or part is None:
            return None
        reasons = {
            clean_name(name): each.slower if isinstance(each, LinearLayer) else getattr(each, SLOWER, "")
            for name, each in part.named_modules()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def decide(self, group: dist.ProcessGroup | None, together: bool = True) -> None:
        """Decide, at the first optimizer step after a forward.

        Args:
            together: whether all ranks of ``group`` decide now, by a collective. Those that share shards always do.
        """
        if self.decided:
            return
        places = [*self._places()]
        own = {name: each.slower or each.comparison for name, each, _ in places if each.comparison != AWAITED}
        found = own, bool(own) or not places or num_enabled_regions() > self._regions_before
        weights = [module._parameters.get("weight") for _, _, module in places]
        meshes = dict.fromkeys(weight.device_mesh for weight in weights if is_dtensor(weight))  # type: ignore[union-attr]
        groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
        for each in [group] * together + groups:
            if are_several_ranks(each):
                found = _agreed(of_all_ranks(found, each))
        self._steps += 1
        if self._steps < STEPS_BEFORE_FORWARDS and not found[1]:
            return
        self.load({name: said for name, said in found[0].items() if is_slower(said)})
        if slower := self.slower():
            reasons = "; ".join({said.partition(HAD)[0]: said for said in slower.values()}.values())
            self._tell(
                f"{len(slower)} layers stay in high precision from now on, because FP8 is slower for their sizes: "
                f"{reasons}. where_faster=False runs linear layers and experts in FP8, and attention='always' attention"
            )

    def load(self, slower: Mapping[str, str] | None, part: nn.Module | None = None, new: Sequence[str] = ()) -> None:
        """Set a decision; None, of a state without one, has no effect.

        Args:
            part: a part of the model, whose names those of ``slower`` are. The decision of the others stays open.
            new: the slots that the state lacks. The decision of their layers stays open, too.
        """
        model = self._model()
        part = model if part is None else getattr(part, "_orig_mod", part)
        if slower is None or part is None:
            return
        names = {id(each): clean_name(name) for name, each in part.named_modules()}
        for _, each, module in self._places():
            if id(module) not in names or any(slot.startswith(f"{names[id(module)]}.") for slot in new):
                continue
            reason = slower.get(names[id(module)], "")
            if each.slower != reason:  # or compiled code that has a guard on the missing attribute is compiled again
                each.slower = reason
            if each.comparison == AWAITED or isinstance(each, LinearLayer):
                each.comparison = ""
            if isinstance(each, Owner):
                setattr(module, SLOWER, reason)
        self.decided = self.decided or (part is model and not new)

    def _places(self) -> Iterator[tuple[str, Any, nn.Module]]:
        """The names of what is compared, the layers or owners, and the modules."""
        model = self._model()
        for name, module in () if model is None else model.named_modules():
            each = module if isinstance(module, LinearLayer) else owner_of(module)
            if each is not None and (each.comparison is not None or each.slower):
                yield clean_name(name), each, module


def _agreed(found_by_rank: list[tuple[dict[str, str], bool]]) -> tuple[dict[str, str], bool]:
    """What ranks found together: of a layer's comparisons, one that FP8 wins if there is any; and whether any ran."""
    agreed: dict[str, str] = {}
    for of_rank, _ in found_by_rank:
        agreed |= {name: agreed.get(name, said) if is_slower(said) else said for name, said in of_rank.items()}
    return agreed, any(ran for _, ran in found_by_rank)
