"""A small Llama, its data, and Trainers of transformers that train it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from lightning_fp8 import FP8TrainerCallback, convert_module, fp8_state_dict

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
STEPS = 4


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(64, (count, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, max_position_embeddings=32, **sizes)
    return LlamaForCausalLM(config)


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    """Four steps of two micro-batches in BF16's autocast; a checkpoint and an evaluation after each second step."""
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "bf16": True,
        "use_cpu": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        "seed": 1,
    }
    return TrainingArguments(str(folder), **{**chosen, **others})


def trainer(
    folder: Path,
    recipe: str | None = "delayed",
    *,
    seed: int = 0,
    callback: FP8TrainerCallback | None = None,
    of: type[Trainer] = Trainer,
    **others: Any,
) -> Trainer:
    """A Trainer of :func:`llama`, which ``recipe`` runs in FP8; None leaves it as it is."""
    transformers.logging.set_verbosity_error()
    model = llama(seed)
    callbacks = []
    if recipe is not None:
        convert_module(model, recipe=recipe)
        callbacks.append(callback or FP8TrainerCallback())
    return of(
        model,
        arguments(folder, **others),
        train_dataset=Tokens(),
        eval_dataset=Tokens(4, seed=9),
        callbacks=callbacks,  # type: ignore[arg-type]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Of 64 words."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(61))]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def sentences(*columns: str) -> Any:
    """A data set of 32 rows."""
    from datasets import Dataset as Rows

    draw = random.Random(0)
    rows = [{each: " ".join(f"w{draw.randrange(61)}" for _ in range(8)) for each in columns} for _ in range(32)]
    return Rows.from_list(rows)


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert not [name for name, value in state.items() if not torch.equal(value, expected[name])]


def assert_same_scales(model: nn.Module, other: nn.Module) -> None:
    state, expected = fp8_state_dict(model), fp8_state_dict(other)
    assert state["names"] == expected["names"]
    assert state["updates"] == expected["updates"]
    for name in ("scale", "amax_history", "seen", "counts"):
        assert torch.equal(state[name], expected[name]), name
