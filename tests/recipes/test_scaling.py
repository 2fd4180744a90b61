"""amax -> scale, against tables worked out by hand."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch

from lightning_fp8 import DelayedScaling, Format, Linear
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.update import reduce_and_update
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.numerics.scaling import current_scale, delayed_scale, e8m0_decode, e8m0_from_amax, floor_power_of_2

FLOAT32_MAX = 3.4028234663852886e38
INF, NAN = math.inf, math.nan
DENORMAL = 2.0**-149


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("amax", "fp8_max", "power_2", "scale"),
    [
        (1.0, 448.0, False, 448.0),
        (0.25, 448.0, False, 1792.0),
        (448.0, 448.0, False, 1.0),
        (3.25, 448.0, False, 137.84615384615384),
        (0.25, 57344.0, False, 229376.0),
        (3.25, 57344.0, False, 17644.307692307691),
        (0.0, 448.0, False, 1.0),
        (INF, 448.0, False, 1.0),
        (NAN, 448.0, False, 1.0),
        (DENORMAL, 448.0, False, FLOAT32_MAX),
        (1e-38, 448.0, False, FLOAT32_MAX),
        (3.25, 448.0, True, 128.0),
        (1.75, 448.0, True, 256.0),
        (1.76, 448.0, True, 128.0),
        (DENORMAL, 448.0, True, 2.0**127),
        (0.0, 448.0, True, 1.0),
    ],
)
def test_current_scale(amax: float, fp8_max: float, power_2: bool, scale: float) -> None:
    assert current_scale(f32(amax), fp8_max, power_2).item() == pytest.approx(scale, rel=1e-7)


def test_scales_are_divided_with_one_rounding() -> None:
    amax = torch.rand(10_000) * torch.logspace(-3, 3, 10_000)
    exact = (448.0 / amax.double()).float()
    assert torch.equal(current_scale(amax, 448.0), exact)
    assert torch.equal(delayed_scale(amax, torch.ones(10_000), 448.0), exact)
    exact_powers = torch.tensor([7 * 2.0**k for k in range(-20, 20)])
    assert current_scale(exact_powers, 448.0, power_2=True).tolist() == [64 * 2.0**-k for k in range(-20, 20)]


def test_epsilon_bounds_the_amax_from_below() -> None:
    assert current_scale(f32(1e-3, 2.0), 448.0, epsilon=0.5).tolist() == [896.0, 224.0]


def test_floor_power_of_2_at_and_around_powers() -> None:
    assert floor_power_of_2(f32(1.0, 1.999, 2.0, 0.75, 3e38)).tolist() == [1.0, 1.0, 2.0, 0.5, 2.0**127]


@pytest.mark.parametrize(
    ("amax", "margin", "scale"),
    [(0.25, 0, 1792.0), (1.0, 2, 112.0), (448.0, 0, 1.0), (0.0, 0, 5.0), (INF, 0, 5.0), (NAN, 2, 5.0)]
    + [(DENORMAL, 0, FLOAT32_MAX), (1e-38, 0, FLOAT32_MAX)],
)
def test_delayed_scale(amax: float, margin: int, scale: float) -> None:
    assert delayed_scale(f32(amax), f32(5.0), 448.0, margin).item() == pytest.approx(scale, rel=1e-7)


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_the_margin_is_multiplied_in_before_the_division(margin: int) -> None:
    """It differs where the quotient overflows: Transformer Engine's order, computed here in float64."""
    amax = 448.0 / FLOAT32_MAX * torch.logspace(-3, 1, 200, base=2.0)
    exact = ((448.0 * 2.0**-margin) / amax.double()).clamp(max=FLOAT32_MAX).float()
    assert torch.equal(delayed_scale(amax, torch.ones(200), 448.0, margin), exact)
    assert 0 < int((exact == torch.tensor(FLOAT32_MAX)).sum()) < 200


@pytest.mark.parametrize(
    ("algorithm", "scales"),
    [
        ("max", [112, 112, 112, 112, 112, 224, 448, 896]),
        ("most_recent", [112, 224, 448, 448, 896, 1792, 3584, 7168]),
    ],
)
def test_delayed_scaling_over_more_steps_than_its_window(algorithm: str, scales: list[float]) -> None:
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)  # type: ignore[arg-type]
    history, updated = AmaxHistory([("x", Role.INPUT)]), []
    for amax in [4, 2, 1, 0, 0.5, 0.25, 0.125, 0.0625]:
        history.amax.fill_(amax)
        reduce_and_update({history: recipe})
        updated.append(history.scale.item())
        assert history.amax.item() == 0
    assert updated == scales
    assert history.amax_history.flatten().tolist() == [0, 0.25, 0.125, 0.0625]  # 0.5 counted for the last time


def test_formats_and_margin_of_the_rows() -> None:
    history = AmaxHistory([("x", Role.INPUT), ("w", Role.WEIGHT), ("g", Role.GRAD_OUTPUT)])
    history.amax.fill_(1.0)
    reduce_and_update({history: DelayedScaling(margin=3)})
    assert history.scale.tolist() == [56.0, 56.0, 7168.0]
    reduce_and_update({history: DelayedScaling(margin=3)})  # nothing was seen: nothing changes
    assert history.scale.tolist() == [56.0, 56.0, 7168.0]
    reduce_and_update({history: DelayedScaling(fp8_format=Format.E4M3)})  # nor here, but what a scale is for
    assert history.scale.tolist() == [448.0, 448.0, 448.0]


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_bad_amax_never_enters_the_window(bad: float, algorithm: str) -> None:
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)  # type: ignore[arg-type]
    history, scales = AmaxHistory([("x", Role.INPUT)]), []
    for amax in [4, bad, 2, bad, 1, 1, 1]:
        history.amax.fill_(amax)
        reduce_and_update({history: recipe})
        scales.append(history.scale.item())
    expected = {"max": [112, 112, 112, 112, 112, 224, 448], "most_recent": [112, 112, 224, 224, 448, 448, 448]}
    assert scales == expected[algorithm]
    assert torch.isfinite(history.amax_history).all()


@pytest.mark.parametrize(
    "what", ["made", "copied", "pickled", "saved whole", "moved", "loaded", "set", "resized", "updated"]
)
def test_a_modules_rows_lie_in_its_history(what: str, tmp_path: Path) -> None:
    """And have version counters of their own: a graph may have saved one while another row is written to."""
    module = Linear(8, 8)
    assert module.history is not None
    if what == "copied":
        module = copy.deepcopy(module)
    elif what == "pickled":
        module = pickle.loads(pickle.dumps(module))
    elif what == "saved whole":
        torch.save(module, tmp_path / "module.pt")
        module = torch.load(tmp_path / "module.pt", weights_only=False)
    elif what == "moved":
        history = module.history
        history.scale, history.amax = history.scale.clone(), history.amax.clone()  # what another device's were
        history.to(torch.device("cpu", 0))
    elif what == "loaded":
        module.history.load_state_dict(module.history.state_dict())
    elif what == "set":
        module.history.set_slot(1, 2.0, torch.ones(3))
    elif what == "resized":
        module.history.resize(7)
    elif what == "updated":
        reduce_and_update({module.history: DelayedScaling()})
    history, slots = module.history, module.slots
    assert history is not None
    assert slots is not None
    for index, slot in enumerate(slots.values()):
        assert slot.history is history
        before = [tensor._version for other in slots.values() for tensor in (other.scale, other.amax)]
        slot.amax.fill_(index + 1.0)
        slot.scale.fill_(index + 4.0)
        after = [tensor._version for other in slots.values() for tensor in (other.scale, other.amax)]
        assert sum(a != b for a, b in zip(before, after)) == 2
        assert not slot.amax._is_view()
    assert history.amax.tolist() == [1.0, 2.0, 3.0]
    assert history.scale.tolist() == [4.0, 5.0, 6.0]
    history.amax.zero_()
    assert [slot.amax.item() for slot in slots.values()] == [0.0] * 3


def test_interval_recomputes_every_nth_update_while_the_window_rolls_on() -> None:
    recipe, history, scales = DelayedScaling(interval=3, amax_history_len=2), AmaxHistory([("x", Role.INPUT)]), []
    for amax in [8, 4, 2, 1, 1, 1]:
        history.amax.fill_(amax)
        reduce_and_update({history: recipe})
        scales.append(history.scale.item())
    assert scales == [0, 0, 112, 112, 112, 448]  # 0: cast by the tensor's own amax


@pytest.mark.parametrize("unusable", [0.0, INF, NAN])
def test_an_update_that_passes_over_a_tensor_is_none_of_its_interval(unusable: float) -> None:
    """One overflow would else cost the whole interval: its update computes nothing, and the next is not due."""
    recipe, history, scales = DelayedScaling(interval=2, amax_history_len=4), AmaxHistory([("x", Role.INPUT)]), []
    for amax in [4, unusable, 2, unusable, 1, 8]:
        history.amax.fill_(amax)
        reduce_and_update({history: recipe})
        scales.append(history.scale.item())
    assert scales == [0, 0, 112, 112, 112, 56]


def test_the_host_learns_which_scales_are_not_0() -> None:
    """After an update that a tensor took part in, until a state is loaded; a copy asks again."""
    history = AmaxHistory([("a", Role.INPUT), ("b", Role.INPUT)])
    first, second = history.slot(0), history.slot(1)
    assert not first.scale_is_nonzero()
    history.amax[0] = 2.0
    reduce_and_update({history: DelayedScaling(amax_history_len=4)})
    assert (first.scale_is_nonzero(), second.scale_is_nonzero()) == (True, False)
    history.amax[1] = 2.0
    reduce_and_update({history: DelayedScaling(amax_history_len=4)})
    assert second.scale_is_nonzero()
    assert not copy.deepcopy(history).slot(0).scale_is_nonzero()
    state = history.state_dict()
    history.load_state_dict(state)
    assert not first.scale_is_nonzero()
    reduce_and_update({history: DelayedScaling(amax_history_len=4)})
    assert first.scale_is_nonzero()
    history.set_slot(0, 0.0, torch.zeros(1))
    assert not first.scale_is_nonzero()


def test_history_is_cut_or_padded_at_its_old_end() -> None:
    history = AmaxHistory([("x", Role.INPUT)])
    for amax in [1, 2, 3]:
        history.amax.fill_(amax)
        reduce_and_update({history: DelayedScaling(amax_history_len=3)})
    history.resize(5)
    assert history.amax_history.flatten().tolist() == [0, 0, 0, 2, 3]
    history.resize(2)
    assert history.amax_history.flatten().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("amax", "code"),
    [(1.0, 119), (3.0, 120), (448.0, 127), (448.0001, 128), (0.0, 0), (INF, 254), (NAN, 255), (DENORMAL, 0)]
    + [(448 * 2.0**k, 127 + k) for k in (-100, -5, 7, 100)],
)
def test_e8m0_rounds_up(amax: float, code: int) -> None:
    assert e8m0_from_amax(f32(amax), 448.0).item() == code


def test_e8m0_covers_every_bf16_amax() -> None:
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    code = e8m0_from_amax(amax, 448.0).double()
    scale = 2.0 ** (code - 127)
    quotient = amax.double() / 448.0
    assert (quotient <= scale * (1 + 1e-6)).all()
    assert ((quotient > scale / 2 * (1 - 1e-6)) | (code == 0)).all()


def test_e8m0_decode() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_decode(codes).double(), 2.0 ** (codes.double() - 127))
    assert math.isnan(e8m0_decode(torch.tensor([255], dtype=torch.uint8)).item())
