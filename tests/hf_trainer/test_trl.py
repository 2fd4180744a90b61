"""TRL's trainers, full and with adapters of peft: they train in FP8, and resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")
pytest.importorskip("peft", reason="adapters are peft's")
pytest.importorskip("trl", reason="the trainers are TRL's")

from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lightning_fp8 import FP8TrainerCallback, conversion_summary, convert_module
from tests.hf_trainer.small import (
    RECIPES,
    arguments,
    assert_same_scales,
    assert_same_weights,
    llama,
    losses,
    sentences,
    tokenizer,
)
from tests.tiers import thorough

pytestmark = thorough


def trained(
    kind: str, folder: Path, base: Path, recipe: str | None, lora: bool, checkpoint: Path | None = None, **others: Any
) -> Any:
    """SFT or DPO of a Llama that was saved at ``base``, from which DPO loads its reference."""
    model = type(llama()).from_pretrained(base, dtype=torch.float32)
    if recipe is not None:
        convert_module(model, recipe=recipe)
        others["callbacks"] = [FP8TrainerCallback()]
    if lora:
        others["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = {**arguments(folder).to_dict(), "max_length": 24, "eval_strategy": "steps", "eval_steps": 2}
    settings = {name: value for name, value in settings.items() if name in SETTINGS}
    columns = ("prompt", "completion") if kind == "sft" else ("prompt", "chosen", "rejected")
    of, configured = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
    rows = sentences(*columns)
    made = of(
        model,
        args=configured(**settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer(),
        **others,
    )
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return made


SETTINGS = {
    "output_dir", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "bf16",
    "use_cpu", "save_strategy", "save_steps", "logging_steps", "disable_tqdm", "report_to", "seed", "max_length",
    "eval_strategy", "eval_steps",
}  # fmt: skip
"""Those that the configurations of TRL have, too."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl_trains_and_resumes(
    kind: str, lora: bool, recipe: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reference() -> dict[str, Any]:
        """One for each Trainer, which changes it."""
        if kind == "sft" or lora:
            return {}
        return {"ref_model": convert_module(type(llama()).from_pretrained(base, dtype=torch.float32), recipe=recipe)}

    first = trained(kind, tmp_path, base, recipe, lora, **reference())
    said = capsys.readouterr().out
    assert "first step: 7 of" in said
    assert "adapter" in said or not lora
    in_bf16 = trained(kind, tmp_path / "bf16", base, None, lora)
    assert losses(first) == pytest.approx(losses(in_bf16), rel=0.1)
    assert losses(first) != losses(in_bf16)
    if kind == "dpo":
        assert losses(first)[0] == pytest.approx(0.693147, abs=1e-6)  # ln 2: the policy is the reference
    resumed = trained(kind, tmp_path, base, recipe, lora, tmp_path / "checkpoint-2", **reference())
    assert_same_weights(resumed.model, first.model)
    if recipe == "delayed":
        assert_same_scales(resumed.model, first.model)


def test_dpos_own_reference_is_not_converted(base: Path, tmp_path: Path) -> None:
    """The first loss shows it."""
    first = trained("dpo", tmp_path, base, "tensorwise", False)
    assert losses(first)[0] != pytest.approx(0.693147, abs=1e-6)


def test_the_table_of_adapters(base: Path, tmp_path: Path) -> None:
    """peft gives the layers other names after they were converted."""
    first = trained("sft", tmp_path, base, "delayed", True)
    summary = conversion_summary(first.model.base_model.model)
    assert sum(layer.fp8 and bool(layer.ran) for layer in summary.layers) == 7
    assert not [layer for layer in summary.layers if layer.fp8 and layer.ran is False]
