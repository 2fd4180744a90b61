"""``lightning_fp8.checkpoint``: on two ranks, with distributed arguments, under trackers, and what it refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_fp8 import checkpoint
from tests.distributed.launch import run_on_two_ranks


def test_recomputation_changes_no_bit_and_distributed_arguments_are_kept_once(tmp_path: Path) -> None:
    first, second = run_on_two_ranks("recomputed", str(tmp_path), folder=tmp_path)
    whole = 16 * 64 * 4
    for report in (first, second):
        assert report["again"] == report["distributed"] == report["nested"] == [True, True]
        assert report["twice"] == [True] * 12
        assert len(report["scales"]) == 18
        assert min(report["scales"]) > 0
        again, distributed = report["kept"]
        assert again - distributed == 9 * whole / 2  # of three blocks in three steps
        assert report["gathers"] == [[[0, 0], [3, 3 * whole]]] * 3
    assert first["first"] == second["first"]
    assert first["scales"] == second["scales"]


def test_keyword_arguments_and_contexts_reach_the_function() -> None:
    entered = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            pass

    x = torch.ones(3, requires_grad=True)
    contexts = Noted("forward"), Noted("recomputation")
    y = checkpoint(lambda x, factor: (factor * x).sin(), x, factor=2.0, context_fn=lambda: contexts)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(2 * x.detach()))  # type: ignore[arg-type]
    assert entered == ["forward", "recomputation"]


def test_use_reentrant_warns_where_it_would_give_no_gradients() -> None:
    linear = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(linear, torch.ones(1, 3))
        checkpoint(linear, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
        with torch.no_grad():
            checkpoint(linear, torch.ones(1, 3), use_reentrant=True)
    with pytest.warns(UserWarning, match="no argument requires a gradient"):
        y = checkpoint(linear, torch.ones(1, 3), use_reentrant=True)
    y.sum().backward()
    assert linear.weight.grad is not None


X = torch.ones(3, 5)


@pytest.mark.parametrize(
    ("args", "options", "error", "says"),
    [
        ((3, X), {}, TypeError, "function=3 cannot be called; pass a module or a function"),
        ((torch.sin, X), {"tp_group": None}, ValueError, "pass tp_group, or leave distribute_saved_activations out"),
        ((torch.sin, X), {}, ValueError, r"the 15 elements of the first argument, \[3, 5\], .* 2 ranks .*; pad it"),
        ((torch.sin, "x"), {}, TypeError, "a str and must be a local torch.Tensor; pass the activation first"),
        ((torch.sin,), {}, TypeError, "a NoneType and must be a local torch.Tensor"),
    ],
)
def test_refused(
    args: Any, options: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    options = {"tp_group": ProcessGroup(0, 2), **options}
    with pytest.raises(error, match=says):
        checkpoint(*args, distribute_saved_activations=True, **options)


def test_every_positional_argument_is_the_functions() -> None:
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda flag, nothing, x: x.sin() if flag is False and nothing is None else x, False, None, x)
    assert torch.equal(y, x.sin())


def test_a_tracker_without_states_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no get_states and set_states; add them"):
        checkpoint(torch.sin, X, get_rng_state_tracker=object)
