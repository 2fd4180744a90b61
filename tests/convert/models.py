"""Small models to convert, and which of their layers are in FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy


class Block(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class LanguageModel(nn.Module):
    """Embedding, blocks, head; the vocabulary is 40."""

    def __init__(self, blocks: int = 4, hidden: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(blocks))
        self.proj = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.proj(x))


def mlp(depth: int) -> nn.Sequential:
    """Linears and ReLUs by turns: no list of same-class blocks. Linears are named 0, 2, 4, ..."""
    return nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(16, 16), nn.ReLU())))


def fp8_names(model: nn.Module, **policy: object) -> list[str]:
    return [layer.name for layer in plan_conversion(model, Policy(**policy)).summary.layers if layer.fp8]


def reasons(model: nn.Module, **policy: object) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan_conversion(model, Policy(**policy)).summary.layers}
