"""Replicas of ``torch.nn.DataParallel``, made and run in threads as it does, but all on the CPU."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import Linear, convert_module, fp8_autocast
from lightning_fp8.torchao.float8 import Float8LinearConfig, convert_to_float8_training


def _replica(module: nn.Module) -> Any:
    """What ``torch.nn.parallel.replicate`` makes: parameters are copies that gradients flow through."""
    replica: Any = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[name] = None
        else:
            setattr(replica, name, parameter.clone())
    for name, child in module._modules.items():
        replica._modules[name] = _replica(child)  # type: ignore[arg-type]
    return replica


def _model(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return model


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_replicas_of_torchaos_path_run_in_fp8(recipe: str) -> None:
    model = _model(recipe)
    one, in_high_precision = (
        copy.deepcopy(model),
        nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)),
    )
    in_high_precision.load_state_dict(model.state_dict())
    pieces = torch.randn(32, 64).chunk(2)  # the order of a sum of two gradients does not matter
    expected = [one(piece) for piece in pieces]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda replica, x: replica(x), [_replica(model) for _ in pieces], pieces))
    for outputs in (expected, found):
        torch.stack(outputs).square().sum().backward()
    assert all(map(torch.equal, found, expected))
    gradients: list[list[Any]] = [[each.grad for each in parameters.parameters()] for parameters in (model, one)]
    assert all(map(torch.equal, *gradients))
    assert not any(map(torch.equal, found, map(in_high_precision, pieces)))
    assert model[0].record.fp8 == len(pieces)


def test_replicas_that_would_ignore_a_region_are_refused() -> None:
    model = _model("rowwise")
    for region, runs in (
        (fp8_autocast(enabled=False), "Linear would run in FP8, rowwise, there"),
        (fp8_autocast(fp8_recipe="delayed"), "Linear would run in FP8, rowwise, there"),
    ):
        with region, pytest.raises(RuntimeError, match=f"where fp8_autocast has no effect: {runs}"):
            _replica(model)
    plain = convert_module(nn.Sequential(nn.Linear(32, 32)), first_last_layers_bf16=False)
    assert isinstance(plain[0], Linear)  # type: ignore[index]
    x: Tensor = torch.randn(4, 32)
    with fp8_autocast(), pytest.raises(RuntimeError, match="Linear would run in high precision there"):
        _replica(plain)
    with fp8_autocast(enabled=False):
        assert torch.equal(_replica(plain)(x), plain(x))
    assert torch.equal(_replica(plain)(x), plain(x))
