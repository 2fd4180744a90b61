"""Tensor parallelism and FSDP2 on a mesh of 2 x 2: FSDP2's gather in FP8 changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_ranks
from tests.distributed.scripts.mesh import STEPS
from tests.tiers import thorough


@pytest.mark.parametrize(
    "recipe", [name if name == "delayed" else pytest.param(name, marks=thorough) for name in RECIPES]
)
def test_a_gather_in_fp8_changes_no_bit(recipe: str, tmp_path: Path) -> None:
    reports = run_on_ranks("mesh", str(tmp_path), recipe, folder=tmp_path, ranks=4)
    for report in reports:
        in_fp8, in_bf16 = report["FP8"], report["BF16"]
        for part in ("losses", "weights", "scales", "records"):
            assert in_fp8[part] == in_bf16[part]
        assert in_fp8["records"] == [STEPS] * 12
        # A shard of 32 or 64 rows over two ranks is no multiple of 128, nor always of 32.
        assert in_fp8["in_fp8"] == {"blockwise": 0, "mxfp8": 6}.get(recipe, 12)
        assert in_bf16["in_fp8"] == 0
        assert in_fp8["scales"] == reports[0]["FP8"]["scales"]
