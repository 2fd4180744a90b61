"""The host's time of a layer is that of the kernels' side, and nothing of the stand-in stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.suites import layer_host
from benchmarks.suites.layer_host import a_card, cuda_sides_on_cpu
from cuda_kernels.host.launch import Launch
from lightning_fp8 import Linear, fp8_autocast
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import scaled_mm_op
from tests.tiers import thorough


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are started."""
    names: list[str] = []
    run = Launch.run

    def noted(launch: Launch, *addresses: Any) -> None:
        names.append(launch.kernel.name.partition("(")[0])
        run(launch, *addresses)

    monkeypatch.setattr(Launch, "run", noted)
    return names


def test_a_layer_starts_what_it_would_on_a_card(started: list[str]) -> None:
    layer = Linear(256, 256).bfloat16()
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    before = quantize_op.implementations["cpu"], scaled_mm_op.implementations["cpu"]
    cast = ["amax", "quantize_tensor"]
    with a_card(), cuda_sides_on_cpu(), fp8_autocast(fp8_recipe="tensorwise"):
        for _ in range(3):  # the first one plans what the others run
            started.clear()
            y = layer(x)
            of_forward = started.copy()
            y.backward(torch.ones_like(y))
            assert of_forward == [*cast, *cast, "gemm"]  # of the input, and of the weight
            assert started[len(of_forward) :] == [*cast, *cast, "gemm", "gemm"]  # of dy, and of the weight, transposed
    assert (quantize_op.implementations["cpu"], scaled_mm_op.implementations["cpu"]) == before
    started.clear()
    with fp8_autocast(fp8_recipe="tensorwise"):
        result = layer(x)
    assert not started
    assert result.isfinite().all()


@thorough
def test_delayed_scaling_has_its_scales(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is not the first step, which has to find them."""
    monkeypatch.setattr(layer_host, "RECIPES", ("delayed",))
    times = layer_host.layer_times(steps=1, passes=1)
    casts = 2 * ["quantize_tensor"]
    expected = [*casts, "gemm", *casts, "gemm", "gemm"]
    assert started[: len(expected)] == expected  # before a decoder layer's
    assert {each.by for each in times if each.name == "Llama block"} >= {"lightning_fp8, fused"}
    assert all(each.note or (each.forward or 0) > 0 < (each.backward or 0) for each in times)
