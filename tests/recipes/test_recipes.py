"""make_recipe: every way to say a recipe, and what a wrong one answers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    make_recipe,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Layout, Role

T, R, X, W, M = Layout.TENSOR, Layout.ROW, Layout.BLOCK_1X128, Layout.BLOCK_128X128, Layout.MX_1X32


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_a_mapping_and_the_object_are_the_same(name: str) -> None:
    recipe = RECIPES[name]()
    assert make_recipe(name) == make_recipe({"name": name}) == make_recipe(recipe) == recipe
    assert make_recipe(recipe) is recipe
    assert recipe.name == name


@pytest.mark.parametrize(
    ("name", "formats", "layouts"),
    [
        ("delayed", ["E4M3", "E4M3", "E5M2"], [T, T, T]),
        ("tensorwise", ["E4M3", "E4M3", "E5M2"], [T, T, T]),
        ("rowwise", ["E4M3", "E4M3", "E4M3"], [R, R, R]),
        ("blockwise", ["E4M3", "E4M3", "E4M3"], [X, W, X]),
        ("mxfp8", ["E4M3", "E4M3", "E4M3"], [M, M, M]),
    ],
)
def test_casts_of_the_roles(name: str, formats: list[str], layouts: list[Layout]) -> None:
    casts = [make_recipe(name).cast(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)]
    assert [cast.float8.name for cast in casts] == formats
    assert [cast.layout for cast in casts] == layouts


def test_a_mapping_of_fields() -> None:
    fields = {"margin": 2, "fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "most_recent"}
    expected = DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent")
    assert make_recipe(fields) == make_recipe({"name": "delayed", **fields}) == expected


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({"fp8": "hybrid"}, DelayedScaling()),
        ({"fp8": "e4m3", "fp8_margin": 1, "fp8_interval": 2}, DelayedScaling(1, 2, Format.E4M3)),
        (
            {"fp8": "hybrid", "fp8_amax_history_len": 8, "fp8_amax_compute_algo": "most_recent"},
            DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent"),
        ),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, Float8CurrentScaling(Format.E4M3)),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_margin": 0}, Float8BlockScaling()),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, MXFP8BlockScaling()),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, MXFP8BlockScaling(Format.HYBRID)),
        ({"fp8": "hybrid", "fp8_recipe": "rowwise"}, Float8RowwiseScaling(Format.HYBRID)),
        ({"fp8_recipe": "mxfp8"}, MXFP8BlockScaling()),
        ({"fp8_recipe": "rowwise"}, Float8RowwiseScaling()),
        ({"fp8_format": "mxfp8"}, MXFP8BlockScaling()),
    ],
)
def test_megatrons_keys(keys: dict[str, Any], recipe: Any) -> None:
    assert make_recipe(keys) == recipe


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("delay", ValueError, "'delay'.*'delayed', 'tensorwise', 'rowwise', 'blockwise', 'mxfp8'"),
        ({"name": "nvfp4"}, ValueError, "'nvfp4'.*'delayed'"),
        ({"margn": 1}, ValueError, "'margn'.*'margin', 'interval', 'fp8_format'"),
        ({"name": "rowwise", "margin": 1}, ValueError, "Float8RowwiseScaling.*'margin'.*'fp8_format'"),
        ({"fp8_format": "E3M4"}, ValueError, "'E3M4'.*'HYBRID', 'E4M3'"),
        ({"fp8_format": "E5M2"}, ValueError, "E5M2.*HYBRID, E4M3"),
        ({"fp8": "e5m2"}, ValueError, "'e5m2'.*'hybrid', 'e4m3'"),
        ({"fp8": "hybrid", "fp8_wgrads": False}, ValueError, "'fp8_wgrads'.*'fp8_margin'"),
        ({"margin": -1}, ValueError, "margin=-1.*at least 0"),
        ({"margin": 0.5}, TypeError, "margin=0.5.*integer"),
        ({"amax_history_len": 0}, ValueError, "amax_history_len=0.*at least 1"),
        ({"interval": 0}, ValueError, "interval=0.*at least 1"),
        ({"amax_compute_algo": "mean"}, ValueError, "'mean'.*'max' or 'most_recent'"),
        ({"name": "tensorwise", "amax_epsilon": -1.0}, ValueError, "amax_epsilon=-1.0"),
        ({"name": "blockwise", "fp8_format": "HYBRID"}, ValueError, "HYBRID.*'blockwise'.*E4M3"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, ValueError, "HYBRID.*'blockwise'.*E4M3"),
        (None, TypeError, "None.*'delayed'"),
        (3, TypeError, "3.*mapping"),
    ],
)
def test_errors_list_what_is_valid(recipe: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_recipe(recipe)


def test_recipes_refuse_a_name_that_is_not_theirs_and_a_format_that_is_no_format() -> None:
    with pytest.raises(ValueError, match="'rowwise'.*DelayedScaling.*'delayed'"):
        DelayedScaling(name="rowwise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'HYBRID'.*Format.HYBRID"):
        DelayedScaling(fp8_format="HYBRID")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"class_path": "torch.nn.Linear"}, r"'torch.nn.Linear' is no recipe; use .*'lightning_fp8.DelayedScaling'"),
        ({"class_path": 3}, r"class_path=3 is no recipe; .*, or name instead: 'delayed'"),
        ({"class_path": "lightning_fp8.DelayedScaling", "init_args": {"len": 1}}, "DelayedScaling has no field 'len'"),
        ({"class_path": "lightning_fp8.MXFP8BlockScaling", "len": 1}, "MXFP8BlockScaling has no field 'len'"),
    ],
)
def test_a_class_path_that_lightning_cli_could_not_make(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_recipe(given)
