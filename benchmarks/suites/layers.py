"""Whole linear layers, forward and backward, with their casts and the update of scales: part of suite ``products``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.timing import Contender
from lightning_fp8 import FP8FabricPrecision, make_recipe
from lightning_fp8.cli.bench import gemms_of, has_kernels
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.ops.torch_scaled_mm import multiplies_mx_blocks

BF16 = "BF16"


class Layer(NamedTuple):
    """Linear layers that run forward and backward, one after another."""

    name: str
    sizes: tuple[tuple[int, int], ...]
    tokens: int
    target: dict[str, float]


LLAMA_8B = {"QKV": (4096, 6144), "proj": (4096, 4096), "fc1": (4096, 28672), "fc2": (14336, 4096)}
"""in and out features; fc1 includes both layers of the gated MLP."""
LAYERS = (
    Layer("Linear, forward and backward", ((4096, 14336),), 8192, {f"over {BF16}": 1.4}),
    Layer("Llama-8B layer's Linears, forward and backward", tuple(LLAMA_8B.values()), 8192, {f"over {BF16}": 1.6}),
)
TINY_LAYERS = (Layer("Linear, forward and backward", ((32, 48),), 16, {f"over {BF16}": 1.4}),)


def layers(layer: Layer, plan: Plan, recipes: Sequence[str | None] = ()) -> Iterator[Candidate]:
    """With ``recipes``, of which None is BF16; by default in BF16, and with every recipe that multiplies in FP8."""
    shape = (layer.tokens, *layer.sizes[0]) if len(layer.sizes) == 1 else (layer.tokens,)
    flops = sum(6 * layer.tokens * inputs * outputs for inputs, outputs in layer.sizes)
    gemms = gemms_of(*layer.sizes[0], layer.tokens)
    in_fp8 = [name for name in RECIPES if any(has_kernels(gemm, make_recipe(name)) for gemm in gemms)]
    for recipe in recipes or (None, *in_fp8, *["mxfp8"] * multiplies_mx_blocks(plan.device)):
        by = BF16 if recipe is None else OURS if recipe == "delayed" else f"{OURS}, {recipe}"
        result = Result(layer.name, by, shape, "bfloat16", flops=flops, target=layer.target if by == OURS else {})
        try:
            call = _step(layer, recipe, plan)
            call()
        except Exception as error:
            yield Candidate(replace(result, correct=False, note=said(error)), None)
            continue
        yield Candidate(result, Contender(call))


def _step(layer: Layer, recipe: str | None, plan: Plan) -> Callable[[], None]:
    """A function that runs forward and backward of each layer."""
    model = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in layer.sizes).to(plan.device, torch.bfloat16)
    plugin = FP8FabricPrecision(recipe=recipe, first_last_layers_bf16=False) if recipe else None  # type: ignore[arg-type]
    if plugin is not None:
        plugin.convert_module(model)

    def data(features: int) -> Tensor:
        return torch.randn(layer.tokens, features, device=plan.device, dtype=torch.bfloat16)

    inputs = [data(size).requires_grad_() for size, _ in layer.sizes]
    gradients = [data(size) for _, size in layer.sizes]

    def forward_and_backward() -> None:
        for linear, x, dy in zip(model, inputs, gradients):
            linear(x).backward(dy)

    def step() -> None:
        if plugin is None:
            forward_and_backward()
        else:
            with plugin.forward_context():
                forward_and_backward()
            plugin.update_scales()
        for tensor in (*inputs, *model.parameters()):
            tensor.grad = None

    return step
