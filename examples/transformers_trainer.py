"""Train a Llama of transformers in FP8 in its own Trainer, on the source text of Python's standard library.

    python examples/transformers_trainer.py                      # FP8, delayed scaling
    python examples/transformers_trainer.py --recipe blockwise   # another recipe
    python examples/transformers_trainer.py --recipe bf16        # the baseline
    python examples/transformers_trainer.py --steps 200 --resume  # goes on, from the last checkpoint in runs/delayed

It needs transformers and accelerate, and about a minute of processor time. Two lines are about FP8:
``convert_module`` and the callback. The model is saved as one without FP8.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_fp8 import FP8TrainerCallback, convert_module
from lightning_fp8.numerics.recipes import RECIPES

LENGTH = 128


class StdlibBytes(Dataset[dict[str, Tensor]]):
    """``count`` windows of 128 bytes at random places of the ``files``."""

    def __init__(self, files: list[Path], count: int) -> None:
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.starts = torch.randint(len(self.text) - LENGTH, (count,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.text[self.starts[index] :][:LENGTH].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama in FP8 in the Trainer of transformers.")
    parser.add_argument("--recipe", default="delayed", choices=[*RECIPES, "bf16"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs"), help="the folder; each recipe has one in it")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint of the recipe")
    args = parser.parse_args()
    folder = args.output / args.recipe

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    if args.recipe != "bf16":
        convert_module(model, recipe=args.recipe)  # before the Trainer is made

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=args.steps // 10,
            bf16=True,  # what is not FP8 computes in BF16; weights stay float32
            use_cpu=not torch.cuda.is_available(),
            eval_strategy="steps",
            eval_steps=max(args.steps // 2, 1),
            save_steps=max(args.steps // 2, 1),
            logging_steps=max(args.steps // 10, 1),
            report_to=[],
        ),
        train_dataset=StdlibBytes([file for index, file in enumerate(files) if index % 10], count=20_000),
        eval_dataset=StdlibBytes(files[::10], count=64),
        callbacks=[] if args.recipe == "bf16" else [FP8TrainerCallback()],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"validation loss ({args.recipe}): {trainer.evaluate()['eval_loss']:.4f}")

    model.save_pretrained(folder / "model")
    print("saved:", type(LlamaForCausalLM.from_pretrained(folder / "model").model.layers[1].mlp.up_proj).__name__)


if __name__ == "__main__":
    main()
