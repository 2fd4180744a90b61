"""Output heads: the linear layers that produce the classes of a loss.

That they stay in BF16 is the policy of :mod:`lightning_fp8.convert.policy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_fp8.convert.layers.linears import features_of, is_linear, linear_names
from lightning_fp8.convert.layers.towers import Tower, find_towers, prefixes_of_parts
from lightning_fp8.names import clean_name


def find_heads(model: nn.Module) -> dict[str, str]:
    """The linear layers that produce the classes of a loss, and what tells: a tie, the model itself, or their place.

    Their place is after the blocks: the last linear layer of the model, and of each part if towers lie in several.
    Without blocks it is the last of all, if it gives as many values as the largest embedding has rows.
    """
    linears = {clean_name(name): module for name, module in model.named_modules() if is_linear(module)}
    embeddings = {clean_name(name): m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    output_heads = {
        name: f"shares its weight with {embedding_name}"
        for name, module in linears.items()
        for embedding_name, embedding in embeddings.items()
        if getattr(module, "weight", None) is embedding.weight
    }
    named_by_model = [head for module in model.modules() if (head := _output_embeddings(module)) is not None]
    head_ids = {id(module) for head in named_by_model for module in head.modules()}  # adapters wrap a head
    output_heads |= {
        name: "the model's get_output_embeddings()"
        for name, module in linears.items()
        if id(module) in head_ids and name not in output_heads
    }
    vocabulary = max((embedding.num_embeddings for embedding in embeddings.values()), default=0)
    towers = find_towers(model)
    candidates = [name for name in linears if not _is_of_a_loss(name)]
    for name in _last(towers, candidates, output_heads):
        if features_of(linears[name])[0] == vocabulary:
            output_heads[name] = f"the last linear layer, out_features={vocabulary} is the vocabulary"
        elif towers:
            output_heads[name] = "the last linear layer, after the blocks"
    for name in _behind(model, towers, linears):
        output_heads.setdefault(name, "the last linear layer of its part, after the blocks")
    return _with_adapters(output_heads, linears)


def _is_of_a_loss(name: str) -> bool:
    return any("loss" in part or "criterion" in part for part in name.lower().split("."))


def _with_adapters(output_heads: dict[str, str], linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """``output_heads`` and the layers that adapt them, or that they adapt."""
    found = dict(output_heads)
    for name, why in output_heads.items():
        parts = name.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            wrapper = ".".join(parts[:depth])
            if f"{wrapper}.base_layer" in linears or f"{wrapper}.original_module" in linears:
                found |= {other: why for other in linears if other.startswith(f"{wrapper}.") and other not in found}
                break
    return found


def _behind(model: nn.Module, towers: list[Tower], linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """The last linear layer of each part behind the one with the blocks, if it gives fewer values than it takes."""
    prefix = ""
    module = model
    while len(children := [child_name for child_name, child in module.named_children() if linear_names(child)]) == 1:
        prefix = f"{prefix}{children[0]}."
        module = module.get_submodule(children[0])
    prefixes = [clean_name(f"{prefix}{child_name}.") for child_name in children]
    holding = [any(tower.prefix.startswith(part) for tower in towers) for part in prefixes]
    last = max((index for index, holds in enumerate(holding) if holds), default=len(prefixes))
    for part in prefixes[last + 1 :]:
        for name in [linear for linear in linears if f"{linear}.".startswith(part)][-1:]:  # none: shared with another
            out_features, in_features = features_of(linears[name])
            if out_features < in_features and not _is_of_a_loss(name):
                yield name


def _last(towers: list[Tower], linears: list[str], known: dict[str, str]) -> set[str]:
    """The last linear layer of the model, and of each of its parts, if behind the blocks."""
    if not towers:
        return {*linears[-1:]} - known.keys()
    found = set()
    for part in {"", *prefixes_of_parts(towers)}:
        inside = [name for name in linears if name.startswith(part)]
        in_tower = [any(tower.index_of(name) is not None for tower in towers) for name in inside]
        if inside and not in_tower[-1] and any(in_tower) and not any(name in known for name in inside):
            found.add(inside[-1])
    return found


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    """The module that a Hugging Face model calls its head; None where it names none."""
    give = getattr(module, "get_output_embeddings", None)
    try:
        head = give() if callable(give) else None
    except (NotImplementedError, AttributeError, TypeError):  # others give it another meaning
        return None
    return head if isinstance(head, nn.Module) else None
