"""Which layers run in FP8, and the conversion in place.

``linear.__class__ = Linear``: parameters stay the same objects, so tied weights, optimizers, hooks and ``state_dict``
keys survive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_fp8.arguments import require_bool, require_module
from lightning_fp8.globs import globs_of_nothing
from lightning_fp8.history import AmaxHistory
from lightning_fp8.modules import Linear
from lightning_fp8.state import clean_name, fp8_modules, fp8_state_dict


@dataclass(frozen=True)
class LayerDecision:
    """Where one linear layer runs, and why.

    Attributes:
        name: the module's name in its model.
        shape: ``(out_features, in_features)``.
        fp8: True for FP8, False for high precision.
        reason: why.
    """

    name: str
    shape: tuple[int, int]
    fp8: bool
    reason: str

    @property
    def precision(self) -> str:
        return "FP8" if self.fp8 else "BF16"


@dataclass(frozen=True)
class ConversionSummary:
    """The decisions of every linear layer of a model, in registration order. ``str()`` is a table."""

    layers: tuple[LayerDecision, ...]

    @property
    def num_fp8(self) -> int:
        return sum(layer.fp8 for layer in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "out × in", "runs in", "because")]
        rows += [(layer.name, "{} × {}".format(*layer.shape), layer.precision, layer.reason) for layer in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]
        count = f"{self.num_fp8} of {len(self.layers)} linear layers run in FP8"
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], count])


@dataclass(frozen=True)
class Policy:
    """Which layers stay in BF16. Arguments and errors as for :func:`convert_module`."""

    first_last_layers_bf16: bool = True
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    replace_layers: bool = True
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field in ("first_last_layers_bf16", "replace_layers"):
            require_bool(field, getattr(self, field))
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field}={value!r} must be an integer of at least 0")
        if not isinstance(self.skip, (list, tuple, set, frozenset)) or not all(isinstance(x, str) for x in self.skip):
            raise TypeError(f"skip={self.skip!r} must be a sequence of module-name globs, for example ('*.lm_head',)")
        object.__setattr__(self, "skip", tuple(self.skip))  # a list could change


def eligible(module: nn.Module, name: str, replace_layers: bool = True) -> str:
    """Why ``module`` cannot run in FP8, or an empty string where it can."""
    if isinstance(module, Linear):
        return ""
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if _unsharded_class(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear with a forward of its own"
    if not module.weight.is_floating_point():  # type: ignore[operator, union-attr]
        return f"its weight is {module.weight.dtype}"
    return "" if replace_layers else "replace_layers=False keeps torch.nn.Linear"


def plan_conversion(model: nn.Module, policy: Policy) -> ConversionSummary:
    """Decide for every linear layer of ``model``; changes nothing."""
    linears = [(clean_name(name), module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layers = _find_layers(model, linears)
    return ConversionSummary(
        tuple(
            LayerDecision(name, (module.out_features, module.in_features), not reason, reason or "eligible")
            for name, module in linears
            for reason in [_reason_for_bf16(name, module, model, layers, policy)]
        )
    )


def convert_module(
    model: nn.Module,
    *,
    first_last_layers_bf16: bool = True,
    num_layers_at_start_in_bf16: int = 1,
    num_layers_at_end_in_bf16: int = 1,
    replace_layers: bool = True,
    skip: Sequence[str] = (),
) -> nn.Module:
    """Turn the linear layers of ``model`` into FP8 layers, in place; again changes nothing.

    A *layer* is an element of the model's longest ``ModuleList`` or ``Sequential`` of same-class blocks; where there
    is none, it is a Linear in registration order. An output head (``out_features`` is the vocabulary, outside the
    layers) stays in BF16 unless it is made as ``lightning_fp8.Linear``.

    Args:
        model: any module; its parameters stay the same objects and its ``state_dict`` keeps its keys.
        first_last_layers_bf16: keep the first and last layers in BF16.
        num_layers_at_start_in_bf16: how many first layers.
        num_layers_at_end_in_bf16: how many last layers.
        replace_layers: False only runs ``lightning_fp8.Linear`` modules in FP8.
        skip: globs of module names that stay in BF16.

    Returns:
        ``model`` itself.

    Raises:
        ValueError, TypeError: a negative count, or ``skip`` that is no sequence of strings, or matches no module.
    """
    require_module("convert_module", model)
    policy = Policy(
        first_last_layers_bf16, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16, replace_layers, skip
    )
    summary = plan_conversion(model, policy)
    for wrong in globs_without_layers(model, policy, summary):
        raise ValueError(wrong)
    apply_conversion(model, summary)
    if not summary.num_fp8:
        warnings.warn(f"{NOTHING_RUNS_IN_FP8}:\n{summary}", stacklevel=2)
    return model


NOTHING_RUNS_IN_FP8 = (
    "no layer of the model runs in FP8 (the table says why); lower num_layers_at_start_in_bf16 or "
    "num_layers_at_end_in_bf16, or pass first_last_layers_bf16=False"
)


def globs_without_layers(model: nn.Module, policy: Policy, summary: ConversionSummary) -> list[str]:
    """What is wrong with globs of ``policy.skip`` that match no layer of ``summary``."""
    modules = [clean_name(name) for name, _ in model.named_modules() if name]
    return globs_of_nothing(policy.skip, [layer.name for layer in summary.layers], modules)


def apply_conversion(model: nn.Module, summary: ConversionSummary) -> AmaxHistory:
    """Retype what ``summary`` runs in FP8 and give all of it one amax history, which keeps what it already knew."""
    decisions = {layer.name: layer for layer in summary.layers}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (decision := decisions[clean_name(name)]):
            if decision.fp8 and not isinstance(module, Linear):
                _retype(module)
            if isinstance(module, Linear):
                module.fp8 = decision.fp8
    return _share_history(model)


def _share_history(model: nn.Module) -> AmaxHistory:
    modules = [(name, module) for name, module in fp8_modules(model) if module.fp8]
    rows = [row for name, module in modules for row in module.history_rows(name)]
    histories = [module.history for _, module in modules]
    shared = histories[0] if histories else None
    if shared and shared.names == [name for name, _ in rows] and all(history is shared for history in histories):
        return shared
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    history = AmaxHistory(rows, device)
    history.load_state_dict(fp8_state_dict(model))
    first_row = 0
    for _, module in modules:
        module.use_history(history, first_row)
        first_row += len(module.roles)
    return history


def _unsharded_class(module: nn.Module) -> type:
    """The class of ``module`` before ``fully_shard`` put its mixin in front."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else type(module)


def _retype(module: nn.Linear) -> None:
    cls = type(module)
    sharded = _unsharded_class(module) is not cls
    module.__class__ = type(cls.__name__, (cls.__bases__[0], Linear), {}) if sharded else Linear


@dataclass(frozen=True)
class _Layers:
    """``index`` of the layer that each linear lies in, ``count`` of layers, and whether they are ``blocks``."""

    index: dict[str, int]
    count: int
    blocks: bool


def _reason_for_bf16(name: str, module: nn.Linear, model: nn.Module, layers: _Layers, policy: Policy) -> str:
    if reason := eligible(module, name, policy.replace_layers):
        return reason
    for pattern in policy.skip:
        if fnmatchcase(name, pattern):
            return f"skip={pattern!r}"
    if not isinstance(module, Linear) and _is_output_head(name, module, model, layers):
        return f"output head: out_features={module.out_features} is the vocabulary"
    if name in layers.index and policy.first_last_layers_bf16:
        index, start, end = layers.index[name], policy.num_layers_at_start_in_bf16, policy.num_layers_at_end_in_bf16
        if index < start:
            return f"in layer {index} of {layers.count}, one of the first {start}"
        if index >= layers.count - end:
            return f"in layer {index} of {layers.count}, one of the last {end}"
    return ""


def _is_output_head(name: str, module: nn.Linear, model: nn.Module, layers: _Layers) -> bool:
    embeddings = [embedding for embedding in model.modules() if isinstance(embedding, nn.Embedding)]
    if any(module.weight is embedding.weight for embedding in embeddings):
        return True
    # A block's linear may have the vocabulary's size by chance; a head comes after the blocks.
    could_be = name not in layers.index if layers.blocks else layers.index[name] == layers.count - 1
    return could_be and any(module.out_features == embedding.num_embeddings for embedding in embeddings)


def _find_layers(model: nn.Module, linears: list[tuple[str, nn.Linear]]) -> _Layers:
    prefix, blocks = max(_block_lists(model, ""), key=lambda found: len(found[1]), default=("", []))
    if not blocks:
        return _Layers({name: index for index, (name, _) in enumerate(linears)}, len(linears), blocks=False)
    index = {
        name: position
        for name, _ in linears
        for position, key in enumerate(blocks)
        if f"{name}.".startswith(f"{prefix}{key}.")
    }
    return _Layers(index, len(blocks), blocks=True)


def _block_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Prefix and keys of the outermost lists of two or more same-class blocks that hold linear layers.

    Lists inside a block (experts, sub-blocks) are no candidates: their length says nothing about the depth.
    """
    children = dict(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        same_class = len({type(child) for child in children.values()}) == 1
        if same_class and all(_holds_linear(child) for child in children.values()):
            yield prefix, list(children)
            return
    for key, child in children.items():
        yield from _block_lists(child, clean_name(f"{prefix}{key}."))


def _holds_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) for child in module.modules())
