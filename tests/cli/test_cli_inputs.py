"""Wrong values in YAML: a program ends with what the plugin says of them, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.fabric.plugins.precision.precision import Precision as FabricPrecision
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_fp8 import FP8FabricPrecision, FP8Precision
from lightning_fp8.cli.main import main
from lightning_fp8.plugin.hints import complaints, plugins_in_message
from tests.convert.test_globs import wide

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


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
    "a recipe's argument in Transformer Engine": (
        {"recipe": {"name": "blockwise", "x_block_scaling_dim": 2}},
        "x_block_scaling_dim=2 is not supported by Float8BlockScaling: blocks are 1 × 128",
    ),
    "no recipe": ({"recipe": None}, "recipe=None is neither a recipe, a name"),
    "a recipe's field": (
        {"recipe": {"name": "delayed", "history_len": 16}},
        "DelayedScaling has no field 'history_len'; its fields are 'fp8_dpa'",
    ),
    "a margin": ({"recipe": {"name": "delayed", "margin": 200}}, "margin=200 must be at most 18"),
    "half a margin": ({"recipe": {"name": "delayed", "margin": 0.5}}, "margin=0.5 must be an integer"),
    "a format": (
        {"recipe": {"name": "delayed", "fp8_format": "E5M2"}},
        "fp8_format=E5M2 is not supported by 'delayed'",
    ),
    "a format's name": (
        {"recipe": {"name": "delayed", "fp8_format": "hybird"}},
        "fp8_format='hybird' is unknown; use one of 'HYBRID', 'E4M3'",
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
    assert_short(capsys.readouterr().err, message)


@pytest.mark.parametrize("case", ["a recipe's name", "a recipe's field", "an argument", "another dtype", "a margin"])
def test_a_wrong_value_in_a_command_line_of_the_user(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[case]
    plugin = {"class_path": "lightning_fp8.FP8Precision", "init_args": arguments}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"trainer": {"plugins": [plugin], "logger": False}}))
    with pytest.raises(SystemExit) as stopped:
        LightningCLI(BoringModel, args=["fit", "--config", str(tmp_path / "my.yaml")], save_config_callback=None)
    assert stopped.value.code == 2
    assert_short(capsys.readouterr().err, message)


def test_a_wrong_value_among_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trainer.plugins=lightning_fp8.FP8Precision", "--trainer.plugins.recipe=float8"]
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, args=["fit", *given], save_config_callback=None)
    assert_short(capsys.readouterr().err, "FP8Precision: recipe 'float8' is unknown; use one of 'delayed'")


@pytest.mark.parametrize("where", ["plugins", "callbacks"])
def test_a_misspelled_class(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"class_path": "lightning_fp8.FP8Precison" if where == "plugins" else "lightning_fp8.FP8Moniter"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"trainer": {where: [given], "logger": False}}))
    with pytest.raises(SystemExit) as stopped:
        LightningCLI(BoringModel, args=["fit", "--config", str(tmp_path / "my.yaml")], save_config_callback=None)
    assert stopped.value.code == 2
    nearest = "lightning_fp8.FP8Precision" if where == "plugins" else "lightning_fp8.FP8Monitor"
    assert_short(capsys.readouterr().err, f"there is no {given['class_path']}; did you mean {nearest}")


def test_a_misspelled_class_in_a_program_that_does_not_import_this_package(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("trainer: {plugins: [{class_path: lightning_fp8.FP8Precison}], logger: false}")
    program = "from lightning.pytorch import cli, demos; cli.LightningCLI(demos.boring_classes.BoringModel)"
    command = [sys.executable, "-c", program, "fit", "--config", str(tmp_path / "my.yaml")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 2
    assert_short(ran.stderr, "there is no lightning_fp8.FP8Precison; did you mean lightning_fp8.FP8Precision")


class MyPrecision(FP8Precision):
    """A user's own."""


@pytest.mark.parametrize("cls", [FP8FabricPrecision, MyPrecision])
def test_other_parsers_and_plugins(cls: type[FP8FabricPrecision], capsys: pytest.CaptureFixture[str]) -> None:
    """A program that takes a plugin of Fabric, and one that handles a parser's errors itself."""
    path = f"{cls.__module__}.{cls.__name__}"
    for exits in (True, False):
        parser = jsonargparse.ArgumentParser(exit_on_error=exits)
        parser.add_argument("--plugin", type=FabricPrecision)
        wrong = {"class_path": path, "init_args": {"recipes": "delayed"}}
        with pytest.raises(SystemExit if exits else jsonargparse.ArgumentError) as stopped:
            parser.parse_object({"plugin": wrong})
        said = capsys.readouterr().err if exits else str(stopped.value)
        assert f"{cls.__name__} has no argument 'recipes'; its arguments are recipe, weights_dtype" in said


def assert_short(said: str, message: str) -> None:
    """``said`` ends with the line of ``message``, and is ten lines at most."""
    lines = said.strip().splitlines()
    assert len(lines) <= 10, said
    assert lines[-1].startswith("error: ")
    assert message in lines[-1]


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
    ({"recipe": {"name": "delayed", "fp8_format": "hybrid"}}, {"fp8_format": "hybrid"}),
    ({"recipe": {"fp8": "e4m3", "fp8_margin": 1}}, {"fp8_margin": 1}),  # Megatron-LM's keys
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


def test_errors_of_others_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value of the Trainer beside a plugin that is right is reported as jsonargparse does."""
    assert not [*plugins_in_message("Given value: {'class_path': 'torch.optim.AdamW', 'init_args': {'lr': 'x'}}")]
    assert not [
        *plugins_in_message(
            "Given value: {'class_path': 'lightning_fp8.FP8Precision', 'init_args': {'skip': <object>}}"
        )
    ]
    assert complaints([(FP8Precision, {"first_last_layers_bf16": "False", "recipe": {"name": "rowwise"}})]) == ""
    with pytest.raises(SystemExit):
        LightningCLI(
            BoringModel,
            args=["fit", "--trainer.plugins=lightning_fp8.FP8Precision", "--trainer.max_steps=many"],
            save_config_callback=None,
        )
    said = capsys.readouterr().err
    assert "usage:" in said
    assert "trainer.max_steps" in said
    assert "FP8Precision" not in said


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
