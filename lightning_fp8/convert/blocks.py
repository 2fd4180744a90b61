"""The structure of a model: its linear layers, towers of blocks and output heads.

:mod:`lightning_fp8.convert.policy` decides which of them stay in BF16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_fp8.modules.experts import is_experts, matrices_of_experts
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.swap import is_conv1d
from lightning_fp8.names import clean_name, prefixes


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer, converted or not."""
    return isinstance(module, (nn.Linear, LinearLayer)) or is_conv1d(module) or is_experts(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """``(out_features, in_features)`` of a linear layer."""
    if is_conv1d(module):
        in_features, out_features = module.weight.shape  # type: ignore[union-attr, misc]
        return out_features, in_features
    if is_experts(module):
        (_, _, in_features), (_, out_features, _) = matrices_of_experts(module).values()
        return out_features, in_features
    return module.out_features, module.in_features  # type: ignore[return-value]


def matrices_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """``(out_features, in_features)`` of each GEMM of a linear layer, by the GEMM's name; ``""`` for a single GEMM.

    The number of experts precedes those of experts.
    """
    if isinstance(module, LinearLayer):
        return dict(module.matrices)
    return matrices_of_experts(module) if is_experts(module) else {"": features_of(module)}


@dataclass(frozen=True)
class BlockPosition:
    """The position of a linear layer or block: ``index`` of ``count``, in the tower ``tower`` if there are several."""

    index: int
    count: int
    tower: str = ""

    def __str__(self) -> str:
        return f"in layer {self.index} of {self.count}{f' of {self.tower}' if self.tower else ''}"


class Structure(NamedTuple):
    """The linear layers of a model, its blocks and its output heads, by their names.

    Attributes:
        places: the position of each block, or of each linear layer in a model without blocks.
        blocks: the position of each block; empty without blocks.
        heads: the reason why each output head is considered one.
    """

    places: Mapping[str, BlockPosition]
    blocks: Mapping[str, BlockPosition]
    heads: Mapping[str, str]


class _Tower(NamedTuple):
    """The names of a tower's blocks, their common ``prefix`` with its dot, and whether they are bare layers."""

    prefix: str
    blocks: tuple[str, ...]
    bare: bool


def structure_of(model: nn.Module) -> Structure:
    """Find the towers and heads of ``model``.

    A tower is a ``ModuleList`` or ``Sequential`` of blocks of the same class (or of a few classes, in hybrids), or of
    stages that each have a list of blocks. The encoder and the decoder of a model are two towers. Without towers, the
    layers are the linear layers in registration order. If several children hold three or more linear layers each,
    every such child is counted separately.
    """
    inside: dict[int, set[int]] = {}
    _find_inside(model, inside)
    modules = {clean_name(name): module for name, module in model.named_modules()}
    linears = {name: module for name, module in modules.items() if is_linear(module)}
    parts = _parts(model, inside)
    towers = _towers(model, linears, inside)
    places = {
        block: BlockPosition(index, len(tower.blocks), tower.prefix.rstrip(".") if len(towers) > 1 else "")
        for tower in towers
        for index, block in enumerate(tower.blocks)
    }
    heads = _heads(modules, linears, towers, places, list(parts))
    if towers:
        return Structure(places, {} if towers[0].bare else places, heads)
    networks = [name for name, part in parts.items() if len(inside[id(part)]) > 2]
    members = {each: [name for name in linears if name.startswith(f"{each}.")] for each in networks}
    if len(networks) < 2:
        members = {"": list(linears)}
    places = {
        name: BlockPosition(index, len(names), network)
        for network, names in members.items()
        for index, name in enumerate(names)
    }
    return Structure(places, {}, heads)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its ``id``. A shared module has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(clean_name(name))
    return names


def place_of(name: str, places: Mapping[str, BlockPosition]) -> BlockPosition | None:
    """The place of the module ``name``, or of the block that holds it; None outside of towers."""
    return next((places[each] for each in (name, *prefixes(name)[::-1]) if each in places), None)


def _find_inside(module: nn.Module, inside: dict[int, set[int]]) -> set[int]:
    """Set ``inside``, for each module by its id, to the ids of the linear layers in it."""
    if id(module) not in inside:
        found = {id(module)} if is_linear(module) else set()
        inside[id(module)] = found.union(*(_find_inside(child, inside) for child in module.children()))
    return inside[id(module)]


def _parts(model: nn.Module, inside: dict[int, set[int]]) -> dict[str, nn.Module]:
    """The children that hold linear layers, of the outermost module with several such children, by their names."""
    prefix, module = "", model
    while True:
        children = {name: child for name, child in module.named_children() if inside[id(child)]}
        if len(children) != 1:
            return {clean_name(f"{prefix}{name}.").rstrip("."): child for name, child in children.items()}
        ((name, module),) = children.items()
        prefix = f"{prefix}{name}."


def _prefixes_of_parts(towers: list[_Tower]) -> set[str]:
    """The prefixes of sibling modules that contain towers: encoder and decoder, or teacher and student."""
    paths = [tower.prefix.split(".")[:-1] for tower in towers]
    shared = next((depth for depth, names in enumerate(zip(*paths)) if len(set(names)) > 1), min(map(len, paths)))
    return {f"{'.'.join(path[: shared + 1])}." for path in paths if len(path) > shared}


def _towers(model: nn.Module, linears: Mapping[str, nn.Module], inside: dict[int, set[int]]) -> list[_Tower]:
    """All lists of blocks. Without any, the longest chain of bare linear layers of each network."""
    towers = list(_block_lists(model, "", inside))
    if blocks := [tower for tower in towers if not tower.bare]:
        return blocks
    chains = [tower for tower in towers if _is_chain([features_of(linears[name]) for name in tower.blocks])]
    networks: dict[str, _Tower] = {}
    for part in (chains and _prefixes_of_parts(chains)) or {""}:
        of_part = [tower for tower in chains if tower.prefix.startswith(part)]
        networks |= {part: max(of_part, key=lambda tower: len(tower.blocks))} if of_part else {}
    return [tower for tower in chains if tower in networks.values()]


def _is_chain(sizes: list[tuple[int, int]]) -> bool:
    """Whether each layer's input has the size of the previous layer's output. Parallel heads do not."""
    return all(before[0] == after[1] for before, after in zip(sizes, sizes[1:]))


def _block_lists(module: nn.Module, prefix: str, inside: dict[int, set[int]]) -> Iterator[_Tower]:
    """The outermost lists of two or more blocks that hold linear layers, with at least two blocks of each class.

    Lists inside a block (experts, sub-blocks) are not candidates, because their length is not a depth.
    """
    children = dict(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        classes = {type(child) for child in children.values()}
        bare = {is_linear(child) for child in children.values()}
        # Hybrids alternate blocks of two classes. The parts of a single block each have a class of their own.
        alike = 2 * len(classes) <= len(children) and len(bare) == 1
        if alike and all(inside[id(child)] for child in children.values()):
            names = [clean_name(f"{prefix}{child_name}") for child_name in children]
            stages = [list(_blocks_of_stage(child, inside)) for child in children.values()]
            if all(stages):
                names = [f"{name}.{block}" for name, stage in zip(names, stages) for block in stage]
            yield _Tower(prefix, tuple(names), bare == {True})
            return
    for child_name, child in children.items():
        yield from _block_lists(child, clean_name(f"{prefix}{child_name}."), inside)


def _blocks_of_stage(module: nn.Module, inside: dict[int, set[int]]) -> Iterator[str]:
    """The names of the blocks in a stage of a Swin or a ConvNeXt."""
    for child_name, child in module.named_children():
        if child_name in ("blocks", "layers") and isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (f"{child_name}.{index}" for index, block in child.named_children() if inside[id(block)])


def _heads(
    modules: Mapping[str, nn.Module],
    linears: Mapping[str, nn.Module],
    towers: list[_Tower],
    places: Mapping[str, BlockPosition],
    parts: list[str],
) -> dict[str, str]:
    """The output heads of a model, with the reason why each one is considered to be one.

    A head is a linear layer that shares its weight with an embedding, that the model itself names, or that is the last
    linear layer after the blocks, of the model or of each part that contains towers. Without blocks, it is the last
    linear layer if it has as many outputs as the largest embedding has rows.
    """
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding)}
    heads = {
        name: f"shares its weight with {embedding_name}"
        for name, module in linears.items()
        for embedding_name, embedding in embeddings.items()
        if getattr(module, "weight", None) is embedding.weight
    }
    named_by_model = [head for module in modules.values() if (head := _output_embeddings(module)) is not None]
    ids = {id(each) for head in named_by_model for each in head.modules()}  # a head may be wrapped by an adapter
    for name, module in linears.items():
        if id(module) in ids:
            heads.setdefault(name, "the model's get_output_embeddings()")
    vocabulary = max((embedding.num_embeddings for embedding in embeddings.values()), default=0)
    candidates = [name for name in linears if not _is_of_a_loss(name)]
    for name in _last(towers, places, candidates, heads):
        if features_of(linears[name])[0] == vocabulary:
            heads[name] = f"the last linear layer, out_features={vocabulary} is the vocabulary"
        elif towers:
            heads[name] = "the last linear layer, after the blocks"
    for name in _behind(parts, towers, linears):
        heads.setdefault(name, "the last linear layer of its part, after the blocks")
    return _with_adapters(heads, linears)


def _is_of_a_loss(name: str) -> bool:
    return any("loss" in part or "criterion" in part for part in name.lower().split("."))


def _with_adapters(heads: dict[str, str], linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """``heads``, and the adapters and base layers that belong to them."""
    found = dict(heads)
    for name, why in heads.items():
        for wrapper in reversed(prefixes(name)):
            if f"{wrapper}.base_layer" in linears or f"{wrapper}.original_module" in linears:
                found |= {other: why for other in linears if other.startswith(f"{wrapper}.") and other not in found}
                break
    return found


def _behind(parts: list[str], towers: list[_Tower], linears: Mapping[str, nn.Module]) -> Iterator[str]:
    """The last linear layer of each part after the part with the blocks, if it has fewer outputs than inputs."""
    holding = [any(tower.prefix.startswith(f"{part}.") for tower in towers) for part in parts]
    last = max((index for index, holds in enumerate(holding) if holds), default=len(parts))
    for part in parts[last + 1 :]:
        of_part = [name for name in linears if f"{name}.".startswith(f"{part}.")]
        for name in of_part[-1:]:  # none: shared with another
            out_features, in_features = features_of(linears[name])
            if out_features < in_features and not _is_of_a_loss(name):
                yield name


def _last(
    towers: list[_Tower], places: Mapping[str, BlockPosition], linears: list[str], known: Mapping[str, str]
) -> set[str]:
    """The last linear layer of the model, and of each of its parts, if it is after the blocks."""
    if not towers:
        return {*linears[-1:]} - known.keys()
    found = set()
    for part in {"", *_prefixes_of_parts(towers)}:
        inside = [name for name in linears if name.startswith(part)]
        in_tower = [place_of(name, places) is not None for name in inside]
        if inside and not in_tower[-1] and any(in_tower) and not any(name in known for name in inside):
            found.add(inside[-1])
    return found


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    """The output head according to a Hugging Face model's ``get_output_embeddings()``, or None."""
    give = getattr(module, "get_output_embeddings", None)
    try:
        head = give() if callable(give) else None
    except (NotImplementedError, AttributeError, TypeError):  # a method of the same name in other models
        return None
    return head if isinstance(head, nn.Module) else None
