"""``lightning-fp8``: recipes in YAML, their printed fields, and what a wrong one says."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_fp8
from lightning_fp8.cli.main import COMMANDS, main
from lightning_fp8.delayed import update
from lightning_fp8.delayed.update import update as update_histories
from lightning_fp8.monitor.record import Record
from lightning_fp8.numerics.recipes import RECIPES
from tests.tiers import thorough

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, list[dict[str, dict]]]]:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *args, "--print_config"])
    assert stopped.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments)
    printed = capsys.readouterr()
    named = re.findall(r"^  (\w+(?:, \w+)*)", printed.out, re.MULTILINE)
    assert {each for line in named for each in line.split(", ")} == {"fit", "validate", "test", "predict", *COMMANDS}
    assert printed.err == ""


def test_a_command_that_is_none_is_answered_by_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["docter"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(command in said for command in ("fit", *COMMANDS))
    assert said.endswith("error: there is no command 'docter'\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: lightning-fp8 {command} " in capsys.readouterr().out


def test_the_package_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "lightning_fp8", "--version"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"lightning-fp8 {lightning_fp8.__version__}\n", "")


def test_the_command_line_is_read_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(CONFIGS / "delayed.yaml")
    monkeypatch.setattr(sys, "argv", ["lightning-fp8", "fit", "--config", config, "--print_config"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(SystemExit) as stopped:
            main()
    assert stopped.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["plugins"]


def test_there_is_one_config_per_recipe_one_of_a_mesh_and_one_of_a_llama() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*RECIPES, "model_parallel", "llama"}


@pytest.mark.parametrize("name", RECIPES)
def test_print_config_shows_every_field_of_the_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = printed_config(capsys, "--config", str(CONFIGS / f"{name}.yaml"))
    (plugin,) = config["trainer"]["plugins"]
    recipe = plugin["init_args"]["recipe"]
    assert recipe["name"] == name
    assert set(recipe) == {field.name for field in dataclasses.fields(RECIPES[name])}


def test_a_recipe_of_a_few_fields_is_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((CONFIGS / "delayed.yaml").read_text())
    config["trainer"]["plugins"][0]["init_args"]["recipe"] = {"name": "delayed", "margin": 2}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(config))
    printed = printed_config(capsys, "--config", str(tmp_path / "short.yaml"))
    recipe = printed["trainer"]["plugins"][0]["init_args"]["recipe"]
    assert (recipe["margin"], recipe["amax_history_len"], recipe["fp8_format"]) == (2, 1024, "HYBRID")


@pytest.mark.parametrize(
    ("name", "field"), [("delayed", "margn"), ("tensorwise", "margin"), ("blockwise", "amax_history_len")]
)
def test_a_wrong_field_is_refused_with_the_valid_ones(
    name: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    config["trainer"]["plugins"][0]["init_args"]["recipe"][field] = 0
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(tmp_path / "wrong.yaml")])
    assert stopped.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{RECIPES[name].__name__} has no field '{field}'" in last_line
    assert all(valid.name in last_line for valid in dataclasses.fields(RECIPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_the_printed_configuration_is_the_plugin_at_its_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a command line of the user, and in a folder that is none of ours."""
    monkeypatch.chdir(tmp_path)
    main(["config", name])
    text = capsys.readouterr().out
    (tmp_path / "my.yaml").write_text(text)
    (given,) = yaml.safe_load(text)["trainer"]["plugins"]
    assert set(given["init_args"]) == set(inspect.signature(lightning_fp8.FP8Precision).parameters)
    assert set(given["init_args"]["recipe"]) == {field.name for field in dataclasses.fields(RECIPES[name])}
    cli = LightningCLI(BoringModel, args=["--config", "my.yaml", "--trainer.logger=false"], run=False)
    assert repr(cli.trainer.precision_plugin) == repr(lightning_fp8.FP8Precision(name))


def test_fit_without_the_plugin_warns(tmp_path: Path) -> None:
    model = ["--model", "examples.train_gpt.GPT", "--data", "examples.train_gpt.StdlibBytes", "--data.length", "16"]
    small = ["--model.width", "32", "--model.depth", "1", "--model.heads", "2"]
    quick = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.logger", "false"]
    quick += ["--trainer.default_root_dir", str(tmp_path), "--trainer.enable_checkpointing", "false"]
    with pytest.warns(UserWarning, match=re.escape("--trainer.plugins+=lightning_fp8.FP8Precision")):
        main(["fit", *model, *small, *quick])


def test_fit_trains_from_yaml(tmp_path: Path) -> None:
    """What ran is saved beside the logs, and not over a file of the user's."""
    small = ["--model.width", "32", "--model.depth", "3", "--model.heads", "2", "--data.length", "16"]
    quick = ["--trainer.max_steps", "3", "--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"]
    quick += ["--trainer.default_root_dir", str(tmp_path), "--config", str(tmp_path / "config.yaml")]
    (tmp_path / "config.yaml").write_text("seed_everything: 1  # mine\n")
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "update", lambda of: (seen.append(1), update_histories(of))[1])
        main(["fit", "--config", str(CONFIGS / "delayed.yaml"), *small, *quick])
    assert len(seen) == 3
    assert (tmp_path / "config.yaml").read_text() == "seed_everything: 1  # mine\n"
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "logs")]
    main(["fit", "--config", str(CONFIGS / "delayed.yaml"), *small, *quick, *logger])
    (saved,) = (tmp_path / "logs").rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["init_args"]["width"] == 32


def test_the_config_of_a_llama_has_as_many_parameters_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / "llama.yaml"
    model = printed_config(capsys, "--config", str(path))["model"]["init_args"]
    width, depth = model["width"], model["depth"]
    parameters = depth * (4 * width**2 + 3 * width * 4 * width) + 2 * 256 * width
    billions, gigabytes = re.search(
        r"with ([\d.]+) billion parameters: on one GPU, (\d+) GB", path.read_text()
    ).groups()
    assert (billions, gigabytes) == (f"{parameters / 1e9:.1f}", f"{16 * parameters / 1e9:.0f}")


@thorough
def test_a_llama_trains_by_the_command_in_its_config(tmp_path: Path) -> None:
    text = (CONFIGS / "llama.yaml").read_text().replace("\\\n#", "")
    command = re.search(r"# A small one.*\n# *lightning-fp8 (.*)", text)[1]
    quick = ["--trainer.max_steps", "2", "--trainer.default_root_dir", str(tmp_path), "--data.length", "16"]
    main([*shlex.split(command), *quick, "--trainer.enable_progress_bar", "false"])
    run = tmp_path / "lightning_logs" / "version_0"
    record = Record.load(run / "fp8_monitor.npz")
    assert record.intervals[-1].last_step == 2
    assert record.verdict.startswith("14 of 29 linear layers ran in FP8")
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)
    assert state["state_dict"]["llama.model.layers.1.self_attn.q_proj.weight"].shape == (128, 128)
