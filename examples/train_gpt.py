"""Train a byte-level GPT in FP8 on the source text of Python's standard library.

    python examples/train_gpt.py                          # FP8, delayed scaling
    python examples/train_gpt.py --compare                # and BF16, with the losses of both
    python examples/train_gpt.py --recipe blockwise       # another recipe
    python examples/train_gpt.py --recipe bf16            # the baseline
    python examples/train_gpt.py --modules                # of lightning_fp8.TransformerLayers
    python examples/train_gpt.py --monitor                # records what FP8 loses, and says how to see it as a page
    STEPS=20 python examples/train_gpt.py                 # a look at it, as --steps 20
    lightning-fp8 fit --config configs/delayed.yaml       # the same from YAML

The first takes half a minute of processor time. The model is a small Llama: RMSNorm, rotary embeddings, causal
attention, SwiGLU. Nothing in it knows about FP8; with ``--modules`` its blocks are
``lightning_fp8.TransformerLayer``s, the same but for the norms' epsilon.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sysconfig
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics.aggregation import MeanMetric

from lightning_fp8 import FP8Monitor, FP8Precision, TransformerLayer
from lightning_fp8.numerics.recipes import RECIPES

BYTES = 256


# ---------------------------------------------------------------------------------------------------------------- data


class StdlibBytes(L.LightningDataModule):
    """The ``.py`` files of the standard library as bytes; every tenth file validates.

    Args:
        length: bytes of context.
        batch_size: sequences of a step.
        train_sequences: sequences drawn for an epoch.
        val_sequences: sequences of a validation, always the same.
        seed: of the drawing.
    """

    def __init__(
        self,
        length: int = 128,
        batch_size: int = 16,
        train_sequences: int = 100_000,
        val_sequences: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.train_sequences, self.val_sequences = train_sequences, val_sequences

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        training = [file for index, file in enumerate(files) if index % 10]
        self.train = Windows(training, self.length, self.train_sequences, self.seed)
        self.val = Windows(files[::10], self.length, self.val_sequences, seed=0)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, 2 * self.batch_size)


class Windows(Dataset[Tensor]):
    """``count`` windows of ``length + 1`` bytes at random places of the files' text."""

    def __init__(self, files: list[Path], length: int, count: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.length = length
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(self.text) - length - 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length + 1].long()


# --------------------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, head, time, channel]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: channel pairs turn by an angle that grows with the position."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), SwiGLU(width, 4 * width)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angle)
        return x + self.mlp(self.mlp_norm(x))


class ModuleBlock(TransformerLayer):
    """:class:`Block` in one module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(
            width,
            4 * width,
            heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
        )

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, rotary_pos_emb=torch.cat([angle, angle], 1)[:, None, None])


def warmup_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The learning rate of each step: it warms up over a tenth of ``steps`` (at most 50), then falls to a fiftieth."""
    steps = max(steps, 1)
    warmup = min(50, max(steps // 10, 1))

    def factor(step: int) -> float:
        progress = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
        return min((step + 1) / warmup, 0.51 + 0.49 * math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


class GPT(L.LightningModule):
    """A byte-level GPT.

    Args:
        width: channels.
        depth: blocks.
        heads: attention heads.
        lr: peak learning rate of AdamW; warms up, then falls to a fiftieth along a cosine.
        modules: blocks are of ``lightning_fp8.TransformerLayer``.
    """

    def __init__(
        self, width: int = 256, depth: int = 6, heads: int = 4, lr: float = 1e-3, modules: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList((ModuleBlock if modules else Block)(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # the branches that are added up start smaller
                residual = name.endswith(("out.weight", "down.weight", "proj.weight", "fc2_weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
        self.val_loss = MeanMetric()

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, time]`` bytes to ``[batch, time, 256]`` logits."""
        x = self.embed(tokens)
        channels = self.hparams["width"] // self.hparams["heads"] // 2
        frequency = 10_000.0 ** (-torch.arange(channels, dtype=torch.float32, device=x.device) / channels)
        angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float32, device=x.device), frequency)
        for block in self.blocks:
            x = block(x, angle)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.val_loss.set_dtype(torch.float32).reset()  # a mean of losses needs more digits than the weights

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_loss.update(self.loss(batch).float(), len(batch))

    def on_validation_epoch_end(self) -> None:
        loss = self.val_loss.compute()
        self.log_dict(
            {"val_loss": loss, "perplexity": loss.exp(), "bits_per_byte": loss / math.log(2)},
            prog_bar=True,
            sync_dist=True,
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"], betas=(0.9, 0.95), weight_decay=0.1)
        schedule = warmup_and_cosine(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, count: int, length: int = 128) -> str:
        """Continue ``prompt`` by ``count`` bytes, drawn from the model's distribution."""
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(count):
            probability = self(tokens[:, -length:])[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probability, 1)], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class Throughput(L.Callback):
    """Bytes per second of training, in the progress bar."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Tensor, index: int) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Tensor, index: int
    ) -> None:
        module.log("bytes/s", batch[:, 1:].numel() / (time.perf_counter() - self.start), prog_bar=True)


# ------------------------------------------------------------------------------------------------------------ training


def train(
    recipe: str, args: argparse.Namespace, monitor: FP8Monitor | None = None
) -> tuple[GPT, dict[str, float], float]:
    """A trained model, its validation metrics, and the seconds that training took; ``"bf16"`` is no recipe."""
    L.seed_everything(args.seed)
    in_bf16 = recipe == "bf16"
    trainer = L.Trainer(
        max_steps=args.steps,
        val_check_interval=min(100, args.steps),
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Throughput(), TQDMProgressBar(refresh_rate=5), *([monitor] if monitor else [])],
        **({"precision": "bf16-mixed"} if in_bf16 else {"plugins": [FP8Precision(recipe=recipe)]}),
    )
    model = GPT(width=args.width, depth=args.depth, modules=args.modules)
    start = time.perf_counter()
    trainer.fit(model, StdlibBytes(batch_size=args.batch_size, seed=args.seed))
    seconds = time.perf_counter() - start
    return model, {name: value.item() for name, value in trainer.callback_metrics.items()}, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT in FP8 on Python's standard library.")
    parser.add_argument("--recipe", default="delayed", help=f"{', '.join(RECIPES)}, or bf16")
    parser.add_argument("--compare", action="store_true", help="train in BF16, too, and print both losses")
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "150")))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", action="store_true", help="blocks of lightning_fp8.TransformerLayer")
    parser.add_argument(
        "--monitor",
        type=Path,
        nargs="?",
        const=Path("lightning_logs"),
        metavar="FOLDER",
        help="record what FP8 loses, in FOLDER (default: lightning_logs), for lightning-fp8 report",
    )
    args = parser.parse_args()

    monitors = {}
    if args.monitor is not None:
        runs = [args.recipe, "bf16"] if args.compare else [args.recipe]
        monitors = {recipe: FP8Monitor(every_n_steps=10, path=args.monitor / f"{recipe}.npz") for recipe in runs}
    model, metrics, seconds = train(args.recipe, args, monitors.get(args.recipe))
    print(f"\n{args.steps} steps in {seconds:.0f} s; validation:", {name: round(x, 4) for name, x in metrics.items()})
    print("\n--- a sample of the model ---")
    print(model.generate("def ", 200))
    if args.compare:
        _, in_bf16, _ = train("bf16", args, monitors.get("bf16"))
        difference = metrics["val_loss"] / in_bf16["val_loss"] - 1
        print(
            f"\nvalidation loss: {metrics['val_loss']:.4f} in FP8 ({args.recipe}), {in_bf16['val_loss']:.4f} in BF16: "
            f"{difference:+.2%}"
        )
    if records := [str(each.saved_to) for each in monitors.values() if each.saved_to]:
        print("\nwhat FP8 lost, as a page:", shlex.join(["lightning-fp8", "report", *records]))


if __name__ == "__main__":
    main()
