"""FP8TrainerCallback: delayed scales beside the checkpoints of transformers' Trainer, and what runs in FP8 in it."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from lightning_fp8.arguments import naming_arguments
from lightning_fp8.convert.first_step import conversion_summary
from lightning_fp8.convert.pinned import pinned_in
from lightning_fp8.delayed.update import are_several_ranks
from lightning_fp8.delayed.watch import PATIENCE
from lightning_fp8.files import replacing
from lightning_fp8.modules.state import FP8State, fp8_state_dict, reset_fp8_scales
from lightning_fp8.numerics.recipes import DelayedScaling, described, fields_of

FILE = "fp8_state.pt"
"""The FP8 state in the folder of a checkpoint: the result of ``fp8_state_dict`` of the Trainer's model."""


class FP8TrainerCallback(TrainerCallback, ExportableState):
    """Resumes FP8 training in the Trainer of transformers and in those of TRL, and reports what runs in FP8.

    ``Trainer(convert_module(model, recipe="delayed"), ..., callbacks=[FP8TrainerCallback()])``. Each checkpoint has the
    scales in ``fp8_state.pt``. They are loaded when training resumes, and for ``load_best_model_at_end``. The table of
    layers is printed before the first step, and after it what ran.

    Args:
        resume_from_checkpoint: the folder that training resumes from; needed only if its ``output_dir`` was moved.

    Raises:
        TypeError, ValueError: If ``resume_from_checkpoint`` is not a folder with ``fp8_state.pt``.
        ValueError: When training begins, if no part of the model has a recipe or ``fp8_state.pt`` cannot be loaded.
    """

    @naming_arguments
    def __init__(self, resume_from_checkpoint: str | os.PathLike[str] | None = None) -> None:
        if resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, (str, os.PathLike)):
            what = f"resume_from_checkpoint is of type {type(resume_from_checkpoint).__name__}, but must be a folder"
            raise TypeError(f"{what}; the model is Trainer(model=convert_module(model, recipe='delayed'), ...)")
        if resume_from_checkpoint is not None and not Path(resume_from_checkpoint, FILE).is_file():
            what = f"resume_from_checkpoint={os.fspath(resume_from_checkpoint)!r} must be a folder with {FILE}"
            raise ValueError(f"{what}, as FP8TrainerCallback saves it; leave it out to resume with empty scales")
        self.resume_from_checkpoint = resume_from_checkpoint
        self.saved: dict[str, str] = {}
        self._model: nn.Module | None = None
        self._output_dir, self._content = "", b""
        self._reports = self._reports_first_step = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        roots = pinned_in(model)
        if not roots:
            what = f"FP8TrainerCallback: the Trainer's {type(model).__name__} has no recipe, nothing runs in FP8"
            raise ValueError(f"{what}; pass Trainer(model=convert_module(model, recipe='delayed'), ...)")
        self._model = model
        self._output_dir, self._content = os.path.abspath(args.output_dir), b""
        for _root, pinned in roots:
            pinned.history.watch.patience = PATIENCE * args.gradient_accumulation_steps
        # The Trainer saves only callbacks that its state has, and a state without this callback may have been loaded.
        recorded = state.stateful_callbacks.setdefault(type(self).__name__, {"args": {}, "attributes": {}})
        recorded = recorded[-1] if isinstance(recorded, list) else recorded  # of several callbacks of this class
        self._reports = state.is_world_process_zero
        if state.global_step:
            self._load(self._found(args, state, recorded["attributes"].get("saved", {})), "training resumes")
        told = roots[0][1].history.watch.said  # once for each model
        self._reports_first_step = self._reports and "table" not in told
        if self._reports_first_step:
            told["table"] = "printed"
            for root, pinned in roots:
                print(f"recipe: {described(fields_of(pinned.recipe))}\n{pinned.summary(root)}")
            recipes = [each.recipe for _, each in roots if isinstance(each.recipe, DelayedScaling)]
            if are_several_ranks() and not all(each.reduce_amax for each in recipes):
                warnings.warn(
                    "reduce_amax=False: each process has its own delayed scales, and checkpoints hold those of process "
                    "0, with which all processes resume. Training resumes to the bit with reduce_amax=True",
                    stacklevel=2,
                )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._reports_first_step:
            self._reports_first_step = False
            for root, _pinned in pinned_in(model):
                print(f"first step: {conversion_summary(root).verdict()}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load(Path(state.best_model_checkpoint, FILE), "the weights of the best checkpoint were loaded")
        self._model = None  # a callback that is kept does not keep it

    def state(self) -> dict[str, Any]:
        """What a Trainer that saves writes into ``trainer_state.json``: the hash of what :meth:`on_save` writes."""
        if self._model is not None:
            torch.save(fp8_state_dict(self._model), buffer := io.BytesIO())
            self._content = buffer.getvalue()
            self.saved = {"sha256": hashlib.sha256(self._content).hexdigest(), "output_dir": self._output_dir}
        return {"args": {}, "attributes": {"saved": self.saved}}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = Path(self._output_dir, f"checkpoint-{state.global_step}", FILE)
        content, self._content = self._content, b""
        searches = state.is_hyper_param_search  # whose checkpoints are elsewhere: these are of another training
        if content and args.should_save and not searches and path.parent.is_dir():
            with replacing(path) as part:
                part.write_bytes(content)

    def _found(self, args: Any, state: Any, saved: dict[str, str]) -> Path | None:
        """The file that ``trainer_state.json`` names; the Trainer does not tell the folder that it resumes from."""
        expected = saved.get("sha256", "")
        if self.resume_from_checkpoint is not None:
            path = Path(self.resume_from_checkpoint, FILE)
            if expected and path.is_file() and _hash(path) != expected:
                what = f"{path} is not the FP8 state that was saved with the checkpoint that training resumes from"
                warnings.warn(f"{what}; leave FP8TrainerCallback(resume_from_checkpoint=...) out", stacklevel=3)
            return path
        outputs = args.output_dir, saved.get("output_dir", "")
        folders = [os.path.join(each, f"checkpoint-{state.global_step}") for each in outputs]
        for path in (Path(folder, FILE) for folder in (*folders, str(args.resume_from_checkpoint))):
            if path.is_file() and _hash(path) == expected:
                return path
        return None

    def _load(self, path: Path | None, why: str) -> None:
        """Load the file, or empty the scales without one."""
        assert self._model is not None
        delayed = [each for _, each in pinned_in(self._model) if isinstance(each.recipe, DelayedScaling)]
        if path is None or not path.is_file():
            reset_fp8_scales(self._model)
            if delayed and self._reports:
                said = (
                    f"{why}, but its {path or FILE} was not found, or has another hash than in trainer_state.json: the "
                    "delayed scales start empty, and until the first update each tensor is scaled by its own amax. If "
                    "FP8TrainerCallback saved one, pass its folder: FP8TrainerCallback(resume_from_checkpoint=folder)"
                )
                warnings.warn(said, stacklevel=3)
            return
        try:
            FP8State(self._model).load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # of torch, an advice to run the code of the file
            reason = error if isinstance(error, (TypeError, ValueError)) else type(error).__name__
            said = f"{path} cannot be loaded as FP8 state: {reason}. Remove the file to continue with empty scales"
            raise ValueError(said) from error
        if delayed and self._reports:
            print(f"FP8 state: the scales of {path} are loaded, after {delayed[0].history.updates} updates")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
