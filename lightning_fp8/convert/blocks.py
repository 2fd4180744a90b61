"""The structure of a model: its linear layers, towers of blocks and output heads.

:mod:`lightning_fp8.convert.policy` decides which of them stay in BF16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.swap import is_conv1d
from lightning_fp8.names import clean_name


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer, converted or not."""
    return isinstance(module, (nn.Linear, LinearLayer)) or is_conv1d(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """``(out_features, in_features)`` of a linear layer."""
    if is_conv1d(module):
        in_features, out_features = module.weight.shape  # type: ignore[union-attr, misc]
        return out_features, in_features
    return module.out_features, module.in_features  # type: ignore[return-value]


def matrices_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` of each GEMM of a linear layer, by the GEMM's name; ``""`` for a single GEMM."""
    return module.matrices if isinstance(module, LinearLayer) else {"": features_of(module)}


def linear_names(module: nn.Module) -> list[str]:
    """The names of the linear layers in ``module``, in registration order."""
    return [clean_name(name) for name, child in module.named_modules() if is_linear(child)]


@dataclass(frozen=True)
class BlockPosition:
    """The position of a linear layer: layer ``index`` of ``count``. ``tower`` is its name if there are several."""

    index: int
    count: int
    tower: str = ""

    def __str__(self) -> str:
        return f"in layer {self.index} of {self.count}{f' of {self.tower}' if self.tower else ''}"


@dataclass(frozen=True)
class Tower:
    """The names of a tower's blocks, their common ``prefix`` with its dot, and whether they are bare layers."""

    prefix: str
    blocks: tuple[str, ...]
    bare: bool = False

    def index_of(self, name: str) -> int | None:
        """The index of the block that is or holds the module ``name``; None outside the tower."""
        return next((i for i, block in enumerate(self.blocks) if f"{name}.".startswith(f"{block}.")), None)


def find_positions(model: nn.Module) -> dict[str, BlockPosition]:
    """The place of each linear layer in a tower.

    A tower is a ``ModuleList`` or ``Sequential`` of blocks of the same class (or of a few classes, in hybrids), or of
    stages that each have a list of blocks. The encoder and the decoder of a model are two towers. Without towers, the
    layers are the linear layers in registration order. If several children hold three or more linear layers each,
    every such child is counted separately.
    """
    linears = linear_names(model)
    if towers := find_towers(model):
        places = {
            name: BlockPosition(index, len(tower.blocks), tower.prefix.rstrip(".") if len(towers) > 1 else "")
            for name in linears
            for tower in towers
            if (index := tower.index_of(name)) is not None
        }
        return places
    networks = _networks(model)
    members = [[name for name in linears if name.startswith(f"{network}.")] for network in networks]
    if len(networks) < 2:
        networks, members = [""], [linears]
    return {
        name: BlockPosition(index, len(names), network)
        for network, names in zip(networks, members)
        for index, name in enumerate(names)
    }


def find_blocks(model: nn.Module) -> dict[str, BlockPosition]:
    """The place of each block of the towers (see :func:`find_positions`); empty without towers."""
    towers = [tower for tower in find_towers(model) if not tower.bare]
    return {
        block: BlockPosition(index, len(tower.blocks), tower.prefix.rstrip(".") if len(towers) > 1 else "")
        for tower in towers
        for index, block in enumerate(tower.blocks)
    }


def prefixes_of_parts(towers: list[Tower]) -> set[str]:
    """The prefixes of sibling modules that contain towers: encoder and decoder, or teacher and student."""
    paths = [tower.prefix.split(".")[:-1] for tower in towers]
    shared = next((depth for depth, names in enumerate(zip(*paths)) if len(set(names)) > 1), min(map(len, paths)))
    return {f"{'.'.join(path[: shared + 1])}." for path in paths if len(path) > shared}


def find_towers(model: nn.Module) -> list[Tower]:
    """All lists of blocks. Without any, the longest chain of bare linear layers of each network."""
    towers = list(_block_lists(model, ""))
    if blocks := [tower for tower in towers if not tower.bare]:
        return blocks
    sizes = {clean_name(name): features_of(module) for name, module in model.named_modules() if is_linear(module)}
    chains = [tower for tower in towers if _is_chain([sizes[name] for name in tower.blocks])]
    networks: dict[str, Tower] = {}
    for part in (chains and prefixes_of_parts(chains)) or {""}:
        inside = [tower for tower in chains if tower.prefix.startswith(part)]
        networks |= {part: max(inside, key=lambda tower: len(tower.blocks))} if inside else {}
    return [tower for tower in chains if tower in networks.values()]


def _is_chain(sizes: list[tuple[int, int]]) -> bool:
    """Whether each layer's input has the size of the previous layer's output. Parallel heads do not."""
    return all(before[0] == after[1] for before, after in zip(sizes, sizes[1:]))


def _block_lists(module: nn.Module, prefix: str) -> Iterator[Tower]:
    """The outermost lists of two or more blocks that hold linear layers, with at least two blocks of each class.

    Lists inside a block (experts, sub-blocks) are not candidates, because their length is not a depth.
    """
    children = dict(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
        classes = {type(child) for child in children.values()}
        bare = {is_linear(child) for child in children.values()}
        # Hybrids alternate blocks of two classes. The parts of a single block each have a class of their own.
        alike = 2 * len(classes) <= len(children) and len(bare) == 1
        if alike and all(linear_names(child) for child in children.values()):
            names = [clean_name(f"{prefix}{child_name}") for child_name in children]
            stages = [list(_blocks_of_stage(child)) for child in children.values()]
            if all(stages):
                names = [f"{name}.{block}" for name, stage in zip(names, stages) for block in stage]
            yield Tower(prefix, tuple(names), bare == {True})
            return
    for child_name, child in children.items():
        yield from _block_lists(child, clean_name(f"{prefix}{child_name}."))


def _blocks_of_stage(module: nn.Module) -> Iterator[str]:
    """The names of the blocks in a stage of a Swin or a ConvNeXt."""
    for child_name, child in module.named_children():
        if child_name in ("blocks", "layers") and isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (f"{child_name}.{index}" for index, block in child.named_children() if linear_names(block))


def _networks(model: nn.Module) -> list[str]:
    """The children that hold three or more linear layers, in the outermost module with several children."""
    prefix = ""
    module = model
    while True:
        children = {child_name: child for child_name, child in module.named_children() if linear_names(child)}
        if len(children) != 1:
            break
        child_name, module = next(iter(children.items()))
        prefix = f"{prefix}{child_name}."
    return [
        clean_name(f"{prefix}{child_name}") for child_name, child in children.items() if len(linear_names(child)) > 2
    ]


def find_heads(model: nn.Module) -> dict[str, str]:
    """The output heads of a model, with the reason why each one is considered to be one.

    A head is a linear layer that shares its weight with an embedding, that the model itself names, or that is the last
    linear layer after the blocks, of the model or of each part that contains towers. Without blocks, it is the last
    linear layer if it has as many outputs as the largest embedding has rows.
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
    head_ids = {
        id(module) for head in named_by_model for module in head.modules()
    }  # a head may be wrapped by an adapter
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
    """``output_heads``, and the adapters and base layers that belong to them."""
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
    """The last linear layer of each part after the part with the blocks, if it has fewer outputs than inputs."""
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
    """The last linear layer of the model, and of each of its parts, if it is after the blocks."""
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
    """The output head according to a Hugging Face model's ``get_output_embeddings()``, or None."""
    give = getattr(module, "get_output_embeddings", None)
    try:
        head = give() if callable(give) else None
    except (NotImplementedError, AttributeError, TypeError):  # a method of the same name in other models
        return None
    return head if isinstance(head, nn.Module) else None
