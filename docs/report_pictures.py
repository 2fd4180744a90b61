"""The pictures of docs/monitor.md: a GPT in FP8, of which a norm is multiplied by 100 in one step, and one in BF16.

python -m docs.report_pictures FOLDER    # some minutes on a CPU; needs Chromium. Records in FOLDER are kept and reused
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
from PIL import Image

from examples.train_gpt import GPT, StdlibBytes
from lightning_fp8 import FP8Monitor, FP8Precision
from lightning_fp8.cli.main import main
from tests.monitor.browser import browser

OUTLIER_STEP = 122
HEIGHTS = {390: 2000, 1440: 2400}


class Outlier(L.Callback):
    """Multiplies a norm by 100 in one step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == OUTLIER_STEP - 1:
            module.blocks[2].mlp_norm.weight.data.mul_(100)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step == OUTLIER_STEP - 1:
            module.blocks[2].mlp_norm.weight.data.div_(100)


def train(path: Path, **precision: Any) -> None:
    """Write the record of a run to ``path``."""
    L.seed_everything(0)
    trainer = L.Trainer(
        max_steps=200,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Outlier(), FP8Monitor(every_n_steps=5, path=path)],
        **precision,
    )
    trainer.fit(GPT(width=128), StdlibBytes(batch_size=8))


if __name__ == "__main__":
    records = Path(sys.argv[1], "fp8.npz"), Path(sys.argv[1], "bf16.npz")
    if not records[0].exists():
        train(records[0], plugins=[FP8Precision(recipe="delayed")])
    if not records[1].exists():
        train(records[1], precision="bf16-mixed")
    main(["report", *map(str, records)])
    with browser() as shown:
        for width, height in HEIGHTS.items():
            shown.open(records[0].with_suffix(".html"), width)
            picture = Path(__file__).with_name(f"report_{width}.png")
            shown.screenshot(picture, height)
            Image.open(picture).quantize(128).save(picture, optimize=True)
