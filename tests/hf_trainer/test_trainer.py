"""FP8 in transformers' Trainer: the hand-written loop's numbers, checkpoints, and what is told."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from transformers import AutoModelForCausalLM, Trainer

from lightning_fp8 import (
    FP8TrainerCallback,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
)
from tests.hf_trainer.small import (
    RECIPES,
    STEPS,
    Tokens,
    arguments,
    assert_same_scales,
    assert_same_weights,
    llama,
    losses,
    trainer,
)
from tests.tiers import thorough

CHECKPOINT = "checkpoint-2"

# --- Numbers ----------------------------------------------------------------------------------------------------------


class Recording(Trainer):
    """Keeps its micro-batches."""

    def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), {name: value.clone() for name, value in inputs.items()}]
        return super().training_step(model, inputs, *others, **named)


def by_hand(recipe: str, batches: list[Any], *, recomputes: bool) -> torch.nn.Module:
    """The loop of the Trainer written out, with an ``fp8_autocast`` around each forward."""
    model = llama().train()
    convert_module(model)
    if recomputes:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))
    for step in range(STEPS):
        micro_batches = batches[2 * step : 2 * step + 2]
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)
        for batch in micro_batches:
            with fp8_autocast(fp8_recipe=recipe), torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(each, marks=thorough) for each in RECIPES[1:])])
@pytest.mark.parametrize("recomputes", [True, pytest.param(False, marks=thorough)])
def test_training_equals_the_loop_by_hand(recipe: str, recomputes: bool, tmp_path: Path) -> None:
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    trained = trainer(tmp_path, recipe, of=Recording, gradient_checkpointing=recomputes, **evaluates)
    trained.train()
    expected = by_hand(recipe, trained.seen, recomputes=recomputes)
    assert_same_weights(trained.model, expected)
    if recipe == "delayed":
        assert_same_scales(trained.model, expected)
    in_bf16 = trainer(tmp_path, None, gradient_checkpointing=recomputes, **evaluates)
    in_bf16.train()
    assert losses(in_bf16) != losses(trained)
    assert losses(in_bf16) == pytest.approx(losses(trained), rel=0.05)


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_compiled(recipe: str, tmp_path: Path) -> None:
    eager = trainer(tmp_path, recipe, save_strategy="no")
    eager.train()
    compiled = trainer(tmp_path, recipe, save_strategy="no", torch_compile=True)
    compiled.train()
    assert losses(compiled) == pytest.approx(losses(eager), rel=5e-3)
    if recipe == "delayed":
        state, expected = fp8_state_dict(compiled.model), fp8_state_dict(eager.model)
        assert state["updates"] == expected["updates"] == STEPS
        first, amaxes = state["amax_history"][-STEPS], expected["amax_history"][-STEPS]  # of equal weights
        torch.testing.assert_close(first, amaxes, rtol=0.05, atol=0.0)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Trained four steps, with a checkpoint after two and four."""
    trained = trainer(tmp_path_factory.mktemp("trained"))
    trained.train()
    return trained


@pytest.fixture
def run(trained: Trainer, tmp_path: Path) -> Path:
    """A copy of the ``output_dir`` of ``trained``."""
    return Path(shutil.copytree(trained.args.output_dir, tmp_path / "run"))


def assert_resumes(trained: Trainer, folder: Path, checkpoint: str | bool, **others: Any) -> None:
    resumed = trainer(folder, seed=5, **others)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same_weights(resumed.model, trained.model)
    assert_same_scales(resumed.model, trained.model)


def test_resumes_to_the_bit(trained: Trainer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoint-4")
    assert_resumes(trained, run, True)
    assert "are loaded, after 2 updates" in capsys.readouterr().out


def test_resumes_from_the_folder_of_another_run(trained: Trainer, tmp_path: Path) -> None:
    """Where ``output_dir`` has a checkpoint of the same step, of other scales."""
    other = trainer(tmp_path / "other", seed=3)
    other.train()
    assert_resumes(trained, tmp_path / "other", f"{trained.args.output_dir}/{CHECKPOINT}")


def test_resumes_from_a_folder_that_was_moved(trained: Trainer, run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "kept"
    (run / CHECKPOINT).rename(moved)
    assert_resumes(trained, tmp_path / "new", str(moved), callback=FP8TrainerCallback(moved))
    assert_resumes(trained, tmp_path / "newer", str(moved), resume_from_checkpoint=str(moved))


def test_the_given_folder_of_another_checkpoint_is_told(run: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A script that keeps the argument of its first resumption, and resumes again."""
    for given in (CHECKPOINT, "checkpoint-4"):
        resumed = trainer(run, save_strategy="no", callback=FP8TrainerCallback(run / given))
        resumed.train(resume_from_checkpoint=str(run / CHECKPOINT))
    told = [str(each.message) for each in recwarn if "is not the FP8 state" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith(f"{run / 'checkpoint-4' / 'fp8_state.pt'} is not the FP8 state that was saved with")


def test_two_callbacks_resume(trained: Trainer, tmp_path: Path) -> None:
    checkpoint: Any = None
    for seed in (0, 5):
        several = trainer(tmp_path, seed=seed)
        several.add_callback(FP8TrainerCallback)
        several.train(resume_from_checkpoint=checkpoint)
        assert_same_weights(several.model, trained.model)
        assert_same_scales(several.model, trained.model)
        checkpoint = str(tmp_path / CHECKPOINT)


class Searching(Trainer):
    """Saves as a search of hyperparameters does."""

    def _get_output_dir(self, trial: Any) -> str:
        return f"{self.args.output_dir}/run-0"


def test_a_search_leaves_the_checkpoints_of_a_training(
    trained: Trainer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.hp_params", dict)  # of a backend that need not be installed
    searching = trainer(run, seed=3, of=Searching)
    searching.train(trial={})
    assert (run / "run-0" / CHECKPOINT).is_dir()
    for step in ("checkpoint-2", "checkpoint-4"):
        of_training = Path(trained.args.output_dir, step, "fp8_state.pt").read_bytes()
        assert (run / step / "fp8_state.pt").read_bytes() == of_training


@thorough
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_other_recipes_resume(recipe: str, tmp_path: Path) -> None:
    trained = trainer(tmp_path, recipe)
    trained.train()
    resumed = trainer(tmp_path, recipe, seed=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / CHECKPOINT))
    assert_same_weights(resumed.model, trained.model)


def test_a_checkpoint_without_scales_empties_them(run: Path, tmp_path: Path) -> None:
    """Those of the training before are not kept; and the Trainer saves again."""
    (run / CHECKPOINT / "fp8_state.pt").unlink()
    state = json.loads((run / CHECKPOINT / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["FP8TrainerCallback"]
    (run / CHECKPOINT / "trainer_state.json").write_text(json.dumps(state))
    resumed = trainer(tmp_path)
    resumed.train()
    with pytest.warns(
        UserWarning, match="training resumes, but its fp8_state.pt was not found, or .*start empty"
    ) as told:
        resumed.train(resume_from_checkpoint=str(run / CHECKPOINT))
    assert sum("fp8_state.pt" in str(each.message) for each in told) == 1
    assert fp8_state_dict(resumed.model)["updates"] == 2
    assert torch.load(tmp_path / "checkpoint-4" / "fp8_state.pt")["updates"] == 2


def test_a_file_of_other_scales_is_told(run: Path, tmp_path: Path) -> None:
    """Its hash is not that of the checkpoint; the message does not say that it is missing."""
    state = json.loads((run / CHECKPOINT / "trainer_state.json").read_text())
    state["stateful_callbacks"]["FP8TrainerCallback"]["attributes"]["saved"]["sha256"] = "0" * 64
    (run / CHECKPOINT / "trainer_state.json").write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="has another hash than in trainer_state.json"):
        trainer(tmp_path).train(resume_from_checkpoint=str(run / CHECKPOINT))


def test_a_folder_to_resume_from_is_checked_at_once(tmp_path: Path) -> None:
    wrong = re.escape(f"resume_from_checkpoint={str(tmp_path)!r} must be a folder with fp8_state.pt")
    with pytest.raises(ValueError, match=wrong):
        FP8TrainerCallback(tmp_path)
    for value in (nn.Linear(4, 4), True):
        with pytest.raises(TypeError, match=f"is of type {type(value).__name__}, .*Trainer\\(model="):
            FP8TrainerCallback(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no argument 'recipe'; its arguments are 'resume_from_checkpoint'"):
        FP8TrainerCallback(recipe="delayed")  # type: ignore[call-arg]


class Opened:
    def __reduce__(self) -> Any:
        return os.mkdir, ("opened",)


NO_STATES = {"empty": b"", "cut": b"PK\x03\x04 cut", "code": pickle.dumps(Opened()), "other": None}


@pytest.mark.parametrize("content", NO_STATES.values(), ids=NO_STATES)
def test_a_file_that_is_no_state_is_refused(
    content: bytes | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / CHECKPOINT / "fp8_state.pt"
    if content is None:
        torch.save({**torch.load(path), "names": ["elsewhere.input"]}, path)
    else:
        path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    resumed = trainer(run, callback=FP8TrainerCallback(run / CHECKPOINT))
    with pytest.raises(ValueError, match=rf"{path} cannot be loaded as FP8 state: .*Remove the file"):
        resumed.train(resume_from_checkpoint=str(run / CHECKPOINT))
    assert not Path("opened").exists()


def test_the_best_model_has_its_scales(tmp_path: Path) -> None:
    """The first: what is learned of random tokens is no use for others."""
    trained = trainer(tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    trained.train()
    assert trained.state.best_model_checkpoint == str(tmp_path / CHECKPOINT)
    expected = convert_module(llama(7))
    load_fp8_state_dict(expected, torch.load(tmp_path / CHECKPOINT / "fp8_state.pt", weights_only=True))
    expected.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path / CHECKPOINT).state_dict())
    assert_same_scales(trained.model, expected)
    assert_same_weights(trained.model, expected)
    assert fp8_state_dict(trained.model)["updates"] == 2


def test_checkpoints_are_kept_and_removed_as_before(tmp_path: Path) -> None:
    trained = trainer(tmp_path, save_steps=1, save_total_limit=2, save_only_model=True)
    trained.train()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    state = torch.load(tmp_path / "checkpoint-4" / "fp8_state.pt", weights_only=True)
    assert state["updates"] == STEPS
    assert not list(tmp_path.rglob(".*"))


def test_a_saved_model_is_one_without_fp8(trained: Trainer, tmp_path: Path) -> None:
    trained.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert_same_weights(loaded, trained.model)
    assert loaded.state_dict().keys() == llama().state_dict().keys()


def test_a_callback_that_is_restored_saves(trained: Trainer, tmp_path: Path) -> None:
    """``restore_callback_states_from_checkpoint`` replaces it by a new one."""
    checkpoint = f"{trained.args.output_dir}/{CHECKPOINT}"
    assert_resumes(trained, tmp_path, checkpoint, restore_callback_states_from_checkpoint=True)
    assert (tmp_path / "checkpoint-4" / "fp8_state.pt").is_file()


# --- What is told -----------------------------------------------------------------------------------------------------


def test_the_table_is_told_once_and_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = trainer(tmp_path, save_strategy="no")
    trained.train()
    said = capsys.readouterr().out
    assert said.count("model.layers.1.mlp.{gate,up}_proj") == 1
    assert said.count("first step: 7 of 22 linear layers ran in FP8") == 1
    trained.train()
    assert "linear layers" not in capsys.readouterr().out


def test_without_a_recipe_the_line_is_named(tmp_path: Path) -> None:
    wrong = Trainer(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[FP8TrainerCallback()])
    with pytest.raises(ValueError, match=r"convert_module\(model, recipe='delayed'\)"):
        wrong.train()


def test_a_callback_that_is_kept_keeps_neither_the_model_nor_what_the_caller_had(tmp_path: Path) -> None:
    """``kept`` is a local variable of a function that trains, and is deleted before the function returns."""
    callback = FP8TrainerCallback()
    trained = trainer(tmp_path, callback=callback, max_steps=1, save_strategy="no")
    kept = torch.zeros(1)
    local, model = weakref.ref(kept), weakref.ref(trained.model)
    trained.train()
    del trained, kept
    gc.collect()
    assert callback is not None
    assert (local(), model()) == (None, None)


def test_two_models_with_recipes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one Trainer's model: both are told, saved and loaded."""

    def halves() -> Any:
        model = llama()
        for index, recipe in ((1, "delayed"), (2, "rowwise")):
            convert_module(model.model.layers[index], recipe=recipe, first_last_layers_bf16=False)
        return model

    def trained(checkpoint: str | None) -> Any:
        given: Any = {"train_dataset": Tokens(), "callbacks": [FP8TrainerCallback()]}
        made = Trainer(halves(), arguments(tmp_path), **given)
        made.train(resume_from_checkpoint=checkpoint)
        return made.model

    first = trained(None)
    assert capsys.readouterr().out.count("first step: 7 of 7 linear layers ran in FP8") == 2
    resumed = trained(str(tmp_path / CHECKPOINT))
    assert_same_weights(resumed, first)
    assert_same_scales(resumed, first)
