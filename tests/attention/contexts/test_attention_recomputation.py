"""checkpoint_core_attention with dropout under a tracker of random states, as Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import DotProductAttention


class Forking:
    """A tracker that keeps one state beside torch's default generator."""

    def __init__(self, seed: int = 3) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(seed).get_state()}

    @contextmanager
    def fork(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states["model-parallel-rng"])
        try:
            yield
        finally:
            self.states["model-parallel-rng"] = torch.get_rng_state()
            torch.set_rng_state(before)


class Tracker(Forking):
    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


class OfGenerators(Tracker):
    """Its states advance in place, as those of Transformer Engine's that CUDA graphs may capture."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(3)}

    @contextmanager
    def fork(self) -> Iterator[None]:
        before, generator = torch.get_rng_state(), self.states["model-parallel-rng"]
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def two_layers(tracker: Forking, recompute: bool, backwards: int = 1) -> tuple[list[Tensor], Tensor]:
    """Output, gradients, and what the tracker draws next; each of two layers has moved it on."""
    module = DotProductAttention(2, 16, qkv_format="bshd", attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, 2, 16, generator=generator).requires_grad_() for _ in range(3))
    o = module(q, k, v, checkpoint_core_attention=recompute)
    o = module(o.unflatten(-1, (2, 16)), k, v, checkpoint_core_attention=recompute)
    for index in range(backwards):
        o.square().sum().backward(retain_graph=index + 1 < backwards)
    with tracker.fork():
        after = torch.rand(4)
    return [o, *(x.grad for x in (q, k, v))], after


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("tracker", [Tracker, OfGenerators])
def test_a_recomputation_draws_its_forwards_mask(tracker: type[Forking], backwards: int) -> None:
    plain, after_plain = two_layers(tracker(), recompute=False, backwards=backwards)
    again, after_again = two_layers(tracker(), recompute=True, backwards=backwards)
    assert all(torch.equal(*pair) for pair in zip(plain, again))
    assert torch.equal(after_plain, after_again), "the recomputation leaves the tracker as it was"


def test_a_tracker_without_states_is_refused() -> None:
    with pytest.raises(TypeError, match="Forking has no get_states and set_states; add them.*or pass checkpoint_core"):
        two_layers(Forking(), recompute=True)
