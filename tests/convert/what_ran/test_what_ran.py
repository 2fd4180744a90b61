"""Random compositions: what a step multiplied in FP8, seen op by op, is what the table says."""

from __future__ import annotations

import pytest

from tests.convert.what_ran.compositions import SEEDS, composition, wrong_with
from tests.tiers import covering


@pytest.mark.parametrize("seed", covering(range(SEEDS), lambda seed: composition(seed).covers))
def test_the_table_says_what_multiplied(seed: int) -> None:
    made = composition(seed)
    for package in made.needs:
        pytest.importorskip(package)
    problems = wrong_with(made)
    assert not problems, "\n  ".join([f"{made}", *problems])
