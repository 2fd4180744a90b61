"""Code in README and docs runs as it is written there: Python by blocks, YAML by the parser, commands by their help."""

from __future__ import annotations

import importlib
import re
import shlex
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_fp8.cli.main import main
from tests.convert.fuse.liger import liger_on_the_cpu
from tests.convert.zoo import stand_in_for_torchvision
from tests.docs.given import ON_ONE_RANK, Data, Model, given
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.tiers import thorough

RUN_ELSEWHERE = {"cuda_graphs.md", "onnx.md"}
"""Pages whose blocks another test runs, and looks at what they leave."""


NOT_EVERYWHERE = {"accelerate", "liger_kernel", "litgpt", "peft", "timm", "trl"}
"""Packages that the extra ``test`` does not install."""
_FP8_QUANTIZER = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"


@pytest.fixture
def few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers train two steps on the CPU where a block says nothing else, and leave their files in a folder."""
    monkeypatch.chdir(tmp_path)
    settings = {"MAX_STEPS": "2", "ACCELERATOR": "cpu", "DEVICES": "1", "LOGGER": "False"}
    for name, value in {**settings, "ENABLE_PROGRESS_BAR": "False", "LIMIT_VAL_BATCHES": "1"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)


@thorough
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in RUN_ELSEWHERE and blocks(page, "python")],
    ids=lambda page: page.name,
)
def test_python_runs(page: Path, few_steps: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Block by block: with names that earlier blocks of the page made, and those that the text takes as given, new."""
    names: dict[str, Any] = {}
    if page.name in ON_ONE_RANK:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for block in blocks(page, "python"):
            if not missing_packages(block):
                names.update(given(page))
                with surroundings(block):
                    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    printed = capsys.readouterr().out
    for block in blocks(page, "text"):
        assert block.text in printed


def surroundings(block: Block) -> AbstractContextManager[Any]:
    """What ``block`` needs to run here, and to leave other packages as they are."""
    if "liger_kernel" in block.text:
        return liger_on_the_cpu(importlib.import_module("transformers.models.llama.modeling_llama"))
    if "from_pretrained(folder" in block.text:  # codes are loaded only where there is a GPU
        return patch(f"{_FP8_QUANTIZER}.validate_environment", lambda *_, **__: None)
    return stand_in_for_torchvision() if "import timm" in block.text else nullcontext()


def missing_packages(block: Block) -> list[str]:
    """Those that ``block`` imports, and not every environment has."""
    imported = re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)
    if "TrainingArguments(" in block.text or "FP8TrainerCallback(" in block.text:
        imported.append("accelerate")  # which the Trainer of transformers needs
    return [name for name in imported if name in NOT_EVERYWHERE and find_spec(name) is None]


@thorough
@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "yaml")], ids=str)
def test_yaml_is_taken_by_a_users_own_cli(block: Block, few_steps: None) -> None:
    Path("my.yaml").write_text(block.text)
    cli = LightningCLI(Model, Data, run=False, save_config_callback=None, args=["--config", "my.yaml"])
    assert set(yaml.safe_load(block.text)) <= {"trainer", "seed_everything"}
    assert type(cli.trainer.precision_plugin).__name__ == "FP8Precision"


def test_the_plugin_is_added_on_a_users_command_line(few_steps: None) -> None:
    (options,) = {tuple(re.findall(r"--trainer\.\w+\+=[\w.]+", page.read_text())) for page in (ROOT / "README.md",)}
    cli = LightningCLI(Model, Data, run=False, save_config_callback=None, args=[*options, "--trainer.max_steps=2"])
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.trainer.precision_plugin.summary.num_fp8 > 0


def commands() -> list[str]:
    """Each ``lightning-fp8`` command in the text and in blocks without a language, once, without its comment."""
    found = {}
    for page in PAGES:
        text = "\n".join(block.text for block in blocks(page, "", "console", "bash", "sh"))
        lines = re.sub(r"\\\n\s*", " ", text)
        found |= dict.fromkeys(re.findall(r"^(?:\w+=\S+ |srun )*(lightning-fp8 [^#\n]+)", lines, re.MULTILINE))
        found |= dict.fromkeys(re.findall(r"`(lightning-fp8 [a-z][^`]*)`", page.read_text()))
    return list(dict.fromkeys(" ".join(command.split()) for command in found))


@thorough
@pytest.mark.parametrize("command", commands())
def test_commands_are_known_with_their_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(command)
    options = [word for word in words if word.startswith("-")]
    subcommands = [word for word in words[: words.index(options[0]) if options else None] if word.isalpha()][:2]
    if subcommands[0] == "doctor":
        subcommands = subcommands[:1]
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([*subcommands, "--help"])
    assert exit.value.code in (0, None)
    said = capsys.readouterr().out
    if subcommands[0] in ("fit", "validate", "test", "predict"):
        options = [each for each in options if not each.startswith("--trainer.strategy.init_args")]
        for config in (words[index + 1] for index, word in enumerate(words) if word == "--config"):
            assert config == "my.yaml" or (ROOT / config).is_file()
    for option in options:
        assert option.partition("=")[0].rstrip("+") in said, option
