"""Ranks that do not run the same, or do not hold the same: none waits for ever for another, and errors say why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("unlike")
    return run_on_two_ranks("unlike", str(folder), folder=folder)


def test_a_region_on_one_rank_alone_inside_a_recipe_without_state(ranks: list[Any]) -> None:
    first, second = (rank["plugin"] for rank in ranks)
    assert first == {"scale": [448 / 2], "told": 1}
    assert second == {"scale": [0], "told": 0}


def test_regions_of_unlike_recipes_share_one_collective(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["plain"] == [[448 / 8], [448 / 8]]


def test_unlike_models_are_named(ranks: list[Any]) -> None:
    first, second = (rank["errors"] for rank in ranks)
    assert first == second
    assert "3 on ranks [0]; 3 on ranks [1]; number 0 is 'first.input' on ranks [0] and 'second." in first["names"]
    assert "3 on ranks [0]; 6 on ranks [1]; number 3 is none on ranks [0] and 'second." in first["lengths"]
    assert "fp8_group" in first["lengths"]
    assert not first["alike"]
