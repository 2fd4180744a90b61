"""Transformer Engine's own tests against our modules, as README.md of this folder has it.

Each test of it passes, or is refused with a sentence of ``docs/transformer_engine_calls.md``, or is about internals
that do not exist here, or is one of :data:`EXPLAINED`. They run in a process of their own, whose imports :mod:`shim`
answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKOUT = os.environ.get("LIGHTNING_FP8_TE_CHECKOUT", "")
ROWS = {"numerics": 16, "sanity": 60, "recipe": 200, "deferred_init": 20}
"""Rows of each test function; a suite then takes less than 5 minutes."""

EXPLAINED = {
    **dict.fromkeys(
        (
            *("test_checkpoint_with_mixed_fp8_regions_saves_only_fp8_recompute_state", "test_dynamic_recipe_update"),
            *("test_fp8_scale_update_with_linear_module", "test_quantizer_update"),
            *("test_gpt_full_activation_recompute_with_inner_autocast", "test_scale_update_numeric_scenarios"),
            *("test_check_for_weight_tensor_and_recipe_correspondence", "test_quantizer_update_on_recipe_change"),
            "test_checkpoint_extra_state_policy_classifier_map_covers_all_recipes",
            "test_quantized_model_init_high_precision_init_val",
        ),
        "reads internals: fp8_meta, quantizers, what they stash and warn of, or classes of FP8 weights",
    ),
    "test_gpt_fp8_parameters": (
        "compares FP8 weights, whose scale is a power of two under delayed and tensorwise, with casts of BF16 weights "
        "by their amax: roundings differ, and errors have the same size (tests/parallel/test_fp8_weights.py)"
    ),
    "test_gpt_cuda_graph": "needs streams and graphs of a GPU",
}
"""Tests that neither pass nor are refused by a sentence, and why."""


@pytest.mark.skipif(not CHECKOUT, reason="LIGHTNING_FP8_TE_CHECKOUT names no checkout of NVIDIA/TransformerEngine")
@pytest.mark.parametrize("suite", ROWS)
def test_a_suite_of_transformer_engine(suite: str, tmp_path: Path) -> None:
    tests, report = Path(CHECKOUT) / "tests/pytorch", tmp_path / "report.json"
    shim = ("-p", "tests.peers.transformer_engine.shim", "-p", "no:cacheprovider", "-c", os.devnull, "-n", "0")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LIGHTNING_FP8_TE_REPORT": str(report),
        "LIGHTNING_FP8_TE_ROWS": os.environ.get("LIGHTNING_FP8_TE_ROWS", str(ROWS[suite])),
    }
    command = [sys.executable, "-m", "pytest", "-q", *shim, "--rootdir", str(tests), str(tests / f"test_{suite}.py")]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert report.exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
    outcomes: dict[str, tuple[str, str]] = json.loads(report.read_text())["outcomes"]
    assert outcomes, ran.stdout[-3000:]
    print(suite, Counter(kind for kind, _ in outcomes.values()))
    failed = {
        test: text
        for test, (kind, text) in outcomes.items()
        if kind == "failed" and test.rpartition("::")[2].partition("[")[0] not in EXPLAINED
    }
    assert not failed, json.dumps(failed, indent=1)
