"""Names of other projects' FP8 here: what works under them, and what is said of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lightning_fp8
from lightning_fp8.fp8_region import current_context


def _output(region: object) -> Tensor:
    torch.manual_seed(0)
    layer = lightning_fp8.Linear(32, 16)
    with region:  # type: ignore[attr-defined]
        return layer(torch.randn(4, 32))  # type: ignore[no-any-return]


def test_autocast_is_fp8_autocast_with_the_newer_names_of_its_arguments() -> None:
    former = _output(lightning_fp8.fp8_autocast(enabled=True, fp8_recipe="rowwise", fp8_group=None))
    newer = _output(lightning_fp8.autocast(enabled=True, recipe="rowwise", amax_reduction_group=None))
    high_precision = _output(lightning_fp8.autocast(enabled=False))
    assert torch.equal(former, newer)
    assert not torch.equal(newer, high_precision)


def test_autocast_decorates_a_function() -> None:
    @lightning_fp8.autocast(recipe="mxfp8")
    def recipe_inside() -> str:
        return current_context().recipe.name

    assert recipe_inside() == "mxfp8"
    assert not current_context().enabled


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enabled": "rowwise"}, r"a recipe is autocast\(recipe='rowwise'\)"),
        ({"enabled": print}, r"write @autocast\(\)"),
        ({"amax_reduction_group": 3}, "amax_reduction_group=3 must be a torch.distributed.ProcessGroup"),
        ({"recipe": "float8"}, "recipe 'float8' is unknown"),
    ],
)
def test_autocast_names_its_own_arguments_in_errors(arguments: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        lightning_fp8.autocast(**arguments)  # type: ignore[arg-type]
