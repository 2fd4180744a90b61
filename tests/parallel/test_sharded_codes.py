"""FSDP2 of layers that multiply by the FP8 codes of a checkpoint, beside one process, on two and four ranks.

Outputs and trained adapters are equal to the bit. Bytes are those that torch.distributed is given, and are computed
here from shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_on_ranks, run_on_two_ranks
from tests.tiers import thorough

WIDTH, HIDDEN, RANK, BLOCKS, STEPS = 256, 512, 4, 2, 2


def run(part: str, folder: Path, *cases: str) -> list[Any]:
    return run_on_two_ranks("sharded_codes", str(folder), part, *cases, folder=folder)


def sent(scales: int, ranks: int = 2, gathers: int = 2) -> int:
    """The bytes that a rank sends: of codes one a weight, of each adapter two a value, and those of ``scales``."""
    of_block = 2 * WIDTH * HIDDEN + 2 * 2 * RANK * (WIDTH + HIDDEN) + scales
    return STEPS * gathers * BLOCKS * of_block // ranks


IN_BLOCKS, IN_ROWS = 4 * 2 * (WIDTH // 128) * (HIDDEN // 128), 4 * (WIDTH + HIDDEN)
SENT = {
    "blocks": sent(IN_BLOCKS),
    "rows": sent(IN_ROWS),
    "one": sent(0),
    "another recipe": sent(IN_BLOCKS),
    "kept": sent(IN_BLOCKS, gathers=1),
    "in float32": sent(IN_BLOCKS),
    "offloaded": sent(IN_BLOCKS),
    "recomputed": sent(IN_BLOCKS),
    "uneven": None,
}


@pytest.mark.parametrize(
    "case", [name if name in ("rows", "kept") else pytest.param(name, marks=thorough) for name in SENT]
)
def test_numbers_are_those_of_one_process_and_a_weight_is_sent_as_a_byte(case: str, tmp_path: Path) -> None:
    for report in run("numbers", tmp_path, case):
        assert report[case]["equal"]
        assert report[case]["kept"]
        assert SENT[case] in (report[case]["sent"], None)


@thorough
def test_replicas_of_shards_and_four_shards(tmp_path: Path) -> None:
    for report in run_on_ranks("sharded_codes", str(tmp_path), "mesh", folder=tmp_path, ranks=4):
        assert report.pop("ranks").endswith("reshard_after_forward is a number of ranks: pass True or False")
        assert all(case["equal"] and case["kept"] for case in report.values())
        assert report["replicas"]["sent"] == sent(IN_ROWS)


def test_experts_are_sent_as_a_byte_for_each_parameter(tmp_path: Path) -> None:
    """Of each mixture ``3 × 128`` rows of WIDTH for each of four experts, in blocks, and a layer in BF16."""
    experts, blocks = 4 * 3 * 128 * WIDTH, 4 * (2 * 2 + 2 * 1)
    for report in run("experts", tmp_path):
        assert report.pop("three").endswith("ignored_params={layer.weight})")
        assert report.pop("held") == BLOCKS * (experts + 4 * blocks) // 2
        for recipe in ("blockwise", "rowwise"):
            of_a_gather = (experts + 4 * blocks + 2 * WIDTH * WIDTH) // 2
            assert report.pop(f"{recipe} sent") == STEPS * 2 * BLOCKS * of_a_gather
        assert [name for name, holds in report.items() if not holds] == []
    assert experts + 4 * blocks < 1.05 * experts


def test_other_orders_and_strategies(tmp_path: Path) -> None:
    for report in run("orders", tmp_path):
        assert "blockwise" in report.pop("table")
        assert all(report.values()), report


@pytest.mark.parametrize("kind", ["rows", *(pytest.param(name, marks=thorough) for name in ("blocks", "E8M0", "one"))])
def test_codes_and_scales_are_saved_and_loaded_to_the_bit(kind: str, tmp_path: Path) -> None:
    for report in run("state", tmp_path, kind):
        assert [name for name, holds in report[kind].items() if not holds] == []


@thorough
def test_in_a_trainer_of_lightning(tmp_path: Path) -> None:
    for report in run("trainer", tmp_path):
        assert report["equal"]
        assert report["sent"] == sent(IN_BLOCKS)


REFUSED = {
    "rows": "up.base.weight [384, 256], codes of a checkpoint: 2 ranks cannot share its 384 rows in multiples of 128, "
    "the rows of a scale: use a mesh whose number of ranks divides 3, or leave the weight whole on every rank, "
    "fully_shard(..., ignored_params={layer.weight})",
    "part of a block": "its 264 rows in multiples of 128, the rows of a scale: leave the weight whole on every rank",
    "dimension": "codes are sharded by rows: Shard(0)",
    "pinned": "pass CPUOffloadPolicy(pin_memory=False)",
    "tensor parallel": "do not distribute FP8 codes of a checkpoint ([512, 256]): use fully_shard",
    "written": "load codes with their scales, or merge adapters in an unsharded model",
    "not converted": "call convert_module before fully_shard",
}


def test_what_cannot_be_sharded_is_said(tmp_path: Path) -> None:
    for report in run("refused", tmp_path):
        assert [name for name, text in REFUSED.items() if text not in report[name]] == []
