"""Wrong values in YAML: the last line of the parser's error is what the plugin says of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fp8 import FP8Precision
from lightning_fp8.cli.main import main
from lightning_fp8.plugin.hints import complaints, plugins_in
from tests.convert.test_globs import wide

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr(sys, "argv", ["lightning-fp8"])


def written(tmp_path: Path, arguments: dict[str, Any]) -> str:
    config = yaml.safe_load((CONFIGS / "delayed.yaml").read_text())
    config["trainer"] |= {"max_steps": 0, "default_root_dir": str(tmp_path)}
    config["trainer"]["plugins"][0]["init_args"] |= arguments
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    return str(tmp_path / "given.yaml")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no bool": ({"first_last_layers_bf16": "nope"}, "first_last_layers_bf16='nope' must be True or False"),
    "a number for a bool": ({"replace_layers": 0}, "replace_layers=0 must be True or False"),
    "a dtype's short name": (
        {"weights_dtype": "bf17"},
        "weights_dtype='bf17' is not supported; use one of torch.bfloat16",
    ),
    "another dtype": ({"weights_dtype": "torch.float64"}, "weights_dtype=torch.float64 is not supported"),
    "skip of one": ({"skip": "*.head"}, "skip='*.head' must be a sequence of module-name globs"),
    "skip of none": ({"skip": None}, "skip=None must be a sequence of module-name globs"),
    "a negative count": ({"num_layers_at_start_in_bf16": -1}, "num_layers_at_start_in_bf16=-1 must be an integer"),
    "an argument": ({"margin": 1}, "FP8Precision has no argument 'margin'; its arguments are recipe, weights_dtype"),
    "a recipe's name": ({"recipe": "fp8"}, "recipe 'fp8' is unknown; use one of 'delayed'"),
    "no recipe": ({"recipe": None}, "recipe=None is neither a recipe, a name"),
    "a margin": ({"recipe": {"name": "delayed", "margin": 200}}, "margin=200 must be at most 18"),
    "half a margin": ({"recipe": {"name": "delayed", "margin": 0.5}}, "margin=0.5 must be an integer"),
    "a format": (
        {"recipe": {"name": "delayed", "fp8_format": "E5M2"}},
        "fp8_format=E5M2 is not supported by 'delayed'",
    ),
    "a format in lower case": (
        {"recipe": {"name": "delayed", "fp8_format": "hybrid"}},
        "fp8_format='hybrid' is not one of E4M3, E5M2, HYBRID",
    ),
    **{
        f"the class {path}": (
            {"recipe": {"class_path": path}},
            f"class_path='{path}' is not a recipe; use one of lightning_fp8.DelayedScaling, lightning_fp8.Float8",
        )
        for path in ("torch.nn.Linear", "lightning_fp8.DelayedScalin", "recipes.nowhere.DelayedScaling")
    },
    "a class's option": (
        {"recipe": {"class_path": "lightning_fp8.Float8BlockScaling", "init_args": {"power_2_scale": "maybe"}}},
        "power_2_scale='maybe' must be True or False",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", written(tmp_path, arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"first_last_layers_bf16": "false", "replace_layers": "true"}, {"first_last_layers_bf16": False}),
    ({"num_layers_at_end_in_bf16": "2"}, {"num_layers_at_end_in_bf16": 2}),
    ({"weights_dtype": "torch.float32", "compute_dtype": "torch.bfloat16"}, {"compute_dtype": "torch.bfloat16"}),
    ({"weights_dtype": "float32"}, {"weights_dtype": "float32"}),
    ({"weights_dtype": "fp32", "compute_dtype": "bf16"}, {"weights_dtype": "fp32", "compute_dtype": "bf16"}),
    ({"skip": "tests.convert.test_globs.wide"}, {"skip": "tests.convert.test_globs.wide"}),
    ({"skip": ["*.router"]}, {"skip": ["*.router"]}),
    ({"recipe": {"name": "delayed", "margin": "1", "reduce_amax": "false"}}, {"margin": 1, "reduce_amax": False}),
    (
        {"recipe": {"class_path": "lightning_fp8.Float8BlockScaling", "init_args": {"power_2_scale": "false"}}},
        {"name": "blockwise", "power_2_scale": False},
    ),
    ({"recipe": {}}, {"name": "delayed", "margin": 0}),
]


@pytest.mark.parametrize(("given", "expected"), RIGHT, ids=str)
def test_text_that_yaml_means_is_taken(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``"false"`` in quotes is False, and not true because it is text."""
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", written(tmp_path, given), "--print_config"])
    assert stopped.value.code == 0
    (plugin,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["plugins"]
    found = plugin["init_args"] | plugin["init_args"]["recipe"]
    assert {name: found[name] for name in expected} == expected


def test_a_dotted_path_in_yaml_is_the_function_of_that_name() -> None:
    parser = LightningArgumentParser()
    parser.add_class_arguments(FP8Precision, "plugin")
    plugin = parser.instantiate_classes(parser.parse_object({"plugin": {"skip": f"{wide.__module__}.wide"}})).plugin
    assert plugin.policy == FP8Precision(skip=wide).policy
    assert plugin.policy != FP8Precision().policy


def test_errors_of_others_are_left_alone() -> None:
    assert plugins_in("Given value: {'class_path': 'torch.optim.AdamW', 'init_args': {'lr': 'x'}}") == []
    assert (
        plugins_in("Given value: {'class_path': 'lightning_fp8.FP8Precision', 'init_args': {'skip': <object>}}") == []
    )
    assert complaints([{"first_last_layers_bf16": "False", "recipe": {"name": "rowwise"}}]) == ""


@pytest.mark.parametrize("command", ["bench", "kernels build --out nowhere"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--linear 64x64 --tokens -1", "argument --tokens: '-1' is not a number of at least 1"),
        ("--linear 64x64 --tokens 0", "argument --tokens: '0' is not a number of at least 1"),
        ("--linear 64x0", "argument --linear: '64x0' is not in x out features"),
        ("--linear 64x64 --recipe fp8", "argument --recipe: invalid choice: 'fp8'"),
    ],
)
def test_sizes_and_recipes_of_our_own_commands(
    command: str, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
