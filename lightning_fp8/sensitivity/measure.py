"""Measures the error of a model's gradient with one layer or block at a time in FP8."""

from __future__ import annotations

import copy
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_fp8.arguments import require_module
from lightning_fp8.convert.conversion import convert_module, nothing_runs_in_fp8
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.delayed.watch import STANDSTILL
from lightning_fp8.fp8_region import fp8_autocast
from lightning_fp8.modules.experts import Experts
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.state import fp8_modules, update_fp8_scales
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe, make_recipe
from lightning_fp8.sensitivity.result import Check, Row, Sensitivity, require_budget

Loss = Callable[[Any, Any], Tensor]

NOISE = 0.1
"""The largest difference between two passes in high precision, as a share of the error with all layers in FP8."""


def measure_sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    recipe: str | Recipe | Mapping[str, Any] = "delayed",
    group: Literal["layer", "block"] = "layer",
    budget: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Sensitivity:
    """Measure how much FP8 in each layer changes the gradient of ``model`` on ``batches``.

    The error of a layer is ``|g - g0| / |g0|`` over all parameters, where g is the gradient with only this layer in FP8
    and g0 the gradient in high precision. It takes one forward and backward pass per batch for each layer or block, and
    4 to 6 more. Their number is printed beforehand. ``model`` is copied and not changed. The copy, its gradient and g0
    take the memory of three models, as much as Adam's state and gradients.

    Scales of delayed scaling are computed from the same batches. For scales that are stale, as in training, use
    :class:`lightning_fp8.FP8Monitor`. Modules stay in train or eval mode; a model in eval mode is switched to train
    mode as a whole. If weights are BF16, gradients are rounded to BF16, with an error of about 0.2 %,
    and smaller errors cannot be measured. Pass float32 weights if they fit in memory.

    Args:
        model: the model before conversion, with trained weights.
        batches: some batches of training data, on the model's device.
        loss: ``loss(model, batch)``, which returns a scalar. ``None`` is a LightningModule's ``training_step``, or
            ``model(**batch).loss``.
        recipe: see :class:`lightning_fp8.FP8Precision`.
        group: measure each layer, or all layers of a block together.
        budget: an error, 0.01 for 1 %. Layers to keep in BF16 are chosen for it, and the resulting error is measured.
        seed: the seed of torch, NumPy and ``random`` in all passes, so that dropout, for example, has the same masks.
        progress: whether to print the number of passes and a progress bar.

    Raises:
        TypeError: If ``model`` is not a module, or its loss is unknown.
        ValueError: If there are no batches, if no layer can run in FP8 or is called, if ``group`` is unknown, or if the
            gradient is not finite.

    Warns:
        UserWarning: If the loss is not deterministic: passes in high precision differ.
    """
    require_module("measure_sensitivity", model)
    batches = list(batches)
    if not batches:
        raise ValueError("measure_sensitivity needs at least one batch")
    if group not in ("layer", "block"):
        raise ValueError(f"group={group!r} is unknown; use 'layer' or 'block'")
    if budget is not None:
        require_budget(budget)
    of_recipe = make_recipe(recipe)
    copied = copy.deepcopy(model)
    by_default = {row.name for row in plan_conversion(copied, Policy()).summary.layers if row.fp8}
    plan = plan_conversion(copied, Policy(first_last_layers_bf16=False)).summary
    if not plan.num_fp8:
        raise ValueError(nothing_runs_in_fp8(plan))
    convert_module(copied, first_last_layers_bf16=False)
    layers = {name: each for name, each in fp8_modules(copied) if isinstance(each, LinearLayer) and each.fp8}
    default_skip = tuple(name for name in layers if not _among(name, by_default))
    groups = _groups(list(layers), group)
    repeats = len(groups) + 4 + isinstance(of_recipe, DelayedScaling) + (budget is not None)
    passes = repeats * len(batches)
    if progress:
        print(
            f"{repeats} configurations × {len(batches)} batches = {passes} forward and backward passes", file=sys.stderr
        )
    with tqdm(total=passes, disable=not progress, unit="pass") as bar:
        gradients = _Gradients(copied, layers, batches, loss or _loss_of(model), of_recipe, seed, bar)
        with _counted(layers) as flops:
            gradients.refer()
        if not (total := sum(flops.values())):
            raise ValueError("the loss called no layer that can run in FP8; pass a loss that runs the whole model")
        gradients.observe()
        rows = [
            Row(name, names, gradients.error(names), sum(flops[each] for each in names) / total)
            for name, names in groups.items()
        ]
        found = Sensitivity(
            of_recipe.name,
            tuple(sorted(rows, key=lambda row: -row.error)),
            gradients.error(layers),
            gradients.error([name for name in layers if name not in default_skip]),
            default_skip,
            passes,
        )
        if budget is not None:
            skip = found.skip(budget)
            measured = gradients.error([name for name in layers if name not in skip])
            found = replace(found, check=Check(budget, skip, found.predicted(skip), measured))
        difference = gradients.error(())
    if difference > NOISE * found.all_error:
        warnings.warn(
            f"the loss is not deterministic, and the ranking is not reliable: the gradient in high precision changes "
            f"by {difference:.3%} from the first pass to the last one, and by {found.all_error:.3%} with all layers in "
            "FP8. Draw random numbers from torch, NumPy or random, and remove state that changes in each pass",
            stacklevel=2,
        )
    return found


@dataclass
class _Gradients:
    """Computes gradients of one model on the same batches, with the same random numbers and buffers."""

    model: nn.Module
    layers: Mapping[str, LinearLayer]
    batches: Sequence[Any]
    loss: Loss
    recipe: Recipe
    seed: int
    bar: Any

    def __post_init__(self) -> None:
        if not self.model.training:
            self.model.train()
        self._buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        for layer in self.layers.values():
            if layer.history is not None:
                layer.history.watch.said[STANDSTILL] = ""  # scales are constant on purpose
        self._reference: list[Tensor | None] = []
        self._norm = 0.0

    def refer(self) -> None:
        """Compute the gradient in high precision, the reference."""
        self._backward(())
        self._reference = [None if each.grad is None else each.grad.clone() for each in self._parameters()]
        self._norm = math.sqrt(sum(_square(each) for each in self._reference if each is not None))
        if not (0 < self._norm < math.inf):
            raise ValueError(
                f"the norm of the gradient in high precision is {self._norm}; pass a loss and batches for which it is "
                "finite and not 0"
            )

    def observe(self) -> None:
        """Compute the scales of delayed scaling from the batches."""
        if isinstance(self.recipe, DelayedScaling):
            self._backward(self.layers)
            update_fp8_scales(self.model)

    def error(self, in_fp8: Collection[str]) -> float:
        """``|g - g0| / |g0|`` with these layers in FP8."""
        self._backward(in_fp8)
        squares = 0.0
        for parameter, reference in zip(self._parameters(), self._reference):
            if parameter.grad is not None and reference is not None:
                squares += _square(parameter.grad.double() - reference.double())
        return math.sqrt(squares) / self._norm if math.isfinite(squares) else math.inf

    def _parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def _backward(self, in_fp8: Collection[str]) -> None:
        for name, layer in self.layers.items():
            layer.fp8 = name in in_fp8
        for parameter in self._parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        devices = sorted({each.device.index for each in self._parameters() if each.is_cuda})
        with _seeded(self.seed, devices):
            for batch in self.batches:
                with fp8_autocast(enabled=bool(in_fp8), fp8_recipe=self.recipe):
                    value = self.loss(self.model, batch)
                    (value / len(self.batches)).backward()
                self.bar.update()


@contextmanager
def _seeded(seed: int, devices: Sequence[int]) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` inside this context, and restore their states."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _groups(layers: Sequence[str], group: str) -> dict[str, tuple[str, ...]]:
    """The names of layers, by the name of their group: of a block, the name up to its first number."""
    found: dict[str, tuple[str, ...]] = {}
    for name in layers:
        block = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
        of = block[0] if block and group == "block" else name
        found[of] = (*found.get(of, ()), name)
    return found


def _among(name: str, rows: Collection[str]) -> bool:
    """Whether a layer, or one of its GEMMs, is in the rows of a table."""
    return name in rows or any(row.startswith(f"{name}.") for row in rows)


@contextmanager
def _counted(layers: Mapping[str, LinearLayer]) -> Iterator[dict[str, float]]:
    """Count the multiply-adds of each layer's forward passes inside this context."""
    counts = dict.fromkeys(layers, 0.0)

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        def count(layer: LinearLayer, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            rows = x.numel() / x.shape[-1]
            if isinstance(layer, Experts):  # each row is multiplied by the weights of the experts that it is routed to
                rows *= (*args, *kwargs.values())[1].shape[-1] / layer.num_experts
            counts[name] += rows * sum(getattr(layer, weight).numel() for weight in layer.weight_names)

        return count

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _loss_of(model: nn.Module) -> Loss:
    """The default loss of a model. Calling it raises a TypeError if the model does not return a loss."""
    if callable(getattr(model, "training_step", None)):

        def of_lightning(copied: Any, batch: Any) -> Tensor:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r".*`self\.log\(\)`")  # there is no Trainer to log to
                output = copied.training_step(batch, 0)
            return _scalar(output["loss"] if isinstance(output, Mapping) else output, "training_step")

        return of_lightning

    def of_output(copied: Any, batch: Any) -> Tensor:
        output = copied(**batch) if isinstance(batch, Mapping) else copied(batch)
        return _scalar(getattr(output, "loss", output), "the model")

    return of_output


def _scalar(value: Any, of: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    raise TypeError(
        f"{of} returned {type(value).__name__}, not a scalar loss; pass loss=, a function of the model and a batch"
    )
