"""What is written for Transformer Engine is what that version reads, and comes back exactly."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_fp8 as fp8
from lightning_fp8.delayed.update import reduce_and_update
from tests.checkpoint.te_models import blocks
from tests.checkpoint.te_writer import VERSIONS
from tests.small import update_all_scales
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
RECIPE = fp8.DelayedScaling(margin=1, fp8_format=fp8.Format.E4M3, amax_history_len=6)


def trained(steps: int = 4) -> nn.Sequential:
    """Linears with amaxes of several steps; attention's rows, which no module feeds yet, are filled by hand."""
    torch.manual_seed(0)
    model = blocks()
    for _ in range(steps):
        for block in model:
            block.self_attention.core_attention.history.amax.uniform_(1, 2)
        with fp8.fp8_autocast(fp8_recipe=RECIPE):
            y = model(torch.randn(8, 16))
        y.square().sum().backward()
        update_all_scales(RECIPE)
    return model


@pytest.mark.parametrize("steps", [1, 4, 9], ids="{} steps of a window of 6".format)
@pytest.mark.parametrize("version", [*VERSIONS, "0.12", "2.4", "2.16.0"])
def test_round_trip(version: str, steps: int) -> None:
    model = trained(steps)
    before = fp8.fp8_state_dict(model)
    assert (before["scale"] > 0).all()
    again = blocks()
    fp8.load_te_state_dict(again, fp8.export_te_state_dict(model, version, RECIPE))
    after = fp8.fp8_state_dict(again)
    assert after["names"] == before["names"]
    holds = torch.tensor(["core_attention" not in name or version not in ("0.12", "1.5") for name in before["names"]])
    assert torch.equal(after["scale"], before["scale"] * holds)
    assert torch.equal(after["amax_history"], before["amax_history"] * holds)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_the_next_step_is_bit_for_bit_the_same() -> None:
    model = trained(steps=9)  # the window is full and has rolled over
    again = blocks()
    fp8.load_te_state_dict(again, fp8.export_te_state_dict(model, "2.4", RECIPE))
    scales = []
    for one in (model, again):
        for module in (one[0].fc, one[1].fc):
            module.history.amax.fill_(1.5)
            reduce_and_update({module.history: RECIPE})
        scales.append(fp8.fp8_state_dict(one)["scale"])
    assert torch.equal(*scales)


READER = """
import json, pickle, sys
from tests.checkpoint.te_writer import fake_recipes
recipes = fake_recipes()
state = pickle.loads(open(sys.argv[1], "rb").read())
recipe = state["recipe"]
assert type(recipe) is recipes.DelayedScaling, recipe
assert recipe.fp8_format is recipes.Format.E4M3, recipe
print(json.dumps([sorted(state), recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo,
                  state["scale_fwd"].tolist(), list(state["amax_history_bwd"].shape)]))
"""


@thorough
def test_a_2_x_state_unpickles_into_the_recipe_class_it_names(tmp_path: Path) -> None:
    import json

    model = trained()
    value = fp8.export_te_state_dict(model, "2.0", RECIPE)["0.fc._extra_state"]
    (tmp_path / "state.pkl").write_bytes(bytes(value.tolist()))
    output = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "state.pkl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    keys, margin, length, algorithm, scale, shape = json.loads(output)
    assert keys == sorted(
        ["recipe", "scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd", "extra_fp8_variables"]
    )
    assert (margin, length, algorithm, shape) == (1, 6, "max", [6, 2])
    fc = model[0].fc.history.scale.tolist()
    assert scale == [fc[0], fc[1], 1.0]


@pytest.mark.parametrize("version", ["1.5", "1.7", "1.13"])
def test_a_1_x_state_is_a_plain_torch_save(version: str) -> None:
    exported = fp8.export_te_state_dict(trained(), version, RECIPE)
    value = exported["1.fc._extra_state"]
    assert isinstance(value, io.BytesIO)
    state: dict[str, Any] = torch.load(value, weights_only=True)
    assert torch.equal(state["scale_inv_fwd"], 1 / state["scale_fwd"])
    assert state["amax_history_fwd"].shape == (6, 3)
    assert not state["amax_history_fwd"][0].any()  # where it collects the next amax
    assert state["extra_fp8_variables"]["fp8_max_bwd"] == 448
    assert ("global_fp8_buffer" in state) == (version == "1.5")
    attention = {key for key in exported if "attention._extra_state" in key}
    prefix = "0.self_attention.core_attention"
    expected = {"1.5": None, "1.7": f"{prefix}.fused_attention._extra_state", "1.13": f"{prefix}._extra_state"}[version]
    assert (expected in attention) if expected else not attention


@pytest.mark.parametrize(("version", "size"), [("1.13", None), ("2.0", len(pickle.dumps(None))), ("2.4", 0)])
def test_modules_without_fp8_state(version: str, size: int | None) -> None:
    model = nn.Sequential(fp8.Linear(16, 16), fp8.RMSNorm(16), fp8.Linear(16, 16), fp8.Linear(16, 16))
    fp8.convert_module(model)
    exported = fp8.export_te_state_dict(model, version)
    value = exported["0._extra_state"]  # the first layer runs in BF16
    assert (torch.load(value, weights_only=True) is None) if size is None else value.numel() == size
    assert ("1._extra_state" in exported) == (version != "1.13")
    fp8.load_te_state_dict(model, exported)


@pytest.mark.parametrize(("version", "message"), [("two", "not a Transformer Engine version"), ("0.11", "too old")])
def test_versions_that_cannot_be_written(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8.export_te_state_dict(blocks(), version)
