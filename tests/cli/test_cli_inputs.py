"""Wrong values in YAML: our command ends with what is said of them, and nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_fp8 import FP8Precision
from lightning_fp8.cli.main import main
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
    "no bool": ({"first_last_layers_bf16": "nope"}, "Expected a <class 'bool'>. Got value: nope"),
    "a number for a bool": ({"replace_layers": 0}, "Expected a <class 'bool'>. Got value: 0"),
    "a dtype's short name": (
        {"weights_dtype": "bf17"},
        "weights_dtype='bf17' is not supported; use one of torch.bfloat16",
    ),
    "another dtype": ({"weights_dtype": "torch.float64"}, "weights_dtype=torch.float64 is not supported"),
    "skip of one": ({"skip": "*.head"}, 'Parser key "skip"'),
    "skip of none": ({"skip": None}, "skip=None must be a sequence of module-name globs"),
    "a negative count": ({"num_layers_at_start_in_bf16": -1}, "num_layers_at_start_in_bf16=-1 must be an integer"),
    "an argument": ({"margin": 1}, "Option 'margin' is not accepted"),
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
            f"class_path='{path}' is no recipe; use one of 'lightning_fp8.DelayedScaling'",
        )
        for path in ("torch.nn.Linear", "lightning_fp8.DelayedScalin", "recipes.nowhere.DelayedScaling")
    },
    "an option of a class": (
        {"recipe": {"class_path": "lightning_fp8.DelayedScaling", "init_args": {"history_len": 16}}},
        "DelayedScaling has no field 'history_len'; its fields are 'fp8_dpa'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", written(tmp_path, arguments)])
    assert stopped.value.code == 2
    assert_short(capsys.readouterr().err, message)


def assert_short(said: str, message: str) -> None:
    """``said`` has a line with ``message``, and is ten lines at most."""
    lines = said.strip().splitlines()
    assert len(lines) <= 10, said
    assert any(message in line for line in lines), said


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


def test_parsers_of_other_programs_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Their errors have the usage, and what the plugin says among the types that were tried."""
    given = ["fit", "--trainer.plugins=lightning_fp8.FP8Precision", "--trainer.max_steps=many"]
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, args=given, save_config_callback=None)
    said = capsys.readouterr().err
    assert "usage:" in said
    assert "trainer.max_steps" in said
    plugin = {"class_path": "lightning_fp8.FP8Precision", "init_args": {"recipe": "fp8"}}
    parser = LightningArgumentParser()
    parser.add_class_arguments(FP8Precision, "plugin")
    with pytest.raises(ValueError, match="recipe 'fp8' is unknown; use one of 'delayed'"):
        parser.instantiate_classes(parser.parse_object({"plugin": plugin["init_args"]}))


@pytest.mark.parametrize("command", ["bench", "kernels build --out nowhere"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--linear 64x64 --tokens -1", "argument --tokens: '-1' is not a number of at least 1"),
        ("--linear 64x64 --tokens 0", "argument --tokens: '0' is not a number of at least 1"),
        ("--linear 64x0", "argument --linear: '64x0' must be in_features x out_features, as in 4096x14336"),
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


HINTS: dict[str, tuple[list[str], str]] = {
    "no model": ([], "name your classes: --model my_module.MyModel --data my_module.MyData"),
    "no file": (["--config", "nowhere.yaml"], "lightning-fp8 config delayed > my.yaml writes one"),
    "a model that is not there": (
        ["--model", "nowhere.Model"],
        "imported from the working directory and from installed",
    ),
    "precision": (["--trainer.precision", "fp8"], "leave precision out, --trainer.plugins+=lightning_fp8.FP8Precision"),
    "a misspelt plugin": (["--trainer.plugins", "lightning_fp8.FP8Precison"], "lightning-fp8 config delayed prints"),
    "an argument that is none": (
        ["--trainer.plugins", '{"class_path": "lightning_fp8.FP8Precision", "init_args": {"exclude": ["head"]}}'],
        "lightning-fp8 config delayed prints the plugin with all its arguments",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_the_parsers_errors_end_with_what_to_do(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, hint = HINTS[case]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert_short(said, hint)
    lines = said.splitlines()
    assert len(lines) == len(set(lines)), said


COMMANDS = (
    "doctor",
    "bench",
    "kernels build",
    "checkpoint inspect",
    "checkpoint convert",
    "report",
    "sensitivity",
    "config",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_argument_and_its_default(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser, *_: parsers.append(parser))
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    (parser,) = parsers
    assert "`" not in parser.format_help()
    for action in parser._actions:
        assert action.help, action.dest
        if action.default not in (None, False, argparse.SUPPRESS):
            default = str(action.default).removesuffix(".0")
            assert f"default: {default}" in action.help % vars(action), action.dest
