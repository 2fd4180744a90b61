"""Small models of several families, their training steps, and what they are compared by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import convert_module, fp8_autocast

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(48).view(2, 24) % 37
HIDDEN, INNER = 64, 96
CONFIG = {
    "vocab_size": 37,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "olmo2": "Olmo2",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "helium": "Helium",
    "ministral": "Ministral",
    "phi3": "Phi3",
    "glm4": "Glm4",
}
"""By a name, the configuration in transformers; older versions lack the newest."""


def causal_lm(family: str = "llama", layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small model whose norms have weights unlike their first ones."""
    if not hasattr(transformers, f"{FAMILIES[family]}Config"):
        pytest.skip(f"this transformers has no {FAMILIES[family]}")
    config = getattr(transformers, f"{FAMILIES[family]}Config")(num_hidden_layers=layers, **CONFIG)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype)


def llama(layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    return causal_lm("llama", layers, dtype)


def converted(fuse: bool, model: Any = None, **options: Any) -> Any:
    model = llama() if model is None else model
    return convert_module(model, first_last_layers_bf16=False, fuse=fuse, **options)


def step(model: Any, recipe: Any = "delayed", enabled: bool = True) -> list[Tensor]:
    """The logits and the gradients of one training step, under autocast if the weights are float32."""
    model.zero_grad()
    wide = model.lm_head.weight.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=wide), fp8_autocast(enabled, fp8_recipe=recipe):
        output = model(input_ids=TOKENS, labels=TOKENS)
    output.loss.backward()
    return [output.logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def distance(found: Tensor, exact: Tensor) -> float:
    """The relative error of one tensor."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of all gradients together."""
    return distance(
        torch.cat([each.flatten() for each in found[1:]]), torch.cat([each.flatten() for each in exact[1:]])
    )


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


class Ops(TorchDispatchMode):
    """Counts the ops that run, also those of tensor subclasses, and keeps the shapes of the results of torch's.

    Attributes:
        counts: the numbers of our ops, by name.
        of_torch: the numbers of torch's ops that compute, by name; views and allocations are not counted.
        shapes: the shapes of the results of the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.of_torch: Counter[str] = Counter()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Tensor) and each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented  # its own dispatch runs the ops inside
        made = function(*args, **(kwargs or {}))
        name = function.name().partition("::")[2].partition(".")[0]
        if function.namespace == "lightning_fp8":
            self.counts[name.removesuffix("_unobserved")] += 1
        elif not function.is_view and not name.startswith(("empty", "new_empty", "detach", "_reshape_alias")):
            self.of_torch[name] += 1
            if isinstance(made, Tensor):
                self.shapes.add(made.shape)
        return made

    @property
    def total(self) -> int:
        return self.counts.total() + self.of_torch.total()
