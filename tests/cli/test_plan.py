"""``lightning-fp8 plan``: its output, its errors, and the table of the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_fp8.cli.main import main
from lightning_fp8.parallel.costs import SHAPES, Setup, memory, shape_of_config

ROOT = Path(__file__).parents[2]

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    main(["plan", *args, "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_docs_have_the_table_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--table"])
    table = capsys.readouterr().out
    assert table.count("\n") > 8
    assert f"\n\n{table}\n" in (ROOT / "docs" / "scaling.md").read_text()


def test_it_starts_without_torch_and_lightning() -> None:
    code = """
import sys
from lightning_fp8.cli.main import main
main(["plan", "--params", "8b", "--mesh", "8x8"])
assert not {"torch", "lightning"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "8.03 B parameters on 64 cards" in done.stdout
    assert "Computed, not measured" in done.stdout


def test_a_configuration_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    from_file = planned(capsys, "--config", str(tmp_path / "config.json"), "--mesh", "4x2")
    assert from_file == planned(capsys, "--params", "8b", "--mesh", "4x2")
    assert shape_of_config(LLAMA) == SHAPES["8b"]


def test_what_fits_has_no_larger_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (planned(capsys, "--params", "8b", "--mesh", "8x1", "--memory", size) for size in ("40", "80"))
    assert 0 < small["bf16"]["most_layers"] < small["fp8"]["most_layers"] < large["fp8"]["most_layers"]
    most = large["fp8"]["most_layers"]
    for layers, fits in ((most, True), (most + 1, False)):
        shape = shape_of_config({**LLAMA, "num_hidden_layers": layers})
        assert (memory(Setup(shape, "delayed", data=8))["all"] <= 80e9) is fits


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "name a model: --params {1b,3b,8b,70b,405b}, or --config"),
        (["--params", "9b"], "invalid choice: '9b'"),
        (["--params", "8b", "--mesh", "8"], "'8' is not data x tensor ranks, as in 8x8"),
        (["--params", "8b", "--mesh", "8x0"], "'8x0' is not data x tensor ranks"),
        (["--params", "8b", "--mesh", "1x16"], "kv_heads=8 are not divisible by 16 tensor-parallel ranks"),
        (["--params", "8b", "--context-parallel", "3"], "sequence_length=8192 does not divide into two chunks"),
        (
            ["--params", "8b", "--mesh", "1x8", "--sequence-length", "9"],
            "9 tokens are not divisible by 8 tensor-parallel",
        ),
        (["--params", "8b", "--memory", "-1"], "'-1' is not a number of GB above 0"),
        (["--params", "8b", "--bf16-blocks", "-1"], "bf16_blocks=-1 must be at least 0"),
        (["--params", "8b", "--accumulate", "0"], "'0' is not a number of at least 1"),
        (["--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_arguments(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *args])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden_size": None}, "the configuration has no hidden_size; it must be a positive integer"),
        ({"vocab_size": "many"}, "the configuration has vocab_size='many'"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
    ],
)
def test_wrong_configurations(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of_config({**LLAMA, **changed})
