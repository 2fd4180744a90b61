"""How far FP8 moves what the blocks of a model give: one batch by the same weights, in FP8 and in BF16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class BlockDistances(L.Callback):
    """Measures, in the first batch of a validation, the distance of each block's result from that in BF16.

    A distance is ``‖x_fp8 - x_bf16‖ / ‖x_bf16‖`` of a block's whole result, the residual stream; errors of the blocks
    before are in it.

    Args:
        blocks: in their order.

    Attributes:
        distances: of the newest validation.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._blocks = list(blocks)
        self._results: list[Tensor] = []
        self._hooks: list[Any] = []
        self.distances: list[float] = []

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self._remove_hooks()  # of a validation that was interrupted
            self._results.clear()
            self._hooks = [block.register_forward_hook(self._note) for block in self._blocks]

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0:
            module.loss(batch)  # outside the plugin's context, hence in BF16
            self._remove_hooks()
            in_fp8, in_bf16 = self._results[: len(self._blocks)], self._results[len(self._blocks) :]
            self.distances = [round(distance(a, b), 5) for a, b in zip(in_fp8, in_bf16, strict=True)]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, block: nn.Module, args: Any, result: Tensor) -> None:
        self._results.append(result.detach().clone())


def distance(a: Tensor, b: Tensor) -> float:
    """``‖a - b‖ / ‖b‖`` in float64."""
    a, b = a.double(), b.double()
    return (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
