"""The modelled step: its prices are the committed results', and its sum is near what was measured."""

from __future__ import annotations

import logging

import pytest
import torch

from benchmarks.budget import LARGE, Launch, Measured, Operand, Run, budget, launches, priced
from tests.tiers import thorough

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured()


@pytest.fixture(autouse=True)
def without_tables() -> None:
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Operand:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return Operand(dtype, shape, True, x.numel() * x.element_size())


def test_prices_of_what_was_measured_alone(measured: Measured) -> None:
    """The committed medians, read from the files by eye."""
    square = [_operand(8192, 8192)] * 2
    assert priced(Launch("mm", "forward", square, [_operand(8192, 8192)]), None, measured) == ("products", 1.713)
    x = _operand(16384, 4096)
    assert measured.cast("cast + transposed", 2**26) == pytest.approx(0.001 + 0.0721, abs=0.002)
    assert measured.copy(2147483648) == 0.5021
    assert measured.copy(134217728) == 0.03238
    group, milliseconds = priced(Launch("add", "forward", [x, x], [x]), "delayed", measured)
    assert group == "residual adds, sums of gradients"
    assert milliseconds == pytest.approx(measured.copy(3 * x.bytes) / 0.95)


def test_a_broadcast_tensor_is_read_once() -> None:
    import benchmarks.budget as module

    x = torch.empty(3, 1, 32).expand(3, 48, 32)
    assert module._operand(x) == Operand(torch.float32, (4, 2048, 128), False, 4 * 4 * 128)


@thorough
def test_the_sums_are_near_the_measured_steps(measured: Measured) -> None:
    """BF16 within 3 %; FP8 less than measured, since the host and lower clocks are not in it."""
    (bf16, _), (delayed, unfused), (fused, ops) = (
        budget(run, measured) for run in (Run(), Run("delayed"), Run("delayed", fuse=True))
    )
    assert sum(bf16.values()) == pytest.approx(measured.step(Run()), rel=0.03)
    assert 0.88 < sum(delayed.values()) / measured.step(Run("delayed")) < 1  # type: ignore[operator]
    assert sum(fused.values()) < sum(delayed.values())
    assert ops < 0.72 * unfused
    assert delayed["products"] == fused["products"] < 0.6 * bf16["products"]
    products = [each for each in launches("delayed", False, False) if each.name.startswith("scaled_mm")]
    flops = sum(2 * each.outputs[0].elements * each.inputs[0].shape[1] for each in products)
    block = LARGE.width * (2 * LARGE.width + 2 * LARGE.keys + 3 * LARGE.inner)
    assert flops == 2 * 6 * LARGE.tokens * block
